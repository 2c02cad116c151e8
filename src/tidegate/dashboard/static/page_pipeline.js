// One pipeline as it is now: its DAG, the checkpoint that is under way, its stages in numbers.

import { Dag } from "./dag.js";
import { h, show } from "./dom.js";
import { progress, words } from "./health.js";
import { age, empty, facts, moment, Paged, pill, scrolling, section, table } from "./pieces.js";
import { behind, bytes, capital, count, duration, NONE, plural, rate, spaced, time } from "./words.js";

const DECISIONS = { fresh: "starts from the beginning", goes_on: "goes on", skips: "skips what is damaged, and goes on", refuses: "refuses to start" };
const SORTS = {
  stage: null,
  rows: ([, stage]) => -stage.rows_per_s,
  lag: ([, stage]) => -(stage.lag ?? -1),
  watermark: ([, stage]) => stage.watermark_ms ?? Infinity,
};

export async function openPipeline({ main, detail }) {
  const dag = new Dag(detail);
  const stages = new Paged(), rows = stages.element;
  const under = h("div", {}), beside = h("div", {}), last = h("div", {});
  const fit = h("button", { type: "button", class: "fit", "aria-pressed": "false" }, "Fit to width");
  let sort = "stage";
  fit.addEventListener("click", () => {
    dag.fit(!dag.isFitted);
    fit.setAttribute("aria-pressed", String(dag.isFitted));
  });
  rows.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-sort]");
    if (!button) return;
    sort = button.dataset.sort;
    update(current);
  });
  const drawn = section("Stages and channels", under, dag.element);
  drawn.querySelector("h2").replaceWith(h("div", { class: "head" }, drawn.querySelector("h2").cloneNode(true), legend(), fit));
  main.replaceChildren(h("h1", { class: "hidden" }, detail.summary.pipeline ?? detail.summary.root), drawn,
    section("Stages in numbers", rows), h("div", { class: "grid wide" }, section("Last checkpoints", last), section("This run", beside)));
  let current = detail;
  const update = (found) => {
    current = found;
    dag.update(found);
    show(under, underWay(found));
    inNumbers(stages, found, sort);
    show(last, lastOnes(found));
    show(beside, aboutRun(found));
  };
  update(detail);
  return { update, close: () => dag.close() };
}

function legend() {
  return h("p", { class: "legend muted" },
    h("span", { class: "key key-barrier" }, "barrier of the checkpoint"), h("span", { class: "key key-passed" }, "passed by it"), h("span", { class: "key key-held" }, "held back"));
}

function underWay({ status, summary, key }) {
  if (summary.life !== "alive" || !status) return [];
  if (status.step) return h("p", { class: "under" }, pill(status.state), ` ${spaced(status.step.step)}${status.step.stage ? `: ${status.step.stage}` : ""}`);
  return status.in_progress.map((each) => {
    const parts = Object.values(each.stages);
    const done = parts.filter((part) => part.progress === "done").length;
    return h("p", { class: "under" }, pill(each.state), h("strong", {}, each.checkpoint),
      h("progress", { max: parts.length, value: done, "aria-label": `${each.checkpoint}: stages that are done` }),
      `${duration(each.duration_ms)}: ${progress(each)}`);
  });
}

