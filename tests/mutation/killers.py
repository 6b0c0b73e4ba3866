"""Checks that tell a mutant from the real engine. Each function asserts its claim (see judge.py)."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch

from outrider.config import ModelConfig, default_model
from outrider.draft import Draft, Law
from outrider.errors import EngineStalledError, NoTokenLeftError
from outrider.lab.prove.deep_rounds import DEEP_SETTINGS, prove_deep
from outrider.lab.prove.engine import EngineProof
from outrider.lab.prove.reference import ReferenceRule
from outrider.lab.prove.rules import prove_tree_verifier, prove_verifier
from outrider.lab.prove.settings import DRAFT, SETTINGS, Setting
from outrider.lab.prove.target_settings import STRUCTURE_SETTINGS
from outrider.lab.prove.tiny import save_tiny_llama
from outrider.lab.prove.tree_reference import TreeRule
from outrider.llm import LLM
from outrider.loading.tokenizers import read_tokenizer
from outrider.params import SamplingParams, StructuredOutputs
from outrider.propose.base import DraftNoise, Proposer, ProposeRequest
from outrider.propose.draft_model import DraftModel
from outrider.propose.ngram import Ngram
from outrider.propose.settings import Method, ProposerContext, SpeculationConfig
from outrider.structured.grammar import GrammarCompiler, GrammarState
from outrider.verify.noise import Key, KeyedNoise, Stream
from outrider.verify.rules import residual
from tests.statistical.nested_laws import prove_merged_verifier, prove_stage

PROMPT = [1, 5, 9, 2, 7, 7, 3, 11, 4]


# -- laws --------------------------------------------------------------------------------------------------------------


def _law(rule: str, **params: Any) -> None:
    folder = Path(tempfile.mkdtemp())
    proof = EngineProof(save_tiny_llama(folder / "target", seed=1), save_tiny_llama(folder / "draft", seed=2))
    drafted = {"method": "draft_model", "model": DRAFT, "num_draft_tokens": 2, "rule": rule}
    setting = Setting(rule, drafted, params)
    finding = proof.prove(setting, 3, faultless=True)
    assert finding.passed, finding


def _named(name: str, length: int = 3) -> None:
    """A setting of the prover's own list."""
    setting = next(s for s in (*SETTINGS, *STRUCTURE_SETTINGS) if s.name == name)
    folder, speaks = Path(tempfile.mkdtemp()), bool(setting.language)
    pair = [save_tiny_llama(folder / part, seed, speaks=speaks) for part, seed in (("target", 1), ("draft", 2))]
    finding = EngineProof(*pair, speaks=speaks).prove(setting, length)
    assert finding.passed, finding


def law_block() -> None:
    _law("block")


def verifier_block() -> None:
    """Many unlike laws: on one pair of models a wrong residual may make no difference at all."""
    finding = prove_verifier(ReferenceRule.BLOCK, 24, 2, 3)
    assert finding.passed, finding


def law_token() -> None:
    _law("token")


def law_walk() -> None:
    _law("walk")


def law_filtered() -> None:
    _law("block", temperature=0.6)


def law_seeded() -> None:
    _law("auto", seed=4)


def law_penalties() -> None:
    _law("block", repetition_penalty=1.6, frequency_penalty=0.7)


def _deep(*names: str) -> None:
    for setting in DEEP_SETTINGS:
        if setting.name in names:
            finding = prove_deep(setting)
            assert finding.passed, finding


def deep_low_confidence() -> None:
    _deep("low confidence, block", "low confidence, token")


def deep_judged() -> None:
    _deep("lengths by their worth, block", "lengths by their worth, token")


def deep_bad_words() -> None:
    _deep("bad words")


def deep_penalties() -> None:
    _deep("penalties")


def deep_chains() -> None:
    _deep("block, 8 places")


def deep_residuals() -> None:
    _deep("block, three tokens")


def deep_tokens() -> None:
    _deep("token, 8 places")


def deep_walks() -> None:
    _deep("walk")


def deep_best_first() -> None:
    _deep("best-first tree")


def deep_recursion() -> None:
    _deep("tree that branches deep, recursive rejection")


