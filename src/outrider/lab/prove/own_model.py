"""Proofs on the caller's own model, or on the embedded pair: identical texts, and a KV memory that is true."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from outrider.cache.state import KVView, SequenceState
from outrider.config import ActivationsName, DTypeName, ModelConfig, RequestOptions, default_model
from outrider.engine.engine import Engine
from outrider.engine.sequence import Sequence as EngineSequence
from outrider.lab.prove.running import Finding
from outrider.llm import LLM
from outrider.loading.configuration import check_rounded_rows, has_rounded_weights, rounds_rows
from outrider.loading.sources import check_sources
from outrider.model.batch import Segment, slots_of
from outrider.model.runner import ModelRunner
from outrider.params import SamplingParams
from outrider.propose.draft_model import DraftModel
from outrider.propose.ngram import Ngram
from outrider.propose.own_layers import EarlyExit, LayerSkip
from outrider.propose.settings import SpeculationConfig
from outrider.propose.suffix import Suffix

#: Norms and rotary factors compute in float32, and round differently when a pass has another shape.
KV_BOUND = 1e-5

_PROMPTS = (
    "def parse(line):\n",
    "class Reader:\n    def __init__(self, path):\n",
    "import os\nimport sys\n\ndef main(",
    "for name in names:\n    for name in names:\n    for",
    "x = [1, 2, 3]\ny = [1, 2, 3]\nz = [",
)


class OwnModel:
    """A model, loaded when it is first used, and the ways to draft for it. It computes in float64, where passes of other
    shapes differ too little to change a text. Rows of 8 bits are not computed in float64, and a difference of any size
    rounds some numbers another way; so such a model computes in float32 and in batch-invariant mode, where passes of other
    shapes have the same bits. It is the embedded pair, and drafts with the built-in methods, unless others are given."""

    def __init__(
        self,
        model: str | None,
        draft_model: str | None,
        speculations: Sequence[SpeculationConfig] | None = None,
        activations: ActivationsName | None = None,
    ) -> None:
        check_sources(model=model, draft_model=draft_model)
        self._model = model
        self._draft = draft_model or (default_model("draft") if model is None else None)
        self._asked = speculations
        config = ModelConfig(model=model or default_model("target"), activations=activations)
        self._activations, self._rounded = activations, rounds_rows(config)
        if config.asks_for_rounded_rows:
            check_rounded_rows(config, brought=has_rounded_weights(config))

    @cached_property
    def llm(self) -> LLM:
        return LLM(
            self._model,
            dtype="float32" if self._rounded else "float64",
            activations=self._activations,
            batch_invariant=self._rounded,
            draft_model=self._draft,
            block_size=8,
        )

    @cached_property
    def speculations(self) -> list[SpeculationConfig]:
        """The ways to draft."""
        if self._asked is not None:
            return [self.llm.resolve(config) for config in self._asked]
        ways = [
            SpeculationConfig(method=Ngram(min_match=1), num_draft_tokens=4),
            SpeculationConfig(method=Suffix(min_match=1, branches=True)),
        ]
        if self.llm.engine.runner.num_layers > 1:
            ways[1:1] = [SpeculationConfig(method=EarlyExit(), num_draft_tokens=4)]
            ways.append(SpeculationConfig(method=LayerSkip(), tree=(2, 1)))
        if self._draft is not None:
            method = DraftModel(model=self._draft)
            ways += [SpeculationConfig(method=method, num_draft_tokens=k) for k in (1, 3, 6)]
            ways.append(SpeculationConfig(method=method, tree=(3, 2)))
        return ways

    @cached_property
    def prompts(self) -> list[tuple[int, ...]]:
        if self.llm.tokenizer is not None:
            return [self.llm.encode(prompt) for prompt in _PROMPTS]
        vocab_size = self.llm.engine.runner.loaded.vocab_size
        return [tuple((5 * i * i + j) % vocab_size for i in range(6 + j)) for j in range(5)]

    def text_is_identical(self, params: SamplingParams) -> Finding:
        """Texts in a batch with drafts differ in no token from texts that are decoded plainly and alone."""
        plain = [self.llm.generate(prompt, params, speculation="none")[0].token_ids for prompt in self.prompts]
        wrong = compared = 0
        predicted = self._predicted(plain)
        for config in self.speculations:
            batch = self.llm.generate(self.prompts, params, speculation=config, prediction=predicted)
            wrong += sum(a != b.token_ids for a, b in zip(plain, batch, strict=True))
            compared += len(plain)
        how = "rows of 8 bits" if self._rounded else "float64"
        return Finding(wrong, 0.0, f"{compared} texts of {params.max_tokens} tokens, {how}, batched against alone")

    def bits_are_identical(self, dtype: DTypeName, length: int) -> Finding:
        """In batch-invariant mode, texts that are decoded plainly and alone equal those of one ragged batch. The batch
        mixes several ways to draft. It computes prompts in small chunks, takes prefixes from the cache, and has too little
        memory for all texts at a time."""
        memory = 4 * (max(map(len, self.prompts)) + length) // 8 * 8
        settings: dict[str, Any] = {"block_size": 8, "max_num_batched_tokens": 40, "kv_cache_tokens": memory}
        how: dict[str, Any] = {"dtype": dtype, "activations": self._activations, "batch_invariant": True}
        llm = LLM(self._model, speculation="none", **how, **settings)
        asked = [SamplingParams(seed=3, max_tokens=length), SamplingParams(temperature=0, max_tokens=length)]
        jobs = [(prompt, params) for prompt in self.prompts[:2] for params in asked]
        plain = [llm.generate(prompt, params)[0].token_ids for prompt, params in jobs]
        ways = self.speculations[1::2]
        prompts, params, configs = zip(*[(*job, config) for config in ways for job in jobs], strict=True)
        found = llm.generate(list(prompts), list(params), speculation=list(configs))
        wrong = sum(a != b.token_ids for a, b in zip(plain * len(ways), found, strict=True))
        detail = f"{len(found)} texts of {length} tokens, {llm.stats.finished.num_preemptions} preemptions"
        return Finding(wrong, 0.0, detail)

    def drafts(self, length: int) -> Finding:
        """The method drafts, and without faults. If it drafted nothing, the other proofs would say nothing about it."""
        greedy = SamplingParams(temperature=0, max_tokens=length)
        plain = [output.token_ids for output in self.llm.generate(self.prompts, greedy, speculation="none")]
        self.llm.stats.reset()
        for config in self.speculations:
            params = SamplingParams(max_tokens=length)
            self.llm.generate(self.prompts, params, speculation=config, prediction=self._predicted(plain))
        stats = self.llm.stats.finished
        detail = f"{stats.num_draft_tokens} draft tokens, {stats.num_accepted_tokens} accepted"
        faults = stats.num_proposer_faults
        return Finding(faults, 0.0, f"{detail}, {faults} faults", stats.num_draft_tokens > 0 and faults == 0)

    def cache_is_true(self, max_tokens: int) -> Finding:
        """The KV of every running sequence after every commit equals that of a fresh prefill of its tokens."""
        for prompt, config in self._pairs():
            params = SamplingParams(seed=5, max_tokens=max_tokens)
            self.llm.engine.add_request(
                prompt, params, config, RequestOptions(prediction=self._predicted([prompt, prompt]))
            )
        audit = CacheAudit(self.llm.engine)
        audit.run()
        holds = audit.num_checked > 0 and audit.worst <= KV_BOUND
        return Finding(audit.worst, KV_BOUND, f"{audit.num_checked} comparisons with a fresh prefill", holds)

    def _predicted(self, texts: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """Returns what a caller might predict: some texts behind one another, each with another token in its middle. Only
        the method `prediction` drafts from it."""
        vocab_size = self.llm.engine.runner.loaded.vocab_size
        changed = [
            (*text[: len(text) // 2], (text[len(text) // 2] + 1) % vocab_size, *text[len(text) // 2 + 1 :])
            for text in texts
        ]
        return tuple(token for text in changed for token in text)

    def _pairs(self) -> Iterator[tuple[tuple[int, ...], SpeculationConfig]]:
        ways = self.speculations
        for i in range(max(len(self.prompts), len(ways))):
            yield self.prompts[i % len(self.prompts)], ways[i % len(ways)]


# --- Compares what is kept of a text after every commit with what a fresh prefill of the same tokens leaves.


@dataclass
class CacheAudit:
    """The largest difference that was seen, and the number of comparisons."""

    engine: Engine  # the engine whose target memory is audited
    # Draft models with the target's tokens whose memory is audited too, with what they have computed ahead.
    drafts: Sequence[ModelRunner] = ()
    worst: float = 0.0  # the largest difference, relative to the largest entry of its tensor
    num_checked: int = 0  # how many times a sequence was compared
    num_ahead: int = 0  # how many tokens ahead of their texts were compared in added layers of draft models

    def run(self) -> None:
        """Step the engine until it is idle, and audit every running sequence after every step."""
        while self.engine.has_work:
            self.engine.step()
            for seq in self.engine.scheduler.running:
                if seq.state.num_computed:
                    self.worst = max(self.worst, self.difference(seq))
                    self.num_checked += 1
                for runner in self.drafts:
                    self._audit_draft(runner, seq)

    def difference(self, seq: EngineSequence) -> float:
        """The largest relative difference between what `seq` holds and what a fresh prefill computes: keys and values in
        the target's layers and in those that proposers have added, and running states."""
        return _difference(self.engine.runner, seq.state, seq.token_ids[: seq.state.num_computed], seq.token_ids)

    def _audit_draft(self, runner: ModelRunner, seq: EngineSequence) -> None:
        state = runner.states.get(seq.view.seq_id)
        if state is None or not state.end:
            return
        tokens = [*seq.token_ids[: state.num_computed], *state.ahead]
        self.worst = max(self.worst, _difference(runner, state, tokens, seq.token_ids))
        self.num_ahead += sum(max(filled - state.num_computed, 0) for filled in state.num_filled.values())


