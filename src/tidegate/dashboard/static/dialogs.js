// Questions to the reader: the token, and whether something is really to be done.

import { hasToken, keepToken } from "./api.js";
import { h } from "./dom.js";
import { capital } from "./words.js";

function tokenField(isWrong) {
  const input = h("input", { type: "password", name: "token", autocomplete: "off", spellcheck: "false", required: true });
  const label = h("label", {}, isWrong ? "That token was refused. The token:" : "The token of this dashboard:", input,
    h("span", { class: "muted" }, "The server says where it is when it starts. It is kept until this page is closed, and nowhere else."));
  return { input, label };
}

/** Shows a dialog; what it gives is the value of the button, or null. */
function ask(title, content, yes, isDangerous = false) {
  const dialog = h("dialog", { "aria-labelledby": "dialog-title" },
    h("form", { method: "dialog" }, h("h2", { id: "dialog-title" }, title), ...content,
      h("p", { class: "buttons" },
        h("button", { type: "button", on: { click: () => dialog.close("") } }, "Not now"),
        h("button", { class: isDangerous ? "main danger" : "main", value: "yes" }, yes))));
  document.body.append(dialog);
  const before = document.activeElement;
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      before?.focus?.();
      resolve(dialog.returnValue === "yes");
    });
  });
}

/** The token, for a server that tells nothing without it; null: the reader does not want to give it. */
export async function wantToken(isFirst) {
  const { input, label } = tokenField(!isFirst);
  const isGiven = await ask("This dashboard wants its token", [label], "Go on");
  return isGiven ? input.value.trim() : null;
}

/** Whether an action is to be carried out. Asks for the token, if it is not known yet. */
export async function wantAction(action, pipeline, isWrong = false) {
  const field = hasToken() && !isWrong ? null : tokenField(isWrong);
  const content = [h("p", {}, h("strong", {}, pipeline)), h("p", {}, action.says), field?.label];
  const isWanted = await ask(`${capital(action.name)}?`, content.filter(Boolean), capital(action.name));
  if (isWanted && field) keepToken(field.input.value.trim());
  return isWanted;
}
