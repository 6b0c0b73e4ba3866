/** The small figures. Each says in words what it draws. */

import type { Row } from "./api";
import { h, s } from "./dom";
import { duration, factor, percent, roughly, shown } from "./format";
import { PARTS, type Part, type Run } from "./run";
import { bestLength } from "./speedup";

const NAMES: Record<Part, string> = {
  draft: "drafting",
  pass: "the target's pass",
  check: "checking",
  rest: "everything else",
};

/** Share of the guesses at each place that stood; in a tree one guess of a level can stand at most. */
export function byPosition(run: Run): HTMLElement {
  const found = run.written.speculation;
  const rows = found.drafted_per_position.map((drafted, place) => {
    const share = drafted ? found.accepted_per_position[place] / drafted : 0;
    const bar = h("span.fill.accepted");
    bar.style.width = `${share * 100}%`;
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, `${run.branches ? "level" : "guess"} ${place + 1}`),
      h("td.bars", {}, h("span.rail", {}, bar)),
      h("td.number", { "data-value": share }, roughly(share)),
    );
  });
  return h("table.chart", {}, h("caption", {}, run.branches ? "How often a level got a guess that stood" : "How many of the guesses at each place stood"), h("tbody", {}, ...rows));
}

/** Where the time of a step goes, in both runs, on one scale. */
export function timeShares(plain: Run, fast: Run): HTMLElement {
  const longest = Math.max(plain.secondsPerRound, fast.secondsPerRound);
  const rows = [
    partsRow("plain", plain, longest, "1 token"),
    partsRow("a round", fast, longest, `${fast.tokensPerRound.toFixed(2)} tokens`),
  ];
  const keys = PARTS.map((part) =>
    h("li", {}, h(`span.key.${part}`), `${NAMES[part]} `, h("b", { "data-part": part }, duration(fast.parts[part]))),
  );
  const caption = h("caption", {}, "The time of one step, and what it brings");
  return h("div", {}, h("table.chart", {}, caption, h("tbody", {}, ...rows)), h("ul.keys", {}, ...keys));
}

function partsRow(name: string, run: Run, longest: number, brings: string): HTMLElement {
  const bars = PARTS.map((part) => {
    const bar = h(`span.fill.${part}`, { title: `${NAMES[part]}: ${duration(run.parts[part])}` });
    bar.style.width = `${(run.parts[part] / longest) * 100}%`;
    return bar;
  });
  const said = h("span.number", {}, `${duration(run.secondsPerRound)} · ${brings}`);
  return h("tr", {}, h("th", { scope: "row" }, name), h("td.bars", {}, h("span.rail.wide", {}, ...bars), said));
}

/** A measured speedup, with its interval where one is known. */
export interface Measured {
  length: number;
  gain: number;
  low?: number | null;
  high?: number | null;
}

/**
 * The expected speedup by length of the draft, with what was measured.
 *
 * @param gain By length, which need not be whole.
 * @param given The longest draft; and a length to point at.
 */
