/** What can be done with a run: save it, open it again, and ask for it in a program. */

import { h } from "./dom";
import { curl, download, python } from "./keeping";
import { Session } from "./session";

/** Buttons for a run. */
export function sharing(session: Session): HTMLElement {
  const command = code("curl", curl(session.asked));
  const program = code("Python", python(session.asked, session.facts.model));
  const save = h("button.quiet", { type: "button", id: "save", click: () => download(session) }, "Save this run");
  const how = "The address of this page holds the prompt and the settings. The file holds the texts and all that is drawn here, too.";
  return h("div.sharing", {}, h("div.sharing-head", {}, save, h("p.fine", {}, how)), command, program);
}

/** A field that opens a saved run. */
export function opener(opened: (session: Session) => void, failed: (error: unknown) => void): HTMLElement {
  const change = async (event: Event) => {
    const input = event.target as HTMLInputElement;
    const file = input.files?.[0];
    if (!file) return;
    try {
      opened(Session.parse(await file.text()));
    } catch (error) {
      failed(error);
    }
    input.value = "";
  };
  return h("div.opener", {}, h("input.hidden", { type: "file", id: "file", accept: ".json,application/json", change }), h("label", { for: "file" }, "Open a saved run"));
}

function code(name: string, text: string): HTMLElement {
  const copy = h<HTMLButtonElement>("button.quiet", { type: "button" }, "Copy");
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
  });
  const box = h("div.code", {}, h("pre", { tabindex: "0", role: "group", "aria-label": `The request in ${name}` }, text), navigator.clipboard ? copy : null);
  return h("details", {}, h("summary", {}, `The same request in ${name}`), box);
}
