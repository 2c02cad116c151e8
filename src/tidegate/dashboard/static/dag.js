// The DAG, drawn from the layout that `tidegate graph` has, and kept as it is: on a change only what differs is touched,
// a few stages and channels in each frame.
//
// From left to right where there is room, from above where there is not. A stage is a box: its name, what it writes, what
// it does. An edge has what flows in it, what its reader has yet to read, and the watermark. The barrier of the checkpoint
// that is under way is a bar across the edge that it is in; what it has passed is marked by a word and a sign.

import { attribute, h, s, say } from "./dom.js";
import { words } from "./health.js";
import { empty } from "./pieces.js";
import { Turns } from "./turns.js";
import { behind, count, plural, rate, shorten, time } from "./words.js";

const ROW = 30; // of the layout, from left to right
const GAP = [132, 200]; // at least, at most
const TURN = 0.45; // of a gap: in the rest an edge is straight, so that words can stand at it
const CHARACTER = 7.4;
const MARGIN = 10;
const NARROW = 700;
const CUT = ["recording", "storing", "done"];
const BEFORE_END = 16; // of a barrier that has come to its reader: before the arrow
const PER_FRAME = 24; // stages and channels that are drawn, or changed, at once

export class Dag {
  #detail;
  #layout = null; // what is drawn
  #parts = [];
  #turns = new Turns((part) => part.draw(part.now), PER_FRAME, (isBusy) => attribute(this.element, "aria-busy", isBusy));

  constructor(detail) {
    this.element = h("div", { class: "dag scrolls", role: "region", "aria-label": "The stages, drawn", tabindex: 0 });
    this.isFitted = false;
    this.#detail = detail;
    this.#watch();
  }

  #watch() {
    let isNarrow = null;
    this.observer = new ResizeObserver(([{ contentRect }]) => {
      if (isNarrow === contentRect.width < NARROW) return;
      isNarrow = contentRect.width < NARROW;
      this.draw(contentRect.width);
    });
    this.observer.observe(this.element);
  }

  close() {
    this.observer.disconnect();
    this.#turns.clear();
  }

  /** Whether it is as wide as the page, or as large as it is. */
  fit(isFitted) {
    this.isFitted = isFitted;
    this.element.classList.toggle("is-fitted", isFitted);
  }

  update(detail) {
    this.#detail = detail;
    if (this.#layout === null) return; // until it is known how much room there is
    const isOther = detail.layout !== this.#layout && JSON.stringify(detail.layout) !== JSON.stringify(this.#layout);
    if (isOther) this.draw(this.element.clientWidth);
    else this.#fill();
  }

  draw(width) {
    const { layout } = this.#detail;
    this.#turns.clear();
    this.#layout = layout;
    if (!layout.nodes.length) {
      this.#parts = [];
      this.element.replaceChildren(empty("Its stages are not known yet."));
      return this.#fill();
    }
    const place = width < NARROW ? fromAbove(layout, width) : fromLeft(layout, width);
    const svg = s("svg", { class: place.isAbove ? "graph is-above" : "graph", viewBox: `0 0 ${place.width} ${place.height}`, width: place.width, height: place.height, role: "group", "aria-label": "Stages and channels" });
    const edges = s("g", {}), labels = s("g", {}), nodes = s("g", {}), bars = s("g", {});
    this.#parts = [...layout.nodes.map((node) => this.#node(node, place, nodes)), ...layout.edges.map((edge) => this.#edge(edge, place, edges, labels, bars))];
    svg.append(arrow(), edges, bars, nodes, labels);
    this.element.replaceChildren(svg);
    this.#fill();
  }

  /** What is not as it should look has its turn, and what is not drawn yet. */
  #fill() {
    const { status, summary } = this.#detail;
    const isAlive = summary.life === "alive";
    const [checkpoint] = isAlive ? (status?.in_progress ?? []) : [];
    const seen = { stages: status?.stages ?? {}, checkpoint, isAlive };
    this.#turns.add(this.#parts.filter((part) => {
      const now = part.look(seen);
      const isAsBefore = part.now !== null && Object.entries(now).every(([name, value]) => part.now[name] === value);
      part.now = now;
      return !isAsBefore;
    }));
  }

  /** A part of the drawing: `look` tells how it should look, as texts; `draw` makes it so. It is made when it is first
   * drawn. */
  #node(node, place, into) {
    const kind = this.#detail.graph[node.stage]?.kind ?? node.kind;
    let made = null;
    return { now: null, look: (seen) => nodeLook(node.stage, kind, seen), draw: (now) => drawNode((made ??= makeNode(node, kind, place, into)), kind, now) };
  }

  #edge(edge, place, edges, labels, bars) {
    const inputs = this.#detail.layout.edges.filter(({ target }) => target === edge.target);
    const at = place.label(edge, inputs.indexOf(edge), inputs.length);
    const about = { ...edge, isOnly: inputs.length <= 1, isAbove: place.isAbove };
    let made = null;
    return { now: null, look: (seen) => edgeLook(about, seen), draw: (now) => drawEdge((made ??= makeEdge(edge, at, place, edges, labels, bars)), now) };
  }
}

