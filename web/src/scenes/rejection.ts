/** Scene 3: the rejection rule, on guesses of a text that is written here. */

import type { Row } from "../api";
import { distribution } from "../charts";
import { fill, h } from "../dom";
import { mean, percent, shown } from "../format";
import { type Lab, experiment, figure, finding } from "../lab";
import { Prediction, SHARE } from "../predict";
import type { Run } from "../run";
import { coins } from "./coins";

/** A guess whose fate was decided. */
interface Tested {
  text: string | null;
  token: number;
  target: number;
  draft: number;
  stood: boolean;
  /** What else could have come there. */
  row: Row;
}

export function rejection(lab: Lab | null): HTMLElement {
  const where = lab ? "The same, on guesses of this server" : "The same, on guesses of a model";
  const box = experiment<Tested[]>(lab, {
    name: "rejection",
    label: "Draw guesses and toss coins",
    hint: "One text of 40 tokens at temperature 1.",
    guess: new Prediction("guess-stood", "Of a hundred guesses of the draft, how many will stand?", SHARE),
    predicted: (tested) => share(tested),
    measure: async (lab, say) => {
      if (!lab.method.adapts) throw new Error("No method of this server draws its guesses. Start it with a draft model.");
      say("Writing 40 tokens with the rule of Leviathan et al. 2023…");
      const tested = decided(await lab.run({ speculation: lab.drafting(4, { rule: "token" }) }));
      if (!tested.length) throw new Error("No guess was tested in this text. Measure again.");
      return tested;
    },
    show: (tested) => [told(tested), viewer(tested)],
  });
  return h("div", {}, coins(), h("h3.sub", {}, where), box);
}

function told(tested: Tested[]): HTMLElement {
  const expected = mean(tested.map(({ row }) => row.overlap ?? 0));
  const scatter = (2 * Math.sqrt(expected * (1 - expected))) / Math.sqrt(tested.length);
  const fits = Math.abs(share(tested) - expected) <= scatter ? "That agrees" : "That is further off than in 95 of 100 texts";
  return finding(
    "Target and draft shared ",
    figure("overlap", expected, percent(expected)),
    ` of their mass on average, so as many of the ${tested.length} tested guesses were to be expected to stand, give or take `,
    figure("scatter", scatter, percent(scatter)),
    " by chance. ",
    figure("stood", share(tested), percent(share(tested))),
    ` did. ${fits}.`,
  );
}

/** Of the tested guesses, those that stood. */
function share(tested: Tested[]): number {
  return tested.filter((each) => each.stood).length / tested.length;
}

/** The guesses up to the first that fell, in every round. */
function decided(run: Run): Tested[] {
  return run.later
    .filter((round) => round.rule === "token")
    .flatMap((round) =>
      round.token_ids.slice(0, round.accepted.length + 1).map((token, node) => ({
        text: round.texts[node],
        token,
        target: round.target_probs[node],
        draft: round.draft_probs[node]!,
        stood: round.accepted.includes(node),
        row: round.rows[round.parents[node] + 1],
      })),
    );
}

/** One guess after the other, beginning with the surest of those that fell. */
function viewer(tested: Tested[]): HTMLElement {
  const place = h("p.round-title");
  const said = h("p.round-said", { "aria-live": "polite" });
  const figures = h("div");
  const sure = ({ stood, draft }: Tested) => (stood ? -1 : draft);
  let at = tested.reduce((best, each, index) => (sure(each) > sure(tested[best]) ? index : best), 0);
  const show = (by: number) => {
    at = (at + by + tested.length) % tested.length;
    fill(place, h("b", {}, `Guess ${at + 1}`), ` of ${tested.length}`);
    fill(said, ...explained(tested[at]));
    const { row, token, stood } = tested[at];
    fill(figures, distribution(row, token, { owed: !stood }));
  };
  const back = h("button.quiet", { type: "button", click: () => show(-1) }, "Back");
  const next = h("button", { type: "button", click: () => show(1) }, "Next guess");
  show(0);
  return h("div.viewer", {}, h("div.round-head", {}, place, h("div.round-buttons", {}, back, next)), said, figures);
}

function explained({ text, token, target: p, draft: q, stood }: Tested): string[] {
  const chance = Math.min(1, p / q);
  const sum = p >= q ? "p is at least q, so it stands for certain." : `${percent(p)} ÷ ${percent(q)} = ${percent(chance)}.`;
  const coin = stood ? "The guess stood." : "The coin fell against it, and the next token is drawn from what the target still owes.";
  return [`The draft drew “${shown(text, token)}” with q = ${percent(q)}; the target gives it p = ${percent(p)}. Chance to stand: ${sum} ${coin}`];
}
