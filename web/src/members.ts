/** Who proposed a draft token, where several methods draft together. */

import type { Round } from "./api";
import { h } from "./dom";
import { named } from "./names";

/** The methods that proposed a draft token, each once. */
export function proposers(round: Round, node: number): string[] {
  const names = round.draws.filter((draw) => draw.node === node).map((draw) => round.drafted_by[draw.member]?.method);
  return [...new Set(names.filter(Boolean))];
}

/** All methods that drafted in some rounds, in the order in which they first did. */
export function drafters(rounds: Round[]): string[] {
  return [...new Set(rounds.flatMap((round) => round.drafted_by.map((part) => part.method)))];
}

/** The place of the first proposer among the drafters, which decides the colour; null where there is one drafter alone. */
export function colourOf(round: Round, node: number, names: string[]): number | null {
  const place = names.indexOf(proposers(round, node)[0]);
  return names.length > 1 && place >= 0 ? place % 4 : null;
}

/** Which colour is whose. */
export function memberKeys(names: string[]): HTMLElement | null {
  if (names.length < 2) return null;
  const items = names.map((name, place) => h("li", {}, h("span.token.accepted", { "data-by": place % 4, "data-method": name }, named(name))));
  return h("ul.legend.members", { "aria-label": "Guesses come from" }, ...items);
}
