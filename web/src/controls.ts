/** The sliders and choices of the playground. */

import type { Asked, Facts, MethodFacts } from "./api";
import { fill, h } from "./dom";
import { named } from "./names";

/** Guesses a round, to begin with. */
const USUAL_LENGTH = 5;

/** What the reader has chosen. */
export interface Choice {
  speculation: Record<string, unknown>;
  maxTokens: number;
  temperature: number;
  sameDice: boolean;
  /** Whether the prompt goes through the model's chat template. */
  chat: boolean;
}

/** The settings that a text was asked for with, as `Controls` takes them. */
export function settingsOf({ speculation, max_tokens, temperature, seed, chat }: Asked): [string, string][] {
  const { method, tree, num_draft_tokens } = typeof speculation === "string" ? { method: speculation } : speculation;
  const shape: [string, string][] = [["shape", tree === undefined ? "chain" : String(tree)]];
  const length: [string, string][] = num_draft_tokens === undefined ? [] : [["length", String(num_draft_tokens)]];
  return [["method", String(method)], ...shape, ...length, ["tokens", String(max_tokens)], ["temperature", String(temperature)], ["dice", String(seed !== undefined)], ["bare", String(!chat)]];
}

export class Controls {
  readonly element = h("div.controls");
  private readonly method = h<HTMLSelectElement>("select", { id: "method", change: () => this.suit() });
  private readonly shape = h<HTMLSelectElement>("select", { id: "shape", change: () => this.suit() });
  private readonly length = slider("length", 1, 12, 1, 5);
  private readonly tokens = slider("tokens", 16, 256, 8, 96);
  private readonly temperature = slider("temperature", 0, 1.5, 0.1, 0.8);
  private readonly dice = h<HTMLInputElement>("input", { id: "dice", type: "checkbox", checked: true });
  private readonly diceWords = h("label", { for: "dice" });
  private readonly bare: HTMLInputElement;

  /** @param changed Is told whether the prompt goes through the chat template, now and whenever that changes. */
  constructor(
    private readonly facts: Facts,
    private readonly changed: (chat: boolean) => void,
  ) {
    this.bare = bareSwitch(facts, changed);
    fill(this.method, ...facts.methods.map((each) => h("option", { value: each.name }, named(each.name))));
    fill(
      this.element,
      field("Guesses come from", this.method),
      field("Shape of the guesses", this.shape),
      field("Guesses a round", this.length),
      field("Tokens to write", this.tokens),
      field("Temperature", this.temperature, "0 takes the likeliest token"),
      h("div.field.check", {}, this.dice, this.diceWords),
      facts.chats && bareField(this.bare),
    );
    changed(this.chat);
    this.suit();
  }

  get choice(): Choice {
    const speculation: Record<string, unknown> = { method: this.method.value };
    if (this.shape.value === "chain") speculation.num_draft_tokens = Number(this.length.value);
    else speculation.tree = this.shape.value === "best_first" ? "best_first" : this.shape.value.split(",").map(Number);
    return {
      speculation,
      maxTokens: Number(this.tokens.value),
      temperature: Number(this.temperature.value),
      sameDice: this.dice.checked && !this.dice.disabled,
      chat: this.chat,
    };
  }

  private get chat(): boolean {
    return this.facts.chats && !this.bare.checked;
  }

  /** What an address holds of the settings, by the ids of their inputs. */
  get settings(): [string, string][] {
    const inputs = [this.method, this.shape, this.length, this.tokens, this.temperature];
    return [...inputs.map((input): [string, string] => [input.id, input.value]), ["dice", String(this.dice.checked)], ["bare", String(!this.chat)]];
  }

  /** Settings of an address; what this server does not offer stays as it is. */
  set settings(given: Iterable<[string, string]>) {
    const found = new Map(given);
    for (const input of [this.method, this.shape, this.length, this.tokens, this.temperature]) {
      const value = found.get(input.id);
      if (value === undefined) continue;
      if (!(input instanceof HTMLSelectElement) || [...input.options].some((option) => option.value === value)) input.value = value;
      if (input instanceof HTMLSelectElement) this.suit();
      else input.dispatchEvent(new Event("input"));
    }
    this.dice.checked = found.get("dice") !== "false";
    this.bare.checked = found.get("bare") === "true";
    this.changed(this.chat);
  }

  /** Offer what the chosen method can do. */
  private suit(): void {
    const method = this.facts.methods.find((each) => each.name === this.method.value);
    if (!method) return;
    const before = this.shape.value;
    fill(this.shape, ...shapes(method).map(([value, name]) => h("option", { value }, name)));
    if ([...this.shape.options].some((option) => option.value === before)) this.shape.value = before;
    this.length.min = String(method.least_length);
    this.length.max = String(Math.max(12, method.num_draft_tokens));
    if (this.method.dataset.shown !== method.name) this.length.value = String(Math.min(USUAL_LENGTH, method.num_draft_tokens));
    this.method.dataset.shown = method.name;
    this.length.disabled = this.shape.value !== "chain";
    this.length.dispatchEvent(new Event("input"));
    this.dice.disabled = !method.takes_seeds;
    const words = method.takes_seeds ? "The same dice on both sides, so the same text" : "Different dice: the engine does not choose by the clock for a text that a seed decides";
    fill(this.diceWords, words);
  }
}

function shapes(method: MethodFacts): [string, string][] {
  const found: [string, string][] = [["chain", "one behind the other"]];
  if (method.takes_tree) found.push(["3,2,1", "a tree: 3, then 2, then 1"]);
  if (method.adapts) found.push(["best_first", "a tree that adapts"]);
  return found;
}

/** Takes the prompt as it is, without the model's chat template. */
export function bareSwitch(facts: Facts, changed: (chat: boolean) => void): HTMLInputElement {
  return h("input", { id: "bare", type: "checkbox", change: (event) => changed(facts.chats && !(event.target as HTMLInputElement).checked) });
}

/** The switch with its words. */
export function bareField(input: HTMLInputElement): HTMLElement {
  return h("div.field.check", {}, input, h("label", { for: input.id }, "The bare prompt, without the model's chat template"));
}

function slider(id: string, min: number, max: number, step: number, value: number): HTMLInputElement {
  return h("input", { id, type: "range", min, max, step, value });
}

function field(name: string, input: HTMLInputElement | HTMLSelectElement, help?: string): HTMLElement {
  const number = input instanceof HTMLInputElement && h("output", { for: input.id });
  const show = () => number && fill(number, input.disabled ? "by the tree" : input.value);
  input.addEventListener("input", show);
  show();
  const small = help ? h("small", {}, help) : null;
  return h("div.field", {}, h("label", { for: input.id }, name, small), h("div.with-number", {}, input, number));
}
