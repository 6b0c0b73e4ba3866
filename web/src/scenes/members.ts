/** Scene 6: several methods guess together. */

import type { Written } from "../api";
import { h } from "../dom";
import { mean, percent } from "../format";
import { type Lab, bars, experiment, finding, mustGuess } from "../lab";
import { proposers } from "../members";
import { listedInWords, named } from "../names";
import { Prediction, SHARE } from "../predict";
import { Rounds } from "../rounds";
import { Run } from "../run";

/** The same lines twice: what came before says what comes next, until it does not. */
const PROMPT = "names = ['alpha', 'beta']\nfor name in names:\n    print(name)\n\nnames = ['gamma', 'delta']\nfor";

export function members(lab: Lab | null): HTMLElement {
  const merges = !lab || lab.facts.methods.some((method) => method.name === "merge");
  const how = h("p.fine", {}, "To measure it here, start the server with ", h("code", {}, "--allow merge"), ".");
  const box = experiment<Written>(merges ? lab : null, {
    name: "members",
    label: "Let several guess",
    hint: "One text of 40 tokens.",
    guess: new Prediction("guess-members", "Of a hundred guesses in the common tree, how many will stand?", SHARE),
    predicted: (text) => share(text.rounds.slice(1).flatMap((round) => round.token_ids.map((_, node) => round.accepted.includes(node)))),
    measure: async (lab, say) => {
      say("Writing 40 tokens…");
      const prompt = lab.chat ? `Repeat this program, and go on with it:\n\n${PROMPT}` : PROMPT;
      const run = await lab.run({ prompt, speculation: { method: "merge" } });
      mustGuess([run]);
      return run.written;
    },
    show: (text) => shown(new Run(text, 1)),
    before: (text) => [stepper(new Run(text, 1))],
  });
  return merges ? box : h("div", {}, box, how);
}

function shown(run: Run): Node[] {
  const counts = run.drafters.map((name) => {
    const guesses = run.later.flatMap((round) => round.token_ids.flatMap((_, node) => (proposers(round, node).includes(name) ? [round.accepted.includes(node)] : [])));
    return { name: named(name), value: share(guesses), text: `${percent(share(guesses))} of ${guesses.length}` };
  });
  const who = run.drafters.length > 1 ? `Guesses came from ${listedInWords(run.drafters)}.` : `All guesses of this text came from ${listedInWords(run.drafters)}; measure again.`;
  const told = finding(`${who} A token that two of them propose is one place in the tree, and each has a test of its own. Colours say who guessed.`);
  return [told, bars("Guesses of each that stood", "accepted", counts), stepper(run)];
}

/** The rounds, from the one in which most methods guessed. */
function stepper(run: Run): HTMLElement {
  return new Rounds(run, () => {}, best(run)).element;
}

/** How many of them stood. */
function share(guesses: boolean[]): number {
  return mean(guesses.map(Number));
}

/** The round in which most methods guessed. */
function best(run: Run): number {
  const sizes = run.rounds.map((round) => new Set(round.token_ids.flatMap((_, node) => proposers(round, node))).size * 100 + round.accepted.length);
  return sizes.indexOf(Math.max(...sizes));
}
