/** How sure a measured factor is: an interval from turns that alternate. */

/** Turns that are measured at least, and at most. */
export const [LEAST_TURNS, MOST_TURNS] = [3, 7];
/** Seconds after which no turn is begun that is not needed. */
const PATIENCE = 30;
/** A wider interval, in logarithms, is worth another turn. */
const NARROW = 0.1;
/** Student's t at 97.5%, by degrees of freedom from 1 on. */
const T = [12.71, 4.303, 3.182, 2.776, 2.571, 2.447];

/** A factor with its 95% interval; without one where there were too few turns. */
export interface Gain {
  middle: number;
  low: number | null;
  high: number | null;
  turns: number;
}

/** The geometric mean of factors of turns, with Student's interval of their logarithms. */
export function gainOf(factors: number[]): Gain {
  const [turns, logs] = [factors.length, factors.map(Math.log)];
  const middle = logs.reduce((sum, value) => sum + value, 0) / turns;
  if (turns < LEAST_TURNS) return { middle: Math.exp(middle), low: null, high: null, turns };
  const variance = logs.reduce((sum, value) => sum + (value - middle) ** 2, 0) / (turns - 1);
  const half = T[Math.min(turns - 1, T.length) - 1] * Math.sqrt(variance / turns);
  return { middle: Math.exp(middle), low: Math.exp(middle - half), high: Math.exp(middle + half), turns };
}

/**
 * Whether another turn would tell hardly more, or would try the reader's patience.
 *
 * @param seconds That it took so far.
 */
export function isKnown({ low, high, turns }: Gain, seconds: number): boolean {
  return turns >= MOST_TURNS || (turns >= LEAST_TURNS && seconds > PATIENCE) || (low !== null && high !== null && Math.log(high / low) / 2 <= NARROW);
}
