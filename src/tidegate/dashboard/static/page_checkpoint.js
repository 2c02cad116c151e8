// One checkpoint: what it waited for, phase by phase, and all that it consists of.

import { get, ofPipeline } from "./api.js";
import { h, show } from "./dom.js";
import { Gantt } from "./gantt.js";
import { words } from "./health.js";
import { empty, facts, moment, Paged, pill, section } from "./pieces.js";
import { tags } from "./page_checkpoints.js";
import { bytes, count, duration, NONE, plural, time } from "./words.js";

const BECAUSE = { aligned: "aligned", timeout: "unaligned: it took too long", always: "unaligned: none waits", asked: "unaligned: as asked for", upstream: "unaligned: a stage before it was" };

export async function openCheckpoint({ main, key, names: [name], signal }) {
  let found = await get(ofPipeline(key, "checkpoints", name), {}, signal);
  const others = get(ofPipeline(key, "checkpoints"), { limit: 30 }, signal).catch(() => ({ checkpoints: [] }));
  const order = (checkpoint) => Object.keys(checkpoint.stages);
  const top = h("div", { class: "stack" }), chartPlace = h("div", {}, empty("Nothing is known of its phases."));
  const { element: rest, draw: drawParts } = parts();
  let chart = null, drawn = null;

  const drawChart = () => {
    if (drawn === JSON.stringify(found.gantt)) return;
    drawn = JSON.stringify(found.gantt);
    if (chart === null && found.gantt.length) {
      chart = new Gantt(order(found.checkpoint).length);
      chartPlace.replaceChildren(chart.element);
    }
    chart?.update(found.gantt, order(found.checkpoint));
  };
  const draw = () => {
    show(top, head(found));
    drawChart();
    drawParts(found);
  };
  draw();
  main.replaceChildren(top, section("What took how long", chartPlace), rest, section("Compare", await compareForm(key, name, others)));

  // While it is under way it is asked for again with every change.
  let asked = false;
  const refresh = async () => {
    if (asked || signal.aborted) return;
    asked = true;
    try {
      found = await get(ofPipeline(key, "checkpoints", name), {}, signal);
      draw();
    } catch {
      // What is shown stays; the stream tells of the connection.
    } finally {
      asked = false;
    }
  };
  const isOpen = () => !["complete", "aborted", "damaged"].includes(found.checkpoint.state);
  return { update: () => isOpen() && refresh(), refresh, close: () => chart?.close() };
}

function head(row) {
  const { checkpoint } = row;
  const { attempt } = checkpoint;
  return [
    h("div", { class: "head" }, h("h1", {}, checkpoint.checkpoint, " ", pill(checkpoint.state)), h("span", {}, tags(row))),
    h("div", { class: "card" },
      h("p", { class: checkpoint.why ? "waited why" : "waited" }, checkpoint.why ?? checkpoint.waited_for ?? (checkpoint.state === "complete" ? "What it waited for is not known." : "It is under way.")),
      checkpoint.why && checkpoint.waited_for && h("p", {}, checkpoint.waited_for),
      facts([
        ["Begun", moment(checkpoint.triggered_at)],
        ["Until decided", duration(checkpoint.duration_ms)],
        ["Until all tables showed it", duration(checkpoint.shown_ms)],
        ["Longest alignment", duration(checkpoint.alignment_ms)],
        ["Stored", `${bytes(checkpoint.new_bytes)} new of ${bytes(checkpoint.total_bytes)}`],
        ["In flight", bytes(checkpoint.in_flight_bytes)],
        ["Watermark", checkpoint.min_watermark_ms === null ? NONE : time(checkpoint.min_watermark_ms)],
        ["Alignment", checkpoint.aligned === null ? NONE : checkpoint.aligned ? "aligned: all tables show the same prefix" : "unaligned: rows were in flight"],
        ["Number", `epoch ${checkpoint.epoch}, generation ${checkpoint.generation}${attempt > 1 ? `, attempt ${attempt}` : ""}`],
      ])),
    row.problems?.length > 0 && h("ul", { class: "notes said-warn" }, row.problems.map((text) => h("li", {}, text))),
  ];
}

