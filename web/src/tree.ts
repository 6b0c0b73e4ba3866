/** Draws the token tree of a round. */

import type { Round } from "./api";
import { s } from "./dom";
import { percent, roughly, shown } from "./format";
import { colourOf, proposers } from "./members";
import { listedInWords } from "./names";
import { lastNode } from "./run";
import { guessesAfter, writtenName } from "./why";

export const STAGES = ["Draft", "Verify", "Accept", "Repair"] as const;
const [WIDTH, HEIGHT, GAP, LINE] = [92, 46, 26, 64];

interface Box {
  x: number;
  y: number;
  name: string;
  small: string;
  kind: string;
  parent: number | null;
  by: number | null;
}

/** The tree at a stage: 0 draft, 1 verify, 2 accept, 3 repair. `root` is how the text ends so far, `names` who drafts. */
export function tree(round: Round, stage: number, root: string, names: string[] = []): SVGElement {
  const boxes = layout(round, stage, root, names);
  const shownBoxes = boxes.filter((box) => box.kind !== "hidden");
  const width = Math.max(...boxes.map((box) => box.x)) + WIDTH + 2;
  const height = Math.max(...boxes.map((box) => box.y)) + HEIGHT + 2;
  return s(
    "svg.tree",
    { viewBox: `-1 -1 ${width + 1} ${height + 1}`, width, height, role: "img", "aria-label": said(round, stage) },
    ...shownBoxes.filter((box) => box.parent !== null).map((box) => edge(boxes[box.parent!], box)),
    ...shownBoxes.map(drawn),
  );
}

/** Box 0 is the root, box i + 1 draft token i, and the last one what the target wrote. */
function layout(round: Round, stage: number, root: string, names: string[]): Box[] {
  const end = lastNode(round);
  const size = round.token_ids.length;
  const boxes: Box[] = Array(size + 2);
  let line = 0;
  const place = (node: number, depth: number): number => {
    const isRepair = node === size;
    const children = isRepair ? [] : guessesAfter(round, node);
    if (node === end && round.token_id !== null) children.push(size);
    const lines = children.map((child) => place(child, depth + 1));
    const y = lines.length ? lines[0] : line++;
    const parent = isRepair ? end : node < 0 ? null : round.parents[node];
    const by = node < 0 || isRepair ? null : colourOf(round, node, names);
    boxes[node + 1] = { x: depth * (WIDTH + GAP), y: y * LINE, parent: parent === null ? null : parent + 1, by, ...look(round, node, stage, root) };
    return y;
  };
  place(-1, 0);
  return boxes.filter(Boolean);
}

function look(round: Round, node: number, stage: number, root: string): { name: string; small: string; kind: string } {
  if (node < 0) return { name: root, small: "the text so far", kind: "root" };
  if (node === round.token_ids.length) {
    const bonus = !guessesAfter(round, lastNode(round)).length;
    const kind = stage < 3 ? "hidden" : !round.token_ids.length ? "plain" : bonus ? "bonus" : "recovered";
    return { name: writtenName(round), small: "the target", kind };
  }
  const name = shown(round.texts[node], round.token_ids[node]);
  const small = stage < 1 ? drafted(round, node) : `target ${percent(round.target_probs[node])}`;
  if (stage < 2) return { name, small, kind: "guess" };
  return { name, small, kind: round.accepted.includes(node) ? "accepted" : "fallen" };
}

/** With what probability a token was guessed. One that was drawn behind others at its place had what they left. */
function drafted(round: Round, node: number): string {
  const own = round.draws.find((draw) => draw.node === node);
  if (!own || own.draft_prob === null) return "guess";
  const elder = round.draws.slice(0, round.draws.indexOf(own)).some((draw) => draw.member === own.member && draw.law === own.law && round.parents[draw.node] === round.parents[node]);
  return elder ? `${roughly(own.draft_prob)} of the rest` : `draft ${percent(own.draft_prob)}`;
}

function edge(from: Box, to: Box): SVGElement {
  const [x1, y1, x2, y2] = [from.x + WIDTH, from.y + HEIGHT / 2, to.x, to.y + HEIGHT / 2];
  const middle = (x1 + x2) / 2;
  return s(`path.edge.${to.kind}`, { d: `M${x1} ${y1} C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}` });
}

function drawn(box: Box): SVGElement {
  const name = [...box.name].length > 11 ? `${[...box.name].slice(0, 10).join("")}…` : box.name;
  return s(
    `g.box.${box.kind}`,
    { transform: `translate(${box.x} ${box.y})`, "data-by": box.by },
    s("title", {}, box.name),
    s("rect", { width: WIDTH, height: HEIGHT, rx: 9 }),
    box.by === null ? null : s("path.by", { d: `M4 10v${HEIGHT - 20}` }),
    s("text.name", { x: WIDTH / 2, y: 20, "text-anchor": "middle" }, name),
    s("text.small", { x: WIDTH / 2, y: 36, "text-anchor": "middle" }, box.small),
  );
}

function said(round: Round, stage: number): string {
  const together = round.drafted_by.length > 1;
  const names = round.token_ids.map((id, node) => {
    const by = together ? ` from ${listedInWords(proposers(round, node))}` : "";
    return `${shown(round.texts[node], id)} ${roughly(round.target_probs[node])}${by}`;
  });
  const guesses = round.token_ids.length ? `Guesses: ${names.join(", ")}.` : "Nothing was guessed.";
  const stood = stage < 2 ? "" : ` ${round.accepted.length} stood.`;
  return `${guesses}${stood}${stage < 3 || round.token_id === null ? "" : ` The target wrote ${writtenName(round)}.`}`;
}
