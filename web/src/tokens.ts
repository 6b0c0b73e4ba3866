/** A text as tokens that can be pointed at: coloured by origin, with a note of what is known of each. */

import { h } from "./dom";
import { percent, shown, spoken } from "./format";
import { colourOf } from "./members";
import { listedInWords } from "./names";
import type { Run, Token } from "./run";
import { reason } from "./why";

const ORIGINS = {
  plain: "written by the target",
  accepted: "a guess that stood",
  recovered: "in place of a guess that fell",
  bonus: "one more, behind a whole draft",
};

/** The text of a run. It is one stop of the tab key; arrow keys go from token to token. */
export class TokenText {
  readonly element: HTMLElement;
  private readonly spans: HTMLElement[];
  private current = 0;
  private tapped = -1;

  /**
   * @param run What is shown.
   * @param label For those who listen.
   * @param note Where the note of a token goes.
   * @param chosen Is told which token was clicked, tapped twice, or entered.
   */
  constructor(
    private readonly run: Run,
    label: string,
    private readonly note: Note,
    private readonly chosen: (token: Token) => void = () => {},
  ) {
    this.spans = run.tokens.map((token, place) => this.span(token, place));
    this.spans[0]?.setAttribute("tabindex", "0");
    const help = `${label}. Arrow keys go from token to token.`;
    this.element = h("div.tokens", { role: "group", "aria-label": help, dir: "auto" }, ...this.spans);
    this.element.addEventListener("keydown", (event) => this.move(event));
  }

  /** Show the tokens up to a time of the run; all without one. */
  until(seconds = Infinity): number {
    let count = 0;
    for (const [place, token] of this.run.tokens.entries()) {
      const isThere = token.at <= seconds;
      count += Number(isThere);
      this.spans[place].classList.toggle("later", !isThere);
    }
    if (count && count < this.spans.length) this.follow(this.spans[count - 1]);
    return count;
  }

  /** Keep the newest token in sight, by moving the text alone and not the page. */
  private follow(newest: HTMLElement): void {
    const bottom = newest.offsetTop + newest.offsetHeight;
    this.element.scrollTop = Math.max(0, bottom - this.element.clientHeight);
  }

  /** Mark the tokens of a round. */
  mark(round: number): void {
    for (const [place, token] of this.run.tokens.entries()) {
      this.spans[place].classList.toggle("marked", token.round.round === round);
    }
  }

  private span(token: Token, place: number): HTMLElement {
    const blank = !token.text.trim();
    const label = `${spoken(token.text)}, ${token.origin}`;
    const given = { role: "button", tabindex: "-1", "aria-label": label, "data-origin": token.origin, "data-place": place };
    const by = token.node === null ? null : colourOf(token.round, token.node, this.run.drafters);
    const span = h(`span.token.${token.origin}`, { ...given, "data-by": by }, ...visible(token.text));
    if (blank) span.classList.add("blank");
    span.addEventListener("pointermove", (event) => {
      if (event.pointerType !== "touch" && (event.movementX || event.movementY)) this.explain(place); // no text that scrolls under a pointer at rest
    });
    span.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && this.note.leave(span));
    span.addEventListener("focus", () => this.entered(place));
    span.addEventListener("blur", () => this.note.leave(span));
    span.addEventListener("click", (event) => ((event as PointerEvent).pointerType === "touch" ? this.tap(place) : this.choose(place)));
    return span;
  }

  /** Mark the token at which two texts part. */
  part(place: number): void {
    this.spans[place]?.classList.add("parting");
  }

  /** The first tap shows the note, and only the second leaves for the round. */
  private tap(place: number): void {
    if (this.tapped === place) return this.choose(place);
    this.tapped = place;
    this.spans[place].focus({ preventScroll: true });
    this.explain(place);
  }

  private choose(place: number): void {
    this.spans[place].focus();
    this.chosen(this.run.tokens[place]);
  }

  /** The token that has the focus is the one stop of the tab key. */
  private entered(place: number): void {
    this.spans[this.current].setAttribute("tabindex", "-1");
    this.current = place;
    this.spans[place].setAttribute("tabindex", "0");
    this.explain(place);
  }

  private explain(place: number): void {
    this.note.show(this.spans[place], this.run.tokens[place], this.run);
  }

  private move(event: KeyboardEvent): void {
    const last = this.spans.length - 1;
    const steps: Record<string, number> = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -last, End: last };
    if (event.key === "Escape") this.note.hide();
    else if (event.key in steps) {
      this.spans[Math.min(last, Math.max(0, this.current + steps[event.key]))].focus();
      event.preventDefault();
    } else if (event.key === "Enter" || event.key === " ") {
      this.choose(this.current);
      event.preventDefault();
    }
  }
}

