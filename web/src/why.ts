/** Why a token stands in the text: one sentence for every rule, in plain words. */

import type { Coin, Round } from "./api";
import { percent, shown } from "./format";
import { proposers } from "./members";
import { listed } from "./names";
import { type Token, chances, lastNode, nameOf } from "./run";

/** What is known of a token: probabilities where the trace has them, and the sentence. */
export interface Reason {
  target: number | null;
  draft: number | null;
  coin: { probability: number; stands: boolean } | null;
  sentence: string;
  /** The methods that guessed it. */
  proposers: string[];
  where: string;
}

export function reason(token: Token, temperature: number): Reason {
  const { round, node } = token;
  const place = node === null ? lastNode(round) : round.parents[node];
  const coin = node === null ? undefined : coinOf(round, node);
  const { target, draft } = chances(round, place, token.tokenId);
  return {
    target,
    draft,
    coin: coin ?? null,
    sentence: sentence(token, temperature),
    proposers: node === null ? [] : proposers(round, node),
    where: `Round ${round.round + 1}${node === null ? "" : `, guess ${node + 1} of ${round.token_ids.length}`}`,
  };
}

function sentence(token: Token, temperature: number): string {
  const own = temperature === 0 ? "its most likely token here" : "drawn from its own probabilities";
  if (token.origin === "accepted") return kept(token, temperature);
  if (token.origin === "recovered") return `${refused(token.round)} ${repaired(token.round, temperature)}`;
  if (token.origin === "bonus") return `All guesses up to here stood. The same pass of the target gave one token more, ${own}.`;
  return `The target wrote it alone, ${own}. Nothing was guessed here.`;
}

/** Why a draft token stands. */
function kept({ round, node }: Token, temperature: number): string {
  const coin = coinOf(round, node!);
  const chance = coin ? percent(coin.probability) : "";
  switch (round.rule) {
    case "token":
      return coin && coin.probability < 1
        ? `It stands: the target likes it less than the draft did, so it had a chance of ${chance}, and the coin fell for it.`
        : "It stands: the target likes it at least as much as the draft did, so it stands for certain.";
    case "recursive":
      return coin?.stands ? `It stands: it was tested with a chance of ${chance}, and the coin fell for it.` : drawn(round, node!);
    case "block":
      return `It stands: ${prefix(round)}`;
    case "traversal":
      return round.laws[node!] === "sampled" ? `It stands: ${branch(round)}` : drawn(round, node!);
    default:
      return walked(round, node!, temperature);
  }
}

function walked(round: Round, node: number, temperature: number): string {
  if (temperature === 0) return "It stands: it is the target's most likely token here.";
  return round.laws[node] === "coupled"
    ? "It stands: target and draft used the same random number, and both arrived at this token."
    : drawn(round, node);
}

/** A guess that no coin decided: the target drew, and it was this token. */
function drawn(round: Round, node: number): string {
  return wasOwed(round, round.parents[node])
    ? "It stands: other guesses fell here, the target drew from the part where it gives more, and it was this token."
    : "It stands: the target drew its own token here, and it was this one.";
}

function prefix(round: Round): string {
  const last = coinOf(round, lastNode(round));
  const chance = last ? `, here one with a chance of ${percent(last.probability)}` : "";
  return `the draft is judged as a whole, and its longest beginning whose coin falls for it is kept${chance}.`;
}

function branch(round: Round): string {
  const last = coinOf(round, lastNode(round));
  return `branches are judged from their ends, and the coin of this one fell for it at ${percent(last?.probability ?? 1)}.`;
}

/** What became of the guess that the written token replaces. */
function refused(round: Round): string {
  const guesses = guessesAfter(round, lastNode(round));
  const inTurn = round.rule === "token" || round.rule === "recursive";
  const names = guesses.map((node) => {
    const coin = inTurn ? coinOf(round, node) : undefined;
    return `“${shown(round.texts[node], round.token_ids[node])}”${coin ? ` (a chance of ${percent(coin.probability)})` : ""}`;
  });
  return `The ${names.length > 1 ? "guesses" : "guess"} ${listed(names)} fell.`;
}

function repaired(round: Round, temperature: number): string {
  if (temperature === 0) return "The target's most likely token stands in its place.";
  return wasOwed(round, lastNode(round))
    ? "This token was drawn from the part where the target gives more."
    : "The target had drawn this token for the same place.";
}

/** Whether the token behind a node was drawn from what the target still owed. */
export function wasOwed(round: Round, node: number): boolean {
  return round.rows[node + 1].likely.some((each) => each.residual !== null);
}

/** The coin that decided about a draft token: the one that fell for it, or the last of those that did not. */
function coinOf(round: Round, node: number): Coin | undefined {
  const coins = round.coins.filter((each) => each.node === node);
  return coins.find((each) => each.stands) ?? coins.at(-1);
}

/** The draft tokens behind a node, in their order. */
export function guessesAfter(round: Round, node: number): number[] {
  return round.parents.flatMap((parent, child) => (parent === node ? [child] : []));
}

/** What the target wrote at the end of a round, readable. */
export function writtenName(round: Round): string {
  return round.token_id === null ? "" : shown(nameOf(round, round.token_id), round.token_id);
}
