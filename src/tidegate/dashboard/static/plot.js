// A plot over time. By mouse, touch or arrow keys one reads a point; its numbers are a table too.
//
// However many points there are, not more is drawn than there are pixels.

import { h, s } from "./dom.js";
import { Numbers } from "./pieces.js";
import { asMs, measured, time } from "./words.js";

const HEIGHT = 150;
const LEFT = 54, RIGHT = 10, TOP = 8, BOTTOM = 20;
const DASHES = [null, "5 3", "2 3", "8 3 2 3", "1 4", "10 4", null];

/** `points`: oldest first, with `at` and `checkpoint`; `series`: {name, unit, of(point)}; `isStacked`: one upon another.
 * `open(point)`: what Enter and a click do. */
export function plot(title, points, series, { isStacked = false, open = null } = {}) {
  const known = points.filter((point) => asMs(point.at) !== null);
  const read = h("p", { class: "read", role: "status" });
  const place = h("div", { class: "drawing", tabindex: 0, role: "group", "aria-label": `${title}, plotted. Left and right move from checkpoint to checkpoint, Enter opens one. The numbers are in the table below.` });
  const key = h("ul", { class: "series" }, series.map(({ name }, index) => h("li", {}, swatch(index, isStacked), name)));
  const numbers = new Numbers(title, [
    { name: "Checkpoint", cell: (point) => point.checkpoint },
    { name: "At", cell: (point) => time(point.at) },
    ...series.map(({ name, unit, of }) => ({ name, isNumber: true, cell: (point) => measured(unit, of(point)) })),
  ]);
  numbers.draw(known.toReversed());
  const figure = h("figure", { class: "plot" }, h("figcaption", {}, h("h3", {}, title), series.length > 1 && key), place, read, numbers.element);
  if (!known.length) {
    place.replaceChildren(h("p", { class: "muted" }, "No checkpoint yet."));
    place.removeAttribute("tabindex");
    return { figure, close() {} };
  }
  const drawing = new Drawing(place, read, known, series, isStacked, open);
  return { figure, close: () => drawing.close() };
}

function swatch(index, isStacked) {
  const shape = isStacked ? s("rect", { class: `f${index + 1}`, width: 12, height: 10 }) : s("path", { class: `line c${index + 1}`, d: "M0 5H18", "stroke-width": 2, "stroke-dasharray": DASHES[index] });
  return s("svg", { viewBox: isStacked ? "0 0 12 10" : "0 0 18 10", width: isStacked ? 12 : 18, height: 10, "aria-hidden": "true" }, shape);
}

class Drawing {
  #at = null; // the point that is read

