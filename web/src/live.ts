/** Two texts while they are written, one after the other. */

import type { Origin, Piece } from "./api";
import { fill, h } from "./dom";
import { count } from "./format";

/** A lane that grows with every pass. Its text is no status: whoever listens is told at the end. */
class LiveLane {
  readonly element: HTMLElement;
  private readonly clock = h("p.clock", {}, "waits for its turn");
  private readonly text = h("div.tokens", { dir: "auto" });
  private readonly bar = h("div.bar");
  private tokens = 0;
  private passes = 0;

  constructor(name: string, how: string, private readonly most: number) {
    this.element = h("section.lane", { "aria-label": name }, h("h3", {}, name, h("small", {}, how)), h("div.track", {}, this.bar), this.clock, this.text);
  }

  heard(piece: Piece): void {
    if (!piece.origins.length) return;
    this.tokens += piece.origins.length;
    this.passes += 1;
    this.bar.style.width = `${(this.tokens / this.most) * 100}%`;
    this.text.append(h(`span.token.${mark(piece.origins)}`, {}, piece.text));
    this.text.scrollTop = this.text.scrollHeight;
    fill(this.clock, `${count(this.tokens, "token")} · ${count(this.passes, "pass")}`);
  }
}

/** What a pass is shown as: by its guesses where some stood, else by the token that the target wrote. */
function mark(origins: Origin[]): Origin {
  return origins.includes("accepted") ? "accepted" : origins[0];
}

/** Both lanes, with a button that ends them. */
export class Live {
  readonly element = h("div.race");
  readonly plain: LiveLane;
  readonly fast: LiveLane;

  /** @param most Tokens that are asked for. */
  constructor(most: number) {
    this.plain = new LiveLane("Plain decoding", "one pass of the target for every token", most);
    this.fast = new LiveLane("With speculation", "one pass of the target for a whole draft", most);
    const text = "One after the other: at the same time each would slow the other. Every block of colour came in one pass.";
    fill(this.element, h("p.fine", {}, text), h("div.lanes", {}, this.plain.element, this.fast.element));
  }
}