def deep_traversal() -> None:
    _deep("tree that branches deep, traversal")


def law_mixed_noise() -> None:
    _named("coupled drafts, or token by what was drafted")


def law_bad_words() -> None:
    _law("block", bad_words_ids=((1, 1), (0, 2)))


def law_processors() -> None:
    _law("token", logits_processors=(lambda ids, scores: scores + (scores.argsort() == int(ids.sum()) % 3) * 2.0,))


def law_structure() -> None:
    _named("regex, block")


def looks_are_taken_back() -> None:
    """What may follow a text does not depend on where drafts were looked along, and no automaton begins anew for it."""
    tokenizer = read_tokenizer(ModelConfig(model=default_model("target")))
    assert tokenizer is not None
    compiler = GrammarCompiler(tokenizer, 4096, frozenset([tokenizer.eos_token_id]))
    structure = StructuredOutputs(regex="[ab](cd|d)e")
    text, fresh = compiler.start(structure), compiler.start(structure)
    a, b, c, d = (tokenizer.encode(letter)[0] for letter in "abcd")
    matcher = text._matcher
    for path in ((a,), (a, c), (b, d), (b,), (a, d)):
        assert text.allowed(path, 4096) is not None
    text.advance(b)
    fresh.advance(b)
    for path in ((), (c,), (d,), ()):
        found, want = text.allowed(path, 4096), fresh.allowed(path, 4096)
        assert found is not None
        assert want is not None
        assert torch.equal(found, want)
    assert text._matcher is matcher


def law_of_wrong_forced_tokens() -> None:
    """The least token that may follow is called forced, whether or not others may follow too."""
    real, GrammarState.only = GrammarState.only, least_allowed
    try:
        _named("regex, nobody drafts")
    finally:
        GrammarState.only = real


def least_allowed(state: GrammarState, path: tuple[int, ...]) -> int | None:
    """In the place of `GrammarState.only`: another token may follow as well."""
    allowed = state.allowed(path, 3)
    return None if allowed is None or not allowed.any() else int(allowed.nonzero()[0])


def forced_and_forbidden() -> None:
    """What the structure forces may be forbidden by something else, and then no text can be written."""
    llm = LLM(save_tiny_llama(Path(tempfile.mkdtemp()) / "target", 1, speaks=True), dtype="float64", device="cpu")
    structure = StructuredOutputs(choice=('"aa"a', '"aa""'))
    for forbidden in ({"bad_words_ids": ((1, 1),)}, {"allowed_token_ids": (0, 2)}):
        (output,) = llm.generate([[0, 1, 2, 0, 1]], SamplingParams(structured_outputs=structure, max_tokens=7, **forbidden))
        assert isinstance(output.error, NoTokenLeftError), output.outputs


def law_tree() -> None:
    _named("tree, traversal")


def law_recursive() -> None:
    _named("tree, recursive rejection")


def law_merged() -> None:
    _named("merged tree, three laws")


def law_staged() -> None:
    _named("staged, a drawn drafter", 4)


def law_of_stages() -> None:
    """Of deep guesses, as drafts in short texts cannot have them."""
    finding = prove_stage({"num_draft_tokens": 3}, SamplingParams(), Path(tempfile.mkdtemp()))
    assert finding.passed, finding


def law_staged_filtered() -> None:
    _named("staged, temperature and top_p")


def staged_as_alone() -> None:
    """Without chance of its own a stage drafts what its draft model drafts alone, whatever its drafter guesses; and with
    chance no drafter has a fault."""
    target, draft = (save_tiny_llama(Path(tempfile.mkdtemp()), seed, vocab_size=8) for seed in (3, 4))
    llm = LLM(target, dtype="float64", block_size=4)
    llm.generate([1, 5, 2, 2, 7], SamplingParams(max_tokens=1))  # a prompt that is cached drafts from the first round on
    alone = {"method": "draft_model", "model": draft, "num_draft_tokens": 5}
    for guesses in ({"tree": (3, 2)}, {"num_draft_tokens": 3}):
        staged = {**alone, "method": "staged", "drafter": {"method": "draft_model", "model": target, **guesses}}
        for params in ({"temperature": 0}, {"seed": 5}, {"seed": 6, "frequency_penalty": 0.5}):
            drafts = []
            for speculation in (alone, staged):
                asked = SamplingParams(max_tokens=30, **params)
                output = llm.generate([1, 5, 2, 2, 7], asked, speculation=speculation, trace=True)[0]
                drafts.append([found.token_ids for found in output.outputs[0].rounds])
            assert drafts[0] == drafts[1], (guesses, params)
        output = llm.generate([1, 5, 2, 2, 7], SamplingParams(max_tokens=30), speculation=staged)[0]
        assert output.stats.num_proposer_faults == 0, output.stats


