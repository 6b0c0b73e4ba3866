/** What speculation is expected to gain, by the formula of Leviathan et al. 2023. */

/** What decides the speedup. */
export interface Conditions {
  /** a, the chance that the next draft token stands. */
  chance: number;
  /** Of drafting one token, in steps of plain decoding. */
  cost: number;
  /** Texts at a time. */
  texts: number;
  /** Rows that a pass takes before arithmetic, and no longer memory, decides its time. */
  room: number;
}

/**
 * Tokens that a round brings: (1 - a^(k+1)) / (1 - a).
 *
 * @param chance a, that the next draft token stands.
 * @param length k, the length of the draft.
 */
export function tokensOf(chance: number, length: number): number {
  return chance >= 1 ? length + 1 : (1 - chance ** (length + 1)) / (1 - chance);
}

/**
 * How many times as fast as plain decoding.
 *
 * @param cost Of one more draft token, drafting and checking it, in steps of plain decoding.
 */
export function speedup(chance: number, length: number, cost: number): number {
  return tokensOf(chance, length) / (1 + cost * length);
}

/** The same where a pass takes as long as the larger of reading the weights and computing its rows. */
export function speedupUnder({ chance, cost, texts, room }: Conditions, length: number): number {
  const pass = (rows: number) => Math.max(1, rows / room);
  const checking = pass(texts * (length + 1)) / pass(texts);
  return tokensOf(chance, length) / (checking + cost * length);
}

/** The length of a draft that is expected to gain most, 0 for none. */
export function bestLength(gain: (length: number) => number, longest: number): number {
  let best = 0;
  for (let length = 1; length <= longest; length++) {
    if (gain(length) > gain(best)) best = length;
  }
  return best;
}
