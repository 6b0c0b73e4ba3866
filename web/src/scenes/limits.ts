/** Scene 7: where it breaks. */

import { fill, h } from "../dom";
import { count, duration, factor, mean, percent } from "../format";
import type { Gain } from "../interval";
import { type Lab, bars, experiment, figure, finding, mustGuess, told } from "../lab";
import { FACTOR, Prediction, SHARE } from "../predict";
import { speedupUnder } from "../speedup";

const TOKENS = 32;
/** Guesses a round, and texts at a time. */
const LENGTH = 5;
const SIZES = [1, 2, 4, 8, 16];

export function limits(lab: Lab | null): HTMLElement {
  return h("div", {}, batches(), first(lab), many(lab), hard(lab));
}

/** How the gain melts when texts share a pass: guesses that often stand, and a pass with room for so many tokens. */
function batches(): HTMLElement {
  const number = h("output", { for: "batch-room" });
  const found = h("div");
  const input = h<HTMLInputElement>("input", { id: "batch-room", type: "range", min: 2, max: 128, step: 1, value: 24 });
  const show = () => {
    const room = Number(input.value);
    fill(number, input.value);
    const rows = SIZES.map((texts) => ({ texts, gain: speedupUnder({ chance: 0.75, cost: 0.08, texts, room }, LENGTH) }));
    const below = rows.find((row) => row.gain < 1);
    const said = below ? finding("Below 1 from ", figure("crossing", below.texts, count(below.texts, "text")), " on: the guesses fill the pass, and what falls of them is paid for.") : finding(figure("crossing", 0, "Up to 16 texts"), " there is room left, and guesses pay.");
    fill(found, said, bars("Expected speedup by texts at a time, where three of four guesses stand", "accepted", rows.map(({ texts, gain }) => ({ name: count(texts, "text"), value: gain, text: `${factor(gain)}×` }))));
  };
  input.addEventListener("input", show);
  show();
  return h("div.toy", {}, h("div.field", {}, h("label", { for: "batch-room" }, "Tokens a pass takes before it gets slower"), h("div.with-number", {}, input, number)), found);
}

/** Time to the first token, of prompts that no cache knows. */
function first(lab: Lab | null): HTMLElement {
  const prompt = () => `# ${Math.random()}\n${"def read(path):\n    return open(path).read()\n\n".repeat(12)}`;
  return experiment<{ plain: number; fast: number }>(lab, {
    name: "first",
    label: "Measure the first token",
    hint: "A long prompt, twice.",
    guess: new Prediction("guess-first", "The first token of a long prompt takes how many times as long with guesses as plainly?", FACTOR),
    predicted: ({ plain, fast }) => fast / plain,
    measure: async (lab, say) => {
      say("The first token of a long prompt, twice…");
      const plain = await lab.run({ prompt: prompt(), speculation: "off", max_tokens: 2 });
      const fast = await lab.run({ prompt: prompt(), speculation: lab.drafting(5), max_tokens: 2 });
      return { plain: plain.firstToken, fast: fast.firstToken };
    },
    show: ({ plain, fast }) => {
      const longer = fast / plain;
      const lesson = longer > 1.1 ? "The prompt has to be read all the same, and whoever guesses has to read it too." : longer > 0.9 ? "That is about the same: the prompt has to be read in any case, and nothing is guessed before it is." : "That is chance: nothing is guessed before the first token, so it cannot come sooner.";
      const head = finding("The first token took ", figure("first-plain", plain, duration(plain)), " plainly and ", figure("first-fast", fast, duration(fast)), ` with speculation. ${lesson}`);
      const rows = [
        { name: "plain", value: plain, text: duration(plain) },
        { name: "with guesses", value: fast, text: duration(fast) },
      ];
      return [head, bars("Time to the first token", "target", rows)];
    },
  });
}

/** The speedup by texts at a time, and where it falls below 1. */
function many(lab: Lab | null): HTMLElement {
  return experiment<{ texts: number; gain: Gain }[]>(lab, {
    name: "many",
    label: "Measure many texts at a time",
    hint: "From one text to sixteen together, three turns each.",
    guess: new Prediction("guess-many", "With sixteen texts at a time, or as many as the server takes, how many times as fast are guesses?", FACTOR),
    predicted: (found) => found.at(-1)!.gain.middle,
    measure: async (lab, say) => {
      const found: { texts: number; gain: Gain }[] = [];
      for (const texts of SIZES.filter((n) => n <= lab.facts.max_texts)) {
        const { gain } = await lab.compare(lab.drafting(LENGTH), (text) => say(`${count(texts, "text")} at a time. ${text}`), { n: texts, max_tokens: TOKENS });
        found.push({ texts, gain });
      }
      return found;
    },
    show: (found) => {
      const rows = found.map(({ texts, gain }) => ({ name: count(texts, "text"), value: gain.middle, text: told(gain) }));
      const [one, most, below] = [rows[0], rows.at(-1)!, rows.find((row) => row.value < 1)];
      const crossing = !below
        ? `Up to ${most.name} speculation pays on average here.`
        : below === one
          ? "Here speculation does not pay even for one text: its guesses cost too much beside such short passes."
          : `It falls below 1 at ${below.name}.`;
      const head = finding("One text: ", figure("gain-one", one.value, one.text), `; ${most.name} together: `, figure("gain-many", most.value, most.text), `. ${crossing}`);
      return [head, bars("Speedup by texts at a time", "accepted", rows)];
    },
  });
}

/** The chance of a guess to stand, in code and in noise. */
function hard(lab: Lab | null): HTMLElement {
  return experiment<{ easy: number; noise: number }>(lab, {
    name: "hard",
    label: "Measure what is hard to guess",
    hint: "Code, and letters at random.",
    guess: new Prediction("guess-hard", "Behind letters at random, how many of a hundred guesses will stand?", SHARE),
    predicted: ({ noise }) => noise,
    measure: async (lab, say) => {
      say("A text in code, and one of letters at random…");
      const given = { speculation: lab.drafting(5), temperature: 0.5, max_tokens: 48, n: Math.min(3, lab.facts.max_texts) };
      const letters = Array.from({ length: 80 }, () => "abcdefghijklmnopqrstuvwxyz "[Math.floor(Math.random() * 27)]).join("");
      const chance = async (more: { prompt?: string; chat?: boolean }) => {
        const runs = await lab.runs({ ...given, ...more });
        mustGuess(runs);
        return mean(runs.filter((run) => run.drafted.length).map((run) => run.chance));
      };
      return { easy: await chance({}), noise: await chance({ prompt: letters, chat: false }) }; // in a chat, the model would write of something else
    },
    show: ({ easy, noise }) => {
      const lesson = noise < easy ? "Where nobody can know what comes, guesses are paid for and thrown away." : "This time it was no lower; texts differ, so measure again.";
      const head = finding("A guess stood with a chance of ", figure("chance-easy", easy, percent(easy)), " in code, and of ", figure("chance-hard", noise, percent(noise)), ` behind letters at random. ${lesson}`);
      const rows = [
        { name: "code", value: easy, text: percent(easy) },
        { name: "letters at random", value: noise, text: percent(noise) },
      ];
      return [head, bars("Chance that the next guess stands", "accepted", rows)];
    },
  });
}
