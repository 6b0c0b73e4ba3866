/** A comparison: the same prompt written plainly and with speculation, in turns; it can be kept in a file. */

import type { Asked, Facts, Written } from "./api";
import { type Gain, gainOf } from "./interval";
import { Run } from "./run";

/** What a file says that it is. */
const FORMAT = "outrider-run-1";

/** Whether speculation was faster, and whether that can be told from noise. */
export type Outcome = "faster" | "slower" | "none" | "unknown";

/** Tokens a second of one turn, plainly and with speculation. */
interface Speeds {
  plain: number;
  fast: number;
}

/** Where two texts part; `length` is that of the longer one. */
export interface Sameness {
  same: number;
  length: number;
}

interface Saved {
  format: string;
  made: string;
  model: string;
  dtype: string;
  asked: Asked;
  plain: Written;
  fast: Written;
  speeds: Speeds[];
}

/** The texts of the first turn, and the speeds of all. */
export class Session {
  readonly speeds: Speeds[] = [];
  readonly plain: Run;
  readonly fast: Run;
  made = new Date().toISOString();

  /** @param asked Of the text with speculation; with a seed where both had the same dice. */
  constructor(
    readonly facts: Pick<Facts, "model" | "dtype">,
    readonly asked: Asked,
    plain: Written,
    fast: Written,
  ) {
    this.plain = new Run(plain, asked.temperature);
    this.fast = new Run(fast, asked.temperature);
    this.add(plain, fast);
  }

  /** One more turn. */
  add(plain: Written, fast: Written): void {
    const speed = (written: Written) => new Run(written, this.asked.temperature).speed;
    this.speeds.push({ plain: speed(plain), fast: speed(fast) });
  }

  get gain(): Gain {
    return gainOf(this.speeds.map(({ plain, fast }) => fast / plain));
  }

  /** A gain is a gain only where passes were saved, and the interval is on one side of 1. */
  get outcome(): Outcome {
    const { low, high } = this.gain;
    if (low === null || high === null) return "unknown";
    if (high < 1) return "slower";
    return low > 1 && this.fast.rounds.length < this.plain.rounds.length ? "faster" : "none";
  }

  get sameness(): Sameness {
    const [plain, fast] = [this.plain.written.tokenIds, this.fast.written.tokenIds];
    const length = Math.max(plain.length, fast.length);
    const parting = Array.from({ length }, (_, place) => place).find((place) => plain[place] !== fast[place]);
    return { same: parting ?? length, length };
  }

  /** Whether both texts are to be the same: nothing is drawn, or both have the same dice. */
  get isDecided(): boolean {
    return this.asked.temperature === 0 || this.asked.seed !== undefined;
  }

  /** Rounds of either text that other texts shared, so that their times are not those of one text alone. */
  get disturbed(): number {
    return [...this.plain.rounds, ...this.fast.rounds].filter((round) => round.num_sequences > 1).length;
  }

  /** As a file holds it. */
  toJSON(): Saved {
    const { model, dtype } = this.facts;
    const [plain, fast] = [this.plain.written, this.fast.written];
    return { format: FORMAT, made: this.made, model, dtype, asked: this.asked, plain, fast, speeds: this.speeds };
  }

  /** @throws Error The text is no file of this page. */
  static parse(text: string): Session {
    let found: Saved | null = null;
    try {
      found = JSON.parse(text);
    } catch {
      // said below
    }
    if (found?.format !== FORMAT) throw new Error("This is no run that was saved on this page: it has no format of that name.");
    const session = new Session(found, found.asked, found.plain, found.fast);
    session.speeds.splice(0, 1, ...found.speeds);
    session.made = found.made;
    return session;
  }
}
