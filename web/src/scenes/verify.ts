/** Scene 2: draft and verify. */

import type { Written } from "../api";
import { type Lab, experiment, figure, finding } from "../lab";
import recorded from "../recorded.json";
import { Rounds } from "../rounds";
import { Run } from "../run";
import { madeOn } from "./memory";

export function verify(lab: Lab): HTMLElement {
  return experiment("Write a text with guesses", "One text of 40 tokens on this server, to step through.", async (say) => {
    say("Writing 40 tokens…");
    return shown(await lab.run({ speculation: lab.drafting(5) }));
  }, () => [madeOn(), ...shown(new Run(recorded.run as unknown as Written, 1))]);
}

function shown(run: Run): Node[] {
  const passes = run.rounds.length;
  const brought = finding(`${run.tokens.length} tokens in `, figure("passes", passes, `${passes} passes`), ". Plain decoding needs a pass for each. Step through a round:");
  return [brought, new Rounds(run).element];
}