// -- a stage ----------------------------------------------------------------------------------------

function makeNode(node, kind, place, into) {
  const { x, y, width, height } = place.box(node);
  const room = Math.floor((width - 18) / (place.isAbove ? 6.2 : CHARACTER));
  const parts = { title: s("title"), does: s("text", { class: "does", x: 13, y: 58 }), rate: s("text", { class: "rate", x: 13, y: 40 }), sign: s("path", { class: "sign", transform: `translate(${width - 21} ${height - 20})` }) };
  const box = s("g", { class: "node", transform: `translate(${x} ${y})`, role: "img" },
    parts.title,
    s("rect", { class: "box", width, height, rx: kind === "stage" ? 4 : 14 }),
    kind === "sink" && s("rect", { class: "inner", x: 3, y: 3, width: width - 6, height: height - 6, rx: 11 }),
    s("rect", { class: "mark", x: 4, y: 14, width: 4, height: height - 28, rx: 2 }),
    s("text", { class: "name", x: 13, y: 22 }, shorten(node.stage, room)),
    parts.rate, parts.does, parts.sign);
  into.append(box);
  return { ...parts, box, room: Math.floor((width - 18) / (place.isAbove ? 5.6 : 6.2)) };
}

function nodeLook(name, kind, { stages, checkpoint, isAlive }) {
  const stage = stages[name], part = checkpoint?.stages[name];
  const held = isAlive ? stage?.held_back_by : null;
  const isLate = Boolean(held || stage?.no_batch);
  const does = !isAlive ? "" : held ? `held back by ${held}` : stage?.no_batch ? "no batch: source silent" : part ? words(part) : stage?.chained_into ? `in ${stage.chained_into}'s query` : stage?.lag > 0 ? `lag ${count(stage.lag)}` : "";
  const flow = isAlive && stage && !stage.chained_into ? rate(stage.rows_per_s) : isAlive ? "" : "not running";
  return {
    does,
    flow,
    state: !isAlive ? "is-off" : isLate ? "is-held" : part ? `is-${part.progress}` : "",
    sign: isLate ? "M6 0L12 11H0z" : part?.progress === "done" ? "M1 6l4 4 7-9" : part && part.progress !== "waiting" ? "M1 1h10v10H1z" : "",
    told: `${kind} ${name}: ${flow || "runs in another's query"}${does ? `, ${does}` : ""}`,
  };
}

function drawNode(node, kind, { does, flow, state, sign, told }) {
  say(node.rate, flow);
  say(node.does, shorten(does, node.room));
  attribute(node.box, "class", `node ${kind} ${state}`);
  attribute(node.sign, "d", sign);
  say(node.title, told);
  attribute(node.box, "aria-label", told);
}

// -- a channel --------------------------------------------------------------------------------------

