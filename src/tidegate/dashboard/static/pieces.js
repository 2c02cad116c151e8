// Pieces that several pages are made of.

import { lastOf } from "./again.js";
import { h, s, show } from "./dom.js";
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
 * on a narrow page; as a browser then takes it for no table, roles say that it is one. `keyOf`: by what a row is known
 * again, where rows come and go. */
export function table(caption, columns, rows, { stacks = false, rowClass = () => null, keyOf = () => null } = {}) {
  const role = (name) => (stacks ? name : null);
  const heads = columns.map((column) => h("th", { scope: "col", role: role("columnheader"), class: classOf(column), "aria-sort": column.sort }, column.head ?? column.name));
  return h("table", { class: stacks ? "stacks" : null, role: role("table") },
    h("caption", { class: "hidden" }, caption),
    h("thead", { role: role("rowgroup") }, h("tr", { role: role("row") }, heads)),
    h("tbody", { role: role("rowgroup") }, rows.map((row) =>
      h("tr", { class: rowClass(row), role: role("row"), "data-key": keyOf(row) }, columns.map((column, index) => cell(column, row, index, role))))));
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

const PAGE = 25;

/** A table of which so many rows are in the page at a time, however many there are, and the way to the others: by pages,
 * or by a part of what names them. */
export class Paged {
  #from = 0;
  #wanted = "";
  #drawn = null;

  /** `size`: rows of a page. */
  constructor(size = PAGE) {
    this.size = size;
    this.element = h("div", { class: "paged" });
    this.element.addEventListener("click", (event) => {
      const by = event.target.closest("button[data-by]")?.dataset.by;
      if (by) this.#go(this.#from + Number(by) * this.size);
    });
    this.element.addEventListener("input", (event) => {
      this.#wanted = event.target.value.trim().toLowerCase();
      this.#go(0);
    });
  }

  /** As `table`. `named(row)`: by what a row is found; without it there is nothing to find. `none`: what is said where
   * there are no rows. */
  draw(caption, columns, rows, { named = null, none = "", ...options } = {}) {
    if (!rows.length) return show(this.element, empty(none));
    this.#drawn = [caption, columns, rows, { named, none, ...options }];
    const found = this.#wanted && named ? rows.filter((row) => named(row).toLowerCase().includes(this.#wanted)) : rows;
    this.#from = Math.min(this.#from, Math.floor(Math.max(0, found.length - 1) / this.size) * this.size);
    const shown = found.slice(this.#from, this.#from + this.size);
    show(this.element, rows.length > this.size && this.#pager(caption, found.length, named),
      scrolling(caption, table(caption, columns, shown, options)));
  }

  #go(from) {
    this.#from = Math.max(0, from);
    this.draw(...this.#drawn);
  }

  #pager(caption, count, named) {
    const last = Math.min(this.#from + this.size, count);
    const button = (by, text, isOff) => h("button", { type: "button", "data-by": by, disabled: isOff }, text);
    return h("p", { class: "pager" },
      named && h("input", { type: "search", placeholder: "Find by name", "aria-label": `${caption}: find by name`, autocomplete: "off", spellcheck: "false" }),
      button(-1, "Before", this.#from === 0),
      h("span", { role: "status" }, count ? `${this.#from + 1} to ${last} of ${count}` : "None has that in its name"),
      button(1, "After", last >= count));
  }
}

/** Pages of a list that the server has, newest first: only the newest grows. */
export class Pages {
  #cursors = [""]; // of the pages before this one, so that one can go back
  #next = null;
  #ask;

  /** `ask(before)` is answered with `next`, by which to ask for the page after it; `draw(answer)`; `turned()`: somebody has
   * gone to another page; `fail(error)`: that could not be asked for. */
  constructor(ask, draw, turned, fail) {
    Object.assign(this, { draw, turned, fail });
    this.#ask = lastOf(ask);
    this.element = h("p", { class: "pager" });
    this.element.addEventListener("click", (event) => this.#turn(event.target.closest("button")?.dataset.go));
  }

  get isFirst() {
    return this.#cursors.length === 1;
  }

  async load() {
    const found = await this.#ask(this.#cursors.at(-1));
    if (found === null) return;
    this.#next = found.next;
    this.draw(found);
    const button = (where, text) => h("button", { type: "button", "data-go": where }, text);
    show(this.element, !this.isFirst && button("newer", "Newer"), !this.isFirst && h("span", { class: "muted" }, `Page ${this.#cursors.length}`), this.#next && button("older", "Older"));
  }

  async #turn(where) {
    const cursors = this.#cursors, next = this.#next;
    if (where === "newer") this.#cursors = cursors.slice(0, -1);
    else if (where === "older" && next) this.#cursors = [...cursors, next];
    else return;
    this.#next = null; // until it is known what comes after that page
    try {
      await this.load();
      this.turned();
    } catch (error) {
      if (error.name === "AbortError") return;
      [this.#cursors, this.#next] = [cursors, next]; // so that it can be tried again
      this.fail(error);
    }
  }
}

/** Numbers of a drawing, as a table that is made when somebody looks, fifty rows at a time. */
export class Numbers {
  #rows = [];
  #place = h("div", {});
  #pages = null; // while somebody looks

  constructor(caption, columns, size = 50) {
    Object.assign(this, { caption, columns });
    this.element = h("details", { class: "numbers" }, h("summary", {}, "Numbers"), this.#place);
    this.element.addEventListener("toggle", () => {
      this.#pages = this.element.open ? new Paged(size) : null;
      this.#place.replaceChildren(...(this.#pages ? [this.#pages.element] : []));
      this.draw(this.#rows);
    });
  }

  draw(rows) {
    this.#rows = rows;
    this.#pages?.draw(this.caption, this.columns, rows);
  }
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
