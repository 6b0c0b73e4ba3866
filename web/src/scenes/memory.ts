/** Scene 1: why decoding waits for memory. */

import { h } from "../dom";
import { bytes, count, duration, median, times } from "../format";
import { type Lab, bars, experiment, figure, finding } from "../lab";
import type { Run } from "../run";

const LENGTHS = [1, 3, 7];

export function memory(lab: Lab): HTMLElement {
  return experiment("Measure passes", "Four short texts, with one, two, four and eight tokens in a pass.", async (say) => {
    await lab.warmUp(lab.drafting(5));
    say("Plain decoding: one token in each pass…");
    const runs: Run[] = [await lab.run({ speculation: "off" })];
    for (const length of LENGTHS) {
      say(`With ${count(length, "guess")} in each pass…`);
      runs.push(await lab.run({ speculation: lab.drafting(length) }));
    }
    return shown(lab, passes(runs));
  });
}

/** Median time of a pass by the number of tokens that it looks at. */
function passes(runs: Run[]): [number, number][] {
  const found = new Map<number, number[]>();
  for (const round of runs.flatMap((run) => run.later)) {
    const rows = round.token_ids.length + 1;
    found.set(rows, [...(found.get(rows) ?? []), round.seconds.forward]);
  }
  const often = [...found].filter(([, seconds]) => seconds.length >= 3);
  return often.map(([rows, seconds]): [number, number] => [rows, median(seconds)]).sort((a, b) => a[0] - b[0]);
}

function shown(lab: Lab, found: [number, number][]): Node[] {
  const [[, one]] = found;
  const [rows, most] = found.at(-1)!;
  const size = lab.facts.weight_bytes;
  const chart = bars(
    "Time of one pass of the target (median)",
    "target",
    found.map(([tokens, seconds]) => ({ name: count(tokens, "token"), value: seconds, text: duration(seconds) })),
  );
  const reading = size && h("p.fine", {}, `One pass reads ${bytes(size)} of weights in ${duration(one)}: ${bytes(size / one)} in each second.`);
  const told = finding(`A pass over ${rows} tokens took `, figure("ratio", most / one, times(most / one)), " the time of a pass over one.");
  return [told, chart, ...(reading ? [reading] : [])];
}