function makeEdge(edge, at, place, edges, labels, bars) {
  const way = place.way(edge);
  const path = s("path", { class: "edge", d: way, "marker-end": "url(#arrow)" }, s("title"));
  const flow = s("text", { class: "flow", x: at?.x, y: at?.y, "text-anchor": at?.anchor });
  const late = s("text", { class: "late", x: at?.x, y: at && at.y + at.below, "text-anchor": at?.anchor });
  const bar = s("g", { class: "barrier is-away" }, s("path", { d: place.isAbove ? "M-11 0H11" : "M0-11V11" }));
  bars.append(bar);
  edges.append(path);
  if (at !== null) labels.append(flow, late);
  // Its points are measured on a path that is in no page: on one that is, that would lay out all of it each time.
  return { path, flow, late, bar, measured: s("path", { d: way }), points: new Map() };
}

function edgeLook(edge, { stages, checkpoint, isAlive }) {
  const source = stages[edge.source], target = stages[edge.target];
  const isHeld = isAlive && source?.held_back_by === edge.target;
  const isChained = source?.chained_into && (source.chained_into === edge.target || source.chained_into === target?.chained_into);
  const flow = !isAlive || !source || isChained ? (isChained ? "one query" : "") : rate(source.rows_per_s);
  const unread = (edge.isOnly ? target?.lag : target?.lags[edge.source]) ?? 0;
  const lag = unread > 0 ? `lag ${count(unread)}` : "";
  const mark = isAlive && source?.watermark_ms ? behind(source.watermark_ms) : "";
  // Of stages that run as one query, the last takes part for all of them.
  const partOf = (name, stage) => checkpoint?.stages[stage?.chained_into ?? name];
  const before = partOf(edge.source, source), after = partOf(edge.target, target);
  const isBehind = Boolean(before && CUT.includes(before.progress) && after && CUT.includes(after.progress));
  const at = barrierAt(edge, before, after);
  return {
    flow: isHeld ? "held back" : edge.isAbove ? flow : [flow, lag].filter(Boolean).join(" · "),
    late: edge.isAbove && lag ? lag : mark, // from above there is little room
    isHeld,
    state: `${isHeld ? "is-held" : ""} ${isBehind ? "is-passed" : ""} ${isChained ? "is-chained" : ""} ${isAlive ? flowing(source?.rows_per_s) : "is-off"}`,
    at,
    told: `${edge.source} to ${edge.target}: ${[flow, isHeld && "held back", unread > 0 && plural(unread, "segment") + " yet to read", mark && `watermark ${time(source.watermark_ms)}, ${mark}`, at !== null && "the barrier is here"].filter(Boolean).join(", ")}`,
  };
}

