/** What the page says while it waits and when something fails; and how it comes back when the server does. */

import { ServerError, isAlive, useKey } from "./api";
import { fill, h } from "./dom";

/** A line that is read aloud when it changes, and a box for errors. */
export class Status {
  readonly element = h("p.status", { role: "status" });
  readonly quiet = h("p.status.now");
  readonly problem = h("div.problem", { role: "alert", hidden: true });
  private waiting = 0;

  /** @param back Is called when a server that was away has come back, or a key was given. */
  constructor(private readonly back: () => void = () => {}) {}

  say(text: string): void {
    fill(this.element, text);
    fill(this.quiet);
  }

  /** Show what is done at the moment; that is not read aloud. */
  show(text: string): void {
    fill(this.element);
    fill(this.quiet, text);
  }

  clear(): void {
    clearInterval(this.waiting);
    this.problem.hidden = true;
    fill(this.problem);
  }

  /** Say what failed, and what can be done. */
  fail(error: unknown): void {
    this.clear();
    this.say("");
    this.problem.hidden = false;
    requestAnimationFrame(() => this.problem.scrollIntoView({ block: "nearest" }));
    const message = error instanceof Error ? error.message : String(error);
    if (error instanceof ServerError && error.status === 401) return this.askForKey(message);
    const gone = error instanceof ServerError && error.gone;
    const wait = gone && "This page goes on by itself when the server is back.";
    fill(this.problem, h("p", {}, h("b", {}, message)), wait && h("p", {}, wait));
    if (gone) this.waiting = window.setInterval(() => void this.lookAgain(), 1000);
  }

  private async lookAgain(): Promise<void> {
    if (!(await isAlive())) return;
    this.clear();
    this.say("The server is back.");
    this.back();
  }

  private askForKey(message: string): void {
    const input = h<HTMLInputElement>("input", { id: "key", type: "password", autocomplete: "off" });
    const submit = (event: Event) => {
      event.preventDefault();
      useKey(input.value);
      this.clear();
      this.back();
    };
    const form = h("form.key-form", { submit }, h("label", { for: "key" }, "API key"), input, h("button", {}, "Use it"));
    fill(this.problem, h("p", {}, h("b", {}, message)), form);
  }
}
