// The frame: which page is shown, what of it is live, whether the connection holds.

import { Again } from "./again.js";
import { get, address, ofPipeline, onTokenWanted } from "./api.js";
import { wantToken } from "./dialogs.js";
import { h, show } from "./dom.js";
import { stateOf, verdict } from "./health.js";
import { icon } from "./icons.js";
import { Stream } from "./live.js";
import { problem, tick } from "./pieces.js";
import { strip, TABS } from "./strip.js";
import { time } from "./words.js";
import { openActions } from "./page_actions.js";
import { openCheckpoint } from "./page_checkpoint.js";
import { openCheckpoints } from "./page_checkpoints.js";
import { openCompare } from "./page_compare.js";
import { openHistory } from "./page_history.js";
import { openPipeline } from "./page_pipeline.js";
import { openPipelines } from "./page_pipelines.js";
import { openSettings } from "./page_settings.js";
import { openTables } from "./page_tables.js";

const main = document.getElementById("main");
const stripPlace = document.getElementById("strip");
const crumbs = document.getElementById("crumbs");
const connection = document.getElementById("connection");
const lost = document.getElementById("lost");
const announcer = document.getElementById("announcer");

let page = null; // {update?, close?}: what is open
let opening = new AbortController(); // what the page before still waits for is of no use
let pipeline = null; // {key, detail, stream, again}: the pipeline that is looked at
let pipelines = null; // {stream, timer}: or all of them
let lostSince = null;
let retry = null; // of a page that could not be opened

// -- where ------------------------------------------------------------------------------------------

const ROUTES = [
  [/^$/, null, (context) => openPipelines(context)],
  [/^p\/([^/]+)$/, "", openPipeline],
  [/^p\/([^/]+)\/checkpoints$/, "checkpoints", openCheckpoints],
  [/^p\/([^/]+)\/checkpoints\/([^/]+)$/, "checkpoints", openCheckpoint],
  [/^p\/([^/]+)\/compare\/([^/]+)\/([^/]+)$/, "checkpoints", openCompare],
  [/^p\/([^/]+)\/tables$/, "tables", openTables],
  [/^p\/([^/]+)\/history$/, "history", openHistory],
  [/^p\/([^/]+)\/settings$/, "settings", openSettings],
  [/^p\/([^/]+)\/actions$/, "actions", openActions],
];

