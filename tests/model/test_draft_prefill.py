"""A draft model reads prompts beside the target: rows are counted, and the first step after a prompt drafts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, DraftModel, SamplingParams, SpeculationConfig
from outrider.model.batch import Segment
from outrider.propose.base import Proposer
from outrider.propose.draft_model import DraftModelProposer
from tests.model import checkpoints

PROMPT = [(7 * i * i + 3 * i) % checkpoints.VOCAB_SIZE for i in range(75)]
SEEDED = SamplingParams(seed=5, max_tokens=12)
CHUNK = 32


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return checkpoints.save("llama", tmp_path_factory.mktemp("models") / "llama")


def self_drafting(path: str) -> LLM:
    """A model that drafts for itself."""
    speculation = SpeculationConfig(method=DraftModel(model=path), num_draft_tokens=3)
    settings: dict[str, Any] = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 4, "block_size": 4}
    return LLM(path, dtype="float64", speculation=speculation, **settings)


@pytest.fixture
def llm(path: str) -> LLM:
    return self_drafting(path)


def drafting(llm: LLM) -> DraftModelProposer:
    method = llm.speculation.method
    assert method is not None
    proposer = llm.proposers.get(method)
    assert isinstance(proposer, DraftModelProposer)
    return proposer


def counted(llm: LLM, patch: pytest.MonkeyPatch) -> list[list[int]]:
    """Rows of each sequence in each pass of the draft model from now on."""
    found: list[list[int]] = []
    runner = drafting(llm).runner
    stock = runner.forward

    def counting(segments: Sequence[Segment], *args: Any, **more: Any) -> Any:
        found.append([segment.num_rows for segment in segments])
        return stock(segments, *args, **more)

    patch.setattr(runner, "forward", counting)
    return found


@pytest.fixture
def passes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    return counted(llm, monkeypatch)


def plain(llm: LLM, prompts: Any, params: SamplingParams) -> list[list[tuple[int, ...]]]:
    """What the target writes without a draft; the caches know nothing of it."""
    outputs = llm.generate(prompts, params, speculation="none", namespace="plain")
    return [[o.token_ids for o in out.outputs] for out in outputs]


def test_the_prompt_is_read_in_the_targets_chunks_and_the_next_step_drafts(llm: LLM, passes: list[list[int]]) -> None:
    output = llm.generate([PROMPT], SEEDED, trace=True)[0]
    assert passes[:3] == [[32], [32], [11]]
    assert passes[3] == [1], "the token that the target wrote, and nothing else is missing"
    rounds = output.outputs[0].rounds or ()
    assert [len(found.token_ids) for found in rounds[:2]] == [0, 3], "the prompt's own round, and then a draft at once"
    assert output.stats.acceptance_rate == 1.0, "what was read is true"
    assert [[output.token_ids]] == plain(llm, [PROMPT], SEEDED)


def test_others_draft_meanwhile(llm: LLM, passes: list[list[int]]) -> None:
    """Where the chunk of the prompt leaves them rows."""
    prompts, params = [PROMPT[:5], PROMPT[10:34]], [SEEDED.replace(max_tokens=30), SEEDED]
    want = [list(plain(llm, [p], s)[0][0]) for p, s in zip(prompts, params, strict=True)]
    engine, sequences = llm.engine, []
    for prompt, sampling in zip(prompts, params, strict=True):
        sequences += engine.add_request(tuple(prompt), sampling, llm.speculation).sequences
        engine.step()
    assert passes == [[5], [24], [1], [1], [1]], "the prompts, and a draft of three beside the second"
    assert [seq.stats.num_drafts for seq in sequences] == [1, 0]
    engine.step()
    assert [seq.stats.num_drafts for seq in sequences] == [2, 1]
    while engine.has_work:
        engine.step()
    assert [seq.output_token_ids for seq in sequences] == want


def test_a_prompt_that_nobody_drafts_behind_is_not_read(llm: LLM, passes: list[list[int]]) -> None:
    llm.generate([PROMPT], SEEDED.replace(max_tokens=2))
    assert passes == []
    llm.generate([PROMPT], SEEDED.replace(max_tokens=3), speculation="none")
    assert passes == []
    llm.generate([PROMPT[1:]], SEEDED.replace(max_tokens=3))
    assert passes[:4] == [[32], [32], [10], [1]]


def test_samples_share_what_was_read(llm: LLM, passes: list[list[int]]) -> None:
    params = SEEDED.replace(n=3)
    texts = [output.token_ids for output in llm.generate([PROMPT], params)[0].outputs]
    assert sum(max(rows) for rows in passes if max(rows) > 4) == len(PROMPT) - 1, "once, up to where the samples part"
    assert passes[3] == [1, 3, 3], "and of a block that is not full every other sample computes its own"
    assert [texts] == plain(llm, [PROMPT], params)


def test_a_prompt_in_the_cache_is_not_read_again(llm: LLM, passes: list[list[int]]) -> None:
    llm.generate([PROMPT], SEEDED)
    passes.clear()
    llm.generate([PROMPT + PROMPT[:9]], SEEDED)
    assert passes[0] == [len(PROMPT) + 9 - 72], "72 tokens fill blocks"


def test_what_memory_has_no_room_for_is_caught_up_with_later(
    llm: LLM, passes: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = plain(llm, [PROMPT], SEEDED)
    blocks = drafting(llm).runner.blocks
    taken = blocks.allocate(blocks.num_free - 12)  # 48 tokens
    calls: list[int] = []
    monkeypatch.setattr(llm.engine.drafting, "planner", _releasing(llm, blocks, taken, calls))
    assert [[llm.generate([PROMPT], SEEDED)[0].token_ids]] == want
    assert passes[0] == [32]
    assert passes[1] == [32], "not before there is room again"
    assert passes[2] == [13], "the rest, and what the target wrote meanwhile"
    assert calls


def _releasing(llm: LLM, blocks: Any, taken: list[int], calls: list[int]) -> Any:
    stock = llm.engine.drafting.planner

    def planner(seq: Any) -> Any:
        calls.append(len(taken))
        blocks.free(taken)
        return stock(seq)

    return planner


def test_reading_that_fails_is_a_fault_and_changes_no_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    want = plain(llm, [PROMPT], SEEDED)
    told: list[int] = []

    def failing(_: Proposer, prompts: Sequence[Any]) -> None:
        told.extend(prompt.stop for prompt in prompts)
        raise RuntimeError("planted")

    monkeypatch.setattr(DraftModelProposer, "prefill", failing)
    output = llm.generate([PROMPT], SEEDED, trace=True)[0]
    assert told == [32, 64, 75]
    assert output.stats.num_proposer_faults == 3
    assert [[output.token_ids]] == want
    laws = {law for found in output.outputs[0].rounds or () for law in found.laws}
    assert laws == {"opaque"}, "it drafts on, and is not believed"
    drafting(llm).check_integrity()


def test_a_draft_model_of_a_shorter_context_reads_nothing_that_it_cannot_use(path: str, tmp_path: Path) -> None:
    """Its context ends within the prompt."""
    import json
    import shutil

    short = tmp_path / "short"
    shutil.copytree(path, short)
    config = json.loads((short / "config.json").read_text("utf-8"))
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 40}), "utf-8")
    speculation = SpeculationConfig(method=DraftModel(model=str(short)), num_draft_tokens=3)
    llm = LLM(path, dtype="float64", speculation=speculation, max_num_batched_tokens=CHUNK, max_num_seqs=4)
    output = llm.generate([PROMPT], SEEDED)[0]
    assert output.stats.num_proposer_faults == 0
    assert drafting(llm).runner.num_passes == 0
    assert [[output.token_ids]] == plain(llm, [PROMPT], SEEDED)
