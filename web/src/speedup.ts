/** What speculation is expected to gain, by the formula of Leviathan et al. 2023. */

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

/** The length of a draft that is expected to gain most. */
export function bestLength(chance: number, cost: number, longest: number): number {
  let best = 0;
  for (let length = 1; length <= longest; length++) {
    if (speedup(chance, length, cost) > speedup(chance, best, cost)) best = length;
  }
  return best;
}
