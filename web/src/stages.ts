/** What happened inside stages: a drafter guesses for a draft model, which keeps some of its guesses. */

import type { StageCounts } from "./api";
import { h } from "./dom";
import { named } from "./names";

const HEADS = ["Guesses from", "Passes of the small model", "Guessed tokens", "Of these, kept"];

/** A table with a row for each stage; null where there was none. */
export function stages(found: Record<string, StageCounts>): HTMLElement | null {
  if (!Object.keys(found).length) return null;
  const head = h("tr", {}, ...HEADS.map((name) => h("th", { scope: "col" }, name)));
  const rows = Object.entries(found).map(([name, counts]) => row(name, counts));
  return h("div.scroller", { tabindex: "0", role: "group", "aria-label": "Guesses for the small model" }, h("table.choices", {}, head, ...rows));
}

function row(name: string, { passes, draft_tokens, accepted_tokens }: StageCounts): HTMLElement {
  const cells = [passes, draft_tokens, accepted_tokens].map((count) => h("td", { "data-value": count }, String(count)));
  return h("tr", { "data-stage": name }, h("th", { scope: "row" }, named(name.split(".").at(-1)!)), ...cells);
}
