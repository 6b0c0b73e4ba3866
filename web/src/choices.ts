/** What the engine chose round by round, where the choice was its own. */

import type { Round } from "./api";
import { h } from "./dom";
import { count } from "./format";
import { inWords, listedInWords } from "./names";
import type { Run } from "./run";

/** A table of who drafted in how many rounds, and why; null where the engine had no choice. */
export function choices(run: Run): HTMLElement | null {
  const found = new Map<string, Round[]>();
  for (const round of run.rounds) {
    if (round.reason) found.set(drafter(round), [...(found.get(drafter(round)) ?? []), round]);
  }
  if (!found.size) return null;
  const head = h("tr", {}, ...["Guesses come from", "Rounds", "Why, in the last of them"].map((name) => h("th", { scope: "col" }, name)));
  return h("div.scroller", { tabindex: "0", role: "group", "aria-label": "Choices of the engine" }, h("table.choices", {}, head, ...[...found].map(row)));
}

function row([name, rounds]: [string, Round[]]): HTMLElement {
  const numbers = { "data-name": name, "data-value": rounds.length };
  return h("tr", numbers, h("th", { scope: "row" }, name), h("td", {}, count(rounds.length, "round")), h("td", {}, inWords(rounds.at(-1)!.reason)));
}

function drafter(round: Round): string {
  return listedInWords([...new Set(round.drafted_by.map((part) => part.method))]) || "nobody";
}
