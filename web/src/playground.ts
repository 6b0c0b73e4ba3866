/** The playground: one prompt, written plainly and with speculation, replayed and looked into. */

import { type Asked, type Facts, type Written, facts, write } from "./api";
import { byPosition, curve, timeShares } from "./charts";
import { choices } from "./choices";
import { Controls } from "./controls";
import { byId, fill, h } from "./dom";
import { bytes, duration, percent, times } from "./format";
import { Race, verdict } from "./race";
import { Rounds } from "./rounds";
import { Run } from "./run";
import { Status } from "./status";
import { Note } from "./tokens";

const EXAMPLES: [string, string][] = [
  ["a class", "class Reader:\n    def __init__(self, path):\n"],
  ["a function", "def parse(line):\n    "],
  ["a test", "import unittest\n\n\nclass TestParser(unittest.TestCase):\n    def test_"],
  ["a repetition", "names = ['alpha', 'beta', 'gamma']\nnames = ['alpha', 'beta', 'gamma']\nnames = ["],
];

const note = new Note();
const status = new Status(() => void begin());
const prompt = byId<HTMLTextAreaElement>("prompt");
const button = byId<HTMLButtonElement>("go");
let controls: Controls | null = null;

async function begin(): Promise<void> {
  try {
    const found = await facts();
    if (!controls) introduce(found);
    button.disabled = false;
  } catch (error) {
    button.disabled = true;
    status.fail(error);
  }
}

function introduce(found: Facts): void {
  const size = found.weight_bytes ? `, ${bytes(found.weight_bytes)} of weights` : "";
  fill(byId("model"), `${found.model}, ${found.dtype}${size}`);
  controls = new Controls(found);
  fill(byId("settings"), controls.element);
  if (!found.methods.length) {
    controls = null;
    status.fail("This server drafts nothing. Start it with a draft model or a method, and load this page again.");
    button.disabled = true;
  }
}

async function run(): Promise<void> {
  if (!controls) return;
  button.disabled = true;
  status.clear();
  try {
    const choice = controls.choice;
    const seed = choice.sameDice ? { seed: Math.floor(Math.random() * 2 ** 31) } : {};
    const asked: Asked = { prompt: prompt.value, max_tokens: choice.maxTokens, temperature: choice.temperature, speculation: "off", ...seed };
    status.say("Reading the prompt…");
    await write({ ...asked, max_tokens: 2, speculation: choice.speculation }); // so that both find it in the prefix cache
    const plain = await side(asked, "Plain decoding");
    const fast = await side({ ...asked, speculation: choice.speculation }, "With speculation");
    show(new Run(plain, choice.temperature), new Run(fast, choice.temperature));
  } catch (error) {
    status.fail(error);
  }
  button.disabled = false;
}

function side(asked: Asked, name: string): Promise<Written> {
  return write(asked, (tokens) => status.say(`${name}: ${tokens} of at most ${asked.max_tokens} tokens…`));
}

function show(plain: Run, fast: Run): void {
  note.hide();
  const race = new Race(plain, fast, note, (token) => {
    rounds.go(token.round.round, 0);
    byId("rounds").scrollIntoView({ block: "nearest" });
  });
  const rounds = new Rounds(fast, (round) => race.mark(round));
  fill(byId("verdict"), verdict(plain, fast), numbers(plain, fast));
  fill(byId("race"), race.element);
  fill(byId("rounds"), rounds.element);
  fill(byId("figures"), ...figures(plain, fast));
  byId("results").hidden = false;
  status.say(`Both texts are finished. Speculation was ${times(fast.speed / plain.speed)} as fast.`);
  byId("results").focus({ preventScroll: true }); // whoever uses the keyboard goes on here
  byId("results").scrollIntoView({ block: "start", behavior: "instant" });
  race.play();
}

function numbers(plain: Run, fast: Run): HTMLElement {
  const found = fast.written.speculation;
  const items: [string, string, number, string][] = [
    ["tau", "tokens a draft brings (τ)", found.mean_acceptance_length, found.mean_acceptance_length.toFixed(2)],
    ["rate", "of all guesses stood", found.acceptance_rate, percent(found.acceptance_rate)],
    ["passes", "passes of the target", found.target_passes, `${found.target_passes} instead of ${plain.written.speculation.target_passes}`],
    ["first", "to the first token, plain and with speculation", fast.firstToken, `${duration(plain.firstToken)} and ${duration(fast.firstToken)}`],
  ];
  const cells = items.map(([name, said, value, text]) => h("div", {}, h("dd", { "data-name": name, "data-value": value }, text), h("dt", {}, said)));
  return h("dl.numbers", {}, ...cells);
}

function figures(plain: Run, fast: Run): HTMLElement[] {
  const gain = fast.speed / plain.speed;
  const length = fast.draftLength;
  const cost = length ? Math.max(0, (fast.secondsPerRound / plain.secondsPerRound - 1) / length) : 0;
  const chosen = choices(fast);
  return [
    figure("Do the guesses stand?", byPosition(fast.written.speculation)),
    figure("Where does the time go?", timeShares(plain, fast)),
    figure(
      "What was to be expected?",
      curve(fast.chance, cost, length ? [{ length, gain }] : []),
      `Each guess stands with a chance of ${percent(fast.chance)} when those before it do, and one more guess costs ${costing(cost)}, drafting and checking together.`,
    ),
    ...(chosen ? [figure("What did the engine choose, and why?", chosen)] : []),
  ];
}

function costing(cost: number): string {
  return cost ? `${percent(cost)} of a plain step` : "so little that this run does not show it";
}

function figure(title: string, body: HTMLElement, text?: string): HTMLElement {
  return h("section.figure", {}, h("h3", {}, title), body, text && h("p.fine", {}, text));
}

byId("main").append(note.element);
byId("status").append(status.element, status.problem);
fill(
  byId("examples"),
  ...EXAMPLES.map(([name, text]) => h("button.quiet", { type: "button", click: () => (prompt.value = text) }, name)),
);
prompt.value = EXAMPLES[0][1];
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  void run();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId<HTMLFormElement>("composer").requestSubmit();
});
void begin();
