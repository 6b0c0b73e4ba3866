/** Scene 5: a chain or a tree, with the same number of guesses. */

import { fill, h, s } from "../dom";
import { factor, mean, percent } from "../format";
import type { Gain } from "../interval";
import { type Compared, type Lab, bars, experiment, figure, finding, told } from "../lab";
import { FACTOR, Prediction } from "../predict";

/** Guesses of both shapes. */
const SIZE = 6;
/** Chances that the guesses for one place stand, where those before fell, beside that of the first. */
const LATER = [1, 0.45, 0.25];

/** Tokens that a round brings, by the chance that the first guess at a place stands. */
export function tokensOfShapes(chance: number): { chain: number; tree: number } {
  const tokens = (places: number[][]) => places.flat().reduce((sum, each) => sum + each, 1);
  return { chain: tokens(chainOf(chance)), tree: tokens(treeOf(chance)) };
}

/** By place, with what chance each guess of a chain stands. */
function chainOf(chance: number): number[][] {
  return Array.from({ length: SIZE }, (_, depth) => [chance ** (depth + 1)]);
}

/** The same of a tree: three at the first place, and one behind each. */
function treeOf(chance: number): number[][] {
  let left = 1;
  const first = LATER.map((part) => {
    const stands = left * chance * part;
    left -= stands;
    return stands;
  });
  return [first, first.map((each) => each * chance)];
}

/** A shape: a box for each guess, filled as far as it stands. */
function drawn(name: string, places: number[][]): HTMLElement {
  const [width, height, gap, line] = [44, 26, 14, 34];
  const lines = Math.max(...places.map((place) => place.length));
  const x = (depth: number) => 22 + depth * (width + gap);
  const boxes = places.flatMap((place, depth) => place.map((stands, row) => ({ stands, depth, y: 2 + row * line })));
  const middle = height / 2;
  const edges = boxes.map(({ depth, y }) => s("path.road", { d: depth ? `M${x(depth) - gap} ${y + middle}h${gap}` : `M10 ${2 + middle}C18 ${2 + middle} 14 ${y + middle} ${x(0)} ${y + middle}` }));
  const rects = boxes.flatMap(({ stands, depth, y }) => [
    s("rect.guessing", { x: x(depth), y, width, height, rx: 6 }),
    s("rect.standing", { x: x(depth), y, width: width * stands, height, rx: 6 }),
    s("text.share", { x: x(depth) + width / 2, y: y + 18, "text-anchor": "middle", "data-value": stands }, percent(stands)),
  ]);
  const said = `${name}. By place its guesses stand with ${places.map((place) => place.map(percent).join(", ")).join("; then ")}.`;
  const size = { viewBox: `0 0 ${x(SIZE)} ${lines * line}` };
  return h("div.shape", {}, h("p.fine", {}, name), s("svg", { ...size, role: "img", "aria-label": said }, ...edges, s("circle.weight", { cx: 6, cy: 2 + middle, r: 5 }), ...rects));
}

export function trees(lab: Lab | null): HTMLElement {
  const number = h("output", { for: "tree-chance" });
  const found = h("div");
  const input = h<HTMLInputElement>("input", { id: "tree-chance", type: "range", min: 0.05, max: 0.98, step: 0.01, value: 0.4 });
  const show = () => {
    const chance = Number(input.value);
    const { chain, tree } = tokensOfShapes(chance);
    fill(number, percent(chance));
    const better = Math.abs(chain - tree) < 0.02 ? "They bring the same" : chain > tree ? "The chain brings more" : "The tree brings more";
    const why = chain > tree ? "guesses are sure, and depth pays." : "guesses are unsure, and a second choice pays more than a guess behind guesses.";
    fill(
      found,
      finding(figure("shape", chain - tree, better), `: ${why}`),
      drawn("A chain of six guesses: how often each stands", chainOf(chance)),
      drawn("A tree of six: three for one place, and one behind each", treeOf(chance)),
      bars("Tokens that a round brings, the target's own included", "accepted", [
        { name: "a chain of 6", value: chain, text: factor(chain) },
        { name: "3, and 1 behind each", value: tree, text: factor(tree) },
      ]),
    );
  };
  input.addEventListener("input", show);
  show();
  const field = h("div.field", {}, h("label", { for: "tree-chance" }, "The first guess at a place stands"), h("div.with-number", {}, input, number));
  return h("div", {}, h("div.toy", {}, field, found), !lab || lab.method.takes_tree ? measured(lab) : h("p.fine", {}, "No method of this server draws trees. Start it with a draft model to measure one."));
}

/** What one shape brought: tokens of a round, and how many times as fast it was. */
interface Shape {
  tokens: number;
  gain: Gain;
}

function measured(lab: Lab | null): HTMLElement {
  const shape = ({ fast, gain }: Compared): Shape => ({ tokens: mean(fast.map((run) => run.tokensPerRound)), gain });
  return experiment<{ chain: Shape; tree: Shape }>(lab, {
    name: "trees",
    label: "Measure both shapes",
    hint: "Six guesses a round, three turns each.",
    guess: new Prediction("guess-shape", "A round with six guesses in a tree brings how many times the tokens of one with a chain of six?", { ...FACTOR, min: 0.5, max: 2, step: 0.05 }),
    predicted: ({ chain, tree }) => tree.tokens / chain.tokens,
    measure: async (lab, say) => ({
      chain: shape(await lab.compare(lab.drafting(SIZE), (text) => say(`A chain. ${text}`))),
      tree: shape(await lab.compare({ method: lab.method.name, tree: [3, 1] }, (text) => say(`A tree. ${text}`))),
    }),
    show: ({ chain, tree }) => [
      finding(`${chain.tokens > tree.tokens ? "The chain" : "The tree"} brought more here: `, figure("tokens-chain", chain.tokens, factor(chain.tokens)), " tokens a round in a chain, and ", figure("tokens-tree", tree.tokens, factor(tree.tokens)), " in a tree."),
      bars("Tokens a round, and what it gained in time", "accepted", [
        { name: "a chain of 6", value: chain.tokens, text: told(chain.gain) },
        { name: "3, and 1 behind each", value: tree.tokens, text: told(tree.gain) },
      ]),
    ],
  });
}
