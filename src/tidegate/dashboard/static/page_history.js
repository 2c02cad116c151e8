// What has happened: starts and recoveries with their causes, failures, ends, checkpoints, savepoints, rewinds.

import { Again } from "./again.js";
import { get, ofPipeline } from "./api.js";
import { h, show } from "./dom.js";
import { icon } from "./icons.js";
import { choices, empty, moment, Pages, problem, section } from "./pieces.js";
import { bytes, capital, duration, spaced, withTimes } from "./words.js";

const SIZE = 50;
const FILTERS = [
  ["Recoveries and failures", "start,failure,end,rewind"],
  ["All", ""],
  ["Checkpoints", "checkpoint"],
  ["Savepoints", "savepoint"],
  ["Rewinds", "rewind"],
];
const BECAUSE = {
  first: "Started for the first time",
  again: "Started again",
  killed: "Started again: the run before was killed",
  failure: "Recovered from a failure",
  instances: "Restarted: an instance came, left or was lost",
  windows: "Restarted to close open windows",
};

export async function openHistory({ main, key, query, signal, detail }) {
  const base = `#/p/${encodeURIComponent(key)}`;
  const kinds = query.get("kinds") ?? FILTERS[0][1];
  const list = h("div", {});
  const pages = new Pages(
    (before) => get(ofPipeline(key, "history"), { kinds, before, limit: SIZE }, signal),
    ({ events }) => show(list, events.length ? h("ol", { class: "events" }, events.map((event) => told(event, base))) : empty("Nothing of this kind has happened, as far as the history goes back.")),
    () => window.scrollTo(0, 0),
    (error) => show(list, problem(error)));
  await pages.load();
  const filters = choices("What has happened", FILTERS.map(([name, value]) => ({ name, href: `${base}/history?kinds=${value}&keep`, isChosen: value === kinds })));
  const whole = section("What has happened", list, pages.element);
  whole.querySelector("h2").after(h("div", { class: "head" }, filters));
  main.replaceChildren(h("h1", { class: "hidden" }, "History"), whole);
  const again = new Again(() => pages.isFirst && pages.load(), 2000, mark(detail));
  return { update: (found) => again.note(mark(found)), refresh: () => again.now(), close: () => again.close() };
}

// A run writes its history beside, in a bucket half a minute later: that it has done something is too early to ask.
const mark = ({ newest_event: newest }) => newest ?? "";

function told(event, base) {
  const [level, title, ...more] = TELL[event.event]?.(event, base) ?? ["info", capital(spaced(event.event))];
  const who = [event.generation !== null && `generation ${event.generation}`, event.instance && `instance ${event.instance}`].filter(Boolean).join(", ");
  return h("li", { "data-key": event.id }, moment(event.at), icon(level), h("div", {}, h("p", {}, h("strong", {}, title)), more.filter(Boolean), who && h("p", { class: "steps" }, who)));
}

const link = (base, name) => h("a", { href: `${base}/checkpoints/${encodeURIComponent(name)}` }, name);

const TELL = {
  start: (event, base) => [
    event.because === "failure" || event.because === "killed" || event.because === "instances" ? "warn" : "info",
    BECAUSE[event.because] ?? "Started",
    h("p", {}, event.base ? ["from ", link(base, event.base)] : "from the beginning", `, in ${duration(event.took_ms)}`, event.host && `, process ${event.pid} on ${event.host}`),
    event.why && h("p", { class: "why" }, withTimes(event.why)),
    event.skipped.length > 0 && h("p", { class: "why" }, `passed over, as damaged: ${event.skipped.join(", ")}`),
    event.steps.length > 0 && h("p", { class: "steps" }, event.steps.map(({ step, took_ms: took }) => `${spaced(step)} ${duration(took)}`).join(" · ")),
    event.changes.length > 0 && h("ul", { class: "notes" }, event.changes.map((text) => h("li", {}, text))),
  ],
  failure: (event) => [
    "bad",
    event.stage ? `Stage ${event.stage} failed` : "Failed",
    h("p", { class: "why" }, withTimes(event.why)),
    h("p", {}, event.retried_in_ms === null ? "The run gave up." : `The run goes back to the last checkpoint after ${duration(event.retried_in_ms)}.`),
  ],
  end: (event) => [event.state === "failed" ? "bad" : "off", `Ended: ${event.state}`, event.why && h("p", { class: event.state === "failed" ? "why" : null }, event.why)],
  checkpoint: ({ checkpoint }, base) => [
    checkpoint.state === "complete" ? "ok" : checkpoint.state === "aborted" || checkpoint.state === "damaged" ? "bad" : "busy",
    `Checkpoint ${checkpoint.state}`,
    h("p", {}, link(base, checkpoint.checkpoint), ` in ${duration(checkpoint.duration_ms)}, ${bytes(checkpoint.new_bytes)} new`),
    checkpoint.why ? h("p", { class: "why" }, checkpoint.why) : checkpoint.waited_for && h("p", { class: "steps" }, checkpoint.waited_for),
  ],
  savepoint: (event, base) => ["info", `Savepoint ${event.name}`, h("p", {}, "of ", link(base, event.checkpoint), ", in ", h("span", { class: "mono" }, event.place))],
  rewind: (event, base) => ["warn", `Set to ${event.checkpoint}`, h("p", {}, `by ${event.how}`, event.source && [" from ", h("span", { class: "mono" }, event.source)], "; the next run goes on from ", link(base, event.checkpoint))],
};