def verifier_tree() -> None:
    finding = prove_tree_verifier(TreeRule.TRAVERSAL, (2, 1), 8, 3)
    assert finding.passed, finding


def verifier_merged() -> None:
    """Two members whose draws collide, on chains and on trees."""
    for rule in (TreeRule.RECURSIVE, TreeRule.TRAVERSAL):
        for shape in (((1,), (1,)), ((2,), (1,))):
            finding = prove_merged_verifier(rule, shape, 16, 2)
            assert finding.passed, finding


def law_guess_behind() -> None:
    _named("two drawn tokens, then a lookup that sometimes finds nothing behind them", 4)


def logprobs() -> None:
    """Of every token, along drafts, as a plain forward pass of the finished text gives them."""
    llm = _llm()
    params = SamplingParams(seed=1, max_tokens=24, logprobs=0, repetition_penalty=1.3)
    output = llm.generate(PROMPT, params, speculation=_self_draft())[0]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llm.engine.runner.loaded.name, dtype=torch.float64)
    with torch.inference_mode():
        law = model(torch.tensor([[*PROMPT, *output.token_ids]])).logits[0].double().log_softmax(-1)
    for place, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        assert abs(entry[token].logprob - float(law[len(PROMPT) + place - 1, token])) < 1e-5


def noise_is_independent() -> None:
    noise = KeyedNoise()
    keys = [Key(i, 5, 0, Stream.TARGET, i) for i in range(4000)]
    tokens = noise.categorical(torch.full((4000, 4), 0.25), keys)
    shares = torch.bincount(tokens, minlength=4) / 4000
    assert (shares - 0.25).abs().max() < 0.05, shares


def empty_residual() -> None:
    law = torch.tensor([[0.25, 0.75]])
    assert torch.equal(residual(law, law, torch.ones(1)), law)


# -- texts -------------------------------------------------------------------------------------------------------------


