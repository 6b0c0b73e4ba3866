/** A guess of the reader's, made before something is measured, and kept between visits. */

import { fill, h } from "./dom";
import { factor, roughly } from "./format";
import { keep, kept } from "./visits";

const KEPT = "outrider-learn-guesses";

/** Guesses by the id of their slider. */
type Guesses = Record<string, number>;

const ALL = new Set<Prediction>();

/** What is guessed: a factor, a number of tokens, or a share. */
export interface Scale {
  min: number;
  max: number;
  step: number;
  said: (value: number) => string;
  /** Whether a guess is close to what was measured. */
  close: (guess: number, measured: number) => boolean;
}

const near = (guess: number, measured: number) => Math.max(measured / guess, guess / measured) < 1.15;

export const FACTOR: Scale = { min: 0.2, max: 4, step: 0.1, said: (value) => `${factor(value)}×`, close: near };
export const TOKENS: Scale = { min: 1, max: 6, step: 0.1, said: factor, close: near };
export const SHARE: Scale = { min: 0, max: 1, step: 0.01, said: roughly, close: (guess, measured) => Math.abs(guess - measured) < 0.06 };

/** A slider; `against` compares the guess with what was measured. */
export class Prediction {
  readonly element: HTMLElement;
  private readonly input: HTMLInputElement;
  private readonly output: HTMLElement;
  private moved = false;

  constructor(
    private readonly id: string,
    question: string,
    private readonly scale: Scale,
  ) {
    const { min, max, step } = scale;
    this.input = h("input", { id, type: "range", min, max, step });
    this.output = h("output", { for: id });
    this.input.addEventListener("input", () => {
      keep(KEPT, { ...kept<Guesses>(KEPT, {}), [id]: this.value });
      this.show(this.value);
    });
    this.show(kept<Guesses>(KEPT, {})[id]);
    ALL.add(this);
    this.element = h("div.field.predict", {}, h("label", { for: id }, h("b", {}, "Predict first. "), question), h("div.with-number", {}, this.input, this.output));
  }

  /** Stand at a guess, or in the middle where there is none. */
  show(guess?: number): void {
    const { min, max, said } = this.scale;
    this.moved = guess !== undefined;
    this.input.value = String(guess ?? (min + max) / 2);
    fill(this.output, said(this.value));
  }

  private get value(): number {
    return Number(this.input.value);
  }

  /** The guess and how it fared; nothing where the reader made none. */
  against(measured: number): Node | null {
    if (!this.moved) return null;
    const word = this.scale.close(this.value, measured) ? "close" : this.value > measured ? "too much" : "too little";
    const [guess, found] = [this.value, measured].map((value) => h("b", { "data-value": value }, this.scale.said(value)));
    return h("p.guessed", { "data-guess": this.id }, "Your guess was ", guess, ", and it is ", found, `: ${word}.`);
  }
}

/** Forget the guesses of this and earlier visits. */
export function forgetGuesses(): void {
  keep(KEPT, {});
  for (const each of ALL) each.show();
}