/** The text of a token, with a pale sign where it is blank. A token without text of its own is a dot. */
function visible(text: string): (Node | string)[] {
  const sign = (mark: string) => h("span.sign", { "aria-hidden": "true" }, mark);
  if (!text) return [sign("·")];
  if (/^ +$/.test(text)) return [sign("␣"), text.slice(1)];
  return text.split("\n").flatMap((line, place) => (place ? [sign("↵"), `\n${line}`] : [line]));
}

/** The note beside a token. There is one on a page. */
export class Note {
  readonly element = h("div.note", { role: "tooltip", id: "note", hidden: true });
  private owner: HTMLElement | null = null;

  constructor() {
    addEventListener("resize", () => this.hide()); // it would point at another place
  }

  show(owner: HTMLElement, token: Token, run: Run): void {
    if (this.owner === owner) return;
    this.hide();
    this.owner = owner;
    owner.setAttribute("aria-describedby", this.element.id);
    this.element.replaceChildren(...content(token, run));
    this.element.hidden = false;
    this.place(owner);
  }

  hide(): void {
    this.owner?.removeAttribute("aria-describedby");
    this.owner = null;
    this.element.hidden = true;
  }

  /** Hide the note if it is about this token. */
  leave(owner: HTMLElement): void {
    if (this.owner === owner) this.hide();
  }

  private place(owner: HTMLElement): void {
    const box = owner.getClientRects()[0] ?? owner.getBoundingClientRect();
    const own = this.element.getBoundingClientRect();
    const left = Math.min(Math.max(12, box.left), document.documentElement.clientWidth - own.width - 12);
    const below = box.bottom + 8 + own.height < window.innerHeight;
    this.element.style.left = `${left + window.scrollX}px`;
    this.element.style.top = `${(below ? box.bottom + 8 : box.top - own.height - 8) + window.scrollY}px`;
  }
}

function content(token: Token, run: Run): Node[] {
  const found = reason(token, run.temperature);
  const facts = h("dl.facts");
  const add = (name: string, value: number | null, text: string) => {
    if (value !== null) facts.append(h("div", {}, h("dt", {}, name), h("dd", { "data-value": value }, text)));
  };
  add("target", found.target, percent(found.target ?? 0));
  add("draft", found.draft, percent(found.draft ?? 0));
  const coin = found.coin;
  add("coin", coin?.probability ?? null, coin ? `${percent(coin.probability)}, ${coin.stands ? "fell for it" : "fell against it"}` : "");
  return [
    h("p.note-head", {}, h("b", {}, shown(token.text, token.tokenId)), h(`span.badge.${token.origin}`, {}, token.origin)),
    h("p.note-kind", {}, ORIGINS[token.origin]),
    facts,
    h("p.note-why", {}, found.sentence),
    h("p.note-where", {}, run.drafters.length > 1 && found.proposers.length ? `${found.where}, from ${listedInWords(found.proposers)}` : found.where),
    ...(matchMedia("(pointer: coarse)").matches ? [h("p.note-where", {}, "Tap again to open its round.")] : []),
  ];
}