class _Tree(Proposer):
    """Two wrong children beside the right guess at every depth, which comes from a recorded text."""

    def __init__(self, text: Sequence[int], vocab_size: int) -> None:
        self._text, self._vocab_size = list(text), vocab_size

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> list[Draft]:
        return [self._draft(request) for request in requests]

    def _draft(self, request: ProposeRequest) -> Draft:
        done = len(request.sequence.token_ids) - request.sequence.num_prompt_tokens
        tokens: list[int] = []
        parents: list[int] = []
        at = -1
        for token in self._text[done : done + request.budget // 3]:
            first = len(tokens)
            tokens += [(token + 1) % self._vocab_size, (token + 2) % self._vocab_size, token]
            parents += [at, at, at]
            at = first + 2
        return Draft(tuple(tokens), tuple(parents), (Law.DETERMINISTIC,) * len(tokens))


class _RecordedTree(Method):
    """Settings of `_Tree`."""

    name: ClassVar[str] = "recorded_tree"

    text: tuple[int, ...]

    def build(self, context: ProposerContext) -> Proposer:
        return _Tree(self.text, context.target.vocab_size)


@cache
def _llm(**settings: Any) -> LLM:
    path = save_tiny_llama(Path(tempfile.mkdtemp()), seed=3, vocab_size=16)
    return LLM(path, dtype="float64", block_size=4, **settings)


def _greedy(prompt: list[int], speculation: Any = "none", **params: Any) -> tuple[int, ...]:
    return (
        _llm()
        .generate(prompt, SamplingParams(temperature=0, **{"max_tokens": 24, **params}), speculation=speculation)[0]
        .token_ids
    )


def _self_draft(**settings: Any) -> SpeculationConfig:
    method = DraftModel(model=_llm().engine.runner.loaded.name)
    return SpeculationConfig(method=method, num_draft_tokens=4, **settings)


def tree_text() -> None:
    plain = _greedy(PROMPT)
    config = SpeculationConfig(method=_RecordedTree(text=plain), num_draft_tokens=9)
    output = _llm().generate(PROMPT, SamplingParams(temperature=0, max_tokens=24), speculation=config)[0]
    assert output.token_ids == plain
    # A wrong mask or position would lose the right branch now and then.
    assert output.stats.accepted_per_position == output.stats.drafted_per_position, output.stats


def self_draft_is_accepted() -> None:
    params = SamplingParams(temperature=0, max_tokens=40)
    stats = _llm().generate(PROMPT, params, speculation=_self_draft())[0].stats
    assert stats.acceptance_rate == 1.0, stats


def prompts_are_read() -> None:
    from tests.model import checkpoints, test_draft_prefill

    llm = test_draft_prefill.self_drafting(checkpoints.save("llama", Path(tempfile.mkdtemp()) / "llama"))
    with pytest.MonkeyPatch.context() as patch:
        passes = test_draft_prefill.counted(llm, patch)
        test_draft_prefill.test_the_prompt_is_read_in_the_targets_chunks_and_the_next_step_drafts(llm, passes)


def min_tokens() -> None:
    plain = _greedy(PROMPT)
    for allowed in range(3, 12):
        ends = (plain[allowed],)
        limits: dict[str, Any] = {"stop_token_ids": ends, "min_tokens": allowed}
        assert _greedy(PROMPT, _self_draft(), **limits) == _greedy(PROMPT, **limits)


def stop_inside_draft() -> None:
    plain = _greedy(PROMPT)
    for end in set(plain):
        assert _greedy(PROMPT, _self_draft(), stop_token_ids=(end,)) == plain[: plain.index(end) + 1]


def stuck_behind_the_end() -> None:
    """No token may follow the one that ends the text."""
    plain = _greedy(PROMPT)
    for end in set(plain) - {PROMPT[-1]}:
        try:
            found = _greedy(PROMPT, _self_draft(), stop_token_ids=(end,), bad_words_ids=_nothing_behind(end))
        except NoTokenLeftError as error:
            raise AssertionError("the text has ended before the row that failed") from error
        assert found == plain[: plain.index(end) + 1]


def stuck_inside_the_text() -> None:
    """No token may follow one that does not end the text."""
    for token in set(_greedy(PROMPT)[:-1]):
        try:
            _greedy(PROMPT, _self_draft(), bad_words_ids=_nothing_behind(token))
        except NoTokenLeftError:
            continue
        raise AssertionError("the text went on where every token was forbidden")


def _nothing_behind(token: int) -> tuple[tuple[int, int], ...]:
    return tuple((token, other) for other in range(_llm().engine.runner.loaded.vocab_size))


def cache_truth() -> None:
    from outrider.lab.prove.own_model import CacheAudit

    llm = _llm()
    config = SpeculationConfig(method=Ngram(min_match=1), num_draft_tokens=4)
    for shift in range(3):
        params = SamplingParams(seed=shift, max_tokens=30)
        llm.engine.add_request((*PROMPT, shift), params, config)
    audit = CacheAudit(llm.engine)
    try:
        audit.run()
    except EngineStalledError as error:  # the books say that all is computed, where it is not
        raise AssertionError("the engine stands still") from error
    assert audit.num_checked > 20
    assert audit.worst < 1e-5, audit.worst


def batch_equals_alone() -> None:
    prompts = [PROMPT[:n] for n in (3, 9, 6)]
    batch = _llm().generate(prompts, SamplingParams(temperature=0, max_tokens=24))
    assert [out.token_ids for out in batch] == [_greedy(prompt) for prompt in prompts]


def prefix_cache() -> None:
    llm = LLM(_llm().engine.runner.loaded.name, dtype="float64", block_size=4, speculation="none")
    same = [3, 3, 3, 3]
    prompts = [[1, 2, 4, 5, *same, 6, 7], [9, 8, 7, 5, *same, 6, 7], [*same, 2, 2]]
    params = SamplingParams(temperature=0, max_tokens=12)
    for prompt in prompts:
        fresh = LLM(_llm().engine.runner.loaded.name, dtype="float64", prefix_caching=False)
        assert llm.generate(prompt, params)[0].token_ids == fresh.generate(prompt, params)[0].token_ids


def samples_apart() -> None:
    prompt = PROMPT[:7]  # the last token but one lies in the middle of a block, which all samples then want to write
    params = SamplingParams(seed=9, n=3, max_tokens=20)
    together = [o.token_ids for o in _llm().generate(prompt, params)[0].outputs]
    alone = LLM(_llm().engine.runner.loaded.name, dtype="float64", max_num_seqs=3, block_size=1)  # nothing to copy
    assert [o.token_ids for o in alone.generate(prompt, params)[0].outputs] == together


def window() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        sliding_window=4,
        eos_token_id=None,
    )
    model = MistralForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.7)
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    text = list(PROMPT)
    for _ in range(10):
        text.append(int(model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    for backend in ("paged", "gather"):  # where there are kernels, the first asks them and not the mask
        llm = LLM(folder, dtype="float64", attention_backend=backend)  # type: ignore[arg-type]
        assert llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=10))[0].token_ids == tuple(text[len(PROMPT) :])


