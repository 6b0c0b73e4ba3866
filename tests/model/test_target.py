"""The handle on the target: its embeddings, its head and some of its layers, on every backend, against the stock model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.cache.blocks import BlockManager
from outrider.cache.memory import StateMemory
from outrider.cache.state import KVView, SequenceState
from outrider.errors import ContradictionError, InvalidParameterError
from outrider.loading import hf_modules
from outrider.model.target import Target
from tests.model import checkpoints

#: A family and the backends that drive it; gemma2 scales embeddings and caps logits, gpt2 adds positions to its embeddings.
CASES = [
    *(("llama", backend) for backend in ("fused", "paged", "gather", "row_by_row")),
    ("qwen3", "fused"),
    ("gemma2", "fused"),
    ("gpt2", "fused"),
    ("granite", "fused"),
    ("granite", "paged"),
    ("phi", "fused"),
    ("gemma2", "paged"),
    ("gemma2", "gather"),
    ("gpt2", "paged"),
    ("mixtral", "fused"),
    ("mixtral", "paged"),
    ("falcon", "gather"),
]
TEXT = [5, 9, 3, 7, 7, 1, 30, 12, 4]
TOLERANCE = 1e-4  # transformers keeps norms and rotary factors in float32


class Oracle:
    """The stock model, whole and with its decoder stopped after some layers."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
        hf_modules.use_plain_experts(self.model)

    @torch.inference_mode()
    def hidden(self, tokens: list[int]) -> tuple[Tensor, ...]:
        """Inputs of each layer, then what the final norm leaves: [num_tokens, hidden_size] each."""
        out = self.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        return tuple(states[0] for states in out.hidden_states)

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> Tensor:
        return self.model(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, Oracle]:
    family, backend = request.param
    path = checkpoints.save(family, tmp_path_factory.mktemp(family), seed=3)
    how: dict[str, Any] = {"batch_invariant": True} if backend == "row_by_row" else {"attention_backend": backend}
    if backend == "row_by_row":
        how["dtype"] = "float64"
        from outrider.model import factory

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(factory, "INVARIANT", ("row_by_row",))
            return LLM(path, **how), Oracle(path)
    return LLM(path, dtype="float64", **how), Oracle(path)


def empty_state(llm: LLM) -> SequenceState:
    """Room for a text, nothing of it computed."""
    return llm.engine.runner.memory.room_for(len(TEXT) + 8)


def close(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max())


def test_facts(case: tuple[LLM, Oracle]) -> None:
    llm, oracle = case
    target, config = Target(llm.engine.runner), oracle.model.config
    assert (target.num_layers, target.hidden_size) == (config.num_hidden_layers, config.hidden_size)
    assert (target.vocab_size, target.max_model_len) == (checkpoints.VOCAB_SIZE, 160)


def test_embed(case: tuple[LLM, Oracle]) -> None:
    llm, oracle = case
    assert close(Target(llm.engine.runner).embed(TEXT), oracle.model.get_input_embeddings()(torch.tensor(TEXT)))


def test_norm_and_head(case: tuple[LLM, Oracle]) -> None:
    llm, oracle = case
    target, kv = Target(llm.engine.runner), empty_state(llm)
    out = target.run([target.rows(KVView(kv), TEXT, 0)])
    assert out.hidden is not None
    assert close(target.norm(out.hidden), oracle.hidden(TEXT)[-1])
    assert close(target.head(oracle.hidden(TEXT)[-1]), oracle.logits(TEXT))
    assert close(out.logits, oracle.logits(TEXT))
    kv.free()


def test_the_first_layers_and_then_the_others(case: tuple[LLM, Oracle]) -> None:
    llm, oracle = case
    target, kv = Target(llm.engine.runner), empty_state(llm)
    rows = target.rows(KVView(kv), TEXT, 0)
    first = target.run([rows], layers=(0, 1))
    assert first.hidden is not None
    assert close(first.hidden, oracle.hidden(TEXT)[2]), "the input of layer 2"
    assert close(target.head(target.norm(first.hidden)), first.logits)
    rest = target.run([rows], layers=range(2, target.num_layers), resume_from=first.hidden)
    assert close(rest.logits, oracle.logits(TEXT))
    kv.free()


