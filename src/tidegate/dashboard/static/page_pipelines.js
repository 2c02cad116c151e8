// All pipelines that this dashboard shows, the worst first.

import { address, get } from "./api.js";
import { h, show } from "./dom.js";
import { stateOf, verdict, worse } from "./health.js";
import { icon } from "./icons.js";
import { age, empty, pill, scrolling, table } from "./pieces.js";
import { behind, count, duration, NONE, plural, rate, time } from "./words.js";

const COLUMNS = [
  { name: "Pipeline", cell: ({ found }) => [h("a", { class: "name", href: `#/p/${encodeURIComponent(found.key)}` }, found.pipeline ?? found.root), h("span", { class: "muted root" }, found.root)] },
  { name: "How it is", className: "sentence", cell: ({ is }) => [h("strong", { class: `said-${is.level}` }, icon(is.level), " ", is.title), is.reasons[0] && h("span", { class: "reason" }, is.reasons[0], is.reasons.length > 1 && h("span", { class: "muted" }, ` (and ${is.reasons.length - 1} more)`))] },
  { name: "State", cell: ({ found }) => pill(stateOf(found)) },
  { name: "Last checkpoint", cell: ({ found }) => lastOf(found) },
  { name: "Rows", isNumber: true, cell: ({ found }) => rate(found.rows_per_s) },
  { name: "Lag", isNumber: true, cell: ({ found }) => (found.lag === null ? NONE : plural(found.lag, "segment")) },
  { name: "Watermark", isNumber: true, cell: ({ found }) => (found.watermark_ms === null ? NONE : [time(found.watermark_ms), h("span", { class: "muted sub" }, behind(found.watermark_ms))]) },
];

function lastOf({ key, last_checkpoint: last }) {
  if (!last) return "none yet";
  const href = `#/p/${encodeURIComponent(key)}/checkpoints/${encodeURIComponent(last.checkpoint)}`;
  return [h("a", { href }, last.checkpoint), h("span", { class: "muted sub" }, age(last.at), `, took ${duration(last.duration_ms)}`)];
}

export async function openPipelines({ main, signal }) {
  const { pipelines } = await get(address("pipelines"), {}, signal);
  const place = h("div", {});
  const told = h("p", { class: "muted" });
  main.replaceChildren(h("div", { class: "head" }, h("h1", {}, "Pipelines"), told), h("section", { "aria-label": "Pipelines" }, place));
  const update = (found) => {
    const judged = found.map((each) => ({ found: each, is: verdict(each) })).toSorted((a, b) => worse(a.is, b.is) || a.found.root.localeCompare(b.found.root));
    const wrong = judged.filter(({ is }) => is.level === "bad" || is.level === "warn").length;
    show(told, wrong ? `${count(wrong)} of ${plural(found.length, "pipeline")} ${wrong === 1 ? "needs" : "need"} a look` : found.length ? "All are well" : "");
    show(place, judged.length ? scrolling("Pipelines", table("Pipelines, the worst first", COLUMNS, judged, { stacks: true, keyOf: ({ found }) => found.key })) : empty("No root was given: tidegate dashboard --root …"));
  };
  update(pipelines);
  return { update };
}
