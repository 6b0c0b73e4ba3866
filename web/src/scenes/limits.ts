/** Scene 7: where it breaks. */

import { fill, h } from "../dom";
import { count, duration, factor, mean, percent } from "../format";
import { type Lab, bars, experiment, figure, finding, told } from "../lab";
import { speedupUnder } from "../speedup";

const TOKENS = 32;
/** Guesses a round, and texts at a time. */
const LENGTH = 5;
const SIZES = [1, 2, 4, 8, 16];

export function limits(lab: Lab): HTMLElement {
  const box = h("div");
  fill(
    box,
    batches(),
    experiment("Measure the first token", "A long prompt, twice.", (say) => first(lab, say)),
    experiment("Measure many texts at a time", "From one text to sixteen together, three turns each.", (say) => many(lab, say)),
    experiment("Measure what is hard to guess", "Code, and letters at random.", (say) => hard(lab, say)),
  );
  return box;
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
async function first(lab: Lab, say: (text: string) => void): Promise<Node[]> {
  const prompt = () => `# ${Math.random()}\n${"def read(path):\n    return open(path).read()\n\n".repeat(12)}`;
  say("The first token of a long prompt, twice…");
  const plain = await lab.run({ prompt: prompt(), speculation: "off", max_tokens: 2 });
  const fast = await lab.run({ prompt: prompt(), speculation: lab.drafting(5), max_tokens: 2 });
  const rows = [
    { name: "plain", value: plain.firstToken, text: duration(plain.firstToken) },
    { name: "with guesses", value: fast.firstToken, text: duration(fast.firstToken) },
  ];
  const longer = fast.firstToken / plain.firstToken;
  const lesson = longer > 1.1 ? "The prompt has to be read all the same, and whoever guesses has to read it too." : longer > 0.9 ? "That is about the same: the prompt has to be read in any case, and nothing is guessed before it is." : "That is chance: nothing is guessed before the first token, so it cannot come sooner. Measure again.";
  const head = finding(
    "The first token took ",
    figure("first-plain", plain.firstToken, duration(plain.firstToken)),
    " plainly and ",
    figure("first-fast", fast.firstToken, duration(fast.firstToken)),
    ` with speculation. ${lesson}`,
  );
  return [head, bars("Time to the first token", "target", rows)];
}

/** The speedup by texts at a time, and where it falls below 1. */
async function many(lab: Lab, say: (text: string) => void): Promise<Node[]> {
  const sizes = SIZES.filter((n) => n <= lab.facts.max_texts);
  const rows: { name: string; value: number; text: string }[] = [];
  for (const n of sizes) {
    const found = await lab.compare(lab.drafting(LENGTH), (text) => say(`${count(n, "text")} at a time. ${text}`), { n, max_tokens: TOKENS });
    rows.push({ name: count(n, "text"), value: found.gain.middle, text: told(found.gain) });
  }
  const below = rows.find((row) => row.value < 1);
  const crossing = !below
    ? `Up to ${rows.at(-1)!.name} speculation pays on average here.`
    : below === rows[0]
      ? "Here speculation does not pay even for one text: its guesses cost too much beside such short passes."
      : `It falls below 1 at ${below.name}.`;
  const head = finding(
    "One text: ",
    figure("gain-one", rows[0].value, rows[0].text),
    `; ${rows.at(-1)!.name} together: `,
    figure("gain-many", rows.at(-1)!.value, rows.at(-1)!.text),
    `. ${crossing}`,
  );
  return [head, bars("Speedup by texts at a time", "accepted", rows)];
}

/** The chance of a guess to stand, in code and in noise. */
async function hard(lab: Lab, say: (text: string) => void): Promise<Node[]> {
  say("A text in code, and one of letters at random…");
  const given = { speculation: lab.drafting(5), temperature: 0.5, max_tokens: 48, n: Math.min(3, lab.facts.max_texts) };
  const letters = Array.from({ length: 80 }, () => "abcdefghijklmnopqrstuvwxyz "[Math.floor(Math.random() * 27)]).join("");
  const easy = mean((await lab.runs(given)).map((run) => run.chance));
  const noise = mean((await lab.runs({ ...given, prompt: letters })).map((run) => run.chance));
  const rows = [
    { name: "code", value: easy, text: percent(easy) },
    { name: "letters at random", value: noise, text: percent(noise) },
  ];
  const lesson = noise < easy ? "Where nobody can know what comes, guesses are paid for and thrown away." : "This time it was no lower; texts differ, so measure again.";
  const head = finding(
    "A guess stood with a chance of ",
    figure("chance-easy", easy, percent(easy)),
    " in code, and of ",
    figure("chance-hard", noise, percent(noise)),
    ` behind letters at random. ${lesson}`,
  );
  return [head, bars("Chance that the next guess stands", "accepted", rows)];
}
