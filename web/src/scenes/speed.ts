/** Scene 4: what decides the speedup. */

import { curve } from "../charts";
import { fill, h } from "../dom";
import { count, mean, median, percent, times } from "../format";
import { type Lab, experiment, figure, finding } from "../lab";
import type { Run } from "../run";
import { bestLength, speedup } from "../speedup";

const LONGEST = 12;
/** Plain decoding and speculation are measured in turns, since a machine is not equally fast all the time. */
const TURNS = 2;
/** Of a guess, in steps of plain decoding, where the target is about as small as the draft model. */
const COST_BESIDE_SMALL = 0.5;

export function speed(lab: Lab): HTMLElement {
  const length = h<HTMLInputElement>("input", { id: "learn-length", type: "range", min: lab.method.least_length, max: LONGEST, value: 5 });
  const number = h("output", { for: "learn-length" }, "5");
  length.addEventListener("input", () => fill(number, length.value));
  const runs: Run[] = [];
  const plain: Run[] = [];
  const box = experiment("Measure this length", "Plainly and with guesses, in turns.", async (say) => {
    await lab.warmUp(lab.drafting(5));
    for (let turn = 0; turn < TURNS; turn++) {
      say(`Turn ${turn + 1} of ${TURNS}: plainly, and with ${count(Number(length.value), "guess")} a round…`);
      plain.push(await lab.run({ speculation: "off" }));
      runs.push(await lab.run({ speculation: lab.drafting(Number(length.value)) }));
    }
    return shown(median(plain.map((run) => run.secondsPerRound)), runs);
  });
  const field = h("div.field", {}, h("label", { for: "learn-length" }, "Guesses a round"), h("div.with-number", {}, length, number));
  return h("div", {}, field, box);
}

/** `step` is the time of a step of plain decoding. */
function shown(step: number, runs: Run[]): Node[] {
  const drafted = runs.filter((run) => run.draftLength > 0);
  if (!drafted.length) throw new Error("Nothing was guessed in this text. Measure again.");
  const chance = mean(drafted.map((run) => run.chance));
  const cost = Math.max(0, mean(drafted.map((run) => (run.secondsPerRound / step - 1) / run.draftLength)));
  const points = drafted.map((run) => ({ length: run.draftLength, gain: run.speed * step }));
  const gain = points.at(-1)!.gain;
  const told = finding(
    "Here a guess stands with a chance of ",
    figure("chance", chance, percent(chance)),
    ", and costs ",
    figure("cost", cost, cost ? `${percent(cost)} of a plain step` : "too little to be seen here"),
    ". The last measurement: ",
    figure("gain", gain, times(gain)),
    ".",
  );
  const best = bestLength(chance, COST_BESIDE_SMALL, LONGEST);
  const small = speedup(chance, best, COST_BESIDE_SMALL);
  const limit = best ? `at most ${times(small)}` : "nothing at all";
  const text = `If the target were so small that a guess cost half of its step, the same guesses would gain ${limit}.`;
  return [told, curve(chance, cost, points, LONGEST), h("p.fine", { "data-name": "small", "data-value": small }, text)];
}