export function curve(gain: (length: number) => number, measured: Measured[], given: { longest?: number; here?: number } = {}): HTMLElement {
  const { longest = 12, here } = given;
  const [width, height, left, bottom] = [360, 204, 38, 38];
  const top = Math.max(1.5, ...measured.map((each) => each.high ?? each.gain), ...lengths(longest).map(gain)) * 1.1;
  const x = (k: number) => left + (k / longest) * (width - left - 12);
  const y = (value: number) => height - bottom - (value / top) * (height - bottom - 10);
  const path = lengths(longest * 4).map((step) => `${x(step / 4).toFixed(1)},${y(gain(step / 4)).toFixed(1)}`);
  const best = bestLength(gain, longest);
  const ticks = (top > 6 ? [1, 2, 4, 6, 8, 10, 12] : [1, 2, 3, 4, 5, 6]).filter((value) => value < top);
  const points = measured.flatMap((each) => {
    const place = x(Math.min(each.length, longest));
    const whisker = each.low != null && each.high != null && s("path.whisker", { d: `M${place} ${y(each.low)}V${y(Math.min(each.high, top))}` });
    return [whisker, s("circle.point", { cx: place, cy: y(each.gain), r: 5.5 })];
  });
  const found = measured.map((each) => `${factor(each.gain)}× with ${each.length.toFixed(1)}`);
  const said = `Expected speedup by length of the draft: most, ${factor(gain(best))}×, with ${best} guesses.${found.length ? ` Measured: ${found.join(", ")}.` : ""}`;
  return h(
    "figure.curve",
    {},
    s(
      "svg",
      { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": said },
      ...ticks.map((value) => s(value === 1 ? "line.grid.one" : "line.grid", { x1: left, x2: width - 12, y1: y(value), y2: y(value) })),
      ...ticks.map((value) => s("text.tick", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, `${value}×`)),
      ...lengths(longest).filter((k) => k % 2 === 0).map((k) => s("text.tick", { x: x(k), y: height - bottom + 17, "text-anchor": "middle" }, String(k))),
      s("text.tick", { x: width - 12, y: height - 4, "text-anchor": "end" }, "guesses a round"),
      s("polyline.line", { points: path.join(" ") }),
      s("circle.best", { cx: x(best), cy: y(gain(best)), r: 6.5 }),
      here === undefined ? null : s("path.here", { d: `M${x(here)} ${y(0)}V${y(gain(here))}` }),
      ...points,
    ),
    h("figcaption", {}, h("span.key-ring", { "aria-hidden": "true" }), h("span", {}, "the best point of the formula"), ...(measured.length ? [h("span.key-dot", { "aria-hidden": "true" }), h("span", {}, "measured, with its interval where it is known")] : [])),
  );
}

function lengths(longest: number): number[] {
  return Array.from({ length: longest + 1 }, (_, k) => k);
}

/** What target and draft held likely behind a token, and the residual, where a token was drawn from one. */
export function distribution(row: Row, guess: number | null, options: { owed?: boolean } = {}): HTMLElement {
  const most = Math.max(...row.likely.map((each) => Math.max(each.target, each.draft ?? 0)), 1e-9);
  const drawn = row.overlap !== null;
  const body = row.likely.slice(0, 9).map((each) => {
    const values: [string, number][] = [["target", each.target]];
    if (each.draft !== null) values.push(["draft", each.draft]);
    if (options.owed && each.residual !== null) values.push(["owed", each.residual]);
    const name = h("code", {}, shown(each.text, each.token_id));
    const isGuess = each.token_id === guess;
    return h(
      `tr${isGuess ? ".guess" : ""}`,
      {},
      h("th", { scope: "row" }, h("span.bar-name", {}, name, isGuess && h("small", {}, " the guess"))),
      h("td.bars", {}, ...values.map(([kind, value]) => bar(kind, value, most))),
      h("td.number", {}, ...values.map(([kind, value]) => h("span", { "data-kind": kind, "data-value": value }, percent(value)))),
    );
  });
  const kinds = ["target", ...(drawn ? ["draft"] : []), ...(options.owed && row.likely.some((each) => each.residual !== null) ? ["owed"] : [])];
  const keys: Record<string, string> = { target: "target p", draft: "draft q", owed: "what the target still owes" };
  return h(
    "div.distribution",
    {},
    h("ul.keys", {}, ...kinds.map((kind) => h("li", {}, h(`span.key.${kind}`), keys[kind]))),
    h("table.chart", {}, h("caption.hidden", {}, "Probabilities of the next token"), h("tbody", {}, ...body)),
  );
}

function bar(kind: string, value: number, most: number): HTMLElement {
  const found = h(`span.fill.${kind}`);
  found.style.width = `${Math.min(1, value / most) * 100}%`;
  return h("span.rail.thin", {}, found);
}
