// The settings in force.

import { h, show } from "./dom.js";
import { empty, facts, moment, scrolling, section, table } from "./pieces.js";
import { count, NONE } from "./words.js";

export async function openSettings({ main, detail }) {
  const place = h("div", { class: "stack" });
  const update = (found) => show(place, drawn(found));
  update(detail);
  main.replaceChildren(h("h1", { class: "hidden" }, "Settings"), place);
  return { update };
}

function drawn({ summary, status, settings, graph }) {
  const rows = Object.entries(settings);
  return [
    section("The pipeline", facts([
      ["Name", summary.pipeline ?? NONE],
      ["Root", h("span", { class: "mono" }, summary.root)],
      ["Stages", count(Object.keys(graph).length)],
      status && ["Started", moment(status.started_at)],
      status && ["Process", `${status.pid} on ${status.host}`],
    ])),
    section("Settings of the last run", h("p", { class: "muted" }, "As tidegate run names them. Secrets are never shown."), rows.length
      ? scrolling("Settings", table("Settings", [
          { name: "Setting", className: "mono", cell: ([name]) => name },
          { name: "Value", className: "mono", cell: ([, value]) => value },
        ], rows))
      : empty("No run has left word of them.")),
  ];
}
