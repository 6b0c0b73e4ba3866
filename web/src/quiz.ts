/** The question at the end of a scene, and the score at the end of the page. */

import { fill, h } from "./dom";
import { forgetGuesses } from "./predict";
import { keep, kept } from "./visits";

export interface Option {
  text: string;
  right?: boolean;
  /** What is said to those who take it. */
  said: string;
}

/** The score, kept between visits: what counts is the first answer to each question. */
export class Score {
  readonly element = h("div.score");
  private readonly answers: Map<number, boolean>;

  constructor(private readonly questions: number) {
    this.answers = new Map(kept<[number, boolean][]>(KEPT, []));
    for (const [question, right] of this.answers) mark(question, right);
    this.show();
  }

  answer(question: number, right: boolean): void {
    if (!this.answers.has(question)) this.answers.set(question, right);
    mark(question, right);
    keep(KEPT, [...this.answers]);
    this.show();
  }

  private forget(): void {
    this.answers.clear();
    keep(KEPT, []);
    forgetGuesses();
    for (const link of document.querySelectorAll("[data-answered]")) link.removeAttribute("data-answered");
    this.show();
  }

  private show(): void {
    const right = [...this.answers.values()].filter(Boolean).length;
    const open = this.questions - this.answers.size;
    const rest = open ? `${open} still to answer.` : right === this.questions ? "All of it, at the first try." : WORDS;
    const again = this.answers.size > 0 && h("button.quiet", { type: "button", id: "forget", click: () => this.forget() }, "Start over");
    fill(this.element, h("p.big", { "data-value": right }, `${right} of ${this.questions}`), h("p", {}, rest), again);
  }
}

const KEPT = "outrider-learn";

function mark(question: number, right: boolean): void {
  document.querySelector(`[data-scene-link="${question}"]`)?.setAttribute("data-answered", right ? "right" : "later");
}

const WORDS = "Go back to the ones that fell: the feedback says why, and each scene can be measured again.";

/** A question with its answers. */
export function question(number: number, text: string, options: Option[], score: Score): HTMLElement {
  const feedback = h("div.feedback", { role: "status" });
  const choices = options.map((option, place) => {
    const id = `answer-${number}-${place}`;
    const input = h("input", { type: "radio", name: `question-${number}`, id, value: place });
    return h("div.option", {}, input, h("label", { for: id }, option.text));
  });
  const submit = (event: Event) => {
    event.preventDefault();
    const chosen = new FormData(event.target as HTMLFormElement).get(`question-${number}`);
    if (chosen === null) return fill(feedback, h("p", {}, "Choose an answer first."));
    const option = options[Number(chosen)];
    score.answer(number, Boolean(option.right));
    const head = option.right ? "Right." : "Not quite.";
    fill(feedback, h(`p.${option.right ? "right" : "wrong"}`, {}, h("b", {}, head), ` ${option.said}`));
  };
  const legend = h("legend", {}, h("small", {}, "A question"), text);
  const fields = h("fieldset", {}, legend, ...choices);
  return h("form.question", { submit }, fields, h("button.quiet", {}, "Check"), feedback);
}
