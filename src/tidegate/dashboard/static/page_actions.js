// What a run can be asked for. Each says first what it will do, and is carried out only after a second yes.

import { get, ofPipeline, post } from "./api.js";
import { wantAction } from "./dialogs.js";
import { h, show } from "./dom.js";
import { icon } from "./icons.js";
import { section } from "./pieces.js";
import { capital } from "./words.js";

export async function openActions({ main, key, signal, detail, announce }) {
  const place = h("div", { class: "grid" });
  const said = h("div", { class: "said", role: "status" });
  let actions = [], isBusy = false;
  const load = async () => {
    ({ actions } = await get(ofPipeline(key, "actions"), {}, signal));
    show(place, actions.map((action) => card(action, isBusy)));
  };
  await load();

  const carryOut = async (action) => {
    let isWrong = false;
    for (;;) {
      if (!(await wantAction(action, detail.summary.pipeline ?? detail.summary.root, isWrong))) return;
      isBusy = true;
      show(place, actions.map((each) => card(each, true)));
      show(said, icon("busy"), ` ${capital(action.name)}: asked for…`);
      try {
        const answer = await post(ofPipeline(key, "actions", action.name));
        show(said, icon(answer.done ? "ok" : "warn"), ` ${capital(answer.said)}`);
        return;
      } catch (error) {
        show(said, icon("bad"), ` ${capital(action.name)}: ${error.message}`);
        isWrong = error.code === 401;
        if (!isWrong) return;
      } finally {
        isBusy = false;
        if (!signal.aborted) await load().catch(() => show(place, actions.map((each) => card(each, false))));
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
      if (mark(found) === seen || isBusy) return;
      seen = mark(found);
      load().catch(() => {});
    },
  };
}

const mark = ({ summary, status }) => [summary.life, summary.state, status?.in_progress.length].join();

function card(action, isBusy) {
  return h("div", { class: "card action" }, h("h3", {}, capital(action.name)), h("p", {}, action.says), action.why_not && h("p", { class: "muted" }, `Not now: ${action.why_not}.`),
    h("button", { type: "button", "data-action": action.name, disabled: !action.allowed || isBusy }, `${capital(action.name)}…`));
}
