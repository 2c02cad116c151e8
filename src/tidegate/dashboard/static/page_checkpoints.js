// The checkpoints of a pipeline: how many, the latest of each kind, all of them by page, and what they took.

import { Again } from "./again.js";
import { get, ofPipeline } from "./api.js";
import { h, show } from "./dom.js";
import { bar, choices, empty, moment, Pages, pill, problem, scrolling, section, table } from "./pieces.js";
import { plot } from "./plot.js";
import { bytes, count, duration, measured, named, NONE, spaced } from "./words.js";

const SIZE = 25;
const FILTERS = [
  ["All", ""],
  ["Complete", "complete"],
  ["Aborted", "aborted"],
  ["Under way", "preparing,prepared,deciding,committing"],
  ["Damaged", "damaged"],
];
const STAGES = 6; // that a plot tells apart; the rest is one more

export async function openCheckpoints(context) {
  const { main, key, query, signal, detail } = context;
  const base = `#/p/${encodeURIComponent(key)}/checkpoints`;
  const state = query.get("state") ?? "";
  const top = h("div", { class: "stack" }), list = h("div", {}), plots = h("div", { class: "grid wide plots" }), summary = h("div", {});
  const filters = h("div", {}, choices("Which checkpoints", FILTERS.map(([name, value]) => ({ name, href: value ? `${base}?state=${value}&keep` : `${base}?keep`, isChosen: value === state }))));
  const pages = new Pages(
    (before) => get(ofPipeline(key, "checkpoints"), { state, before, limit: SIZE }, signal),
    (found) => {
      show(top, overview(found, base));
      show(list, listed(found, base, state));
    },
    () => list.scrollIntoView({ block: "nearest" }),
    (error) => show(list, problem(error)));

  let drawn = [];
  async function loadSummary() {
    const found = await get(ofPipeline(key, "checkpoints", "summary"), {}, signal);
    show(summary, percentiles(found.measures));
    // A plot that somebody reads, by its table or by keys, is not taken away from under them.
    if (plots.querySelector("details[open]") || plots.contains(document.activeElement)) return;
    for (const each of drawn) each.close();
    drawn = plotted(found.series, (point) => (location.hash = `${base}/${encodeURIComponent(point.checkpoint)}`));
    plots.replaceChildren(...drawn.map(({ figure }) => figure));
  }

  await Promise.all([pages.load(), loadSummary()]);
  if (signal.aborted) return {};
  main.replaceChildren(
    h("h1", { class: "hidden" }, "Checkpoints"), top, section("Over time", plots),
    section("All of them", h("div", { class: "head" }, filters), list, pages.element), section("In all", summary));

  // What has begun or ended since: the list, and what is plotted, are asked for again, but not with every event.
  const again = new Again(() => pages.isFirst && pages.load(), 1000, happened(detail));
  const plotAgain = new Again(loadSummary, 5000, ended(detail.status));
  return {
    update(now) {
      again.note(happened(now));
      plotAgain.note(ended(now.status));
    },
    refresh: () => (again.now(), plotAgain.now()),
    close: () => (again.close(), plotAgain.close(), drawn.forEach((each) => each.close())),
  };
}

const told = (found) => (found ?? []).map(({ checkpoint, state }) => `${checkpoint} ${state}`).join();
// By the run, or by a command: a savepoint, a restore.
const happened = ({ status, newest_event: newest }) => `${newest} ${told([...(status?.in_progress ?? []), ...(status?.checkpoints ?? [])])}`;
const ended = (status) => told(status?.checkpoints);

