"""The memory of running states is counted before a text runs, and texts never take more."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.errors import ModelTooLargeError
from outrider.lab.cli.doctor import _facts
from outrider.lab.doctor.examination import model_facts
from outrider.loading import hf_modules
from outrider.model import memory
from outrider.model.memory import TextBytes
from outrider.model.running import RunningPass
from tests.model import checkpoints
from tests.model.checkpoints import VOCAB_SIZE
from tests.model.test_running_states import BRANCHES, EXIT, GREEDY, KINDS, PREDICTION, PROMPT, load, saved

ROWS, TEXTS = 24, 4


def together(tensors: list[Tensor]) -> int:
    """Bytes of the memory behind tensors, each part of it once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("family", KINDS)
def test_texts_take_no_more_than_is_counted(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load(saved(family, tmp_path), max_num_batched_tokens=ROWS)
    want = llm.generate(PROMPT, GREEDY, speculation="none")[0].token_ids
    scheduler, keep, found = llm.engine.scheduler, RunningPass.keep, list[tuple[int, int, TextBytes]]()

    def measured(running: RunningPass) -> None:
        """Where a pass ends, what was there before is there still."""
        texts = [seq.state for seq in scheduler.running]
        kept = [record for state in texts for record in state.running.records.values()]
        left = [record for each in running._left for record in each.values()]
        states = together([anchor.state for record in kept + left for anchor in record.anchors])
        tapes = together([inputs for record in kept + left for inputs in record.tape])
        keep(running)
        if texts:  # and not where a method is tried out before there are some
            found.append((states, tapes, TextBytes.of(texts[0], 0)))

    monkeypatch.setattr(RunningPass, "keep", measured)
    wrong = tuple((token + (place % 5 == 4)) % VOCAB_SIZE for place, token in enumerate(want))
    for speculation in (PREDICTION, BRANCHES, EXIT):
        llm.generate([PROMPT] * TEXTS, GREEDY, speculation=speculation, prediction=wrong)
    assert llm.stats.finished.num_accepted_tokens > 20
    (taken,) = {bytes_ for _, _, bytes_ in found}
    assert taken.by_text == llm.engine.runner.text_bytes
    most_states, most_inputs = (max(sizes) for sizes in list(zip(*found, strict=True))[:2])
    assert TEXTS * taken.by_text / 2 < most_states <= TEXTS * taken.by_text
    assert 0 < most_inputs <= ROWS * taken.by_row


def limited(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda device: free)


def sizes(path: str) -> tuple[int, int]:
    """Bytes of a token's keys and values, and of a text's states."""
    llm = load(path)
    llm.generate(PROMPT, GREEDY, speculation="none")
    return llm.engine.runner.pool.bytes_per_slot(), llm.engine.runner.text_bytes


def test_blocks_get_a_share_of_what_states_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved("qwen3_next", tmp_path)
    by_token, by_text = sizes(path)
    free = 2 * TEXTS * by_text
    limited(free, monkeypatch)
    got = load(path).engine.runner.blocks.num_blocks * 4 * by_token
    assert free / 4 / 4 < got < (free - TEXTS * by_text) / 4


def test_an_attention_model_counts_no_states(tmp_path: Path) -> None:
    assert load(saved("llama", tmp_path)).engine.runner.text_bytes == 0


@pytest.mark.parametrize("family", ["qwen3_next", "mamba"])
def test_states_that_do_not_fit_are_refused_with_a_number_that_does(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(family, tmp_path)
    _, by_text = sizes(path)
    limited(8 * by_text, monkeypatch)
    with pytest.raises(
        ModelTooLargeError, match=r"running states of max_num_seqs=9 texts.* Use max_num_seqs=(\d) or less"
    ) as caught:
        load(path, max_num_seqs=9)
    assert caught.value.state_bytes > 9 * by_text
    most = int(str(caught.value).split("Use max_num_seqs=")[1][0])
    load(path, max_num_seqs=most)
    with pytest.raises(ModelTooLargeError):
        load(path, max_num_seqs=most + 1)


def test_blocks_that_are_asked_for_and_states_must_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved("qwen3_next", tmp_path)
    by_token, by_text = sizes(path)
    limited(8 * by_text, monkeypatch)
    tokens = 8 * by_text // by_token
    load(path, kv_cache_tokens=tokens // 10)
    with pytest.raises(ModelTooLargeError, match=r"GB for keys and values.* a smaller kv_cache_tokens, or a machine"):
        load(path, kv_cache_tokens=tokens)


def test_states_that_the_prefix_cache_keeps_must_fit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved("qwen3_next", tmp_path)
    limited(2 * 2**20, monkeypatch)
    with pytest.raises(ModelTooLargeError, match=r"GB for those of the prefix cache.* a smaller state_cache_mib"):
        load(path, state_cache_mib=2)
    states = load(path).engine.runner.blocks.states
    assert states is not None
    by_text = load(path).engine.runner.text_bytes
    assert 0 < states.capacity * by_text / 6 <= 2 * 2**20 / 16


def test_doctor_says_what_a_text_takes(tmp_path: Path) -> None:
    facts = model_facts(load(saved("qwen3_next", tmp_path)).engine.runner)
    paper = Console(width=200, record=True, file=StringIO())
    paper.print(_facts("target", facts))
    assert f"{facts.text_bytes / 1e6:.2f} MB a text at most" in paper.export_text()


def test_layers_that_read_keys_of_others_keep_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last two of the four layers of this Gemma 4 read those of the first two: half of the memory, the same bits."""
    path, prompt = checkpoints.save("gemma4_text", tmp_path), [(7 * i * i + 3) % VOCAB_SIZE for i in range(20)]
    params, found = SamplingParams(temperature=0, max_tokens=12, logprobs=3), []
    for shares in (True, False):
        if not shares:
            monkeypatch.setattr(hf_modules, "owners_of_keys", lambda config: {})
        llm = LLM(path, dtype="float32", speculation="suffix")
        output = llm.generate([prompt], params)[0]
        found.append((llm.engine.runner.pool.bytes_per_slot(), output.token_ids, output.logprobs))
        assert llm.engine.runner.pool.layers == ([0, 1] if shares else [0, 1, 2, 3])
    assert 2 * found[0][0] == found[1][0]
    assert found[0][1:] == found[1][1:]
