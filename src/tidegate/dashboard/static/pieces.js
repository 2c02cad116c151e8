// Pieces that several pages are made of.

import { h, s } from "./dom.js";
import { icon } from "./icons.js";
import { ago, capital, exact, NONE, spaced, time } from "./words.js";

const LEVELS = {
  complete: "ok", done: "ok", running: "ok", alive: "ok",
  aborted: "bad", damaged: "bad", failed: "bad", killed: "bad", hangs: "bad", unreadable: "bad", declined: "bad",
  preparing: "busy", prepared: "busy", deciding: "busy", committing: "busy",
  starting: "busy", stopping: "busy", restarting: "warn",
  finished: "off", interrupted: "off", stopped: "off",
};

export const levelOf = (state) => LEVELS[state] ?? "info";

export function pill(state, level = levelOf(state)) {
  return h("span", { class: `pill ${level}` }, icon(level), capital(spaced(state)));
}

/** A moment, and how long ago it was, which goes on by itself. */
export function moment(at, { withAge = true } = {}) {
  if (!at) return NONE;
  const told = h("time", { datetime: exact(at), title: exact(at) }, time(at));
  return withAge ? h("span", { class: "nowrap" }, told, ", ", age(at)) : told;
}

export const age = (at) => (at ? h("time", { class: "age", datetime: exact(at), title: `${time(at)} (${exact(at)})` }, ago(at)) : NONE);

export function tick() {
  for (const each of document.querySelectorAll("time.age")) {
    const text = ago(each.dateTime);
    if (each.textContent !== text) each.textContent = text;
  }
}

/** `facts`: pairs of a word and what it is; those that are null are left out. */
export function facts(pairs, className = "facts") {
  return h("dl", { class: className }, pairs.filter(Boolean).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

/** `columns`: {name, isNumber, cell(row), className}. The first cell of a row is its heading. With `stacks` a row is a card
 * on a narrow page; as a browser then takes it for no table, roles say that it is one. */
export function table(caption, columns, rows, { stacks = false, rowClass = () => null } = {}) {
  const role = (name) => (stacks ? name : null);
  const heads = columns.map((column) => h("th", { scope: "col", role: role("columnheader"), class: classOf(column), "aria-sort": column.sort }, column.head ?? column.name));
  return h("table", { class: stacks ? "stacks" : null, role: role("table") },
    h("caption", { class: "hidden" }, caption),
    h("thead", { role: role("rowgroup") }, h("tr", { role: role("row") }, heads)),
    h("tbody", { role: role("rowgroup") }, rows.map((row) =>
      h("tr", { class: rowClass(row), role: role("row") }, columns.map((column, index) => cell(column, row, index, role))))));
}

const classOf = (column) => [column.isNumber && "number", column.className].filter(Boolean).join(" ") || null;

function cell(column, row, index, role) {
  const value = column.cell(row);
  if (index === 0) return h("th", { scope: "row", role: role("rowheader"), class: classOf(column) }, value);
  return h("td", { class: classOf(column), role: role("cell"), "data-name": column.name }, h("span", {}, value));
}

const TALL = 25;

/** A table may be wider than the page, or long: then it scrolls, and the page does not. */
export function scrolling(label, content) {
  const isTall = content.tBodies[0].rows.length > TALL && !content.classList.contains("stacks");
  return h("div", { class: isTall ? "scrolls tall" : "scrolls", role: "region", "aria-label": label, tabindex: 0 }, content);
}

/** Numbers of a drawing, as a table that is made when somebody looks, fifty rows at a time. */
export function numbers(caption, columns, rows, size = 50) {
  const place = h("div", {});
  const details = h("details", { class: "numbers" }, h("summary", {}, "Numbers"), place);
  let from = 0;
  const draw = () => {
    place.replaceChildren(scrolling(caption, table(caption, columns, rows.slice(from, from + size))));
    if (rows.length <= size) return;
    const move = (by) => () => {
      from = Math.min(Math.max(0, from + by), Math.floor((rows.length - 1) / size) * size);
      draw();
    };
    place.append(
      h("p", { class: "pager" },
        h("button", { type: "button", disabled: from === 0, on: { click: move(-size) } }, "Before"),
        h("span", {}, `${from + 1} to ${Math.min(from + size, rows.length)} of ${rows.length}`),
        h("button", { type: "button", disabled: from + size >= rows.length, on: { click: move(size) } }, "After")),
    );
  };
  details.addEventListener("toggle", () => (details.open ? draw() : place.replaceChildren()));
  return details;
}

/** Choices of which one holds, as links: they are in the address, so that they can be sent to somebody. */
export function choices(label, options) {
  return h("nav", { class: "choices", "aria-label": label },
    options.map(({ name, href, isChosen }) => h("a", { href, "aria-current": isChosen ? "true" : null }, name)));
}

export function problem(error, onRetry) {
  return h("div", { class: "problem", role: "alert" }, icon("bad"), h("p", {}, capital(error.message)),
    onRetry && h("button", { type: "button", on: { click: onRetry } }, "Try again"));
}

export const empty = (text) => h("p", { class: "empty" }, text);

export function section(title, ...content) {
  const id = `s-${title.toLowerCase().replaceAll(/[^a-z]+/g, "-")}`;
  return h("section", { "aria-labelledby": id }, h("h2", { id }, title), ...content);
}

/** A bar beside a number, for comparing down a column. It says nothing that the number does not. */
export function bar(part) {
  const width = `${Math.round(Math.min(1, Math.max(0, part)) * 100)}%`;
  return s("svg", { class: "meter", height: 3, "aria-hidden": "true" }, s("rect", { width, height: 3, rx: 1.5 }));
}