function inNumbers(pages, { status, summary, graph }, sort) {
  const stages = Object.entries(status?.stages ?? {});
  const isAlive = summary.life === "alive";
  const [checkpoint] = isAlive ? (status?.in_progress ?? []) : [];
  const by = SORTS[sort];
  const found = by ? stages.toSorted((a, b) => by(a) - by(b)) : stages;
  const head = (name, which) => h("button", { type: "button", "data-sort": which }, name, sort === which && which !== "stage" ? " ↓" : "");
  const order = (which, how) => (sort === which ? how : "none");
  const most = Math.max(1, ...stages.map(([, stage]) => stage.lag ?? 0));
  const columns = [
    { name: "Stage", head: head("Stage", "stage"), sort: order("stage", "other"), cell: ([name]) => name },
    { name: "Kind", cell: ([, stage]) => stage.kind },
    { name: "Does", className: "sentence", cell: ([name, stage]) => doing(stage, checkpoint?.stages[name], isAlive) },
    { name: "Rows/s", head: head("Rows/s", "rows"), sort: order("rows", "descending"), isNumber: true, cell: ([, stage]) => (isAlive ? rate(stage.rows_per_s) : NONE) },
    { name: "Rows", isNumber: true, cell: ([, stage]) => count(stage.rows) },
    { name: "Lag", head: head("Lag", "lag"), sort: order("lag", "descending"), isNumber: true, cell: ([, stage]) => (stage.lag === null ? NONE : `${plural(stage.lag, "segment")}`) },
    { name: "Watermark", head: head("Watermark", "watermark"), sort: order("watermark", "ascending"), isNumber: true, cell: ([, stage]) => (stage.watermark_ms === null ? NONE : `${time(stage.watermark_ms)}, ${behind(stage.watermark_ms)}`) },
    { name: "Batch", isNumber: true, cell: ([, stage]) => count(stage.batch) },
    { name: "Table", className: "where", cell: ([name]) => (graph[name]?.table ? h("span", { class: "mono" }, `${graph[name].table.kind} ${graph[name].table.address}`) : NONE) },
  ];
  const isLate = ([, stage]) => isAlive && (stage.held_back_by || stage.no_batch || (stage.lag === most && most > 20));
  pages.draw("Stages in numbers", columns, found, { none: "No stage runs.", named: ([name]) => name, rowClass: (row) => (isLate(row) ? "is-late" : null) });
}

function doing(stage, part, isAlive) {
  if (!isAlive) return NONE;
  const found = [];
  if (stage.held_back_by) found.push(h("span", { class: "said-warn" }, `held back by ${stage.held_back_by}`));
  if (stage.no_batch) found.push(h("span", { class: "said-warn" }, `no batch since ${time(stage.no_batch.since)}: ${stage.no_batch.why}`));
  for (const each of stage.held) found.push(`waits with ${each.input}, which is ${duration(each.by_ms)} ahead of ${each.ahead_of}`);
  if (stage.chained_into) found.push(`runs in ${stage.chained_into}'s query`);
  if (part) found.push(`checkpoint: ${words(part)}`);
  return found.length ? found.flatMap((each, index) => (index ? ["; ", each] : [each])) : "running";
}

function lastOnes({ status, summary }) {
  const found = (status?.checkpoints ?? []).toReversed();
  if (!found.length) return empty("None in this run yet.");
  const base = `#/p/${encodeURIComponent(summary.key)}/checkpoints`;
  return [
    h("ul", { class: "last" }, found.map((each) =>
      h("li", {}, h("a", { href: `${base}/${encodeURIComponent(each.checkpoint)}` }, each.checkpoint), pill(each.state), h("span", { class: "number" }, duration(each.duration_ms)),
        h("span", { class: "muted" }, each.why ?? each.waited_for ?? "")))),
    h("p", {}, h("a", { href: base }, "All checkpoints")),
  ];
}

function aboutRun({ status, outlook, outlook_told: told, summary, problems }) {
  const notes = [...(problems ?? []), ...(status?.changes ?? [])];
  return [
    facts([
      status && ["Process", `${status.pid} on ${status.host}`],
      status && ["Started", moment(status.started_at)],
      status && summary.life !== "alive" && ["Last heard of", moment(status.updated_at)],
      status && ["Generation", count(status.generation)],
      status?.transfer && ["Transfers", `${status.transfer.doing}: ${status.transfer.files} of ${plural(status.transfer.of_files, "file")}, ${bytes(status.transfer.bytes)}`],
    ]),
    outlook && h("p", { class: "outlook" }, capital(told ?? `the next run ${DECISIONS[outlook.decision]}${outlook.checkpoint ? ` from ${outlook.checkpoint}` : ""}${outlook.why ? `: ${outlook.why}` : ""}`), "."),
    notes.length > 0 && h("ul", { class: "notes" }, notes.map((text) => h("li", {}, text))),
    status?.instances.length > 0 && scrolling("Instances", table("Instances", [
      { name: "Instance", cell: (each) => each.name },
      { name: "Is", cell: (each) => (each.missing_since ? h("span", { class: "said-bad" }, "missing since ", age(each.missing_since)) : each.leads ? "leads" : each.stages.length ? "runs stages" : "stands by") },
      { name: "Where", cell: (each) => (each.host ? `${each.pid} on ${each.host}` : NONE) },
      { name: "Stages", className: "sentence", cell: (each) => each.stages.join(", ") || NONE },
    ], status.instances)),
  ];
}
