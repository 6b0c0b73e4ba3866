/** Scene 2: draft and verify. */

import { type Lab, experiment, figure, finding } from "../lab";
import { Rounds } from "../rounds";

export function verify(lab: Lab): HTMLElement {
  return experiment("Write a text with guesses", "One text of 40 tokens, to step through.", async (say) => {
    say("Writing 40 tokens…");
    const run = await lab.run({ speculation: lab.drafting(5) });
    const found = run.written.speculation;
    const told = finding(
      `${run.tokens.length} tokens in `,
      figure("passes", found.target_passes, `${found.target_passes} passes`),
      ". Plain decoding needs a pass for each. Step through a round:",
    );
    return [told, new Rounds(run).element];
  });
}