def _difference(runner: ModelRunner, state: SequenceState, tokens: Sequence[int], text: Sequence[int]) -> float:
    """The largest relative difference between what a model keeps of tokens and what a fresh prefill of them leaves. The
    whole text decides which rotary factors they have."""
    held, kv = [*_kept(runner, state, len(tokens))], KVView(state)
    fresh, hidden = _fresh(runner, tokens, text, None if state.source is None else state.source.token_ids)
    for added in runner.memory.added:
        count = added.num_filled(kv)
        if count:
            held += [rows for layer in range(added.shape.num_layers) for rows in added.read(kv, layer, count)]
            anew = added.recompute(tokens[:count], {layer: hidden[layer][:count] for layer in added.aux_layers})
            fresh += [rows for pair in anew for rows in pair]
    pairs = zip(held, fresh, strict=True)
    return max(float((one - other).abs().max() / other.abs().max().clamp(min=1e-9)) for one, other in pairs)


def _kept(runner: ModelRunner, state: SequenceState, num_tokens: int) -> Iterator[Tensor]:
    """Keys and values of the first tokens of a text and of its source, layer by layer, and then the running states behind
    the tokens."""
    size = runner.blocks.block_size
    found = [slots_of(state.block_table, num_tokens, size)]
    if state.source is not None:
        found.append(slots_of(state.source.block_table, len(state.source.token_ids), size))
    for slots in found:
        for layer in runner.pool.layers:
            yield from runner.pool.read(layer, torch.from_numpy(slots).to(runner.loaded.device))
    for _, record in sorted(state.running.records.items()):
        yield record.state_at(num_tokens)


def _fresh(
    runner: ModelRunner, tokens: Sequence[int], text: Sequence[int], source: tuple[int, ...] | None
) -> tuple[list[Tensor], Mapping[int, Tensor]]:
    """Returns the same as a fresh prefill leaves it, and the hidden states that added layers read."""
    other = runner.with_own_memory(len(tokens) + len(source or ()))
    state = other.memory.state(source=source)
    state.open(text, share=False)
    reserved = state.reserve(len(tokens))
    assert reserved, "the memory was made for these tokens"
    wanted = sorted({layer for added in runner.memory.added for layer in added.aux_layers})
    out = other.forward([Segment.of(state, tokens, 0)], wanted)
    return [*_kept(other, state, len(tokens))], out.aux_hidden_states
