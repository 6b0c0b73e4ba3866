/** Steps through the rounds of a run: draft, verify, accept, repair. */

import type { Round } from "./api";
import { distribution } from "./charts";
import { fill, h } from "./dom";
import { count, duration, percent, shown } from "./format";
import { memberKeys } from "./members";
import { inWords, listedInWords } from "./names";
import { type Run, hasChild, lastNode, nameOf } from "./run";
import { STAGES, tree } from "./tree";
import { guessesAfter, writtenName } from "./why";

/** The stepper. */
export class Rounds {
  readonly element = h("div.rounds");
  private place = 0;
  private stage = 0;
  private readonly title = h("p.round-title");
  private readonly said = h("p.round-said", { "aria-live": "polite" });
  private readonly figure = h("div.scroller", { tabindex: "0", role: "group", "aria-label": "The token tree of this round" });
  private readonly beside = h("div.round-beside");
  private readonly slider: HTMLInputElement;
  private readonly tabs: HTMLElement[];
  private readonly next = h<HTMLButtonElement>("button", { type: "button", click: () => this.step(1) }, "Next step");
  private readonly back = h<HTMLButtonElement>("button.quiet", { type: "button", click: () => this.step(-1) }, "Back");

  /**
   * @param run Whose rounds.
   * @param moved Is told the number of the round that is shown.
   * @param first The round to begin with; without one, the first in which something was guessed.
   */
  constructor(
    private readonly run: Run,
    private readonly moved: (round: number) => void = () => {},
    first = opening(run),
  ) {
    const input = (event: Event) => this.go(Number((event.target as HTMLInputElement).value) - 1, 0);
    this.slider = h("input", { type: "range", id: "round", min: 1, max: run.rounds.length, "aria-label": "Round", input });
    this.tabs = STAGES.map((name, stage) => h("button.stage", { type: "button", click: () => this.go(this.place, stage) }, name));
    const head = h("div.round-head", {}, this.title, this.slider, h("div.round-buttons", {}, this.back, this.next));
    const stages = h("div.stages", { role: "group", "aria-label": "Steps of the round" }, ...this.tabs);
    fill(this.element, head, stages, this.said, memberKeys(run.drafters), this.figure, this.beside);
    this.go(first, 0);
  }

  /** Show a round at a stage. */
  go(place: number, stage: number): void {
    [this.place, this.stage] = [place, stage];
    const round = this.run.rounds[place];
    const last = place === this.run.rounds.length - 1 && stage === STAGES.length - 1;
    this.slider.value = String(place + 1);
    this.slider.setAttribute("aria-valuetext", `round ${place + 1} of ${this.run.rounds.length}`);
    this.next.disabled = last;
    this.back.disabled = place === 0 && stage === 0;
    this.next.textContent = last ? "The end" : stage === STAGES.length - 1 ? "Next round" : "Next step";
    for (const [index, tab] of this.tabs.entries()) {
      tab.toggleAttribute("data-done", index < stage);
      if (index === stage) tab.setAttribute("aria-current", "step");
      else tab.removeAttribute("aria-current");
    }
    fill(this.title, h("b", {}, `Round ${place + 1}`), ` of ${this.run.rounds.length}`);
    fill(this.said, explained(round, stage, this.run.temperature));
    fill(this.figure, tree(round, stage, this.ending(round), this.run.drafters));
    fill(this.beside, stage >= 2 && this.decisive(round, stage));
    this.moved(round.round);
  }

  /** One stage on or back, over the ends of rounds. */
  step(by: number): void {
    const at = this.place * STAGES.length + this.stage + by;
    if (at < 0 || at >= this.run.rounds.length * STAGES.length) return;
    this.go(Math.floor(at / STAGES.length), at % STAGES.length);
  }

  /** How the text ends before a round. */
  private ending(round: Round): string {
    const before = this.run.tokens.filter((token) => token.round.round < round.round);
    const text = before.map((token) => token.text).join("");
    return text ? `…${shown(text.slice(-8))}` : "the prompt";
  }

