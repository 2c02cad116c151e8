// Two checkpoints side by side.

import { get, ofPipeline } from "./api.js";
import { h } from "./dom.js";
import { moment, Paged, pill, scrolling, section, table } from "./pieces.js";
import { duration, measured, named, NONE } from "./words.js";

const WHOLE = ["duration_ms", "alignment_ms", "new_bytes", "total_bytes", "in_flight_bytes"];
const PARTS = ["alignment_ms", "snapshot_ms", "new_bytes", "total_bytes", "in_flight_bytes", "batch"];

export async function openCompare({ main, key, names: [a, b], signal }) {
  const found = await get(ofPipeline(key, "compare", a, b), {}, signal);
  const base = `#/p/${encodeURIComponent(key)}`;
  const link = (one) => h("a", { href: `${base}/checkpoints/${encodeURIComponent(one.checkpoint)}` }, one.checkpoint);
  const about = (one) => h("div", { class: "card" }, h("h2", {}, link(one), " ", pill(one.state)), h("p", {}, moment(one.triggered_at)), h("p", { class: one.why ? "why" : null }, one.why ?? one.waited_for ?? NONE));
  const stages = Object.entries(found.stages);
  const most = Object.fromEntries(PARTS.map((measure) => [measure, Math.max(1, ...stages.map(([, stage]) => Math.abs(stage[measure]?.difference ?? 0)))]));
  const sources = stages.filter(([, stage]) => stage.positions_a.length || stage.positions_b.length);
  main.replaceChildren(
    h("div", { class: "head" }, h("h1", {}, `${a} and ${b}`), h("span", { class: "muted" }, found.apart_ms === null ? "" : `${duration(Math.abs(found.apart_ms))} apart`),
      h("a", { href: `${base}/compare/${encodeURIComponent(b)}/${encodeURIComponent(a)}` }, "The other way round")),
    found.problems.length > 0 && h("ul", { class: "notes said-warn" }, found.problems.map((text) => h("li", {}, text))) || "",
    h("div", { class: "grid wide" }, about(found.a), about(found.b)),
    section("In all", scrolling("In all", table("In all", [
      { name: "Measure", cell: named },
      { name: a, isNumber: true, cell: (name) => measured(name, found[name].a) },
      { name: b, isNumber: true, cell: (name) => measured(name, found[name].b) },
      { name: "Difference", isNumber: true, cell: (name) => difference(name, found[name]) },
    ], WHOLE))),
    section("Stage by stage", paged("Stage by stage: what is more or less in the second", [
      { name: "Stage", cell: ([name]) => name },
      { name: "In", cell: ([, stage]) => (stage.in_a && stage.in_b ? "both" : stage.in_a ? a : b) },
      ...PARTS.map((measure) => ({
        name: measure === "batch" ? "Cut at batch" : named(measure),
        isNumber: true,
        cell: ([, stage]) => both(measure, stage[measure], most[measure]),
      })),
    ], stages, "Neither tells of its stages.")),
    section("Where sources stood", paged("Where sources stood", [
      { name: "Source", cell: ([name]) => name },
      { name: a, className: "sentence", cell: ([, stage]) => lines(stage.positions_a) },
      { name: b, className: "sentence", cell: ([, stage]) => lines(stage.positions_b) },
    ], sources, "That is not known any more.")));
  return {};
}

function paged(caption, columns, rows, none) {
  const pages = new Paged();
  pages.draw(caption, columns, rows, { none, named: ([name]) => name });
  return pages.element;
}

const lines = (texts) => (texts.length ? h("ul", {}, texts.map((text) => h("li", {}, text))) : NONE);

function difference(name, { difference: by }) {
  if (by === null) return NONE;
  if (by === 0) return "the same";
  return `${by > 0 ? "▲ +" : "▼ "}${measured(name, by)}`;
}

function both(name, compared, most) {
  if (!compared) return NONE;
  const isLarge = Math.abs(compared.difference ?? 0) > most / 2;
  const told = difference(name, compared);
  return [h("span", { class: "nowrap" }, `${measured(name, compared.a)} → ${measured(name, compared.b)}`), h("span", { class: isLarge ? "sub is-large" : "sub muted" }, told)];
}
