/** Scene 6: several methods guess together. */

import { h } from "../dom";
import { percent } from "../format";
import { type Lab, bars, experiment, finding } from "../lab";
import { listed, proposers } from "../members";
import recorded from "../recorded.json";
import { Rounds } from "../rounds";
import { Run } from "../run";
import { madeOn } from "./memory";
import type { Written } from "../api";

/** The same lines twice: what came before says what comes next, until it does not. */
const PROMPT = "names = ['alpha', 'beta']\nfor name in names:\n    print(name)\n\nnames = ['gamma', 'delta']\nfor";

export function members(lab: Lab): HTMLElement {
  const recordedRun = () => [madeOn(), ...shown(new Run(recorded.merged as unknown as Written, 1))];
  const merged = lab.facts.methods.find((method) => method.name === "merge");
  if (!merged) {
    const how = h("p.fine", {}, "To measure it here, start the server with ", h("code", {}, "--allow merge"), ".");
    return h("div", {}, ...recordedRun(), how);
  }
  return experiment("Let several guess", "One text of 40 tokens.", async (say) => {
    say("Writing 40 tokens…");
    return shown(await lab.run({ prompt: PROMPT, speculation: { method: "merge" } }));
  }, recordedRun);
}

function shown(run: Run): Node[] {
  const counts = run.drafters.map((name) => {
    const drafted = run.later.flatMap((round) => round.token_ids.map((_, node) => ({ round, node }))).filter(({ round, node }) => proposers(round, node).includes(name));
    const stood = drafted.filter(({ round, node }) => round.accepted.includes(node)).length;
    return { name, value: drafted.length ? stood / drafted.length : 0, text: `${percent(drafted.length ? stood / drafted.length : 0)} of ${drafted.length}` };
  });
  const told = finding(`${listed(run.drafters)} guessed together. A token that both propose is one place in the tree, and each has a test of its own. Colours say who guessed.`);
  return [told, bars("Guesses of each that stood", "accepted", counts), new Rounds(run, () => {}, best(run)).element];
}

/** The round in which most methods guessed. */
function best(run: Run): number {
  const sizes = run.rounds.map((round) => new Set(round.token_ids.flatMap((_, node) => proposers(round, node))).size * 100 + round.accepted.length);
  return sizes.indexOf(Math.max(...sizes));
}
