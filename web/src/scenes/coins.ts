/** The rejection rule as a toy: drag p and q, toss coins, and see on what the tokens settle. */

import { fill, h } from "../dom";
import { count, percent, roughly } from "../format";

const NAMES = ["self", "path", "name", "None", "x"];
const THROWS = [1, 100, 10_000];
/** Standard errors between which a share stays by chance, for all five tokens together. */
const SURE = 3.3;

/** How often a token came, as a guess that stood and in place of one that fell. */
interface Tally {
  stood: number;
  repaired: number;
}

/** The chance that a token comes at all, with the repair and without it. */
export function settlesOn(p: number[], q: number[], repair: boolean): number[] {
  const shared = p.map((value, token) => Math.min(value, q[token]));
  const fell = 1 - sum(shared);
  return repair ? p : shared.map((value, token) => value + fell * p[token]);
}

export function coins(): HTMLElement {
  const laws = { target: [0.4, 0.25, 0.2, 0.1, 0.05], draft: [0.15, 0.45, 0.1, 0.1, 0.2] };
  let tallies: Tally[] = [];
  const histogram = h("div");
  const told = h("p.finding");
  const repair = h<HTMLInputElement>("input", { id: "repair", type: "checkbox", checked: true, change: () => clear() });
  const inputs: Record<keyof typeof laws, HTMLInputElement[]> = { target: [], draft: [] };
  const shares: Record<keyof typeof laws, HTMLElement[]> = { target: [], draft: [] };

  const show = () => {
    for (const law of ["target", "draft"] as const) {
      for (const [token, value] of laws[law].entries()) {
        inputs[law][token].value = String(Math.round(value * 100));
        fill(shares[law][token], roughly(value));
      }
    }
    const total = sum(tallies.map((each) => each.stood + each.repaired));
    fill(histogram, table(tallies, total, laws.target));
    fill(told, ...finding(tallies, total, laws.target, laws.draft, repair.checked));
  };
  const clear = () => {
    tallies = NAMES.map(() => ({ stood: 0, repaired: 0 }));
    show();
  };
  const toss = (times: number) => {
    for (let round = 0; round < times; round++) throwOnce(laws.target, laws.draft, repair.checked, tallies);
    show();
  };
  const drag = (law: keyof typeof laws, token: number, value: number) => {
    laws[law] = withShare(laws[law], token, value);
    clear();
  };
  const slider = (law: keyof typeof laws, token: number) => {
    const label = `${law === "target" ? "p, the target's" : "q, the draft's"} share of ${NAMES[token]}`;
    const input = h<HTMLInputElement>(`input.${law}`, { type: "range", min: 1, max: 95, "aria-label": label });
    input.addEventListener("input", () => drag(law, token, Number(input.value) / 100));
    inputs[law].push(input);
    shares[law].push(h("span.number"));
    return h("td", {}, h("div.with-number", {}, input, shares[law][token]));
  };
  const rows = NAMES.map((name, token) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, name)), slider("target", token), slider("draft", token)));
  const head = h("tr", {}, h("td"), h("th", { scope: "col" }, h("span.key.target"), "target p"), h("th", { scope: "col" }, h("span.key.draft"), "draft q"));
  const buttons = THROWS.map((times) => h(times === THROWS[1] ? "button" : "button.quiet", { type: "button", click: () => toss(times) }, times === 1 ? "Throw once" : times.toLocaleString("en")));
  clear();
  toss(THROWS[1]);
  return h(
    "div.toy",
    {},
    h("table.laws", {}, h("caption", {}, "Drag the shares: the draft guesses by q, the target wants p"), head, ...rows),
    h("div.go", { role: "group", "aria-label": "Throws" }, ...buttons, h("button.quiet", { type: "button", click: clear }, "Clear")),
    h("div.field.check", {}, repair, h("label", { for: "repair" }, "Repair: where a guess falls, draw from the part where the target gives more")),
    told,
    histogram,
  );
}

/** One guess, its coin, and the repair; without it the target's own p is drawn from again, as one might think. */
function throwOnce(p: number[], q: number[], repair: boolean, tallies: Tally[]): void {
  const guess = draw(q);
  if (Math.random() * q[guess] < p[guess]) tallies[guess].stood++;
  else tallies[draw(repair ? p.map((value, token) => Math.max(0, value - q[token])) : p)].repaired++;
}

function draw(weights: number[]): number {
  let left = Math.random() * sum(weights);
  const found = weights.findIndex((weight) => (left -= weight) < 0);
  return found < 0 ? weights.length - 1 : found;
}

/** The law with another share of one token; the rest keep their proportions. */
function withShare(law: number[], token: number, value: number): number[] {
  const rest = 1 - law[token];
  return law.map((share, each) => (each === token ? value : (share / rest) * (1 - value)));
}

function table(tallies: Tally[], total: number, p: number[]): HTMLElement {
  const most = Math.max(...p, ...tallies.map((each) => (each.stood + each.repaired) / (total || 1))) * 1.1;
  const rows = NAMES.map((name, token) => {
    const parts = (["stood", "repaired"] as const).map((kind) => {
      const bar = h(`span.fill.${kind === "stood" ? "accepted" : "owed"}`);
      bar.style.width = `${((tallies[token][kind] / (total || 1)) / most) * 100}%`;
      return bar;
    });
    const mark = h("span.wanted");
    mark.style.left = `${(p[token] / most) * 100}%`;
    const share = (tallies[token].stood + tallies[token].repaired) / (total || 1);
    const number = h("td.number", { "data-share": share, "data-wanted": p[token] }, total ? percent(share) : "none yet");
    return h("tr", {}, h("th", { scope: "row" }, h("code", {}, name)), h("td.bars", {}, h("span.rail.marked", {}, ...parts, mark)), number);
  });
  const keys = h("ul.keys", {}, h("li", {}, h("span.key.accepted"), "stood"), h("li", {}, h("span.key.owed"), "in place of one that fell"), h("li", {}, h("span.key.wanted"), "p, what the target wants"));
  return h("div", {}, h("table.chart", {}, h("caption", {}, "What was written, by token"), h("tbody", {}, ...rows)), keys);
}

function finding(tallies: Tally[], total: number, p: number[], q: number[], repair: boolean): (Node | string)[] {
  if (!total) return ["Throw, and watch where the bars settle."];
  const expected = settlesOn(p, q, repair);
  const token = expected.reduce((worst, value, each) => (Math.abs(value - p[each]) > Math.abs(expected[worst] - p[worst]) ? each : worst), 0);
  const off = Math.max(...tallies.map((each, place) => Math.abs((each.stood + each.repaired) / total - p[place])));
  const chance = SURE * Math.max(...p.map((value) => Math.sqrt((value * (1 - value)) / total)));
  const stood = h("b", { "data-name": "stood-share" }, percent(sum(tallies.map((each) => each.stood)) / total));
  const head = [`${count(total, "throw").replace(/\d+/, total.toLocaleString("en"))}: `, stood, " of the guesses stood. "];
  if (repair || Math.abs(expected[token] - p[token]) < 0.005) {
    const verdict = off <= chance ? "the text is the target's, however bad q is." : "that happens once in some hundred series. Throw on.";
    return [...head, `No bar is further than ${percent(off)} from p, and chance alone allows ${percent(chance)}: ${verdict}`];
  }
  return [...head, "Without the repair ", h("code", {}, NAMES[token]), ` settles on ${percent(expected[token])}, and the target wants ${percent(p[token])}. More throws do not mend that.`];
}

function sum(values: number[]): number {
  return values.reduce((total, value) => total + value, 0);
}
