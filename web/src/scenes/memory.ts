/** Scene 1: why decoding waits for memory. */

import { fill, h, s } from "../dom";
import { bytes, count, duration, factor, median } from "../format";
import { type Lab, experiment, figure, finding, mustGuess } from "../lab";
import { FACTOR, Prediction } from "../predict";
import type { Run } from "../run";

const LENGTHS = [1, 3, 7];

/** Times of passes by the number of tokens that they look at. */
type Passes = [number, number[]][];

/** Passes of a target, and the bytes of its weights. */
interface Found {
  passes: Passes;
  size: number | null;
}

export function memory(lab: Lab | null): HTMLElement {
  const box = experiment<Found>(lab, {
    name: "memory",
    label: "Measure passes",
    hint: "Four short texts, with one, two, four and eight tokens in a pass.",
    guess: new Prediction("guess-pass", "A pass over eight tokens takes how many times as long as one over a single token?", { ...FACTOR, min: 0.5, max: 8 }),
    predicted: ({ passes }) => ratioOf(passes),
    measure: async (lab, say) => {
      await lab.warmUp(lab.drafting(5));
      say("Plain decoding: one token in each pass…");
      const runs: Run[] = [await lab.run({ speculation: "off" })];
      for (const length of LENGTHS) {
        say(`With ${count(length, "guess")} in each pass…`);
        runs.push(await lab.run({ speculation: lab.drafting(length) }));
      }
      mustGuess(runs.slice(1));
      return { passes: passesOf(runs), size: lab.facts.weight_bytes };
    },
    show: shown,
  });
  return h("div", {}, bus(), box);
}

/** The weights cross the bus once for each pass, however many tokens ride along. */
function bus(): HTMLElement {
  const said = h("p.fine", { "aria-live": "polite" });
  const drawing = h("div.bus");
  const show = (tokens: number) => {
    fill(said, tokens === 1 ? "All weights cross, and one token uses them." : "The same weights cross once, and eight tokens use them while they are there. Arithmetic grows with the tokens; the crossing does not.");
    const tiles = Array.from({ length: 24 }, (_, place) => s("rect.weight", { x: 6 + (place % 6) * 13, y: 22 + Math.floor(place / 6) * 13, width: 10, height: 10, rx: 2 }));
    const riders = Array.from({ length: tokens }, (_, place) => s("rect.rider", { x: 268 + (place % 4) * 20, y: 34 + Math.floor(place / 4) * 20, width: 16, height: 16, rx: 4 }));
    const crossing = Array.from({ length: 6 }, (_, place) => {
      const tile = s("rect.weight.crossing", { x: 100 + place * 24, y: 43, width: 10, height: 10, rx: 2 });
      tile.style.setProperty("--turn", String(place));
      return tile;
    });
    const label = tokens === 1 ? "Weights cross from memory to the processor, for one token." : "Weights cross from memory to the processor once, for eight tokens.";
    fill(
      drawing,
      s("svg", { viewBox: "0 0 360 92", role: "img", "aria-label": label }, s("text.tick", { x: 6, y: 13 }, "memory: all weights"), s("text.tick", { x: 268, y: 13 }, count(tokens, "token")), s("path.road", { d: "M92 38H252M92 58H252" }), ...tiles, ...crossing, ...riders),
    );
  };
  const choice = (tokens: number) => {
    const input = h<HTMLInputElement>("input", { type: "radio", name: "bus", id: `bus-${tokens}`, checked: tokens === 8, change: () => show(tokens) });
    return h("span.choice", {}, input, h("label", { for: `bus-${tokens}` }, `${count(tokens, "token")} in a pass`));
  };
  show(8);
  return h("div.toy", {}, h("div.go", { role: "radiogroup", "aria-label": "Tokens in a pass" }, choice(1), choice(8)), drawing, said);
}

function passesOf(runs: Run[]): Passes {
  const found = new Map<number, number[]>();
  for (const round of runs.flatMap((run) => run.later)) {
    const rows = round.token_ids.length + 1;
    found.set(rows, [...(found.get(rows) ?? []), round.seconds.forward]);
  }
  return [...found].filter(([, seconds]) => seconds.length >= 3).sort((a, b) => a[0] - b[0]);
}

/** The time of the widest passes over that of those of one token. */
function ratioOf(passes: Passes): number {
  return median(passes.at(-1)![1]) / median(passes[0][1]);
}

function shown({ passes, size }: Found): Node[] {
  const [one, ratio, [rows]] = [median(passes[0][1]), ratioOf(passes), passes.at(-1)!];
  const reading = size && h("p.fine", {}, `One pass reads ${bytes(size)} of weights in ${duration(one)}: ${bytes(size / one)} in each second.`);
  const told = finding(`A pass over ${rows} tokens took `, figure("ratio", ratio, `${factor(ratio)}×`), ` the time of a pass over one. ${lesson(rows, ratio)}`);
  return [told, scatter(passes), ...(reading ? [reading] : [])];
}

/** What the ratio means, whatever it is. */
export function lesson(rows: number, ratio: number): string {
  const each = `Each of the ${rows} tokens cost ${factor(ratio / rows)} of a pass of its own.`;
  if (ratio < 1.3) return `That is hardly longer: nearly all of a pass was waiting. ${each}`;
  if (ratio < rows * 0.6) return `That is longer, and far less than ${rows} times: a part of a pass was waiting, and the rest is arithmetic. ${each}`;
  return `That is nearly ${rows} times: here arithmetic takes the time, and there is little waiting to use. ${each}`;
}

/** Every pass a dot, with the median as a line. */
function scatter(found: Passes): HTMLElement {
  const all = found.flatMap(([, seconds]) => seconds).sort((a, b) => a - b);
  const most = Math.max(...found.map(([, seconds]) => median(seconds)), all[Math.floor(all.length * 0.95)]) * 1.1;
  const along = (value: number) => `${((value / most) * 100).toFixed(1)}%`;
  const rows = found.map(([tokens, seconds]) => {
    const dots = seconds.filter((value) => value <= most).map((value) => s("circle.pass", { cx: along(value), cy: "50%", r: 3.5 }));
    const at = along(median(seconds));
    const drawing = s("svg.strip", { "aria-hidden": "true" }, ...dots, s("line.middle", { x1: at, x2: at, y1: 0, y2: "100%" }));
    return h("tr", {}, h("th", { scope: "row" }, count(tokens, "token")), h("td.bars", {}, drawing), h("td.number", { "data-value": median(seconds) }, duration(median(seconds))));
  });
  return h("table.chart", {}, h("caption", {}, "Time of one pass of the target: every pass a dot, the median a line"), h("tbody", {}, ...rows));
}
