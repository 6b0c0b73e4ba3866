/** A guess of the reader's, made before something is measured. */

import { fill, h } from "./dom";
import { factor } from "./format";

/** A slider for a factor; `said` compares it with what was measured. */
export class Prediction {
  readonly element: HTMLElement;
  private readonly input: HTMLInputElement;
  private moved = false;

  constructor(id: string, question: string, min: number, max: number, step: number) {
    this.input = h("input", { id, type: "range", min, max, step, value: (min + max) / 2 });
    const output = h("output", { for: id });
    const show = () => fill(output, `${factor(this.value)}×`);
    this.input.addEventListener("input", () => {
      this.moved = true;
      show();
    });
    show();
    this.element = h("div.field.predict", {}, h("label", { for: id }, h("b", {}, "Predict first. "), question), h("div.with-number", {}, this.input, output));
  }

  get value(): number {
    return Number(this.input.value);
  }

  /** The guess, if the reader made one. */
  get made(): number | null {
    return this.moved ? this.value : null;
  }

  /** How the guess fared. */
  against(measured: number): string {
    if (!this.moved) return "";
    const off = Math.max(measured / this.value, this.value / measured);
    const word = off < 1.15 ? "close" : this.value > measured ? "too much" : "too little";
    return ` Your guess of ${factor(this.value)}× was ${word}.`;
  }
}
