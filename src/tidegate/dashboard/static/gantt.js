// A checkpoint over time: every phase of every stage, every commit; what it waited for has a border and a line through it.

import { h, s, show } from "./dom.js";
import { Numbers } from "./pieces.js";
import { duration, shorten, spaced } from "./words.js";

const LINE = 22, TOP = 24;
export const PHASES = ["beginning", "waiting", "aligning", "catching_up", "recording", "storing", "quorum", "deciding", "committing"];
const TEXTURES = { waiting: "M0 8L8 0", aligning: "M0 0L8 8M0 8L8 0", catching_up: "M4 0V8", recording: "M0 4H8" };
const MEANS = {
  beginning: "until it was announced to the stages",
  waiting: "for the first barrier",
  aligning: "waiting for the barriers of other inputs",
  catching_up: "consuming what came before the barriers",
  recording: "what is in flight, until the last barrier",
  storing: "its snapshot",
  quorum: "everybody's word",
  deciding: "written to the decision log",
  committing: "until the table shows it",
};

export class Gantt {
  #place = h("div", {});
  #phases = h("ul", { class: "phases" });
  #box = h("input", { type: "checkbox" });
  #numbers = new Numbers("Phases of this checkpoint", [
    { name: "Who", cell: (span) => span.name ?? "the pipeline" },
    { name: "Phase", cell: (span) => spaced(span.phase) },
    { name: "From", isNumber: true, cell: (span) => duration(span.from_ms) },
    { name: "To", isNumber: true, cell: (span) => duration(span.to_ms) },
    { name: "Took", isNumber: true, cell: (span) => duration(span.to_ms - span.from_ms) },
    { name: "Critical path", cell: (span) => (span.is_critical ? "yes" : "no") },
  ]);
  #spans = [];
  #rows = [];
  #width = 0;

  /** `stages`: how many there are. */
  constructor(stages) {
    this.#box.checked = stages > 30;
    this.#box.addEventListener("change", () => this.#draw());
    this.observer = new ResizeObserver(([{ contentRect }]) => {
      if (Math.round(contentRect.width) === this.#width) return;
      this.#width = Math.round(contentRect.width);
      this.#draw();
    });
    this.observer.observe(this.#place);
    this.element = h("div", {}, h("div", { class: "head" }, this.#phases, h("label", {}, this.#box, " Only the critical path")), this.#place, this.#numbers.element);
  }

  /** `spans` as the server tells them; `order`: the stages in the pipeline's order. What somebody has opened stays open. */
  update(spans, order) {
    this.#spans = spans;
    this.#rows = rowsOf(spans, order);
    const phases = PHASES.filter((phase) => spans.some((span) => span.phase === phase));
    show(this.#phases, phases.map((phase) => h("li", { title: MEANS[phase] }, sample(phase), spaced(phase))), h("li", {}, critical(), "critical path: what it waited for"));
    this.#numbers.draw(spans);
    this.#draw();
  }

  #draw() {
    if (!this.#width) return; // until it is known how much room there is
    this.#place.replaceChildren(drawing(this.#box.checked ? this.#rows.filter((row) => row.isCritical) : this.#rows, this.#spans, this.#width));
  }

  close() {
    this.observer.disconnect();
  }
}

/** A line per stage, in order, one for the whole, then one per sink that commits. */
function rowsOf(spans, order) {
  const rows = new Map();
  const line = (id, name, kind) => rows.get(id) ?? rows.set(id, { name, kind, spans: [], isCritical: false }).get(id);
  for (const name of order) if (spans.some((span) => span.name === name && span.phase !== "committing")) line(`stage ${name}`, name, "stage");
  const whole = spans.some((span) => span.name === null);
  if (whole) line("whole", "all stages", "whole");
  for (const span of spans) {
    const isCommit = span.phase === "committing";
    const row = span.name === null ? line("whole", "all stages", "whole") : line(`${isCommit ? "commit" : "stage"} ${span.name}`, isCommit ? `${span.name} (table)` : span.name, isCommit ? "commit" : "stage");
    row.spans.push(span);
    row.isCritical ||= span.is_critical;
  }
  return [...rows.values()];
}

function drawing(rows, spans, width) {
  const left = Math.min(190, Math.max(92, width * 0.24)), right = 14;
  const end = Math.max(1, ...spans.map((span) => span.to_ms));
  const x = (ms) => left + (ms / end) * (width - left - right);
  const height = TOP + rows.length * LINE + 6;
  const told = spans.filter((span) => span.is_critical).map((span) => `${span.name ?? "the pipeline"} ${spaced(span.phase)} ${duration(span.to_ms - span.from_ms)}`);
  const svg = s("svg", { class: "gantt", viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-labelledby": "gantt-title gantt-desc" },
    s("title", { id: "gantt-title" }, "Phases of this checkpoint over time"),
    s("desc", { id: "gantt-desc" }, `It took ${duration(end)} until all was done. It waited for: ${told.join(", ") || "nothing that is known"}. All numbers are in the table below.`),
    textures());
  const steps = width < 500 ? 2 : 5;
  for (let step = 0; step <= steps; step++) {
    const ms = (end / steps) * step;
    svg.append(s("path", { class: "line", d: `M${x(ms)} ${TOP - 6}V${height}` }), s("text", { class: "tick", x: x(ms), y: 12, "text-anchor": step === 0 ? "start" : step === steps ? "end" : "middle" }, duration(ms)));
  }
  const room = Math.floor((left - 8) / 6.3);
  const bars = s("g"), texts = s("g"); // what a bar says is above the way through it
  rows.forEach((row, index) => {
    const y = TOP + index * LINE;
    if (index % 2) svg.append(s("rect", { class: "band", x: 0, y, width, height: LINE }));
    svg.append(s("text", { class: row.isCritical ? "who is-critical" : "who", x: 0, y: y + 15 }, s("title", {}, row.name), shorten(row.name, room)));
    for (const span of row.spans.toSorted((a, b) => a.is_critical - b.is_critical)) drawBar(span, row.name, x, y, bars, texts);
  });
  svg.append(bars, way(rows, x), texts);
  return svg;
}

function drawBar(span, name, x, y, bars, texts) {
  const from = x(span.from_ms), size = Math.max(2, x(span.to_ms) - from);
  const place = { x: from, y: y + 4, width: size, height: LINE - 8, rx: 2 };
  const title = `${name}: ${spaced(span.phase)} ${duration(span.to_ms - span.from_ms)}, from ${duration(span.from_ms)} to ${duration(span.to_ms)}${span.is_critical ? " (critical path)" : ""}`;
  const word = `${spaced(span.phase)} ${duration(span.to_ms - span.from_ms)}`;
  const short = duration(span.to_ms - span.from_ms);
  const text = size > word.length * 6 + 8 ? word : size > short.length * 6 + 8 ? short : null;
  bars.append(s("rect", { ...place, class: `bar phase-${span.phase} ${span.is_critical ? "is-critical" : ""}` }, s("title", {}, title)));
  if (TEXTURES[span.phase]) bars.append(s("rect", { ...place, fill: `url(#texture-${span.phase})`, "pointer-events": "none" }));
  if (text) texts.append(s("text", { class: "word", x: from + 4, y: y + 15 }, text));
}

/** The critical path as a line from one of its bars to the next. */
function way(rows, x) {
  const found = rows.flatMap((row, index) => row.spans.filter((span) => span.is_critical).map((span) => ({ span, y: TOP + index * LINE + LINE / 2 })));
  found.sort((a, b) => a.span.from_ms - b.span.from_ms || a.span.to_ms - b.span.to_ms);
  const d = found.slice(1).map(({ span, y }, index) => {
    const before = found[index];
    const at = x(Math.min(before.span.to_ms, span.from_ms)) + (span.from_ms < before.span.to_ms ? 1 : 0);
    return before.y === y ? "" : `M${at} ${before.y + Math.sign(y - before.y) * 7}V${y}H${x(span.from_ms)}`;
  });
  return s("path", { class: "way", d: d.join("") });
}

function textures() {
  return s("defs", {}, Object.entries(TEXTURES).map(([phase, d]) =>
    s("pattern", { id: `texture-${phase}`, width: 8, height: 8, patternUnits: "userSpaceOnUse" }, s("path", { class: "texture", d }))));
}

function sample(phase) {
  const place = { width: 18, height: 11, rx: 2 };
  return s("svg", { class: "gantt-key", viewBox: "0 0 18 11", width: 18, height: 11, "aria-hidden": "true" }, s("rect", { ...place, class: `phase-${phase}` }), TEXTURES[phase] && s("rect", { ...place, fill: `url(#texture-${phase})` }));
}

function critical() {
  return s("svg", { class: "gantt", viewBox: "0 0 18 11", width: 18, height: 11, "aria-hidden": "true" }, s("rect", { class: "bar is-critical", x: 1.5, y: 1.5, width: 15, height: 8, rx: 2, "fill-opacity": 0 }));
}