/** What it consists of: tables that may be long, each with pages of its own. */
function parts() {
  const sources = new Paged(), sinks = new Paged(), stages = new Paged();
  const none = "That is not known any more.";
  const element = h("div", { class: "stack" },
    h("div", { class: "grid wide" }, section("Where sources stood", sources.element), section("Tables", sinks.element)),
    section("Stages", stages.element));
  const draw = ({ checkpoint, positions, files, tables }) => {
    sources.draw("Where sources stood", [
      { name: "Source", cell: ([stage]) => stage },
      { name: "Position", className: "sentence", cell: ([, texts]) => h("ul", {}, texts.map((text) => h("li", {}, text))) },
    ], Object.entries(positions), { none, named: ([stage]) => stage });
    sinks.draw("Tables at this checkpoint", [
      { name: "Sink", cell: ([sink]) => sink },
      { name: "Version", isNumber: true, cell: ([, found]) => (found.version === null ? NONE : count(found.version)) },
      { name: "Commit", cell: ([sink]) => commit(checkpoint.commits[sink], checkpoint.state === "complete") },
      { name: "Table", className: "sentence", cell: ([, found]) => [h("span", { class: "mono" }, [found.kind, found.address].filter(Boolean).join(" ")), found.why && h("span", { class: "sub muted" }, found.why)] },
    ], Object.entries(tables), { none, named: ([sink]) => sink });
    stages.draw("Each stage's part", [
      { name: "Stage", cell: ([stage]) => stage },
      { name: "Part", cell: ([, part]) => (part.progress === "done" ? "done" : pill(words(part), part.progress === "declined" || checkpoint.state === "aborted" ? "bad" : "busy")) },
      { name: "Cut", className: "nowrap", cell: ([, part]) => (part.cut_because ? `batch ${part.cut ?? NONE}, ${BECAUSE[part.cut_because]}` : NONE) },
      { name: "First barrier", isNumber: true, cell: ([, part]) => duration(part.barrier_ms) },
      { name: "Alignment", isNumber: true, cell: ([, part]) => duration(part.alignment_ms) },
      { name: "Caught up", isNumber: true, cell: ([, part]) => (part.caught_up_segments === null ? NONE : plural(part.caught_up_segments, "segment")) },
      { name: "Storing", isNumber: true, cell: ([, part]) => duration(part.snapshot_ms) },
      { name: "New", isNumber: true, cell: ([, part]) => bytes(part.new_bytes) },
      { name: "All", isNumber: true, cell: ([, part]) => bytes(part.total_bytes) },
      { name: "Files", isNumber: true, cell: ([stage]) => (files[stage] ? count(files[stage].count) : NONE) },
      { name: "In flight", isNumber: true, cell: ([, part]) => bytes(part.in_flight_bytes) },
      { name: "Watermark", isNumber: true, cell: ([, part]) => (part.watermark_ms === null ? NONE : time(part.watermark_ms)) },
    ], Object.entries(checkpoint.stages), { none: "Nothing is known of its stages.", named: ([stage]) => stage });
  };
  return { element, draw };
}

/** One that is complete, though its own run saw no end of this commit, was shown by the next start. */
function commit(found, isComplete) {
  if (!found) return NONE;
  const failed = found.failures ? `, ${plural(found.failures, "failure")}${found.why ? `: ${found.why}` : ""}` : "";
  return found.took_ms === null ? `${isComplete ? "by a later start" : "not yet"}${failed}` : `${duration(found.took_ms)}${failed}`;
}

async function compareForm(key, name, others) {
  const { checkpoints } = await others;
  const known = checkpoints.map(({ checkpoint }) => checkpoint).filter(({ checkpoint }) => checkpoint !== name);
  if (!known.length) return empty("There is no other to compare it with.");
  const select = h("select", { id: "with" }, known.map((each) => h("option", { value: each.checkpoint }, `${each.checkpoint}: ${each.state}, ${duration(each.duration_ms)}`)));
  const before = known.find((each) => each.checkpoint < name && each.state === "complete");
  if (before) select.value = before.checkpoint;
  const go = () => {
    const pair = [select.value, name].toSorted();
    location.hash = `#/p/${encodeURIComponent(key)}/compare/${pair.map(encodeURIComponent).join("/")}`;
  };
  return h("p", { class: "pager" }, h("label", { for: "with" }, "With"), select, h("button", { type: "button", class: "main", on: { click: go } }, "Compare"));
}
