"""Heads that draft for a model with a running state: what they keep and what the model keeps belong to one text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, Eagle1, Eagle3, SpeculationConfig
from outrider.lab.prove.own_model import KV_BOUND, CacheAudit
from outrider.lab.prove.tiny_heads import save_random_eagle
from outrider.model import memory
from tests.model import checkpoints, test_mtp
from tests.model.double import Double
from tests.model.eagle_reference import Eagle1Reference, EagleReference
from tests.model.mtp_reference import MtpReference
from tests.model.preempted import found_again
from tests.model.test_feature_heads import BOUND, GREEDY, PROMPTS, SEEDED, Watch, faults, texts
from tests.model.test_running_states import PROMPT
from tests.model.test_target import Oracle

#: All of a layer of the checkpoint is float64 here but for rotary factors, which stock transformers makes in float32.
FACTORS_BOUND = 1e-7
HYBRID = test_mtp.Family("qwen3_5_text", "qwen3_next")


@pytest.mark.parametrize("name", ["eagle3", "eagle1"])
def test_every_draft_of_eagle_is_what_the_reference_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After rejected drafts, prefix hits, preemptions and forks."""
    path = checkpoints.save(HYBRID.name, tmp_path / "target", seed=3)
    model = Oracle(path).model
    if name == "eagle3":
        layers: dict[str, Any] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
        head = save_random_eagle(tmp_path / "head", path, "speculators", scale=0.1, **layers)
        way, reference = SpeculationConfig(method=Eagle3(model=head), tree=(3, 2)), EagleReference(head, model)
    else:
        head = save_random_eagle(tmp_path / "head", path, "safeailab1", scale=0.1)
        way, reference = SpeculationConfig(method=Eagle1(model=head), num_draft_tokens=3), Eagle1Reference(head, model)
    llm = test_mtp.load(path, kv_cache_tokens=80, max_num_batched_tokens=48)
    watch, found = Watch(reference, monkeypatch), found_again(monkeypatch)
    params = [each.replace(max_tokens=10) for each in (GREEDY, SEEDED.replace(temperature=0, n=2), SEEDED) * 2]
    outputs = llm.generate([*PROMPTS, *PROMPTS], params, speculation=way)
    stats = llm.stats.finished
    assert faults(outputs) == 0
    assert watch.worst <= BOUND
    assert watch.num_rows > 50
    assert stats.num_preemptions > 0
    assert sum(found) > 0
    assert stats.num_draft_tokens > stats.num_accepted_tokens
    assert texts(outputs) == texts(llm.generate([*PROMPTS, *PROMPTS], params, speculation="none"))


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    """Running states and norms are float32 in stock transformers, whatever the dtype of the model, and they are here beside
    the target and in the reference."""
    with Double():
        yield


def audited(llm: LLM, prompt: list[int], way: SpeculationConfig) -> tuple[int, ...]:
    """A text, all that is kept of it compared after every step."""
    request = llm.engine.add_request(tuple(prompt), GREEDY.replace(max_tokens=12), way)
    audit = CacheAudit(llm.engine)
    audit.run()
    assert request.error is None
    assert audit.worst <= KV_BOUND
    return tuple(request.sequences[0].output_token_ids)


def test_texts_that_begin_with_kept_states_are_drafted_for_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits end where a state is kept with a block that the layers ahead hold, too, and not behind blocks that others left
    without these layers."""
    monkeypatch.setattr(memory, "STATE_SPACING", 8)
    path = test_mtp.made(HYBRID, tmp_path)
    llm, way, plain = test_mtp.load(path), test_mtp.way(), SpeculationConfig()
    watch = Watch(MtpReference(path, HYBRID.layout, 1, Oracle(path).model), monkeypatch)
    want, cached = audited(llm, PROMPT, plain), [0]
    assert audited(llm, PROMPT, way) == want
    cached.append(llm.stats.finished.num_cached_tokens)
    for prompt in (PROMPT, [*PROMPT, 5, 6, 7, 8, 9], [*PROMPT, *want[:11]]):
        rows = watch.num_rows
        audited(llm, prompt, way)
        cached.append(llm.stats.finished.num_cached_tokens)
        assert watch.num_rows > rows
    assert watch.worst <= FACTORS_BOUND
    assert cached == [0, 0, 20, 40, 72]
    assert llm.stats.finished.num_accepted_tokens < llm.stats.finished.num_draft_tokens
    llm.engine.check_integrity()
    llm.engine.check_rest()
