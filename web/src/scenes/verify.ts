/** Scene 2: draft and verify. */

import type { Written } from "../api";
import { factor } from "../format";
import { type Lab, experiment, figure, finding, mustGuess } from "../lab";
import { Prediction, TOKENS } from "../predict";
import { Rounds } from "../rounds";
import { Run } from "../run";

export function verify(lab: Lab | null): HTMLElement {
  return experiment<Written>(lab, {
    name: "verify",
    label: "Write a text with guesses",
    hint: "One text of 40 tokens on this server, to step through.",
    guess: new Prediction("guess-tokens", "Five guesses a round: how many tokens does a pass of the target bring, on average?", TOKENS),
    predicted: (text) => text.tokenIds.length / text.rounds.length,
    measure: async (lab, say) => {
      say("Writing 40 tokens…");
      const run = await lab.run({ speculation: lab.drafting(5) });
      mustGuess([run]);
      return run.written;
    },
    show: shown,
    before: (text) => [new Rounds(new Run(text, 1)).element],
  });
}

function shown(text: Written): Node[] {
  const [run, passes] = [new Run(text, 1), text.rounds.length];
  const brought = finding(
    `${run.tokens.length} tokens in `,
    figure("passes", passes, `${passes} passes`),
    `, ${factor(run.tokens.length / passes)} a pass. Plain decoding needs a pass for each. Step through a round:`,
  );
  return [brought, new Rounds(run).element];
}
