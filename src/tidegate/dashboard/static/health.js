// Whether a pipeline is well and, if it is not, what is late and why: in words, worst first.

import { ago, capital, plural, withTimes } from "./words.js";

const RANK = { bad: 0, warn: 1, busy: 2, off: 3, ok: 4 };
const ALERTS = { error: "bad", warning: "warn" };
const ENDED = ["finished", "interrupted", "failed"];

export const worse = (a, b) => RANK[a.level] - RANK[b.level];

/** The state that a run is in, as one word. */
export function stateOf(summary) {
  if (summary.life === "unreadable") return "unreadable";
  if (summary.life === "hanging") return "hangs";
  if (summary.life !== "alive" && summary.state && !ENDED.includes(summary.state)) return "killed";
  return summary.state ?? "never run";
}

/** {level, title, reasons}. `status` may be missing: the list of pipelines has none. */
export function verdict(summary, status = null) {
  const state = stateOf(summary);
  const [level, title] = base(state, summary, status);
  const alerts = (summary.alerts ?? []).map(({ level: how, text }) => ({ level: ALERTS[how] ?? "warn", text }));
  const worst = [{ level }, ...alerts].toSorted(worse)[0].level;
  const reasons = alerts.toSorted(worse).map(({ text }) => capital(withTimes(text)));
  if (summary.why && !reasons.some((text) => text.includes(summary.why))) reasons.push(capital(summary.why));
  return { level: worst, title: worst !== level && level === "ok" ? (worst === "bad" ? "Trouble" : "Needs a look") : title, reasons };
}

function base(state, summary, status) {
  switch (state) {
    case "running": return ["ok", "Healthy"];
    case "unreadable": return ["bad", "The root cannot be read"];
    case "hangs": return ["bad", status ? `Hangs: last heard of ${ago(status.updated_at)}` : "Hangs"];
    case "killed": return ["bad", status ? `Killed: last heard of ${ago(status.updated_at)}` : "Killed"];
    case "failed": return ["bad", "Failed"];
    case "restarting": return ["warn", "Restarting"];
    case "starting": return ["busy", "Starting"];
    case "stopping": return ["busy", "Stopping"];
    case "finished": return ["off", "Finished"];
    case "interrupted": return ["off", "Stopped"];
    default: return ["off", "Has not run yet"];
  }
}

/** What the checkpoint that is under way does, in one sentence. */
export function progress(checkpoint) {
  const stages = Object.entries(checkpoint.stages);
  const done = stages.filter(([, part]) => part.progress === "done");
  if (checkpoint.state === "committing") {
    const behind = Object.entries(checkpoint.commits).filter(([, commit]) => commit.took_ms === null).map(([name]) => name);
    return behind.length ? `decided; ${behind.slice(0, 3).join(", ")} yet to show it` : "decided; tables are brought to show it";
  }
  if (checkpoint.state !== "preparing") return checkpoint.state;
  const waits = stages.find(([, part]) => part.progress === "aligning" || part.progress === "recording");
  const slow = waits ?? stages.find(([, part]) => part.progress === "catching_up" || part.progress === "storing");
  const told = slow && `${slow[0]} ${words(slow[1])}`;
  return `${done.length} of ${plural(stages.length, "stage")} done${told ? `; ${told}` : ""}`;
}

/** What a stage does for a checkpoint. */
export function words(part) {
  if (part.progress === "aligning") return `waits for ${part.waits_for.join(", ")}`;
  if (part.progress === "recording") return `records until ${part.waits_for.join(", ")}`;
  return part.progress.replaceAll("_", " ");
}
