/** A text that was written, and what can be said of its speed. */

import type { Origin, Round, Written } from "./api";
import { mean } from "./format";
import { drafters } from "./members";
import { inWords, named } from "./names";

/** A token of the text: `node` is its number in the draft of its round, or null where the target wrote it. */
export interface Token {
  text: string;
  tokenId: number;
  origin: Origin;
  round: Round;
  node: number | null;
  at: number;
}

/** The parts of a step. Everything that is neither drafting, the pass nor checking is the rest. */
export const PARTS = ["draft", "pass", "check", "rest"] as const;
export type Part = (typeof PARTS)[number];

/** Methods that look up what was there before. */
const LOOKUPS = ["ngram", "suffix", "token_recycling", "prediction"];

/** One text with figures. Times are in seconds, and those of the engine. */
export class Run {
  readonly tokens: Token[] = [];
  /** Who drafted. */
  readonly drafters: string[];

  constructor(
    readonly written: Written,
    readonly temperature: number,
  ) {
    this.drafters = drafters(written.rounds);
    for (const round of written.rounds) {
      for (const node of round.accepted) this.add(round, round.token_ids[node], node);
      if (round.token_id !== null) this.add(round, round.token_id, null);
    }
  }

  private add(round: Round, tokenId: number, node: number | null): void {
    const place = this.tokens.length;
    const { texts, origins } = this.written;
    this.tokens.push({ text: texts[place], tokenId, origin: origins[place], round, node, at: round.at });
  }

  get rounds(): Round[] {
    return this.written.rounds;
  }

  /** From the request to its first token. */
  get firstToken(): number {
    return this.rounds[0].at;
  }

  get total(): number {
    return this.rounds.at(-1)!.at;
  }

  /** Rounds behind the first token: the first one is the prompt's. */
  get later(): Round[] {
    return this.rounds.slice(1);
  }

  /** Seconds of a round, behind the first. */
  get secondsPerRound(): number {
    return this.later.length ? (this.total - this.firstToken) / this.later.length : 0;
  }

  get tokensPerRound(): number {
    return this.later.length ? this.later.reduce((sum, round) => sum + written(round), 0) / this.later.length : 0;
  }

  /** Tokens a second, behind the first. */
  get speed(): number {
    return this.secondsPerRound ? this.tokensPerRound / this.secondsPerRound : 0;
  }

  /** Mean seconds of the parts of a round, behind the first. */
  get parts(): Record<Part, number> {
    const phase = (name: string) => mean(this.later.map((round) => round.seconds[name]));
    const [draft, pass, check] = [phase("propose"), phase("forward"), phase("verify")];
    return { draft, pass, check, rest: Math.max(0, this.secondsPerRound - draft - pass - check) };
  }

  /** Rounds in which anything was drafted. */
  get drafted(): Round[] {
    return this.later.filter((round) => round.token_ids.length);
  }

  /** Why nobody guessed, as the end of a sentence; empty where somebody did. */
  get whyNobody(): string {
    if (this.drafted.length) return "";
    if (!this.later.length) return "the text ended with its first token, before which there is nothing to guess";
    const reasons = this.later.map((round) => round.reason).filter(Boolean);
    const often = (reason: string) => reasons.filter((each) => each === reason).length;
    const most = reasons.toSorted((a, b) => often(b) - often(a))[0];
    if (most) return inWords(most);
    const { method } = this.written.speculation;
    return LOOKUPS.includes(method) ? "what was written did not occur before, so there was nothing to look up" : `${named(method)} had no guess`;
  }

  /** Draft tokens of a round in which anything was drafted, on the longest path. */
  get draftLength(): number {
    return mean(this.drafted.map(depth));
  }

  /** By how much one guess makes a round longer, in steps of plain decoding; 0 where no round with a draft was longer. */
  costBeside(step: number): number {
    const taken = mean(this.drafted.map((round) => round.at - this.rounds[this.rounds.indexOf(round) - 1].at));
    return this.drafted.length ? Math.max(0, (taken / step - 1) / this.draftLength) : 0;
  }

  /** Whether some guesses shared a place, so that not all of them could stand. */
  get branches(): boolean {
    return this.later.some((round) => new Set(round.parents).size < round.parents.length);
  }

  /** Share of the places that drafts reached at which a guess stood. */
  get placesHit(): number {
    const reached = this.later.reduce((sum, round) => sum + depth(round), 0);
    return reached ? this.later.reduce((sum, round) => sum + round.accepted.length, 0) / reached : 0;
  }

  /** Chance that the next draft token stands when all before it did: accepted among those whose fate was decided. */
  get chance(): number {
    const accepted = this.drafted.reduce((sum, round) => sum + round.accepted.length, 0);
    const refused = this.drafted.filter((round) => round.token_id !== null && hasChild(round, lastNode(round))).length;
    return accepted + refused ? accepted / (accepted + refused) : 0;
  }
}

/** The last accepted draft token of a round; -1 where none is. */
export function lastNode(round: Round): number {
  return round.accepted.at(-1) ?? -1;
}

/** Whether the draft goes on behind a node. */
export function hasChild(round: Round, node: number): boolean {
  return round.parents.includes(node);
}

/** Tokens that a round brought. */
export function written(round: Round): number {
  return round.accepted.length + (round.token_id === null ? 0 : 1);
}

/** Tokens on the longest path of the draft. */
export function depth(round: Round): number {
  const depths: number[] = [];
  for (const parent of round.parents) depths.push(parent < 0 ? 1 : depths[parent] + 1);
  return Math.max(0, ...depths);
}

/** How a token reads by itself, from a round that names it. */
export function nameOf(round: Round, tokenId: number): string | null {
  const drafted = round.token_ids.indexOf(tokenId);
  if (drafted >= 0) return round.texts[drafted];
  for (const row of round.rows) {
    const found = row.likely.find((likely) => likely.token_id === tokenId);
    if (found) return found.text;
  }
  return null;
}

/** The target's and the draft's probability of a token behind a node. */
export function chances(round: Round, node: number, tokenId: number): { target: number | null; draft: number | null } {
  const found = round.rows[node + 1]?.likely.find((likely) => likely.token_id === tokenId);
  return { target: found?.target ?? null, draft: found?.draft ?? null };
}
