// The strip above every page of a pipeline: is it well, what is late, and why.

import { h } from "./dom.js";
import { progress, verdict } from "./health.js";
import { icon } from "./icons.js";
import { age } from "./pieces.js";
import { behind, capital, count, duration, exact, NONE, plural, rate, spaced, time } from "./words.js";

export const TABS = [
  ["", "Pipeline"],
  ["checkpoints", "Checkpoints"],
  ["tables", "Tables"],
  ["history", "History"],
  ["settings", "Settings"],
  ["actions", "Actions"],
];

export function strip(detail, tab, key) {
  const { summary, status } = detail;
  const { level, title, reasons } = verdict(summary, status);
  const base = `#/p/${encodeURIComponent(key)}`;
  return [
    h("div", { class: `strip ${level}`, role: "region", "aria-label": "How it is" },
      h("div", {},
        h("p", { class: "verdict" }, icon(level), title),
        h("ul", {}, (reasons.length ? reasons : [calm(detail)]).slice(0, 4).map((text) => h("li", {}, text)),
          reasons.length > 4 && h("li", { class: "muted" }, `and ${reasons.length - 4} more`))),
      h("dl", {},
        fact("Last checkpoint", ...last(summary, base)),
        fact(...underWay(status, summary, base), "wide-fact"),
        fact("Rows", rate(summary.rows_per_s), summary.rows_per_s === null ? null : "from sources"),
        fact("Lag", summary.lag === null ? NONE : count(summary.lag), summary.lag === null ? null : summary.lag === 1 ? "segment" : "segments"),
        fact("Watermark", summary.watermark_ms === null ? NONE : h("time", { datetime: exact(summary.watermark_ms), title: exact(summary.watermark_ms) }, time(summary.watermark_ms)),
          summary.watermark_ms === null ? null : behind(summary.watermark_ms)))),
    h("nav", { class: "tabs", "aria-label": "Pages of this pipeline" },
      TABS.map(([name, text]) => h("a", { href: name ? `${base}/${name}` : base, "aria-current": name === tab ? "page" : null }, text))),
  ];
}

function fact(name, value, sub, className = null) {
  return h("div", { class: className }, h("dt", {}, name), h("dd", {}, value, sub && h("span", { class: "sub" }, sub)));
}

function calm({ summary, status }) {
  if (status?.step) return told(status.step);
  if (summary.life === "alive") return "Nothing is late";
  return "No run is alive";
}

function told(step) {
  return capital(`${spaced(step.step)}${step.stage ? `: ${step.stage}` : ""}${step.number ? `, ${step.number} of ${step.of}` : ""}`);
}

function last({ last_checkpoint: found }, base) {
  if (!found) return [NONE, "none yet"];
  return [h("a", { href: `${base}/checkpoints/${encodeURIComponent(found.checkpoint)}` }, found.checkpoint),
    [age(found.at), `, took ${duration(found.duration_ms)}`]];
}

function underWay(status, summary, base) {
  // The root may know it to be complete before the run has said so.
  const active = (status?.in_progress ?? []).filter((each) => each.checkpoint !== summary.last_checkpoint?.checkpoint);
  const [found] = active;
  if (!found || summary.life !== "alive") return ["Under way", NONE, status?.stopping ? spaced(status.stopping) : "no checkpoint"];
  const more = active.length > 1 ? ` (and ${plural(active.length - 1, "more", "more")})` : "";
  return ["Under way", h("a", { href: `${base}/checkpoints/${encodeURIComponent(found.checkpoint)}` }, found.checkpoint), `${duration(found.duration_ms)}: ${progress(found)}${more}`];
}
