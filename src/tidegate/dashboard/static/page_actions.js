// What a run can be asked for. Each says first what it will do, and is carried out only after a second yes.

import { lastOf } from "./again.js";
import { get, ofPipeline, post } from "./api.js";
import { wantAction } from "./dialogs.js";
import { h, show } from "./dom.js";
import { icon } from "./icons.js";
import { section } from "./pieces.js";
import { capital } from "./words.js";

export async function openActions({ main, key, signal, detail }) {
  const place = h("div", { class: "grid" });
  const said = h("div", { class: "said", role: "status" });
  // Each for itself: who waits for the checkpoint that they have asked for can still cancel it, or stop the run.
  const waiting = new Set();
  const told = new Map(); // what became of each, by its name: [level, text]
  let actions = [];
  const draw = () => show(place, actions.map((action) => card(action, waiting.has(action.name))));
  const ask = lastOf(() => get(ofPipeline(key, "actions"), {}, signal));
  const load = async () => {
    const found = await ask();
    if (found === null) return;
    actions = found.actions;
    draw();
  };
  const tell = (name, level, text) => {
    told.delete(name); // the last that was said comes last
    told.set(name, [level, text]);
    show(said, [...told.values()].map(([how, words]) => h("p", {}, icon(how), ` ${words}`)));
  };
  await load();

  const carryOut = async (action) => {
    const { name } = action;
    let isWrong = false;
    for (;;) {
      if (!(await wantAction(action, detail.summary.pipeline ?? detail.summary.root, isWrong))) return;
      for (const each of told.keys()) if (!waiting.has(each)) told.delete(each);
      waiting.add(name);
      draw();
      tell(name, "busy", `${capital(name)}: asked for…`);
      try {
        const answer = await post(ofPipeline(key, "actions", name));
        tell(name, answer.done ? "ok" : "warn", capital(answer.said));
        return;
      } catch (error) {
        tell(name, "bad", `${capital(name)}: ${error.message}`);
        isWrong = error.code === 401;
        if (!isWrong) return;
      } finally {
        waiting.delete(name);
        if (!signal.aborted) await load().catch(draw);
      }
    }
  };
  place.addEventListener("click", (event) => {
    const action = actions.find(({ name }) => name === event.target.closest("button")?.dataset.action);
    if (action) carryOut(action);
  });
  main.replaceChildren(
    h("h1", { class: "hidden" }, "Actions"),
    section("Actions", !detail.actions_allowed && h("p", {}, "Actions are off. ", h("code", {}, "tidegate dashboard --allow-actions"), " allows them to whoever has its token."), said, place));
  let seen = mark(detail);
  return {
    update: (found) => {
      if (mark(found) === seen) return;
      seen = mark(found);
      load().catch(() => {});
    },
  };
}

const mark = ({ summary, status }) => [summary.life, summary.state, ...(status?.in_progress ?? []).map(({ checkpoint }) => checkpoint)].join();

function card(action, isWaiting) {
  return h("div", { class: "card action" }, h("h3", {}, capital(action.name)), h("p", {}, action.says), action.why_not && h("p", { class: "muted" }, `Not now: ${action.why_not}.`),
    h("button", { type: "button", "data-action": action.name, disabled: !action.allowed || isWaiting }, `${capital(action.name)}…`));
}