def longrope() -> None:
    """A short text beside a long one and one that becomes long, against each alone."""
    from tests.model import checkpoints

    path = checkpoints.save("longrope", Path(tempfile.mkdtemp()) / "longrope", seed=1)
    llm = LLM(path, dtype="float64", block_size=4)
    prompts = [[(7 * i * i + 3 * i) % checkpoints.VOCAB_SIZE for i in range(n)] for n in (12, 25, 40)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == checkpoints.greedy_by_transformers(path, prompt, 12)


# -- kernels -----------------------------------------------------------------------------------------------------------


def kernels_decoder() -> None:
    """A fused pass in two chunks, with a neighbour and a tree, against stock transformers; windows and normalised heads."""
    from transformers import AutoModelForCausalLM

    from outrider.cache.blocks import BlockManager
    from outrider.cache.memory import StateMemory
    from outrider.lab.prove.tiny import raise_norms
    from outrider.model.batch import Segment
    from tests.model import checkpoints

    text = [(5 * i * i + 3 * i + 1) % checkpoints.VOCAB_SIZE for i in range(44)]
    for family in ("mistral", "qwen3"):
        path = checkpoints.save(family, Path(tempfile.mkdtemp()) / family, seed=3)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
        raise_norms(model)
        with torch.inference_mode():
            want = model(torch.tensor([text]), use_cache=False).logits[0]
        runner = LLM(path, dtype="float64", attention_backend="fused", block_size=4).engine.runner
        runner.memory = StateMemory(BlockManager(40, 4))
        spare, table = runner.blocks.allocate(5), runner.blocks.allocate(11)[::-1]
        first = runner.forward([Segment(text[:9], 0, spare), Segment(text[:35], 0, table)]).logits[9:]
        tokens, parents = [text[35], 7, *text[36:43]], (-1, 0, 0, *range(2, 8))  # deeper than the window, with an uncle
        tree = runner.forward([Segment(tokens, 35, table, parents)]).logits[[0, *range(2, 9)]]
        assert torch.allclose(torch.cat([first, tree]), want[:43], rtol=1e-9, atol=1e-9)


def kernels_attention() -> None:
    """A text of several runs against sums in float64, and its bits from rows alone, in chunks and in a tree."""
    from outrider.kernels.library import kernel_library
    from tests.model.attention import LONG, Attention, Layer, in_pieces, segment, text_of

    library = kernel_library()
    assert library is not None
    hidden = text_of(LONG)
    layer = Layer(Attention(kv_heads=1, window=520, softcap=2.0, sinks=True), library.instruction_set, threads=2)
    whole = in_pieces(layer, hidden, [])
    assert torch.allclose(whole, layer.reference(hidden), rtol=1e-12, atol=1e-12)
    assert torch.equal(in_pieces(layer, hidden, list(range(LONG - 20, LONG))), whole)
    layer.clear()
    table = list(range(150))
    layer.forward([hidden[:-4]], [segment(0, LONG - 4, table)])
    tree, parents = torch.cat([hidden[-4:], hidden[:2]]), (-1, 0, 1, 2, 1, 4)
    assert torch.equal(layer.forward([tree], [segment(LONG - 4, LONG + 2, table, parents)])[0][:4], whole[-4:])


def kernels_attention_operator() -> None:
    """Attention as an operator, against its definition."""
    from outrider.kernels.library import kernel_library
    from tests.unit import test_attention_kernel

    library = kernel_library()
    assert library is not None
    for way in test_attention_kernel.WAYS:
        for shape in ((2, 3, 5), (5, 3, 16)):  # all heads together, and in three parts
            test_attention_kernel.test_every_row_attends_to_what_it_sees(library.instruction_set, way, *shape)


def kernels_recurrence() -> None:
    """Rows over running states, chains and trees, against their definition."""
    from outrider.kernels.library import kernel_library
    from tests.unit import test_recurrence_kernel

    library = kernel_library()
    assert library is not None
    test_recurrence_kernel.test_rows_are_what_their_definition_says(library.instruction_set, torch.float64)


def kernels_families() -> None:
    """A fused pass of families that differ in norms, positions, activations, scales and order, against transformers."""
    from transformers import AutoModelForCausalLM

    from outrider.loading import hf_modules
    from outrider.model.batch import Segment
    from tests.model import checkpoints
    from tests.model.double import Double

    text = [(5 * i * i + 3 * i + 1) % checkpoints.VOCAB_SIZE for i in range(30)]
    attending = ("gemma2", "gemma3", "gpt2", "gpt_neox", "cohere", "granite", "olmo2", "opt", "smollm3")
    for family in (*attending, "qwen3_next", "lfm2", "granitemoehybrid"):
        path = checkpoints.save(family, Path(tempfile.mkdtemp()) / family, seed=3)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()
        hf_modules.use_plain_experts(model)
        with torch.inference_mode(), Double():
            want = model(torch.tensor([text]), use_cache=False).logits[0]
        runner = LLM(path, dtype="float64", attention_backend="fused", block_size=4).engine.runner
        got = runner.forward([Segment(text, 0, runner.blocks.allocate(8))]).logits
        assert torch.allclose(got, want, rtol=1e-10, atol=1e-10)


def kernels_experts() -> None:
    """Experts against float64, with ties and with many rows of one expert, and every row's bits its own."""
    from dataclasses import replace

    from outrider.kernels.library import kernel_library
    from tests.unit.test_experts import PLAIN, SHAPES, Experts, Layer, some_rows

    library = kernel_library()
    assert library is not None
    for name, shape in SHAPES.items():
        experts = Experts.random(shape, 7, 40, 24, torch.float64, biased=name == "bounded")
        experts.router[5] = experts.router[2]
        rows = some_rows(61, 40, torch.float64)
        layer = Layer(library, experts, torch.float64)
        whole = layer(rows)
        assert torch.allclose(whole, experts.expected(rows), rtol=1e-10, atol=1e-10)
        for begin, end in ((0, 1), (7, 9), (20, 50)):
            assert torch.equal(layer(rows[begin:end]), whole[begin:end])
    experts = Experts.random(replace(PLAIN, num_chosen=2), 3, 16, 24, torch.float64)
    rows = some_rows(600, 16, torch.float64)
    assert torch.allclose(Layer(library, experts, torch.float64)(rows), experts.expected(rows), rtol=1e-10, atol=1e-10)


def kernels_rounding() -> None:
    """int8 weights and their scales, and the weights made of them again, by PyTorch's operators."""
    from outrider.kernels.rounding import rounded, unrounded

    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(45, 77).to(dtype)
        weight[3], weight[4] = 0, torch.arange(77) - 63.5
        weight[4, 0], weight[5, 1], weight[6, 1] = 127, -9, 9  # with a scale of 1, halves go to the even number
        wide = weight.float()
        scale = wide.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
        data = (wide / scale[:, None]).round().clamp(-127, 127)
        got = rounded(weight)
        assert torch.equal(got[0], data.to(torch.int8))
        assert torch.equal(got[1], scale)
        assert torch.equal(unrounded(*got, dtype), (data * scale[:, None]).to(dtype))


def kernels_linear() -> None:
    """Products of many shapes and kinds against float64, every row's bits its own, and the weights given back."""
    from torch import nn

    from outrider.kernels.formats import FORMATS
    from outrider.kernels.library import kernel_library
    from outrider.kernels.linear import use_packed_linear, use_stock_linear
    from outrider.kernels.weights import quantise_linears, stored_weight

    library = kernel_library()
    assert library is not None
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        layer = nn.Linear(1300, 43, dtype=torch.float32 if dtype is torch.int8 else dtype).requires_grad_(False)
        weight = layer.weight.double()
        if dtype is torch.int8:
            quantise_linears(layer, FORMATS["int8"])
            stored = cast(Any, layer).quantised_weight
            weight = stored.data.double() * stored.scale.double()[:, None]
        rows = torch.randn(130, 1300).to(layer.weight.dtype)  # more than a block of them
        want = rows.double() @ weight.t() + layer.bias.double()
        use_packed_linear(layer, library)
        got = layer(rows)
        assert torch.allclose(got.double(), want, rtol=8e-3 if dtype is torch.bfloat16 else 1e-4, atol=1e-3)
        for count in (1, 2, 3, 5, 13, 97):
            assert torch.equal(layer(rows[:count]), got[:count])
        if dtype is torch.int8:  # sums that are beyond float32 before they are scaled
            large = layer(torch.cat([rows[:5] * 1e36, rows[5:7]])).double()
            assert torch.allclose(large[:5] / 1e36, want[:5] - layer.bias.double(), rtol=1e-4, atol=1e-3)
            assert torch.equal(large[5:], got[5:7].double())
        use_stock_linear(layer)
        given_back = stored_weight(layer)
        scale = 1.0 if given_back.scale is None else given_back.scale.double()[:, None]
        assert torch.equal(given_back.data.double() * scale, weight)


def kernels_formats() -> None:
    """Products with weights in groups against float64."""
    from dataclasses import replace
    from itertools import product

    from outrider.kernels.formats import FORMATS
    from outrider.kernels.library import kernel_library
    from outrider.kernels.packed import PackedWeights
    from outrider.kernels.packed import product as multiply
    from outrider.kernels.weights import row_group, unrounded_rows

    library = kernel_library()
    assert library is not None
    for name, rounds_rows in product(("int8", "int8-g64", "int4-g32", "int4-g128-asym"), (False, True)):
        stored = replace(FORMATS[name], rounds_rows=rounds_rows).store(torch.randn(70, 1280))
        packed, weight = PackedWeights(library, stored), stored.format.dequantise(stored, torch.float64)
        rows = torch.randn(15, 1280)
        if rounds_rows:
            rows = unrounded_rows(rows, row_group(stored.format, 1280))
        for count in (1, 2, 15):
            got = multiply(library, packed.struct, rows[:count])[:, :70].double()
            assert torch.allclose(got, rows[:count].double() @ weight.t(), rtol=1e-4, atol=1e-3)


def kernels_blocks() -> None:
    """Products of rounded rows with blocks of files against float64."""
    from dataclasses import replace

    from outrider.kernels.gguf_blocks import GGUF_TYPES, NARROWED_TYPES, stored_blocks, whole_numbers
    from outrider.kernels.library import kernel_library
    from outrider.kernels.packed import PackedWeights
    from outrider.kernels.packed import product as multiply
    from outrider.kernels.weights import unrounded_rows_for
    from tests.unit.test_blocks_of_files import random_rows

    library = kernel_library()
    assert library is not None
    stored = [
        GGUF_TYPES[name].stored(torch.from_numpy(random_rows(name)), torch.float32) for name in ("Q4_K", "Q5_0", "Q6_K")
    ]
    codes, scale = torch.randint(0, 16, (70, 768), dtype=torch.uint8), torch.randn(70, 6).half()
    zeros = torch.randint(0, 16, (70, 6), dtype=torch.uint8)
    stored.append(stored_blocks(whole_numbers(4, 128, torch.float16, has_zeros=True), torch.float32, codes, scale, zeros))
    rows = torch.from_numpy(random_rows("Q5_0"))
    narrow = [kind.stored(rows, torch.float32) for kind in (GGUF_TYPES["Q5_0"], NARROWED_TYPES["Q5_0"])]
    wide, four = (each.format.dequantise(each, torch.float32) for each in narrow)
    assert float((four - wide).norm() / wide.norm()) < 0.08
    steps = narrow[1].scale.float().repeat_interleave(32, 1)
    assert abs(float(((four - wide) / steps)[steps.abs() > 1e-5].mean())) < 0.05
    for each in stored:
        each = replace(each, format=replace(each.format, rounds_rows=True))
        packed, weight = PackedWeights(library, each), each.format.dequantise(each, torch.float64)
        rows = unrounded_rows_for(torch.randn(13, 768), each)
        for count in (1, 3, 13):
            got, want = multiply(library, packed.struct, rows[:count])[:, :70].double(), rows[:count].double() @ weight.t()
            assert torch.allclose(got, want, rtol=1e-4, atol=1e-5 * float(weight.abs().max()) * 768**0.5)


def kernels_laws() -> None:
    """Laws and draws against the stock ones."""
    import os

    from outrider.verify.logits import target_probs
    from outrider.verify.noise import gumbel_max, invert_cdf, mix_fields

    def both(function: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        here = os.environ["OUTRIDER_KERNELS"]
        found = function(*arguments)
        os.environ["OUTRIDER_KERNELS"] = "off"
        stock = function(*arguments)
        os.environ["OUTRIDER_KERNELS"] = here
        return found, stock

    logits = torch.cat([torch.randn(24, 999, dtype=torch.float64) * 3, torch.zeros(24, 999, dtype=torch.float64)])
    settings = [{"top_k": 5}, {"top_p": 0.7}, {"top_p": 0.05}, {"min_p": 0.1}, {"temperature": 0.0}, {"temperature": 2.0}]
    params = [SamplingParams(**settings[i % 6]) for i in range(48)]  # type: ignore[arg-type]
    large = torch.randn(4, 20_000, dtype=torch.float64) * 3  # of which a sample is taken, and parts are gathered
    wide = [
        SamplingParams(top_k=k, top_p=p, min_p=m) for k, p, m in ((50, 1, 0), (0, 0.95, 0), (0, 0.9, 0.01), (3000, 0.99, 0))
    ]
    flat = torch.randn(4, 120_000, dtype=torch.float64) / 4  # of which many are left when parts are gathered
    many = [SamplingParams(top_k=k, top_p=p) for k, p in ((3000, 1), (0, 0.02), (0, 0.98), (117_000, 1))]
    for rows, asked in ((flat, many), (large, wide), (logits, params)):
        found, stock = both(target_probs, rows, asked)
        assert torch.equal(found > 0, stock > 0)
        assert torch.allclose(found, stock, rtol=1e-12, atol=0)
    halves = target_probs(torch.zeros(1, 4, dtype=torch.float64), [SamplingParams(top_p=0.5)])
    assert halves.tolist() == [[0.5, 0.5, 0, 0]]
    bits = torch.from_numpy(mix_fields(torch.arange(240).view(48, 5).numpy().astype("uint64")))
    for draw in (gumbel_max, invert_cdf):
        tokens, others = both(draw, stock, bits)
        assert torch.equal(tokens, others)
    p, q, weight = stock, stock.roll(1, 0), torch.linspace(0.1, 1, 48, dtype=torch.float64)
    law, other = both(residual, p, q, weight)
    assert torch.allclose(law, other, rtol=1e-9, atol=1e-15)


def kernels_finite() -> None:
    """Rows without a token to choose, against the stock function."""
    from tests.unit import test_sampling_kernels

    test_sampling_kernels.test_rows_from_which_no_token_can_be_chosen_are_told(61, torch.float64)


def kernels_exact_laws() -> None:
    """Laws against their definition, over logits that hypothesis draws."""
    from tests.unit import test_exact_probabilities

    test_exact_probabilities.test_top_k_keeps_the_largest_whatever_the_largest_is()
    test_exact_probabilities.test_probabilities_are_what_the_parameters_mean()
