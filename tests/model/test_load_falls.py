"""The real engine gains again within a second where one text is left of sixteen."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams
from outrider.config import default_model
from outrider.lab.measure.tasks import built_in
from outrider.results import RoundTrace
from outrider.widen import wide_target

#: Tokens of the texts that end together, and of the one that goes on alone.
CROWD, ALONE = 48, 240


def drafted(rounds: list[RoundTrace]) -> float:
    """The share of the rounds that had a draft."""
    return sum(bool(each.token_ids) for each in rounds) / len(rounds)


@pytest.mark.slow
def test_one_text_that_is_left_of_sixteen_is_drafted_for_within_a_second() -> None:
    """Whether it is drafted for counts, and not how long that takes: other work may share the machine."""
    tasks = built_in("code_completion")
    prompts = [tasks[place % len(tasks)].prompt for place in range(16)]
    params = [
        SamplingParams(max_tokens=CROWD + (ALONE if place == 0 else 0), ignore_eos=True, seed=place) for place in range(16)
    ]
    with LLM(wide_target("bfloat16"), dtype="bfloat16", draft_model=default_model("draft"), max_num_seqs=16) as llm:
        llm.generate(prompts, [SamplingParams(max_tokens=CROWD, ignore_eos=True, seed=place) for place in range(16)])
        rounds = list(llm.generate(prompts, params, trace=True)[0].outputs[0].rounds)
    alone = [each for each in rounds if each.num_sequences == 1]
    assert max(each.num_sequences for each in rounds) == 16
    later = [each for each in alone if each.at > alone[0].at + 1.0]
    assert len(later) >= 20
    assert drafted(later) >= 0.7
