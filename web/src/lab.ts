/** Experiments of the Learn page: what they ask the server, and how they say what they found. */

import { type Asked, type Facts, type MethodFacts, type Written, writeAll } from "./api";
import { fill, h } from "./dom";
import { factor } from "./format";
import { type Gain, LEAST_TURNS, gainOf } from "./interval";
import type { Prediction } from "./predict";
import recorded from "./recorded.json";
import { Run } from "./run";
import { Status } from "./status";

/** What is written in most experiments: what a beginning goes on with, and what a message asks for. */
const PROMPT = "class Reader:\n    def __init__(self, path):\n";
const MESSAGE = "Write a class in Python that reads a file line by line, with a comment for each step.";

/** What an experiment may use. */
export class Lab {
  /** Whether prompts go through the model's chat template. */
  chat: boolean;

  constructor(readonly facts: Facts) {
    this.chat = facts.chats;
  }

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
    const chat = given.chat ?? this.chat;
    const asked = { prompt: chat ? MESSAGE : PROMPT, max_tokens: 40, temperature: 1, ignore_eos: true, ...given, chat };
    const found: Written[] = await writeAll(asked);
    return found.map((each) => new Run(each, asked.temperature));
  }

  /** Both ways in turns, each beginning with the other one; the first turns are warm. */
  async compare(speculation: Asked["speculation"], say: (text: string) => void, given: Partial<Asked> = {}, turns = LEAST_TURNS): Promise<Compared> {
    const found: Compared = { gain: gainOf([1]), plain: [], fast: [] };
    const factors: number[] = [];
    await this.runs({ ...given, speculation, max_tokens: 2 });
    for (let turn = 0; turn < turns; turn++) {
      say(`Turn ${turn + 1} of ${turns}: plainly and with guesses…`);
      const write = async (each: Asked["speculation"]) => this.runs({ ...given, speculation: each });
      const [one, other] = turn % 2 ? [await write(speculation), await write("off")] : [await write("off"), await write(speculation)];
      const [plain, fast] = turn % 2 ? [other, one] : [one, other];
      factors.push(together(fast) / together(plain));
      found.plain.push(...plain);
      found.fast.push(...fast);
    }
    return { ...found, gain: gainOf(factors) };
  }

  /** Let the model read a prompt, so that what is timed next finds it in the prefix cache. */
  async warmUp(speculation: Asked["speculation"]): Promise<void> {
    await this.run({ speculation, max_tokens: 2 });
  }
}

/** @throws Error Nobody guessed in any of these texts, so nothing can be said of guesses. */
export function mustGuess(runs: Run[]): void {
  if (runs.every((run) => run.whyNobody)) throw new Error(`Nobody guessed in these texts: ${runs[0].whyNobody}. Measure again.`);
}

/** Something that is measured on a server, or was on the machine of the record. */
export interface Experiment<Found> {
  /** In the record. */
  name: Exclude<keyof typeof recorded, "machine">;
  /** On the button. */
  label: string;
  /** What will be asked of the server. */
  hint: string;
  guess: Prediction;
  /** What the guess is about. */
  predicted: (found: Found) => number;
  /** Measures, and says what it does. */
  measure: (lab: Lab, say: (text: string) => void) => Promise<Found>;
  show: (found: Found) => Node[];
  /** What is shown of the record before anything is asked; it gives away nothing that is to be guessed. */
  before?: (record: Found) => Node[];
}

/** An event with what was measured: web/record.py keeps it. */
export interface Measured {
  name: string;
  found: unknown;
}

/**
 * The guess, a button that measures or shows the record, and what was found.
 *
 * @param lab None where there is no server to measure on.
 */
export function experiment<Found>(lab: Lab | null, it: Experiment<Found>): HTMLElement {
  const record = recorded[it.name] as unknown as Found;
  const status = new Status();
  status.say(lab ? it.hint : "");
  const found = h("div.found", {}, ...(it.before ? [madeOn(lab), ...it.before(record)] : []));
  const button = h<HTMLButtonElement>("button", { type: "button" }, lab ? it.label : "Show what was recorded");
  button.addEventListener("click", async () => {
    button.disabled = true;
    status.clear();
    try {
      const data = lab ? await it.measure(lab, (text) => status.show(text)) : record;
      fill(found, !lab && madeOn(lab), it.guess.against(it.predicted(data)), ...it.show(data));
      found.dataset.measured = "";
      if (lab) {
        found.dispatchEvent(new CustomEvent<Measured>("measured", { bubbles: true, detail: { name: it.name, found: data } }));
        button.textContent = "Measure again";
      }
      status.say(lab ? "Measured." : "Shown.");
    } catch (error) {
      status.fail(error);
    }
    button.disabled = false;
    button.focus({ preventScroll: true });
  });
  return h("div.experiment", {}, it.guess.element, h("div.go", {}, button, status.element, status.quiet), status.problem, found);
}

/** Says where recorded numbers are from. */
function madeOn(lab: Lab | null): HTMLElement {
  const then = lab ? " Measure, and what this server does takes its place." : "";
  return h("p.recorded", {}, `Recorded on ${recorded.machine}.${then}`);
}

/** Plain decoding and speculation in turns, after which it is known how many times as fast it was. */
export interface Compared {
  gain: Gain;
  plain: Run[];
  fast: Run[];
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
    return h("tr", {}, h("th", { scope: "row" }, h("span.bar-name", {}, row.name)), cell, h("td.number", { "data-value": row.value }, row.text));
  });
  return h("table.chart", {}, h("caption", {}, caption), h("tbody", {}, ...body));
}

/** Tokens a second of several texts, behind the first token of each. */
export function together(runs: Run[]): number {
  const start = Math.min(...runs.map((run) => run.firstToken));
  const end = Math.max(...runs.map((run) => run.total));
  return runs.reduce((sum, run) => sum + run.tokens.length - 1, 0) / (end - start);
}

/** A gain as it is known: "2.1 to 2.6×", or that no difference was seen. */
export function told({ low, high, middle }: Gain): string {
  if (low === null || high === null) return `${factor(middle)}×, from one turn`;
  const range = factor(low) === factor(high) ? `${factor(low)}×` : `${factor(low)} to ${factor(high)}×`;
  return low <= 1 && high >= 1 ? `${range}: no difference seen` : range;
}
