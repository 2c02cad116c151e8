// Elements, made and changed. Text goes in as text nodes only: whatever a name holds, it is never markup.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. `given`: attributes; `on`: listeners; null, undefined and false are left out. */
export function h(tag, given = {}, ...children) {
  return fill(document.createElement(tag), given, children);
}

/** The same of SVG. */
export function s(tag, given = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), given, children);
}

function fill(element, given, children) {
  for (const [name, value] of Object.entries(given ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(element, child);
    else element.append(child instanceof Node ? child : String(child));
  }
}

/** Makes what is in `place` what it should be, and touches only what differs: focus and selection stay where they are.
 * For what is live; listeners belong to `place`, or to something around it. Of what has a `data-key`, each stays what it
 * was wherever it goes: one more above a list is one more, and not another text in each of its lines. */
export function show(place, ...children) {
  const wanted = document.createElement("div");
  append(wanted, children);
  const held = document.activeElement;
  morphChildren(place, wanted);
  if (held !== document.activeElement && place.contains(held)) held.focus({ preventScroll: true }); // it was moved
}

const keyOf = (node) => node.dataset?.key;

function morphChildren(place, wanted) {
  const old = [...place.childNodes];
  const fresh = [...wanted.childNodes];
  if (fresh.length && keyOf(fresh[0]) !== undefined) return morphByKey(place, old, fresh);
  fresh.forEach((each, index) => {
    if (index < old.length) morph(old[index], each);
    else place.append(each);
  });
  for (const each of old.slice(fresh.length)) each.remove();
}

function morphByKey(place, old, fresh) {
  const kept = new Map(old.map((each) => [keyOf(each), each]));
  const keys = new Set(fresh.map(keyOf));
  for (const each of old) if (!keys.has(keyOf(each)) || kept.get(keyOf(each)) !== each) each.remove();
  let at = place.firstChild;
  for (const each of fresh) {
    const found = kept.get(keyOf(each));
    if (found === undefined) {
      place.insertBefore(each, at);
    } else {
      if (found === at) at = at.nextSibling;
      else place.insertBefore(found, at);
      morph(found, each);
    }
  }
}

function morph(old, wanted) {
  if (old.nodeType !== wanted.nodeType || old.nodeName !== wanted.nodeName) {
    old.replaceWith(wanted);
  } else if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== wanted.data) old.data = wanted.data;
  } else {
    for (const { name, value } of wanted.attributes) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    for (const { name } of [...old.attributes]) {
      if (!wanted.hasAttribute(name) && !(name === "open" && old.nodeName === "DETAILS")) old.removeAttribute(name);
    }
    morphChildren(old, wanted);
  }
}

/** Sets the text of a node that is kept, if it is another one. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function attribute(node, name, value) {
  const text = String(value);
  if (node.getAttribute(name) !== text) node.setAttribute(name, text);
}