/** null: there is no such page. */
function where() {
  const [path, search] = location.hash.replace(/^#\/?/, "").split("?");
  for (const [pattern, tab, open] of ROUTES) {
    const found = pattern.exec(path.replace(/\/$/, ""));
    if (!found) continue;
    try {
      return { tab, open, parts: found.slice(1).map(decodeURIComponent), query: new URLSearchParams(search) };
    } catch {
      return null; // a % that stands for nothing
    }
  }
  return null;
}

async function go() {
  if (location.hash === "#main") return; // the link that skips to the content
  const isFirst = page === null;
  page?.close?.();
  clearTimeout(retry);
  opening.abort();
  opening = new AbortController();
  const { signal } = opening;
  page = { close: null };
  const at = where();
  if (at === null) {
    leavePipeline();
    tell("Not found", []);
    main.replaceChildren(h("h1", {}, "There is no such page"), h("p", {}, h("a", { href: "#/" }, "All pipelines")));
    return;
  }
  main.setAttribute("aria-busy", "true");
  try {
    const opened = at.tab === null ? await inAll(at, signal) : await inPipeline(at, signal);
    if (signal.aborted) return opened?.close?.();
    page = opened;
    if (!isFirst) main.focus({ preventScroll: true });
    if (!at.query.has("keep")) window.scrollTo(0, 0);
  } catch (error) {
    if (signal.aborted || error.name === "AbortError") return;
    if (!error.code && error.code !== 0) console.error(error);
    if (at.tab !== null && pipeline === null) tell("Not shown", [["Not shown", null]]);
    main.replaceChildren(problem(error, go));
    if (error.code === 0 || error.code === 503) retry = setTimeout(go, 5000); // that may pass by itself
  } finally {
    if (!signal.aborted) {
      main.removeAttribute("aria-busy");
      main.dataset.shows = location.hash; // what is drawn now, for whoever waits for it
    }
  }
}

async function inAll(at, signal) {
  leavePipeline();
  tell("Pipelines", []);
  const context = { ...at, main, signal, announce };
  const opened = await at.open(context);
  if (signal.aborted) return opened;
  followAll((found) => opened.update?.(found));
  return { ...opened, close: () => (leaveAll(), opened.close?.()) };
}

async function inPipeline(at, signal) {
  const [key] = at.parts;
  if (pipeline?.key !== key) {
    leavePipeline();
    const detail = await get(ofPipeline(key), {}, signal);
    pipeline = { key, detail, stream: null, again: new Again(() => refresh(key), 2000, detail.mark) };
    pipeline.stream = new Stream(ofPipeline(key, "live"), (name, data) => name === "status" && take(key, data), connected);
  }
  const { detail } = pipeline;
  const context = { ...at, key, detail, main, signal, announce, names: at.parts.slice(1) };
  drawStrip(at.tab);
  const name = detail.summary.pipeline ?? detail.summary.root;
  tell(`${at.parts.slice(1).join(" and ") || TABS.find(([tab]) => tab === at.tab)[1]} · ${name}`, [[name, `#/p/${encodeURIComponent(key)}`], ...at.parts.slice(1).map((part) => [part, null])]);
  return at.open(context);
}

function leavePipeline() {
  pipeline?.stream?.close();
  pipeline?.again.close();
  pipeline = null;
  stripPlace.replaceChildren();
  held(null);
}

function tell(title, places) {
  document.title = `${title} · Tidegate`;
  const all = [["Pipelines", "#/"], ...places];
  show(crumbs, h("ol", {}, all.map(([name, href], index) =>
    h("li", {}, index === all.length - 1 || !href ? h("span", { "aria-current": "page" }, name) : h("a", { href }, name)))));
}

// -- what is live -----------------------------------------------------------------------------------

let due = null;

/** Draws with the next frame what has come last until then; nothing while nobody looks. */
function drawSoon(draw) {
  if (due === null) {
    requestAnimationFrame(() => {
      const last = due;
      due = null;
      last();
    });
  }
  due = draw;
}

function take(key, data) {
  if (pipeline?.key !== key) return;
  noteChanges(pipeline.detail, data);
  Object.assign(pipeline.detail, { summary: data.summary, status: data.status ?? pipeline.detail.status, newest_event: data.newest_event });
  pipeline.again.note(data.mark); // other stages, other settings, another checkpoint from which the next run goes on
  drawSoon(() => {
    if (pipeline?.key !== key) return;
    drawStrip(where()?.tab);
    page?.update?.(pipeline.detail);
  });
}

async function refresh(key) {
  const detail = await get(ofPipeline(key));
  if (pipeline?.key !== key) return;
  Object.assign(pipeline.detail, detail);
  page?.update?.(pipeline.detail);
}

function drawStrip(tab) {
  show(stripPlace, strip(pipeline.detail, tab, pipeline.key));
}

let lastSpoken = 0;

/** For who listens: what is worth interrupting them for, and of what goes well not more than one in twenty seconds. */
function noteChanges(before, after) {
  const was = verdict(before.summary, before.status);
  const is = verdict(after.summary, after.status ?? before.status);
  if (stateOf(before.summary) !== stateOf(after.summary) || was.level !== is.level) {
    announce(`${after.summary.pipeline}: ${is.title}. ${is.reasons.slice(0, 2).join(". ")}`);
    return;
  }
  const [last] = (after.status?.checkpoints ?? []).slice(-1);
  const [known] = (before.status?.checkpoints ?? []).slice(-1);
  if (!last || last.checkpoint === known?.checkpoint) return;
  if (last.state === "aborted") announce(`${last.checkpoint} was aborted: ${last.why ?? ""}`);
  else if (Date.now() - lastSpoken > 20_000) announce(`${last.checkpoint} ${last.state}`);
}

export function announce(text) {
  lastSpoken = Date.now();
  announcer.textContent = text;
}

function followAll(update) {
  leaveAll();
  pipelines = { stream: null, timer: null };
  const mine = pipelines;
  const draw = (found) => drawSoon(() => mine === pipelines && update(found));
  const poll = async () => {
    try {
      const found = await get(address("pipelines"));
      if (mine !== pipelines) return;
      connected("live");
      draw(found.pipelines);
    } catch (error) {
      if (mine === pipelines) connected("lost", error.message);
    }
    if (mine === pipelines) mine.timer = setTimeout(poll, 3000);
  };
  mine.stream = new Stream(address("live"), (name, data) => name === "pipelines" && draw(data.pipelines), (state, why) =>
    state === "missing" ? poll() : mine === pipelines && connected(state, why));
}

function leaveAll() {
  pipelines?.stream?.close();
  clearTimeout(pipelines?.timer);
  pipelines = null;
  held(null);
}

function connected(state, why) {
  if (state === "live") return held("live");
  held("lost", why);
}

/** Says whether what is shown is what is: "live", "lost", or null where nothing is followed. */
function held(state, why = null) {
  document.documentElement.classList.toggle("is-stale", state === "lost");
  show(connection, state === null ? [] : [icon(state === "live" ? "ok" : "bad"), state === "live" ? "Live" : "Not live"]);
  if (state === "lost") {
    if (lostSince === null) {
      lostSince = Date.now();
      announce("The connection is lost.");
    }
    show(lost, `The connection was lost at ${time(lostSince)} (${why}). What is shown is as it was then; trying again…`);
  } else if (lostSince !== null) {
    lostSince = null;
    if (state === "live") {
      announce("The connection is back.");
      page?.refresh?.();
    }
  }
  if (lost.hidden === (state === "lost")) lost.hidden = state !== "lost";
}

// -- colours, token, beginning ----------------------------------------------------------------------

const theme = document.getElementById("theme");
theme.value = document.documentElement.dataset.theme;
theme.addEventListener("change", () => {
  document.documentElement.dataset.theme = theme.value;
  try {
    localStorage.setItem("tidegate-theme", theme.value);
  } catch {
    // It holds until the page is closed.
  }
});

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});

onTokenWanted(wantToken);
setInterval(tick, 1000);
window.addEventListener("hashchange", go);
go();