def test_a_layer_is_skipped(case: tuple[LLM, Oracle]) -> None:
    """With its deep branches scaled by nothing a skipped layer must be missed: the negative control."""
    llm, oracle = case
    target, kv = Target(llm.engine.runner), empty_state(llm)
    without = target.run([target.rows(KVView(kv), TEXT, 0)], layers=[0, 1, *range(3, target.num_layers)])
    assert not close(without.logits, oracle.logits(TEXT))
    skipped = oracle.model.base_model.get_submodule(_path_of_layers(oracle.model))[2]
    stock = skipped.forward
    in_tuple: list[bool] = []

    def hand_on(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        in_tuple.append(isinstance(stock(hidden_states, *args, **kwargs), tuple))
        return (hidden_states,) if in_tuple[-1] else hidden_states

    skipped.forward = hand_on
    try:
        assert close(without.logits, oracle.logits(TEXT))
    finally:
        del skipped.forward
    kv.free()


def _path_of_layers(model: Any) -> str:
    return next(
        name
        for name, module in model.base_model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == model.config.num_hidden_layers
    )


def test_trees_and_chunks_over_the_same_memory(case: tuple[LLM, Oracle]) -> None:
    llm, oracle = case
    target, kv = Target(llm.engine.runner), empty_state(llm)
    first, rest = TEXT[:5], TEXT[5:]
    target.run([target.rows(KVView(kv), first, 0, logits_from=5)], layers=(0, 1))
    tree = target.rows(KVView(kv), [*rest[:1], 2, *rest[1:]], 5, (-1, -1, 0, 2, 3))
    out = target.run([tree], layers=(0, 1))
    assert out.hidden is not None
    assert close(out.hidden[[0, 2, 3, 4]], oracle.hidden(TEXT)[2][5:])
    kv.free()


def test_aux_layers_of_a_partial_pass(case: tuple[LLM, Oracle]) -> None:
    llm, oracle = case
    target, kv = Target(llm.engine.runner), empty_state(llm)
    out = target.run([target.rows(KVView(kv), TEXT, 0)], layers=(0, 1), aux_layers=(1,))
    assert close(out.aux_hidden_states[1], oracle.hidden(TEXT)[1])
    kv.free()


def test_nothing_is_left_behind(case: tuple[LLM, Oracle]) -> None:
    """After the handle was used the model is what it was."""
    llm, _ = case
    before = llm.generate([TEXT], SamplingParams(temperature=0, max_tokens=8))[0].token_ids
    target, kv = Target(llm.engine.runner), empty_state(llm)
    target.run([target.rows(KVView(kv), TEXT, 0)], layers=(1,))
    target.head(target.norm(target.embed(TEXT)))
    kv.free()
    assert llm.generate([TEXT], SamplingParams(temperature=0, max_tokens=8))[0].token_ids == before


def test_what_is_refused(case: tuple[LLM, Oracle]) -> None:
    llm, _ = case
    target, kv = Target(llm.engine.runner), empty_state(llm)
    rows = target.rows(KVView(kv), TEXT, 0)
    passes = llm.engine.runner.num_passes
    with pytest.raises(InvalidParameterError, match=r"layers=4: the target has 4 layers. Use 0 to 3"):
        target.run([rows], layers=(0, 4))
    with pytest.raises(InvalidParameterError, match="ascending"):
        target.run([rows], layers=(1, 0))
    with pytest.raises(InvalidParameterError, match=r"aux_layers=9"):
        target.run([rows], aux_layers=(9,))
    with pytest.raises(InvalidParameterError, match="that layer does not run"):
        target.run([rows], layers=(1,), aux_layers=(0,))
    with pytest.raises(InvalidParameterError, match="no list of rows"):
        target.run([])
    with pytest.raises(InvalidParameterError, match="two of one sequence"):
        target.run([rows, rows])
    for wrong in ([10**12], [-1], [1.5]):
        with pytest.raises(InvalidParameterError, match="no token of the target"):
            target.rows(KVView(kv), wrong, 0)
    for parents in ((-1,), (-9, -3), (0, 1)):
        with pytest.raises(InvalidParameterError, match="parents"):
            target.rows(KVView(kv), [1, 2], 0, parents)
    for first in (-1, 3):
        with pytest.raises(InvalidParameterError, match="logits_from"):
            target.rows(KVView(kv), [1, 2], 0, logits_from=first)
    with pytest.raises(InvalidParameterError, match="not the target's KV"):
        target.rows(KVView(StateMemory(BlockManager(9, 4)).state()), [1], 0)
    with pytest.raises(InvalidParameterError, match=r"Use \[9, 32\]"):
        target.run([rows], resume_from=torch.zeros(3, 32))
    with pytest.raises(InvalidParameterError, match="token id outside"):
        target.embed([checkpoints.VOCAB_SIZE])
    with pytest.raises(InvalidParameterError, match="another shape"):
        target.head(torch.zeros(2, 5))
    with pytest.raises(ContradictionError, match="Stay within the budget"):
        target.rows(KVView(kv), [1] * 200, 0)
    kv.commit(0, range(4))
    with pytest.raises(ContradictionError, match="Start at 4 or later"):
        target.rows(KVView(kv), [1], 3)
    with pytest.raises(ContradictionError, match="Start at 4 or later"):
        target.run([rows])  # made when this was still behind the text
    assert llm.engine.runner.num_passes == passes, "refused before any work"
    kv.free()


def test_rows_end_where_the_rotary_factors_change(tmp_path: Path) -> None:
    """The depth of a tree counts, and not its rows."""
    llm = LLM(checkpoints.save("longrope", tmp_path, seed=4), dtype="float64", block_size=4)
    kv = llm.engine.runner.memory.state()
    kv.open([1], share=False)
    assert kv.reserve(checkpoints.LONG_AFTER + 8)
    last, target = checkpoints.LONG_AFTER - 1, Target(llm.engine.runner)
    target.run([target.rows(KVView(kv), [1] * last, 0)])
    out = target.run([target.rows(KVView(kv), [1, 2, 1], last, parents=(-1, -1, -1))])
    chain = target.run([target.rows(KVView(kv), [1], last)])
    assert out.logits is not None
    assert chain.logits is not None
    assert torch.allclose(out.logits[[0, 2]], chain.logits.expand(2, -1), atol=TOLERANCE)
    with pytest.raises(ContradictionError, match="other rotary factors"):
        target.rows(KVView(kv), [1, 2], last)
    kv.free()
