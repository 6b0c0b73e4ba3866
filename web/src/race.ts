/** Two runs beside each other, replayed at the speed at which they were written. */

import { fill, h } from "./dom";
import { count, duration } from "./format";
import { memberKeys } from "./members";
import { type Run, type Token } from "./run";
import { type Note, TokenText } from "./tokens";

interface Lane {
  element: HTMLElement;
  run: Run;
  text: TokenText;
  bar: HTMLElement;
  clock: HTMLElement;
}

/** The replay. */
export class Race {
  readonly element = h("div.race");
  private readonly lanes: Lane[];
  private readonly whole: number;
  private readonly button = h<HTMLButtonElement>("button.quiet", { type: "button", click: () => this.play() }, "Replay");
  private readonly rate = h<HTMLSelectElement>("select", { id: "rate", change: () => this.play() });
  private frame = 0;

  /**
   * @param plain Plain decoding.
   * @param fast With speculation.
   * @param note Where the note of a token goes.
   * @param chosen Is told which token of the second text was clicked.
   */
  constructor(plain: Run, fast: Run, note: Note, chosen: (token: Token) => void) {
    this.whole = Math.max(plain.total, fast.total);
    this.lanes = [
      this.lane(plain, "Plain decoding", "one pass of the target for every token", note, () => {}),
      this.lane(fast, "With speculation", "one pass of the target for a whole draft", note, chosen),
    ];
    fill(this.element, this.controls(), h("div.lanes", {}, ...this.lanes.map((lane) => lane.element)));
    this.at(Infinity);
  }

  /** Mark where the texts part. */
  part(place: number): void {
    for (const lane of this.lanes) lane.text.part(place);
  }

  /** Whether it may be played: not while something is measured, which it would slow down. */
  set isReady(ready: boolean) {
    this.button.disabled = !ready;
    this.rate.disabled = !ready;
  }

  /** Mark the tokens of a round in the second text. */
  mark(round: number): void {
    this.lanes[1].text.mark(round);
  }

  /** From the beginning, at the chosen speed; at once where the reader wants no motion. */
  play(): void {
    cancelAnimationFrame(this.frame);
    if (matchMedia("(prefers-reduced-motion: reduce)").matches) return this.at(Infinity);
    const start = performance.now();
    const rate = Number(this.rate.value);
    const step = (now: number) => {
      const seconds = ((now - start) / 1000) * rate;
      this.at(seconds);
      if (seconds < this.whole) this.frame = requestAnimationFrame(step);
      else this.at(Infinity);
    };
    this.at(0);
    this.frame = requestAnimationFrame(step);
  }

  private at(seconds: number): void {
    for (const { run, text, bar, clock } of this.lanes) {
      const tokens = text.until(seconds);
      const passes = run.rounds.filter((round) => round.at <= seconds).length;
      const now = Math.min(seconds, run.total);
      bar.style.width = `${(now / this.whole) * 100}%`;
      bar.classList.toggle("done", seconds >= run.total);
      fill(clock, `${duration(now)} · ${count(tokens, "token")} · ${count(passes, "pass")}`);
    }
  }

  private lane(run: Run, name: string, how: string, note: Note, chosen: (token: Token) => void): Lane {
    const text = new TokenText(run, name, note, chosen);
    const bar = h("div.bar");
    const clock = h("p.clock");
    const title = h("h3", {}, name, h("small", {}, how));
    const element = h("section.lane", { "aria-label": name }, title, h("div.track", {}, bar), clock, text.element);
    return { element, run, text, bar, clock };
  }

  private controls(): HTMLElement {
    const speeds: [string, number][] = [
      ["true speed", 1],
      ["half speed", 0.5],
      ["a tenth", 0.1],
    ];
    const choices = speeds.map(([name, rate]) => h("option", { value: rate }, name));
    fill(this.rate, ...choices);
    return h("div.race-controls", {}, this.button, h("label", { for: "rate" }, "at"), this.rate, memberKeys(this.lanes[1].run.drafters), legend());
  }
}

/** What the colours mean. */
export function legend(): HTMLElement {
  const meanings = { accepted: "guess that stood", recovered: "in place of one that fell", bonus: "one more for free" };
  const items = Object.entries(meanings).map(([origin, text]) => h("li", {}, h(`span.token.${origin}`, {}, origin), text));
  return h("ul.legend", {}, ...items);
}
