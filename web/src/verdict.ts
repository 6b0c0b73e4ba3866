/** Who was faster, whether that is sure, and whether the texts are the same: in words. */

import { h } from "./dom";
import { count, duration, factor, shown } from "./format";
import { MOST_TURNS } from "./interval";
import type { Run } from "./run";
import type { Session } from "./session";

/**
 * The result so far.
 *
 * @param turn The turn that is being measured; 0 when nothing is any more.
 */
export function verdict(session: Session, turn = 0): HTMLElement {
  const { gain, outcome } = session;
  const data = { "data-outcome": turn ? "unknown" : outcome, "data-turns": gain.turns, "data-value": gain.middle, "data-low": gain.low, "data-high": gain.high };
  return h(
    "div.verdict",
    {},
    h(`p.big.${turn ? "unknown" : outcome}`, data, headline(session, turn)),
    h("div.verdict-why", {}, h("p", {}, sureness(session, turn)), steps(session), ...warnings(session)),
    sameness(session),
  );
}

/** One line of the result, for the title and for those who listen. */
export function headline(session: Session, turn = 0): string {
  const { middle, low, high } = session.gain;
  if (turn) return `${factor(middle)}× so far`;
  switch (session.outcome) {
    case "faster":
      return `${range(low!, high!)} as fast`;
    case "slower":
      return `Slower: ${range(low!, high!)} as fast`;
    case "none":
      return "No difference seen";
    default:
      return "Not known yet";
  }
}

function range(low: number, high: number): string {
  const [from, to] = [factor(low), factor(high)];
  return from === to ? `${from}×` : `${from} to ${to}×`;
}

function sureness(session: Session, turn: number): string {
  const { middle, low, high, turns } = session.gain;
  if (turn) return `One turn says little. Turn ${turn} of at most ${MOST_TURNS} is being written, until the result is known.`;
  const { whyNobody, written } = session.fast;
  const none = whyNobody ? `Nobody guessed: ${whyNobody}. ` : "No guess stood, so there was nothing to gain. ";
  const fell = written.speculation.accepted_tokens ? "" : none;
  switch (session.outcome) {
    case "unknown":
      return `${fell}${turns === 1 ? "One turn" : `${turns} turns`} gave ${factor(middle)}×, which may be chance. It takes three to know.`;
    case "none":
      return `${fell}Speculation was ${range(low!, high!)} as fast in ${turns} turns, and that cannot be told from 1×.`;
    default:
      return `${fell}In ${turns} turns, plainly and with guesses one after the other. The true value lies there in 95 of 100 such measurements.`;
  }
}

function steps({ plain, fast }: Session): HTMLElement {
  return h(
    "p",
    {},
    `In the first turn a step of plain decoding took ${duration(plain.secondsPerRound)} and brought one token; a round of guesses took `,
    h("b", {}, duration(fast.secondsPerRound)),
    " and brought ",
    h("b", {}, `${factor(fast.tokensPerRound)} tokens`),
    ".",
  );
}

function warnings(session: Session): HTMLElement[] {
  const shared = session.disturbed;
  if (!shared) return [];
  const text = `Other texts were written at the same time: ${count(shared, "step")} were shared with them. The times here are not those of one text alone.`;
  return [h("p.warning", { "data-value": shared }, text)];
}

/** Whether the texts are the same; where not, where they part, and why. */
export function sameness(session: Session): HTMLElement {
  const { same, length } = session.sameness;
  const data = { "data-same": same, "data-length": length };
  if (same === length) return h("p.sameness.same", data, h("b", {}, `${same} of ${count(length, "token")} identical.`), session.isDecided ? "" : " By chance: without a seed each text is a draw of its own.");
  const [one, other] = [session.plain, session.fast].map((run) => name(run, same));
  const head = same ? `The first ${count(same, "token")} of ${length} ${same === 1 ? "is" : "are"} identical.` : `The texts differ from the first of ${count(length, "token")} on.`;
  const where = ` Then plain decoding wrote ${one}, and speculation ${other}. `;
  return h("p.sameness", data, h("b", {}, head), where, reason(session));
}

function name(run: Run, place: number): string {
  const token = run.tokens[place];
  return token ? `“${shown(token.text, token.tokenId)}”` : "nothing more";
}

function reason({ isDecided, facts }: Session): string {
  if (!isDecided) return "Without a seed these are two draws from the same probabilities; neither is more the model's own.";
  return `A pass over several tokens rounds differently in ${facts.dtype}, and here two tokens were nearly even. A server started with --batch-invariant writes the same text to the last bit.`;
}
