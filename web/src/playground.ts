/** The playground: one prompt, written plainly and with speculation, replayed and looked into. */

import { type Asked, type Facts, type Hearing, Stopped, type Written, facts, write } from "./api";
import { Controls, settingsOf } from "./controls";
import { byId, fill, h } from "./dom";
import { bytes } from "./format";
import { isKnown } from "./interval";
import { fromAddress, keep, kept, toAddress } from "./keeping";
import { Live } from "./live";
import { Results } from "./results";
import { Session } from "./session";
import { opener } from "./share";
import { Status } from "./status";
import { headline } from "./verdict";

/** Names of examples, each with a beginning to go on with and with a message to answer. */
const EXAMPLES: [string, string, string][] = [
  ["a class", "class Reader:\n    def __init__(self, path):\n", "Write a class in Python that reads a file line by line."],
  ["a function", "def parse(line):\n    ", "Write a function in Python that parses a line like `name = value`."],
  ["a test", "import unittest\n\n\nclass TestParser(unittest.TestCase):\n    def test_", "Write unit tests in Python for a function `parse(line)` that splits `name = value`."],
  ["a repetition", "names = ['alpha', 'beta', 'gamma']\nnames = ['alpha', 'beta', 'gamma']\nnames = [", "Repeat this program, and add one name:\n\nnames = ['alpha', 'beta', 'gamma']\nfor name in names:\n    print(name, len(name))"],
];

const status = new Status(() => void begin());
const prompt = byId<HTMLTextAreaElement>("prompt");
const button = byId<HTMLButtonElement>("go");
const stop = byId<HTMLButtonElement>("stop");
const results = new Results();
let known: Facts | null = null;
let controls: Controls | null = null;
let chats = false;

async function begin(): Promise<void> {
  try {
    known = await facts();
    if (!controls) introduce(known);
    button.disabled = !controls;
  } catch (error) {
    button.disabled = true;
    status.fail(error);
  }
}

function introduce(found: Facts): void {
  const size = found.weight_bytes ? `, ${bytes(found.weight_bytes)} of weights` : "";
  fill(byId("model"), `${found.model}, ${found.dtype}${size}`);
  if (!found.methods.length) {
    return status.fail("This server drafts nothing. Start it with a draft model or a method, and load this page again.");
  }
  controls = new Controls(found, address);
  fill(byId("settings"), controls.element);
  const before = fromAddress();
  if (before.size) controls.settings = before;
  const last = kept();
  if (last) open(last);
}

/** Take the prompt as a message or as a beginning; an example that stands there becomes its like. */
function address(chat: boolean): void {
  const standing = EXAMPLES.find((example) => example[chats ? 2 : 1] === prompt.value);
  chats = chat;
  if (standing) prompt.value = standing[chat ? 2 : 1];
  fill(byId("prompt-label"), chat ? "A message, for the model to answer" : "A beginning, for the model to go on with");
}

/** Show a run that was kept, with its prompt. */
function open(session: Session): void {
  status.clear();
  prompt.value = session.asked.prompt;
  results.show(session);
  status.say(`A run of ${new Date(session.made).toLocaleString()} on ${session.facts.model}. ${headline(session)}.`);
}

/** Open a run of a file: its settings come with it, and it is kept as one that was measured here. */
function openFile(session: Session): void {
  if (controls) {
    controls.settings = settingsOf(session.asked);
    toAddress(session.asked.prompt, controls.settings);
  }
  keep(session);
  open(session);
}

async function run(): Promise<void> {
  if (!controls || !known || button.disabled) return;
  const abort = new AbortController();
  stop.onclick = () => abort.abort();
  begun(true);
  try {
    await compare(known, controls, abort.signal);
  } catch (error) {
    results.halted(error instanceof Stopped ? "Stopped" : "Broken off");
    if (error instanceof Stopped) status.say("Stopped.");
    else status.fail(error);
  }
  begun(false);
}

/** Write both texts before the reader's eyes, then in turns until it is known which is faster. */
async function compare(found: Facts, chosen: Controls, signal: AbortSignal): Promise<void> {
  const { maxTokens, temperature, speculation, sameDice, chat } = chosen.choice;
  const asked: Asked = { prompt: prompt.value, ...(chat ? { chat } : {}), max_tokens: maxTokens, temperature, speculation };
  const turn = () => ({ ...asked, ...(sameDice ? { seed: Math.floor(Math.random() * 2 ** 31) } : {}) });
  toAddress(asked.prompt, chosen.settings);
  status.say("Reading the prompt.");
  await write({ ...asked, max_tokens: 2 }, { signal }); // so that both find it in the prefix cache
  const live = new Live(maxTokens);
  results.watch(live);
  const first = turn();
  status.say("Plain decoding is written, then the same with guesses.");
  const plain = await side(first, true, { signal, heard: (piece) => live.plain.heard(piece) });
  const fast = await side(first, false, { signal, heard: (piece) => live.fast.heard(piece) });
  const session = new Session(found, first, plain, fast);
  results.show(session, 2);
  keep(session);
  try {
    await measure(session, turn, signal);
  } finally {
    results.conclude(session);
    keep(session);
    byId("results").focus({ preventScroll: true }); // whoever uses the keyboard goes on here
  }
  status.say(`Both texts are finished. ${headline(session)}.`);
}

/** Further turns, each beginning with the other side. */
async function measure(session: Session, turn: () => Asked, signal: AbortSignal): Promise<void> {
  const begun = performance.now();
  while (!isKnown(session.gain, (performance.now() - begun) / 1000)) {
    const [asked, number] = [turn(), session.gain.turns + 1];
    results.measuring(session, number);
    const order = number % 2 ? [true, false] : [false, true];
    const [one, other] = [await side(asked, order[0], { signal }), await side(asked, order[1], { signal })];
    if (order[0]) session.add(one, other);
    else session.add(other, one);
  }
}

function side(asked: Asked, isPlain: boolean, hearing: Hearing): Promise<Written> {
  return write(isPlain ? { ...asked, speculation: "off" } : asked, hearing);
}

/** While texts are written there is a button to stop, and none to begin. */
function begun(running: boolean): void {
  button.disabled = running;
  stop.hidden = !running;
  if (running) status.clear();
}

byId("main").append(results.note.element);
byId("status").append(status.element, status.problem);
byId("status").after(opener(openFile, (error) => status.fail(error)));
fill(
  byId("examples"),
  ...EXAMPLES.map(([name, text, message]) => h("button.quiet", { type: "button", click: () => (prompt.value = chats ? message : text) }, name)),
);
prompt.value = fromAddress().get("prompt") ?? EXAMPLES[0][1];
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  void run();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId<HTMLFormElement>("composer").requestSubmit();
});
void begin();
