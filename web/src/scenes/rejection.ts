/** Scene 3: the rejection rule, on guesses of a text that is written here. */

import type { Round } from "../api";
import { distribution } from "../charts";
import { fill, h } from "../dom";
import { mean, percent, shown } from "../format";
import { type Lab, experiment, figure, finding } from "../lab";
import type { Run } from "../run";
import { coins } from "./coins";

/** A guess whose fate was decided. */
interface Tested {
  round: Round;
  node: number;
}

export function rejection(lab: Lab): HTMLElement {
  return h("div", {}, coins(), h("h3.sub", {}, "The same, on guesses of this server"), guesses(lab));
}

function guesses(lab: Lab): HTMLElement {
  return experiment("Draw guesses and toss coins", "One text of 40 tokens at temperature 1.", async (say) => {
    if (!lab.method.adapts) throw new Error("No method of this server draws its guesses. Start it with a draft model.");
    say("Writing 40 tokens with the rule of Leviathan et al. 2023…");
    const run = await lab.run({ speculation: lab.drafting(4, { rule: "token" }) });
    const tested = decided(run);
    if (!tested.length) throw new Error("No guess was tested in this text. Measure again.");
    const shares = tested.map(({ round, node }) => round.rows[round.parents[node] + 1].overlap ?? 0);
    const stood = tested.filter(({ round, node }) => round.accepted.includes(node)).length / tested.length;
    const expected = mean(shares);
    const scatter = (2 * Math.sqrt(expected * (1 - expected))) / Math.sqrt(tested.length);
    const fits = Math.abs(stood - expected) <= scatter ? "That agrees" : "That is further off than in 95 of 100 texts";
    const told = finding(
      "Target and draft shared ",
      figure("overlap", expected, percent(expected)),
      ` of their mass on average, so as many of the ${tested.length} tested guesses were to be expected to stand, give or take `,
      figure("scatter", scatter, percent(scatter)),
      " by chance. ",
      figure("stood", stood, percent(stood)),
      ` did. ${fits}.`,
    );
    return [told, viewer(tested)];
  });
}

/** The guesses up to the first that fell, in every round. */
function decided(run: Run): Tested[] {
  return run.later.flatMap((round) =>
    round.token_ids.flatMap((_, node) => (round.rule === "token" && node <= round.accepted.length ? [{ round, node }] : [])),
  );
}

/** One guess after the other, beginning with the surest of those that fell. */
function viewer(tested: Tested[]): HTMLElement {
  const place = h("p.round-title");
  const said = h("p.round-said", { "aria-live": "polite" });
  const figures = h("div");
  const sure = ({ round, node }: Tested) => (round.accepted.includes(node) ? -1 : round.draft_probs[node]!);
  let at = tested.reduce((best, each, index) => (sure(each) > sure(tested[best]) ? index : best), 0);
  const show = (by: number) => {
    at = (at + by + tested.length) % tested.length;
    fill(place, h("b", {}, `Guess ${at + 1}`), ` of ${tested.length}`);
    fill(said, ...explained(tested[at]));
    const { round, node } = tested[at];
    const fell = !round.accepted.includes(node);
    fill(figures, distribution(round.rows[round.parents[node] + 1], round.token_ids[node], { owed: fell }));
  };
  const back = h("button.quiet", { type: "button", click: () => show(-1) }, "Back");
  const next = h("button", { type: "button", click: () => show(1) }, "Next guess");
  show(0);
  return h("div.viewer", {}, h("div.round-head", {}, place, h("div.round-buttons", {}, back, next)), said, figures);
}

function explained({ round, node }: Tested): (Node | string)[] {
  const [p, q] = [round.target_probs[node], round.draft_probs[node]!];
  const name = shown(round.texts[node], round.token_ids[node]);
  const chance = Math.min(1, p / q);
  const sum = p >= q ? "p is at least q, so it stands for certain." : `${percent(p)} ÷ ${percent(q)} = ${percent(chance)}.`;
  const coin = round.accepted.includes(node) ? "The guess stood." : "The coin fell against it, and the next token is drawn from what the target still owes.";
  return [`The draft drew “${name}” with q = ${percent(q)}; the target gives it p = ${percent(p)}. Chance to stand: ${sum} ${coin}`];
}
