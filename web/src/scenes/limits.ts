/** Scene 5: where it breaks. */

import { fill, h } from "../dom";
import { duration, mean, percent, times } from "../format";
import { type Lab, bars, experiment, figure, finding } from "../lab";
import type { Run } from "../run";

const TOKENS = 32;

export function limits(lab: Lab): HTMLElement {
  const box = h("div");
  fill(
    box,
    experiment("Measure the first token", "A long prompt, twice.", (say) => first(lab, say)),
    experiment("Measure many texts at a time", "One text, then up to eight together.", (say) => many(lab, say)),
    experiment("Measure what is hard to guess", "Code, and letters at random.", (say) => hard(lab, say)),
  );
  return box;
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
  const told = finding(
    "The first token took ",
    figure("first-plain", plain.firstToken, duration(plain.firstToken)),
    " plainly and ",
    figure("first-fast", fast.firstToken, duration(fast.firstToken)),
    " with speculation: the prompt has to be read all the same, and whoever guesses has to read it too.",
  );
  return [told, bars("Time to the first token", "target", rows)];
}

/** The speedup of one text, and of several at a time. */
async function many(lab: Lab, say: (text: string) => void): Promise<Node[]> {
  const most = Math.min(8, lab.facts.max_texts);
  const gains: { name: string; value: number; text: string }[] = [];
  await lab.warmUp(lab.drafting(5));
  for (const n of [1, most]) {
    say(`${n === 1 ? "One text" : `${n} texts at a time`}, plainly and with guesses…`);
    const plain = together(await lab.runs({ n, max_tokens: TOKENS, speculation: "off" }));
    const fast = together(await lab.runs({ n, max_tokens: TOKENS, speculation: lab.drafting(5) }));
    gains.push({ name: n === 1 ? "one text" : `${n} texts`, value: fast / plain, text: times(fast / plain) });
  }
  const told = finding(
    "One text gained ",
    figure("gain-one", gains[0].value, gains[0].text),
    `, ${most} together `,
    figure("gain-many", gains[1].value, gains[1].text),
    ". The more texts share a pass, the less of it is waiting, and the more every guess that falls has cost.",
  );
  return [told, bars("Speedup", "accepted", gains)];
}

/** Tokens a second of several texts, behind the first token of each. */
function together(runs: Run[]): number {
  const start = Math.min(...runs.map((run) => run.firstToken));
  const end = Math.max(...runs.map((run) => run.total));
  return runs.reduce((sum, run) => sum + run.tokens.length, 0) / (end - start);
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
  const told = finding(
    "A guess stood with a chance of ",
    figure("chance-easy", easy, percent(easy)),
    " in code, and of ",
    figure("chance-hard", noise, percent(noise)),
    ` behind letters at random. ${lesson}`,
  );
  return [told, bars("Chance that the next guess stands", "accepted", rows)];
}
