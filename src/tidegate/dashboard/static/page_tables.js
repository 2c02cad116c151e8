// The tables of a pipeline: which checkpoint each of them shows, and what each checkpoint added to them.

import { Again, lastOf } from "./again.js";
import { get, ofPipeline } from "./api.js";
import { h, show } from "./dom.js";
import { empty, moment, scrolling, section, table } from "./pieces.js";
import { count, NONE, plural } from "./words.js";

const ROWS = 20; // of the matrix, at first

export async function openTables({ main, key, signal, detail }) {
  const base = `#/p/${encodeURIComponent(key)}/checkpoints`;
  const place = h("div", { class: "stack" });
  let found = null, rows = ROWS;
  const draw = () => show(place, drawn(found, base, rows));
  const ask = lastOf(() => get(ofPipeline(key, "tables"), {}, signal));
  const load = async () => {
    const answer = await ask();
    if (answer === null) return;
    found = answer;
    draw();
  };
  place.addEventListener("click", (event) => {
    if (!event.target.closest("button[data-more]")) return;
    rows += ROWS;
    draw();
  });
  await load();
  main.replaceChildren(h("h1", { class: "hidden" }, "Tables"), place);
  const again = new Again(load, 2000, mark(detail));
  return { update: (now) => again.note(mark(now)), refresh: () => again.now(), close: () => again.close() };
}

// A command may set tables back while no run tells anything.
const mark = ({ status, newest_event: newest }) => [newest, ...(status?.checkpoints ?? []).map(({ checkpoint, state }) => `${checkpoint} ${state}`)].join();

function drawn({ tables, matrix, problems }, base, rows) {
  const link = (name) => (name ? h("a", { href: `${base}/${encodeURIComponent(name)}` }, name) : "none");
  const shown = new Set(tables.map(({ shows }) => shows));
  const isOne = shown.size === 1 && !shown.has(null);
  return [
    problems?.length > 0 && h("ul", { class: "notes said-warn" }, problems.map((text) => h("li", {}, text))),
    section("What they show now",
      tables.length > 0 && h("p", { class: "waited" }, isOne ? `All tables show ${[...shown][0]}.` : tables.length === 1 ? "" : "Tables show different checkpoints: one is being committed, or a table is behind."),
      tables.length ? scrolling("Tables", table("Tables, and what they show", [
        { name: "Table of", cell: (each) => each.sink },
        { name: "Shows", cell: (each) => link(each.shows) },
        { name: "Since", cell: (each) => moment(each.since) },
        { name: "Version", isNumber: true, cell: (each) => count(each.version) },
        { name: "Where", className: "sentence", cell: (each) => [h("span", { class: "mono" }, `${each.kind} ${each.address}`), each.why && h("span", { class: "sub said-warn" }, each.why)] },
      ], tables, { stacks: true })) : empty("This pipeline has no tables.")),
    section("Checkpoints and versions", matrix.length && tables.length
      ? h("div", { class: "scrolls tall matrix", role: "region", "aria-label": "Checkpoints and versions", tabindex: 0 }, table("Which version of each table a checkpoint made, newest first", [
          { name: "Checkpoint", cell: (row) => link(row.checkpoint) },
          ...tables.map(({ sink, shows }) => ({ name: sink, cell: (row) => cell(row.versions[sink], row.missing[sink], row.checkpoint === shows) })),
        ], matrix.slice(0, rows), { keyOf: ({ checkpoint }) => checkpoint, rowClass: ({ checkpoint }) => (shown.has(checkpoint) ? "is-marked" : null) }))
      : empty("No checkpoint is complete yet."),
      matrix.length > rows && h("p", { class: "pager" }, h("button", { type: "button", "data-more": "" }, "More"), h("span", { class: "muted" }, `${rows} of ${matrix.length}`))),
  ];
}

const MISSING = { not_shown: "not shown yet", not_known: "not known" };

function cell(version, missing, isShown) {
  const added = !version ? (MISSING[missing] ?? "adds nothing") : version.rows_added === null ? "rows not known" : `+${plural(version.rows_added, "row")}`;
  return [version ? `v${version.version}` : NONE, isShown && h("span", { class: "now" }, " ◂ shown now"), h("span", { class: "sub" }, added)];
}