function overview({ counts, latest }, base) {
  const link = (name) => h("a", { href: `${base}/${encodeURIComponent(name)}` }, name);
  const card = (title, level, content) => h("div", { class: "card latest" }, h("h3", {}, title), content ?? h("p", { class: "muted" }, "None"));
  return [
    section("How many", h("dl", { class: "counts" }, [["completed", counts.completed], ["failed", counts.failed], ["under way", counts.in_progress], ["restored", counts.restored], ["savepoints", counts.savepoints]]
      .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", { class: name === "failed" && value ? "said-bad" : null }, count(value)))))),
    h("div", { class: "grid latest-ones", role: "group", "aria-label": "The latest of each kind" },
      card("Latest completed", "ok", latest.completed && [h("p", {}, link(latest.completed.checkpoint.checkpoint), " ", moment(latest.completed.checkpoint.triggered_at)), h("p", {}, `${duration(latest.completed.checkpoint.duration_ms)}, ${bytes(latest.completed.checkpoint.new_bytes)} new of ${bytes(latest.completed.checkpoint.total_bytes)}`)]),
      card("Latest failed", "bad", latest.failed && [h("p", {}, link(latest.failed.checkpoint.checkpoint), " ", moment(latest.failed.checkpoint.triggered_at)), h("p", { class: "why" }, latest.failed.checkpoint.why ?? "aborted")]),
      card("Latest restored", "info", latest.restored && [h("p", {}, link(latest.restored.checkpoint), " ", moment(latest.restored.at)), h("p", {}, `because: ${spaced(latest.restored.because)}`)]),
      card("Latest savepoint", "info", latest.savepoint && [h("p", {}, link(latest.savepoint.checkpoint), " ", moment(latest.savepoint.at)), h("p", { class: "mono" }, latest.savepoint.name)])),
  ];
}

function listed({ checkpoints }, base, state) {
  if (!checkpoints.length) return empty(state ? "None of this kind." : "No checkpoint has been taken here yet.");
  const longest = Math.max(1, ...checkpoints.map(({ checkpoint }) => (checkpoint.state === "aborted" ? 0 : checkpoint.duration_ms ?? 0)));
  const columns = [
    { name: "Checkpoint", cell: ({ checkpoint }) => h("a", { href: `${base}/${encodeURIComponent(checkpoint.checkpoint)}` }, checkpoint.checkpoint) },
    { name: "State", cell: ({ checkpoint }) => pill(checkpoint.state) },
    { name: "Begun", cell: ({ checkpoint }) => moment(checkpoint.triggered_at) },
    { name: "Took", isNumber: true, cell: ({ checkpoint }) => [duration(checkpoint.duration_ms), bar((checkpoint.duration_ms ?? 0) / longest)] },
    { name: "Waited for", className: "sentence", cell: ({ checkpoint }) => (checkpoint.why ? h("span", { class: "why" }, checkpoint.why) : checkpoint.waited_for ?? NONE) },
    { name: "Alignment", isNumber: true, className: "extra", cell: ({ checkpoint }) => duration(checkpoint.alignment_ms) },
    { name: "New", isNumber: true, className: "extra", cell: ({ checkpoint }) => bytes(checkpoint.new_bytes) },
    { name: "All", isNumber: true, className: "extra", cell: ({ checkpoint }) => bytes(checkpoint.total_bytes) },
    { name: "In flight", isNumber: true, className: "extra", cell: ({ checkpoint }) => bytes(checkpoint.in_flight_bytes) },
    { name: "Kind", className: "extra", cell: (row) => tags(row) },
  ];
  return scrolling("Checkpoints", table("Checkpoints, newest first", columns, checkpoints, { stacks: true, keyOf: ({ checkpoint }) => checkpoint.checkpoint, rowClass: ({ checkpoint }) => (checkpoint.state === "aborted" || checkpoint.state === "damaged" ? "is-bad" : null) }));
}

export function tags({ checkpoint, retained, is_savepoint: isSavepoint }) {
  const found = [
    retained && "retained",
    isSavepoint && "savepoint",
    checkpoint.aligned === false && "unaligned",
    checkpoint.full && "full",
    checkpoint.drain && "drain",
    checkpoint.attempt > 1 && `attempt ${checkpoint.attempt}`,
  ].filter(Boolean);
  return found.flatMap((text) => [h("span", { class: "tag" }, text), " "]);
}

function percentiles(measures) {
  const names = Object.keys(measures);
  if (!names.length || !measures.duration_ms?.count) return empty("No checkpoint is complete yet.");
  const of = (which) => ({ name: which.startsWith("p") ? which : spaced(which), isNumber: true, cell: (name) => measured(name, measures[name][which]) });
  const columns = [{ name: "Measure", cell: named }, ...["min", "average", "max", "p50", "p90", "p95", "p99"].map(of), { name: "of", isNumber: true, cell: (name) => count(measures[name].count) }];
  return scrolling("What completed checkpoints took", table("What completed checkpoints took", columns, names));
}

function plotted(series, open) {
  const newest = series.at(-1)?.state_by_stage ?? {};
  const stages = Object.entries(newest).toSorted(([, a], [, b]) => b - a).map(([name]) => name);
  const told = stages.slice(0, STAGES);
  const rest = ({ state_by_stage: all }) => Object.entries(all).reduce((sum, [name, value]) => (told.includes(name) ? sum : sum + value), 0);
  const perStage = told.map((name) => ({ name, unit: "bytes", of: (point) => point.state_by_stage[name] ?? 0 }));
  if (stages.length > STAGES) perStage.push({ name: `${stages.length - STAGES} more`, unit: "bytes", of: rest });
  return [
    plot("Duration", series, [{ name: "duration", unit: "_ms", of: (point) => point.duration_ms }, { name: "alignment", unit: "_ms", of: (point) => point.alignment_ms }], { open }),
    plot("Size", series, [{ name: "all", unit: "bytes", of: (point) => point.total_bytes }, { name: "new", unit: "bytes", of: (point) => point.new_bytes }], { open }),
    plot("State per stage", series, perStage.length ? perStage : [{ name: "state", unit: "bytes", of: () => 0 }], { isStacked: true, open }),
    plot("In flight", series, [{ name: "in flight", unit: "bytes", of: (point) => point.in_flight_bytes }], { open }),
  ];
}
