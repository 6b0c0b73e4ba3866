/** The lower part of the playground: what was found, from the first token to the last turn. */

import { byPosition, curve, timeShares } from "./charts";
import { choices } from "./choices";
import { byId, fill, h } from "./dom";
import { duration, percent } from "./format";
import type { Live } from "./live";
import { Race } from "./race";
import { Rounds } from "./rounds";
import type { Run } from "./run";
import type { Session } from "./session";
import { sharing } from "./share";
import { speedup } from "./speedup";
import { stages } from "./stages";
import { Note } from "./tokens";
import { verdict } from "./verdict";

/** What follows the two texts; hidden while there is no result. */
const LATER = ["rounds", "figures", "sharing"];

export class Results {
  readonly note = new Note();
  private race: Race | null = null;

  /** Begin with two empty lanes. */
  watch(live: Live): void {
    this.note.hide();
    this.race = null;
    this.open(false);
    fill(byId("race-title"), "Both are being written");
    fill(byId("verdict"), h("div.verdict", {}, h("p.big.unknown", {}, "Writing…")));
    fill(byId("race"), live.element);
    byId("results").scrollIntoView({ block: "start", behavior: "instant" });
    byId("stop").focus({ preventScroll: true });
  }

  /** Show both texts; `turn` is the one that is measured next, or 0. */
  show(session: Session, turn = 0): void {
    this.note.hide();
    const { plain, fast, sameness } = session;
    const race = new Race(plain, fast, this.note, (token) => {
      rounds.go(token.round.round, 0);
      byId("rounds").scrollIntoView({ block: "nearest" });
    });
    const rounds = new Rounds(fast, (round) => race.mark(round));
    if (sameness.same < sameness.length) race.part(sameness.same);
    this.race = race;
    race.isReady = !turn;
    fill(byId("race-title"), "Watch it again");
    fill(byId("race"), h("p.fine", {}, "This is a replay of the first turn. Point at a token, tap it, or walk with the arrow keys, to see why it stands. Choose it to open its round."), race.element);
    fill(byId("rounds"), rounds.element);
    fill(byId("figures"), ...figures(session));
    fill(byId("sharing"), sharing(session));
    this.measuring(session, turn);
    this.open(true);
  }

  /** Say what is known while a turn is measured. */
  measuring(session: Session, turn: number): void {
    fill(byId("verdict"), verdict(session, turn), numbers(session));
  }

  /** The texts were ended before both were there. */
  halted(why: string): void {
    if (byId("results").hidden || this.race) return;
    fill(byId("race-title"), "Not finished");
    fill(byId("verdict"), h("div.verdict", {}, h("p.big.unknown", {}, why)));
  }

  /** Nothing is measured any more. */
  conclude(session: Session): void {
    this.measuring(session, 0);
    fill(byId("figures"), ...figures(session));
    if (this.race) this.race.isReady = true;
  }

  private open(complete: boolean): void {
    byId("results").hidden = false;
    for (const name of LATER) byId(name).closest<HTMLElement>("section")!.hidden = !complete;
  }
}

/** A name, what the number is, the number, and how it is written. */
type Item = [string, string, number, string];

function numbers({ plain, fast }: Session): HTMLElement {
  const found = fast.written.speculation;
  const stood: Item = fast.branches
    ? ["places", "of the places that drafts reached got a guess that stood", fast.placesHit, percent(fast.placesHit)]
    : ["rate", "of all guesses stood", found.acceptance_rate, percent(found.acceptance_rate)];
  const tau: Item = ["tau", "tokens a draft brings (τ)", found.mean_acceptance_length, found.mean_acceptance_length.toFixed(2)];
  const nobody: Item = ["nobody", `Why: ${fast.whyNobody}`, 0, "Nobody guessed"];
  const items: Item[] = [
    ...(fast.whyNobody ? [nobody] : [tau, stood]),
    ["passes", "passes of the target", found.target_passes, `${found.target_passes} instead of ${plain.written.speculation.target_passes}`],
    ["first", "to the first token, plain and with speculation", fast.firstToken, `${duration(plain.firstToken)} and ${duration(fast.firstToken)}`],
  ];
  const cells = items.map(([name, said, value, text]) => h("div", {}, h("dd", { "data-name": name, "data-value": value }, text), h("dt", {}, said)));
  return h("dl.numbers", {}, ...cells);
}

function figures(session: Session): HTMLElement[] {
  const { plain, fast, gain } = session;
  const length = fast.draftLength;
  const cost = fast.costBeside(plain.secondsPerRound);
  const chosen = choices(fast);
  const staged = stages(fast.written.speculation.stages ?? {});
  if (fast.whyNobody) {
    const none = h("p.fine", {}, `Nobody guessed in this text: ${fast.whyNobody}.`);
    return [figure("Do the guesses stand?", none), figure("Where does the time go?", timeShares(plain, fast)), ...(chosen ? [figure("What did the engine choose, and why?", chosen)] : [])];
  }
  const more = fast.branches ? "one more level of guesses" : "one more guess";
  const stands = fast.branches ? "At each place some guess stands" : "Each guess stands";
  return [
    figure("Do the guesses stand?", byPosition(fast)),
    figure("Where does the time go?", timeShares(plain, fast)),
    figure(
      "What was to be expected?",
      curve((each) => speedup(fast.chance, each, cost), length ? [{ length, gain: gain.middle, low: gain.low, high: gain.high }] : []),
      `${stands} with a chance of ${percent(fast.chance)} when those before did, and ${more} costs ${costing(cost)}, drafting and checking together.${idle(fast)}`,
    ),
    ...(chosen ? [figure("What did the engine choose, and why?", chosen)] : []),
    ...(staged ? [figure("Who guessed for the small model?", staged)] : []),
  ];
}

function costing(cost: number): string {
  return cost ? `${percent(cost)} of a plain step` : "so little that this run does not show it";
}

/** Rounds without a guess are measured with the others, and the curve knows nothing of them. */
function idle({ later, drafted }: Run): string {
  const none = later.length - drafted.length;
  return none ? ` That is of the rounds with guesses: in ${none} of ${later.length} nothing was guessed, and what was measured holds these too.` : "";
}

function figure(title: string, body: HTMLElement, text?: string): HTMLElement {
  return h("section.figure", {}, h("h3", {}, title), body, text && h("p.fine", {}, text));
}