  /** The probabilities at the place where the round ended. */
  private decisive(round: Round, stage: number): HTMLElement | null {
    const end = lastNode(round);
    const guess = guessesAfter(round, end)[0];
    const row = round.rows[end + 1];
    if (!round.token_ids.length || !row) return null;
    const name = guess === undefined ? "behind the last guess" : `at guess ${guess + 1}`;
    const found = distribution(row, guess === undefined ? null : round.token_ids[guess], { owed: stage === 3 });
    return h("section.decisive", {}, h("h3", {}, `What could have come ${name}`), found);
  }
}

/** The first round in which something was guessed; where there is none, the one behind the prompt's. */
function opening({ rounds }: Run): number {
  const drafted = rounds.findIndex((round) => round.token_ids.length);
  return drafted >= 0 ? drafted : Math.min(1, rounds.length - 1);
}

/** What happens at a stage, in a sentence or two. */
export function explained(round: Round, stage: number, temperature: number): string {
  const size = round.token_ids.length;
  if (!size) return alone(round, stage);
  const methods = [...new Set(round.drafted_by.map((part) => part.method))];
  if (stage === 0) {
    return `${count(size, "guess")} ${size === 1 ? "comes" : "come"} from ${listedInWords(methods)}${branches(round) ? siblings(round) : ""}${chosen(round)}. That takes ${duration(round.seconds.propose)}.`;
  }
  if (stage === 1) {
    return `One pass of the target looks at ${size === 1 ? "the guess" : `all ${size} guesses`} at once: ${duration(round.seconds.forward)}. Now its own probabilities are known at every place.`;
  }
  return stage === 2 ? acceptance(round, temperature) : repair(round);
}

/** Why the engine chose so, where it had a choice. */
function chosen(round: Round): string {
  return round.reason && ` (the engine's choice: ${round.reason})`;
}

/** What is to be known of guesses for one place: those that were drawn had what the elder ones left. */
function siblings(round: Round): string {
  const drawn = round.drafted_by.length === 1 && round.laws.every((law) => law === "sampled");
  return drawn ? ", several for one place; each was drawn from what those before it left" : ", several for one place";
}

function branches(round: Round): boolean {
  return new Set(round.parents).size < round.parents.length;
}

function alone(round: Round, stage: number): string {
  const name = writtenName(round);
  const why = round.round === 0 ? "The first token comes with the prompt's own pass, and nothing is guessed for it." : `Nothing was guessed in this round${round.reason && `: ${inWords(round.reason)}`}.`;
  return stage < 3 ? why : `${why} The target writes “${name}”.`;
}

function acceptance(round: Round, temperature: number): string {
  const stood = round.accepted.length;
  const first = guessesAfter(round, lastNode(round))[0];
  const all = first === undefined;
  const head = all ? (branches(round) ? "One branch stands to its end." : "The whole draft stands.") : stood ? `${count(stood, "guess")} ${stood === 1 ? "stands" : "stand"}.` : "No guess stands.";
  if (all) return head;
  const name = shown(round.texts[first], round.token_ids[first]);
  const coin = round.coins.findLast((each) => each.node === first);
  if (temperature === 0) return `${head} “${name}” is not the target's most likely token.`;
  if (!coin || round.rule === "block" || round.rule === "traversal") return `${head} “${name}” falls, and what follows it falls with it.`;
  return `${head} “${name}” had a chance of ${percent(coin.probability)}; its coin fell against it, and what follows it falls too.`;
}

function repair(round: Round): string {
  if (round.token_id === null) return "An accepted token ended the text, so nothing more was written.";
  const name = shown(nameOf(round, round.token_id), round.token_id);
  if (!hasChild(round, lastNode(round))) return `One more for free: the same pass already told what comes next, “${name}”.`;
  return `The target writes “${name}” there. So a round always brings a token, and the text follows the target's own probabilities.`;
}
