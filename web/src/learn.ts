/** The Learn page: scenes with something to move, a guess and a measurement, and a question. On the documentation site there is no
 * server, and what was recorded stands in place of measurements. */

import { facts } from "./api";
import { bareField, bareSwitch } from "./controls";
import { byId, fill, h } from "./dom";
import { bytes } from "./format";
import { Lab } from "./lab";
import { type Option, Score, question } from "./quiz";
import { limits } from "./scenes/limits";
import { members } from "./scenes/members";
import { memory } from "./scenes/memory";
import { rejection } from "./scenes/rejection";
import { speed } from "./scenes/speed";
import { trees } from "./scenes/trees";
import { verify } from "./scenes/verify";
import { Status } from "./status";

/** What a scene measures, and what it asks; its prose stands in learn.html. */
const SCENES: { measure: (lab: Lab | null) => HTMLElement; asks: string; options: Option[] }[] = [
  {
    measure: memory,
    asks: "A pass over one token takes 20 ms, and nearly all of that is reading weights. About how long does a pass over four tokens take?",
    options: [
      { text: "About 80 ms, as there is four times the work", said: "The arithmetic is four times as much, but it was not what took the time: the weights are read once for all four." },
      { text: "A little more than 20 ms", right: true, said: "The weights are read once, and all four tokens use them while they are there." },
      { text: "About 5 ms, as four share it", said: "The weights still have to come from memory once, and that takes 20 ms." },
    ],
  },
  {
    measure: verify,
    asks: "A draft has five guesses, and the third is the first that falls. How many tokens does this round bring?",
    options: [
      { text: "2", said: "Two guesses stand, but the round is not over: the target writes its own token in place of the third." },
      { text: "3", right: true, said: "Two guesses stand, and the target's own token takes the place of the third. A round never brings less than one token." },
      { text: "5", said: "What follows a guess that fell was guessed behind the wrong token. It falls too." },
    ],
  },
  {
    measure: rejection,
    asks: "The draft gives a token 40%, the target gives it 10%, and the draft has drawn it. What happens?",
    options: [
      { text: "It falls, since the target likes it less", said: "Then the target's 10% would never come true: this token could come only as a replacement, and there it is owed nothing." },
      { text: "It stands, since it was drawn", said: "Then it would come in 40% of all texts, and the target gives it 10%." },
      { text: "It stands with a chance of 25%", right: true, said: "10 ÷ 40. It is drawn 40 times of 100, and stands in 10 of them: just as often as the target wants." },
    ],
  },
  {
    measure: speed,
    asks: "Your target has 0.1 billion parameters, your draft model half as many. Four of five guesses stand. What do you gain?",
    options: [
      { text: "About four times the speed, as four of five stand", said: "Guesses are not free here: each costs about half a pass of the target." },
      { text: "Little", right: true, said: "A guess costs about half of what it saves, and a small target waits little for memory. Speculation needs a target that is much slower than its guesses." },
      { text: "As much as a large target with the same guesses", said: "The share that stands is the same, but a guess that costs half a pass eats what it saves." },
    ],
  },
  {
    measure: trees,
    asks: "A text is hard to guess: the first guess stands in one of five cases. There is room for six guesses a round. How should they stand?",
    options: [
      { text: "In a chain, since one guess may lead to the next", said: "The second in a chain stands only if the first did: in one of twenty-five cases. Most of the chain is paid for in vain." },
      { text: "Several for the first place, and few behind them", right: true, said: "A second choice for the first place stands more often than a guess behind a guess." },
      { text: "It does not matter, as there are six either way", said: "They cost the same, but what they bring depends on where they stand." },
    ],
  },
  {
    measure: members,
    asks: "A small model and a lookup propose the same token after the same text. What does the pass of the target compute?",
    options: [
      { text: "Two rows, one for each guess", said: "Both are about the same token after the same text, so the target's answer is the same." },
      { text: "One row, and each guess has its own test", right: true, said: "What the target computes depends on the token alone. How it is tested depends on how it was chosen." },
      { text: "One row, and one test for both", said: "They were chosen by different laws. One test for both would shift the text." },
    ],
  },
  {
    measure: limits,
    asks: "Users complain that it takes two seconds until the first word appears. Will speculation help them?",
    options: [
      { text: "Yes, it makes everything faster", said: "Only what comes behind the first token. That one waits for the prompt to be read, and guessing begins after it." },
      { text: "Yes, if drafts are long", said: "However long the drafts are, the first token comes before any of them." },
      { text: "No", right: true, said: "The first token comes when the prompt has been read, and nothing is guessed before that. A draft model even has to read the prompt as well." },
    ],
  },
];

/** Whether this is the page of the documentation site. */
const onSite = document.documentElement.hasAttribute("data-site");
const status = new Status(() => void begin());
const score = new Score(SCENES.length);
let begun = false;

async function begin(): Promise<void> {
  if (begun) return;
  try {
    const found = await facts();
    if (!found.methods.length) throw new Error("This server drafts nothing. Start it with a draft model or a method, and load this page again.");
    begun = true;
    fill(byId("model"), `${found.model}, ${found.dtype}${found.weight_bytes ? `, ${bytes(found.weight_bytes)} of weights` : ""}`);
    const lab = new Lab(found);
    if (found.chats) byId("status").after(bareField(bareSwitch(found, (chat) => (lab.chat = chat))));
    open(lab);
  } catch (error) {
    status.fail(error);
  }
}

function open(lab: Lab | null): void {
  for (const [place, scene] of SCENES.entries()) fill(byId(`lab-${place + 1}`), scene.measure(lab));
}

for (const [place, scene] of SCENES.entries()) {
  byId(`question-${place + 1}`).append(question(place + 1, scene.asks, scene.options, score));
}
byId("status").append(status.element, status.problem);
const onward = onSite ? h("a", { href: "tutorial/" }, "From nothing to a server that is twice as fast") : h("a", { href: "/" }, "Try it with your own text");
fill(byId("score"), score.element, h("p.onward", {}, onward));
if (onSite) open(null);
else void begin();