  constructor(place, read, points, series, isStacked, open) {
    Object.assign(this, { place, read, points, series, isStacked, open });
    this.times = points.map((point) => asMs(point.at));
    this.values = isStacked ? stacked(points, series) : series.map(({ of }) => points.map(of));
    this.top = nice(Math.max(0, ...this.values.map((each) => each.reduce((most, value) => Math.max(most, value ?? 0), 0))), series[0].unit);
    this.observer = new ResizeObserver(([{ contentRect }]) => this.#draw(Math.round(contentRect.width)));
    this.observer.observe(place);
    place.addEventListener("pointermove", (event) => this.#point(event.offsetX));
    place.addEventListener("pointerleave", () => this.#show(null));
    place.addEventListener("click", () => this.#open());
    place.addEventListener("keydown", (event) => this.#key(event));
    this.#show(null);
  }

  close() {
    this.observer.disconnect();
  }

  #x(index) {
    const [first] = this.times, last = this.times.at(-1);
    const room = this.width - LEFT - RIGHT;
    return LEFT + (last === first ? room / 2 : ((this.times[index] - first) / (last - first)) * room);
  }

  #y(value) {
    return TOP + (1 - Math.min(value, this.top) / this.top) * (HEIGHT - TOP - BOTTOM);
  }

  #draw(width) {
    if (!width || width === this.width) return;
    this.width = width;
    const svg = s("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" });
    const { unit } = this.series[0];
    for (const part of [0, 0.5, 1]) {
      const y = this.#y(this.top * part);
      svg.append(s("path", { class: "grid-line", d: `M${LEFT} ${y}H${width - RIGHT}` }), s("text", { class: "tick", x: LEFT - 6, y: y + 4, "text-anchor": "end" }, measured(unit, this.top * part).replace(".0 ", " ")));
    }
    const last = this.times.length - 1;
    const ends = [[0, "start"], ...(last > 0 ? [[last, "end"]] : [])];
    for (const [index, anchor] of ends) svg.append(s("text", { class: "tick", x: anchor === "start" ? LEFT : width - RIGHT, y: HEIGHT - 5, "text-anchor": anchor }, time(this.times[index], { withSeconds: false })));
    if (this.isStacked) this.#areas(svg);
    else this.values.forEach((values, index) => this.#line(svg, values, index));
    this.cross = s("path", { class: "cross", d: "" });
    svg.append(this.cross);
    this.place.replaceChildren(svg);
    this.#show(this.#at);
  }

  #line(svg, values, index) {
    if (this.times.length > (this.width - LEFT - RIGHT) / 2) return this.#dense(svg, values, index);
    const shown = this.#known(values);
    if (shown.length === 1) svg.append(s("circle", { class: `dot f${index + 1}`, cx: this.#x(shown[0]), cy: this.#y(values[shown[0]]), r: 3 }));
    const d = shown.map((each, step) => `${step ? "L" : "M"}${this.#x(each).toFixed(1)} ${this.#y(values[each]).toFixed(1)}`).join("");
    svg.append(s("path", { class: `line c${index + 1}`, d, "stroke-dasharray": DASHES[index] }));
  }

  /** Of many points: the mean as a line, and behind it from the lowest to the highest, four pixels at a time. */
  #dense(svg, values, index) {
    const steps = new Map();
    for (const each of this.#known(values)) {
      const step = Math.round(this.#x(each) / 4) * 4;
      const found = steps.get(step) ?? { low: Infinity, high: -Infinity, sum: 0, count: 0 };
      const value = values[each];
      steps.set(step, { low: Math.min(found.low, value), high: Math.max(found.high, value), sum: found.sum + value, count: found.count + 1 });
    }
    const at = [...steps.keys()].toSorted((a, b) => a - b).map((x) => [x, steps.get(x)]);
    const path = (of, order = at) => order.map(([x, step]) => `${x} ${this.#y(of(step)).toFixed(1)}`);
    svg.append(
      s("path", { class: `range f${index + 1}`, d: `M${[...path((step) => step.high), ...path((step) => step.low, at.toReversed())].join("L")}Z` }),
      s("path", { class: `line c${index + 1}`, d: `M${path((step) => step.sum / step.count).join("L")}`, "stroke-dasharray": DASHES[index] }));
  }

  #areas(svg) {
    this.values.forEach((values, index) => {
      const below = index ? this.values[index - 1] : null;
      const shown = this.#thinned(values);
      const upper = shown.map((each) => `${this.#x(each).toFixed(1)} ${this.#y(values[each]).toFixed(1)}`);
      const lower = shown.toReversed().map((each) => `${this.#x(each).toFixed(1)} ${this.#y(below ? below[each] : 0).toFixed(1)}`);
      svg.append(s("path", { class: `area f${index + 1} c${index + 1}`, d: `M${[...upper, ...lower].join("L")}Z` }));
    });
  }

  #known(values) {
    return values.flatMap((value, index) => (value === null || value === undefined ? [] : [index]));
  }

  /** Which points to draw: of each pixel the lowest, the highest and the last. */
  #thinned(values) {
    const known = this.#known(values);
    if (known.length <= this.width) return known;
    const pixels = new Map();
    for (const index of known) {
      const value = values[index], pixel = Math.round(this.#x(index));
      const found = pixels.get(pixel) ?? { low: index, high: index };
      if (value < values[found.low]) found.low = index;
      if (value > values[found.high]) found.high = index;
      pixels.set(pixel, { ...found, last: index });
    }
    return [...new Set([...pixels.values()].flatMap(({ low, high, last }) => [low, high, last]))].toSorted((a, b) => a - b);
  }

  #point(x) {
    let low = 0, high = this.times.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.#x(middle) < x) low = middle + 1;
      else high = middle;
    }
    this.#show(low > 0 && x - this.#x(low - 1) < this.#x(low) - x ? low - 1 : low);
  }

  #key(event) {
    const last = this.points.length - 1;
    const moves = { ArrowLeft: (at) => Math.max(0, (at ?? last + 1) - 1), ArrowRight: (at) => Math.min(last, (at ?? last - 1) + 1), Home: () => 0, End: () => last };
    if (event.key === "Enter") this.#open();
    else if (event.key in moves) {
      event.preventDefault();
      this.#show(moves[event.key](this.#at));
    }
  }

  #open() {
    if (this.#at !== null) this.open?.(this.points[this.#at]);
  }

  #show(index) {
    this.#at = index;
    const at = index ?? this.points.length - 1;
    const point = this.points[at];
    this.cross?.setAttribute("d", index === null || !this.width ? "" : `M${this.#x(index)} ${TOP}V${HEIGHT - BOTTOM}`);
    const told = this.series.map(({ name, unit, of }) => `${this.series.length > 1 ? `${name} ` : ""}${measured(unit, of(point))}`);
    this.read.textContent = `${index === null ? "Newest: " : ""}${point.checkpoint}, ${time(point.at)}: ${told.join(", ")}`;
  }
}

function stacked(points, series) {
  const found = [];
  for (const { of } of series) {
    const below = found.at(-1);
    found.push(points.map((point, index) => (of(point) ?? 0) + (below ? below[index] : 0)));
  }
  return found;
}

/** The end of an axis that holds a value: 1, 2 or 5, and noughts. */
function nice(value, unit) {
  if (value <= 0) return unit.endsWith("_ms") ? 1000 : unit.endsWith("bytes") ? 1000 : 1;
  const size = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 10].find((each) => each * size >= value) * size;
}
