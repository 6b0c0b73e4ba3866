/** Experiments of the Learn page: what they ask the server, and how they say what they found. */

import { type Asked, type Facts, type MethodFacts, type Written, writeAll } from "./api";
import { fill, h } from "./dom";
import { Run } from "./run";
import { Status } from "./status";

export const PROMPT = "class Reader:\n    def __init__(self, path):\n";

/** What an experiment may use. */
export class Lab {
  constructor(readonly facts: Facts) {}

  /** Who drafts: a method that draws its guesses, where there is one. */
  get method(): MethodFacts {
    return this.facts.methods.find((method) => method.adapts) ?? this.facts.methods[0];
  }

  /** Settings for drafts of a length. */
  drafting(length: number, more: Record<string, unknown> = {}): Record<string, unknown> {
    return { method: this.method.name, num_draft_tokens: Math.max(length, this.method.least_length), ...more };
  }

  /** One text of the usual prompt; it does not end early. */
  async run(given: Partial<Asked> & Pick<Asked, "speculation">): Promise<Run> {
    const [found] = await this.runs(given);
    return found;
  }

  /** Several texts at a time. */
  async runs(given: Partial<Asked> & Pick<Asked, "speculation">): Promise<Run[]> {
    const asked = { prompt: PROMPT, max_tokens: 40, temperature: 1, ignore_eos: true, ...given };
    const found: Written[] = await writeAll(asked);
    return found.map((each) => new Run(each, asked.temperature));
  }

  /** Let the model read a prompt, so that what is timed next finds it in the prefix cache. */
  async warmUp(speculation: Asked["speculation"], prompt = PROMPT): Promise<void> {
    await this.run({ prompt, speculation, max_tokens: 2 });
  }
}

/**
 * A box with a button that measures something.
 *
 * @param label On the button.
 * @param hint What will be asked of the server.
 * @param measure Measures, says what it does, and returns what is shown.
 */
export function experiment(label: string, hint: string, measure: (say: (text: string) => void) => Promise<Node[]>): HTMLElement {
  const status = new Status();
  status.say(hint);
  const found = h("div.found");
  const button = h<HTMLButtonElement>("button", { type: "button" }, label);
  button.addEventListener("click", async () => {
    button.disabled = true;
    status.clear();
    try {
      fill(found, ...(await measure((text) => status.say(text))));
      button.textContent = "Measure again";
      status.say("Measured.");
    } catch (error) {
      status.fail(error);
    }
    button.disabled = false;
    button.focus({ preventScroll: true });
  });
  return h("div.experiment", {}, h("div.go", {}, button, status.element), status.problem, found);
}

/** What was found, as the sentence that matters. */
export function finding(...parts: (Node | string)[]): HTMLElement {
  return h("p.finding", {}, ...parts);
}

/** A number in a finding. */
export function figure(name: string, value: number, text: string): HTMLElement {
  return h("b", { "data-name": name, "data-value": value }, text);
}

/** A table of bars, each with its name and its number. */
export function bars(caption: string, kind: string, rows: { name: string; value: number; text: string }[]): HTMLElement {
  const most = Math.max(...rows.map((row) => row.value), 1e-9);
  const body = rows.map((row) => {
    const bar = h(`span.fill.${kind}`);
    bar.style.width = `${(row.value / most) * 100}%`;
    const cell = h("td.bars", {}, h("span.rail", {}, bar));
    return h("tr", {}, h("th", { scope: "row" }, row.name), cell, h("td.number", { "data-value": row.value }, row.text));
  });
  return h("table.chart", {}, h("caption", {}, caption), h("tbody", {}, ...body));
}