function drawEdge(edge, { flow, late, isHeld, state, at, told }) {
  say(edge.flow, flow);
  say(edge.late, late);
  attribute(edge.path, "class", `edge ${state}`);
  attribute(edge.flow, "class", isHeld ? "flow is-held" : "flow");
  const wasAway = edge.bar.classList.contains("is-away");
  attribute(edge.bar, "class", at === null ? "barrier is-away" : wasAway ? "barrier is-new" : "barrier"); // a new one does not fly in
  if (at !== null) {
    const { x, y } = pointAt(edge, at);
    attribute(edge.bar, "transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
  }
  say(edge.path.firstChild, told);
}

/** Where in an edge the barrier is, "begin" or "end"; null: not in it. */
function barrierAt(edge, before, after) {
  if (!before || !after || !CUT.includes(before.progress)) return null;
  if (after.progress === "waiting") return "begin";
  if ((after.progress === "aligning" || after.progress === "recording") && after.waits_for.includes(edge.source)) return "begin";
  if (after.progress === "aligning" || after.progress === "catching_up") return "end";
  return null;
}

const flowing = (perSecond) => (!perSecond ? "is-idle" : perSecond < 1000 ? "" : perSecond < 20000 ? "is-busy" : "is-full");

function pointAt(edge, at) {
  if (!edge.points.has(at)) {
    const length = edge.measured.getTotalLength();
    edge.points.set(at, edge.measured.getPointAtLength(at === "begin" ? length * 0.15 : length - BEFORE_END));
  }
  return edge.points.get(at);
}

function arrow() {
  return s("defs", {}, s("marker", { id: "arrow", viewBox: "0 0 10 10", refX: 9, refY: 5, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto" }, s("path", { d: "M0 0L10 5L0 10z" })));
}

// -- where everything stands ------------------------------------------------------------------------

const columnsOf = (layout) => layout.columns ?? 1 + Math.max(0, ...layout.nodes.map(({ column }) => column));
const rowsOf = (layout) => Math.max(1, ...layout.nodes.map(({ row, height }) => row + height), ...layout.edges.flatMap(({ points }) => points.map(({ row }) => row + 1)));

function fromLeft(layout, room) {
  const widths = Array(columnsOf(layout)).fill(126);
  for (const { stage, column } of layout.nodes) widths[column] = Math.max(widths[column], Math.min(200, stage.length * CHARACTER + 44));
  const free = room - 2 * MARGIN - widths.reduce((sum, width) => sum + width, 0);
  const gap = Math.min(GAP[1], Math.max(GAP[0], free / Math.max(1, widths.length - 1)));
  const lefts = [];
  let right = MARGIN;
  for (const width of widths) {
    lefts.push(right);
    right += width + gap;
  }
  const y = (row) => MARGIN + row * ROW + ROW / 2;
  const ends = (points) => points.slice(1).map((to, index) => [points[index], to]);
  return {
    isAbove: false,
    width: right - gap + MARGIN,
    height: rowsOf(layout) * ROW + 2 * MARGIN,
    box: ({ column, row, height }) => ({ x: lefts[column], y: MARGIN + row * ROW + 6, width: widths[column], height: height * ROW - 12 }),
    way: ({ points }) =>
      ends(points).map(([from, to], index) => {
        const x1 = lefts[from.column] + widths[from.column], x2 = lefts[to.column], over = x1 + gap * TURN, bend = (x1 + over) / 2;
        const start = index === 0 ? `M${x1} ${y(from.row)}` : `H${x1}`;
        return `${start} C${bend} ${y(from.row)} ${bend} ${y(to.row)} ${over} ${y(to.row)} H${x2}`;
      }).join(" "),
    label: ({ points }) => {
      const to = points.at(-1);
      return { x: lefts[to.column] - 24, y: y(to.row) - 5, below: 17, anchor: "end" }; // between them there is room for a barrier
    },
  };
}

function fromAbove(layout, width) {
  const rows = rowsOf(layout);
  const unit = Math.max(29, Math.min(60, (width - 2 * MARGIN) / rows));
  const down = 72, gap = 62;
  const x = (row) => MARGIN + row * unit + unit / 2;
  const y = (column) => MARGIN + column * (down + gap);
  return {
    isAbove: true,
    width: Math.max(rows * unit + 2 * MARGIN, Math.min(width, 320)),
    height: columnsOf(layout) * (down + gap) - gap + 2 * MARGIN,
    box: ({ column, row, height }) => ({ x: MARGIN + row * unit + 3, y: y(column), width: height * unit - 6, height: down }),
    way: ({ points }) =>
      points.slice(1).map((to, index) => {
        const from = points[index];
        const y1 = y(from.column) + down, y2 = y(to.column), over = y1 + gap * TURN, bend = (y1 + over) / 2;
        const start = index === 0 ? `M${x(from.row)} ${y1}` : `V${y1}`;
        return `${start} C${x(from.row)} ${bend} ${x(to.row)} ${bend} ${x(to.row)} ${over} V${y2}`;
      }).join(" "),
    label: ({ points }, index, of) => {
      const to = points.at(-1);
      if (index < of - 1) return null; // of several inputs the last has room for words
      return { x: x(to.row) + 14, y: y(to.column) - 24, below: 13, anchor: "start" };
    },
  };
}
