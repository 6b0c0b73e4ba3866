/** Scene 4: what decides the speedup. */

import { type Measured, curve } from "../charts";
import { fill, h } from "../dom";
import { count, factor, mean, median, percent, roughly } from "../format";
import { type Compared, type Lab, experiment, figure, finding, mustGuess, told } from "../lab";
import type { Gain } from "../interval";
import { FACTOR, Prediction } from "../predict";
import { type Conditions, bestLength, speedupUnder } from "../speedup";

const LONGEST = 12;

/** A slider of the curve. */
interface Knob {
  name: keyof Conditions | "length";
  label: string;
  min: number;
  max: number;
  step: number;
  value: number;
  said: (value: number) => string;
}

const KNOBS: Knob[] = [
  { name: "chance", label: "A guess stands", min: 0.05, max: 0.98, step: 0.01, value: 0.75, said: roughly },
  { name: "cost", label: "Drafting a guess costs, in plain steps", min: 0, max: 1, step: 0.01, value: 0.08, said: roughly },
  { name: "length", label: "Guesses a round", min: 0, max: LONGEST, step: 1, value: 3, said: String },
  { name: "texts", label: "Texts at a time", min: 1, max: 32, step: 1, value: 1, said: String },
  { name: "room", label: "Tokens a pass takes before it gets slower", min: 1, max: 256, step: 1, value: 32, said: String },
];

/** What was measured, as the sliders have it. */
interface Fitted {
  gain: Gain;
  chance: number;
  cost: number;
  length: number;
}

export function speed(lab: Lab | null): HTMLElement {
  const values = Object.fromEntries(KNOBS.map((knob) => [knob.name, knob.value])) as Record<Knob["name"], number>;
  const measured: Measured[] = [];
  const drawing = h("div");
  const sentence = h("p.finding", {});
  const outputs = new Map<Knob["name"], [HTMLInputElement, HTMLElement, Knob]>();
  const show = () => {
    const gain = (length: number) => speedupUnder(values, length);
    const best = bestLength(gain, LONGEST);
    for (const [input, output, knob] of outputs.values()) {
      input.value = String(values[knob.name]);
      fill(output, knob.said(values[knob.name]));
    }
    fill(drawing, curve(gain, measured, { longest: LONGEST, here: values.length }));
    const most = best ? [figure("best", best, count(best, "guess")), " a round, for ", figure("best-gain", gain(best), `${factor(gain(best))}×`)] : [figure("best", 0, "none"), ": any guess costs more than it brings"];
    fill(sentence, "With ", figure("here", gain(values.length), `${count(values.length, "guess")}: ${factor(gain(values.length))}×`), ". Best: ", ...most, ".");
  };
  const knobs = KNOBS.map((knob) => {
    const input = h<HTMLInputElement>("input", { id: `knob-${knob.name}`, type: "range", min: knob.min, max: knob.max, step: knob.step, value: knob.value });
    const output = h("output", { for: input.id });
    outputs.set(knob.name, [input, output, knob]);
    input.addEventListener("input", () => {
      values[knob.name] = Number(input.value);
      show();
    });
    return h("div.field", {}, h("label", { for: input.id }, knob.label), h("div.with-number", {}, input, output));
  });
  show();
  const box = experiment<Fitted>(lab, {
    name: "speed",
    label: "Measure this server",
    hint: "Three turns, plainly and with guesses; the point is pinned into the curve.",
    guess: new Prediction("guess-gain", `How many times as fast is ${lab ? "this server" : "the machine of the record"} with guesses? First move the sliders to where you think it stands.`, FACTOR),
    predicted: ({ gain }) => gain.middle,
    measure: async (lab, say) => fit(await lab.compare(lab.drafting(Math.max(1, values.length)), say)),
    show: ({ gain, chance, cost, length }) => {
      measured.push({ length, gain: gain.middle, low: gain.low, high: gain.high });
      Object.assign(values, { chance, cost, length: Math.round(length), texts: 1, room: 256 });
      show();
      return [
        finding(lab ? "This server: " : "With guesses: ", figure("gain", gain.middle, told(gain)), "."),
        h("p.fine", {}, "Here a guess stood with a chance of ", figure("chance", chance, percent(chance)), " and cost ", figure("cost", cost, percent(cost)), " of a plain step, drafting and checking together. The sliders stand there now."),
      ];
    },
  });
  return h("div", {}, h("div.toy", {}, h("div.knobs", {}, ...knobs), sentence, drawing), box);
}

/** What the runs tell of chance, cost and length. */
function fit({ plain, fast, gain }: Compared): Fitted {
  mustGuess(fast);
  const drafted = fast.filter((run) => run.drafted.length);
  const step = median(plain.map((run) => run.secondsPerRound));
  const length = mean(drafted.map((run) => run.draftLength));
  return { gain, chance: mean(drafted.map((run) => run.chance)), cost: mean(drafted.map((run) => run.costBeside(step))), length };
}
