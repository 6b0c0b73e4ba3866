"""The fused decoder is the stock one: families, trees, chunks, windows, hidden states; and bits of a row are its own."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from outrider import LLM, SamplingParams
from outrider.cache.blocks import BlockManager
from outrider.cache.memory import StateMemory
from outrider.config import CacheConfig, ModelConfig, SchedulerConfig
from outrider.errors import UnsupportedModelError
from outrider.kernels.library import available_sets
from outrider.loading import hf_modules
from outrider.loading.loader import load_model
from outrider.model.batch import Segment
from outrider.model.factory import make_runner
from outrider.model.families import FAMILIES
from outrider.model.fused import FusedDecoder
from outrider.model.layer_builder import norm_of
from outrider.model.probe import probe_bits, reference
from outrider.model.runner import ModelRunner
from tests.model import checkpoints, encoders
from tests.model.core import core, in_turn
from tests.model.double import Double

pytestmark = pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")
NAMES = tuple(name for name in (*checkpoints.FAMILIES, *checkpoints.RUNNING) if checkpoints.is_described(name))
#: Those whose layers keep a running state, which `test_running_states` has more of.
RUNNING = tuple(name for name in checkpoints.RUNNING if checkpoints.is_described(name))
#: The best instruction set of this machine.
TAKEN = available_sets()[-1] if available_sets() else ""
TEXT = [(5 * i * i + 3 * i + 1) % checkpoints.VOCAB_SIZE for i in range(45)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("fused")
    return {name: checkpoints.save(name, folder / name, seed=3) for name in NAMES}


@pytest.fixture(params=available_sets())
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("OUTRIDER_KERNELS", request.param)
    return str(request.param)


def runner_of(path: str, dtype: str, backend: str = "fused") -> ModelRunner:
    loaded = load_model(ModelConfig(model=path, dtype=dtype))
    return make_runner(loaded, backend, CacheConfig(block_size=4), SchedulerConfig(max_num_seqs=4))


@torch.inference_mode()
def stock(path: str, text: list[int], dtype: torch.dtype = torch.float64) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    hf_modules.use_plain_experts(model)
    with Double():
        return model(torch.tensor([text]), use_cache=False, output_hidden_states=True)


def test_every_family_is_tested() -> None:
    behind_encoders = {"t5", *(str(getattr(transformers, kind).model_type) for kind in encoders.DESCRIBED)}  # test_encoders
    assert {checkpoints.model_type(name) for name in NAMES} | behind_encoders == set(FAMILIES)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_norms_have_their_offset_in_numbers_that_hold_it(name: str) -> None:
    """In bfloat16, 1 + 0.001 is 1."""
    norm = torch.nn.RMSNorm(2, dtype=torch.bfloat16)
    torch.nn.init.constant_(norm.weight, 0.001)
    weight = norm_of(norm, FAMILIES[name]).weight
    assert torch.equal(weight, norm.weight.float() + (1.0 if name == "gemma2" else 0.0))


#: Every family with the instruction set that is taken here, and those between them that use each kernel with all others.
KERNELS = (
    "llama",
    "gemma2",
    "gpt2",
    "gpt_neox",
    "cohere",
    "granite",
    "mixtral",
    "gpt_oss",
    "qwen3_next",
    "granitemoehybrid",
)
WAYS = [(name, found) for name in NAMES for found in available_sets() if name in KERNELS or found == TAKEN]


@pytest.mark.parametrize(("name", "instruction_set"), WAYS, indirect=["instruction_set"])
def test_logits_and_hidden_states_are_the_stock_ones(paths: dict[str, str], name: str, instruction_set: str) -> None:
    runner = runner_of(paths[name], "float64")
    want = stock(paths[name], TEXT)
    table = runner.blocks.allocate(12)
    layers = (0, 1, 3, 4)
    long = runner.loaded.long_rope_after is not None and len(TEXT) > runner.loaded.long_rope_after
    out = runner.forward([Segment(TEXT, 0, table, long_rope=long)], layers)
    torch.testing.assert_close(out.logits, want.logits[0], rtol=1e-10, atol=1e-10)
    for layer in layers:
        torch.testing.assert_close(out.aux_hidden_states[layer], want.hidden_states[layer][0], rtol=1e-10, atol=1e-10)


#: Where a change may concern one pair of a model and an instruction set.
OF_KERNELS = ("src/outrider/kernels/", "src/outrider/model/", "tests/model/checkpoints.py")
NARROW = list(product(["llama", "gemma2", "gpt2", "granite"], ["float32", "bfloat16"], available_sets()))
FEW_NARROW = [case for place, case in enumerate(NARROW) if case[2] == TAKEN or place % 5 == 0]


@pytest.mark.parametrize(
    ("name", "dtype", "instruction_set"), core(NARROW, FEW_NARROW, *OF_KERNELS), indirect=["instruction_set"]
)
def test_narrow_types_stay_close(paths: dict[str, str], name: str, dtype: str, instruction_set: str) -> None:
    runner = runner_of(paths[name], dtype)
    table = runner.blocks.allocate(12)
    got, want = runner.forward([Segment(TEXT, 0, table)]).logits, stock(paths[name], TEXT).logits[0]
    if dtype == "float32":
        assert (got - want).abs().max() < 1e-5 * want.abs().max()
    else:  # no farther than the stock model of the same type
        assert (got - want).norm() <= (stock(paths[name], TEXT, torch.bfloat16).logits[0] - want).norm()


ACTIVATIONS = ["silu", "gelu", "gelu_new", "gelu_fast", "quick_gelu", "relu", "relu2"]
GATED = [("llama", found) for found in available_sets()]
ACTIVE = [(*pair, name) for pair in (*GATED, ("phi", TAKEN)) for name in ACTIVATIONS]
#: Each of them with a gate, where some instruction set computes it, and without.
FEW_ACTIVE = [case for case in ACTIVE if case[:2] == ("llama", TAKEN) or case[2] in ("relu2", "gelu_new")]


@pytest.mark.parametrize(
    ("name", "instruction_set", "activation"), core(ACTIVE, FEW_ACTIVE, *OF_KERNELS), indirect=["instruction_set"]
)
def test_every_activation_with_and_without_a_gate(
    paths: dict[str, str], name: str, activation: str, instruction_set: str, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(paths[name], dtype=torch.float64)
    model.config.hidden_act = activation
    model.save_pretrained(tmp_path)
    want = stock(str(tmp_path), TEXT).logits[0]
    for dtype, tolerance in (("float64", 1e-10), ("float32", 1e-5)):
        runner = runner_of(str(tmp_path), dtype)
        got = runner.forward([Segment(TEXT, 0, runner.blocks.allocate(12))]).logits
        assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", RUNNING)
def test_bits_of_running_states_do_not_depend_on_the_batch(paths: dict[str, str], name: str, dtype: str) -> None:
    """Texts in one pass, in parts, beside a neighbour, and as a path of a tree."""
    runner = runner_of(paths[name], dtype)
    probe_bits(runner.loaded, runner.backend)


def in_pieces(runner: ModelRunner, cuts: list[int], beside: bool) -> Tensor:
    """Logits of the text computed chunk by chunk, in blocks that lie anywhere, alone or with neighbours."""
    runner.memory = StateMemory(BlockManager(64, 4))
    spare = runner.blocks.allocate(5)
    table = runner.blocks.allocate(12)[::-1]
    found, start = [], 0
    for end in [*cuts, len(TEXT)]:
        segments = [Segment(TEXT[start:end], start, table)]
        if beside:
            segments = [Segment(TEXT[3:12], 0, spare), *segments, Segment(TEXT[7:10], 0, spare[3:])]
        out = runner.forward(segments)
        first, last = out.logits_spans[int(beside)]
        found.append(out.logits[first:last])
        start = end
    return torch.cat(found)


#: Every model with the instruction set that is taken here, in one type, and every type with every instruction set.
CHUNKED = ["llama", "qwen3", "phi3", "gemma2", "gpt_neox", "olmo2", "mixtral", "qwen3_moe_shares", "gpt_oss"]
DTYPES = ["bfloat16", "float32", "float64"]
FEW_CHUNKED = [*in_turn(CHUNKED, DTYPES, available_sets()[-1:]), *product(["mixtral"], DTYPES, available_sets())]


@pytest.mark.parametrize(
    ("name", "dtype", "instruction_set"),
    core(product(CHUNKED, DTYPES, available_sets()), FEW_CHUNKED, *OF_KERNELS),
    indirect=["instruction_set"],
)
def test_bits_do_not_depend_on_the_chunk_or_the_batch(
    paths: dict[str, str], name: str, dtype: str, instruction_set: str
) -> None:
    runner = runner_of(paths[name], dtype)
    whole = in_pieces(runner, [], beside=False)
    for cuts in ([1], [20, 21, 22, 29], list(range(1, 45))):
        for beside in (False, True):
            assert torch.equal(in_pieces(runner, cuts, beside=beside), whole)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2", "qwen3_moe", "gpt_oss"])
def test_a_tree_computes_the_bits_of_its_paths(paths: dict[str, str], name: str, instruction_set: str) -> None:
    runner = runner_of(paths[name], "bfloat16")
    whole = in_pieces(runner, [], beside=False)
    runner.memory = StateMemory(BlockManager(64, 4))
    table = runner.blocks.allocate(12)
    runner.forward([Segment(TEXT[:20], 0, table)])
    tokens = [TEXT[20], 9, TEXT[21], 4, TEXT[22], 8, TEXT[23]]
    parents = (-1, 0, 0, 2, 2, 1, 4)
    logits = runner.forward([Segment(tokens, 20, table, parents)]).logits
    assert torch.equal(logits[[0, 2, 4, 6]], whole[20:24])
    assert not torch.equal(logits[3], whole[22])


def test_without_kernels_the_paged_backend_serves(paths: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    fast = LLM(paths["llama"], dtype="float64")
    assert fast.engine.runner.backend.name == "fused"
    monkeypatch.setenv("OUTRIDER_KERNELS", "off")
    slow = LLM(paths["llama"], dtype="float64")
    assert slow.engine.runner.backend.name == "paged"
    prompts, params = [TEXT[:7], TEXT[:20]], SamplingParams(seed=5, max_tokens=30)
    texts = [[o.token_ids for o in llm.generate(prompts, params)] for llm in (fast, slow)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2", "gpt_neox", "mixtral"])
def test_a_model_that_only_looks_alike_is_left_to_others(paths: dict[str, str], name: str) -> None:
    """Its weights go back to where they were, whatever their layout was."""
    loaded = load_model(ModelConfig(model=paths[name], dtype="float32"))
    before = reference(loaded).logits[0]
    layer = hf_modules.decoder_layers(loaded.model)[1]
    forward = layer.mlp.forward
    layer.mlp.forward = lambda x: forward(x) * 1.5  # what the kernels know nothing of
    want = reference(loaded).logits[0]
    assert not torch.allclose(before, want, rtol=1e-2)
    runner = make_runner(loaded, "auto", CacheConfig(), SchedulerConfig(max_num_seqs=2))
    assert runner.backend.name == "paged"
    table = runner.blocks.allocate(1)
    tokens = [(7 * i + 3) % checkpoints.VOCAB_SIZE for i in range(12)]
    torch.testing.assert_close(runner.forward([Segment(tokens, 0, table)]).logits, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "differing"),
    [
        ("olmo", {"clip_qkv": 3.0}),
        ("olmoe", {"clip_qkv": 3.0}),
        ("opt", {"do_layer_norm_before": False}),
        ("llama", {"hidden_act": "tanh"}),
    ],
)
def test_what_is_not_described_is_left_to_others(
    paths: dict[str, str], name: str, differing: dict[str, Any], tmp_path: Path
) -> None:
    """Even where the tokens of the probe would not show it."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(paths[name])
    config.update(differing)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="the kernels do not know"):
        runner_of(str(tmp_path), "float32")
    assert runner_of(str(tmp_path), "float32", "auto").backend.name == "paged"


def test_dynamic_factors_stay_those_of_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables grow as texts do, and never beyond what the model allows, where its factors would change for all tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=40, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0},
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    monkeypatch.setattr("outrider.model.fused._FIRST_POSITIONS", 16)
    runner = runner_of(str(tmp_path), "float64")
    table, found = runner.blocks.allocate(10), []
    for start in range(0, 40, 10):
        found.append(runner.forward([Segment(TEXT[start : start + 10], start, table)]).logits)
    torch.testing.assert_close(torch.cat(found), stock(str(tmp_path), TEXT[:40]).logits[0], rtol=1e-9, atol=1e-9)


def test_unknown_hidden_states_are_refused(paths: dict[str, str]) -> None:
    runner = runner_of(paths["llama"], "float64")
    segment = Segment([1, 2, 3], 0, runner.blocks.allocate(1))
    last = runner.forward([segment], [-1, 4]).aux_hidden_states
    assert torch.equal(last[-1], last[4])
    with pytest.raises(IndexError):
        runner.forward([segment], [5])


def test_threads_that_differ_do_not_meddle(paths: dict[str, str]) -> None:
    """Two runners in threads of their own, each with its own number of threads, compute what each computes alone."""
    from concurrent.futures import ThreadPoolExecutor

    runners = {count: runner_of(paths["llama"], "float32") for count in (1, 3)}  # transformers loads one at a time

    def passes(count: int) -> Tensor:
        torch.set_num_threads(count)
        runner = runners[count]
        return torch.stack([in_pieces(runner, [7, 20], beside=True) for _ in range(10)])

    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(2) as pool:
            one, three = pool.map(passes, (1, 3))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one, three)
    assert (one == one[0]).all()


def test_wide_groups_need_no_stack(tmp_path: Path) -> None:
    """Sixteen heads of 256 that share their keys, in a thread with less stack than their sums take."""
    from threading import Thread, stack_size

    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=16,
        num_key_value_heads=1, head_dim=256, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    runner, text = runner_of(str(tmp_path), "float64"), [t % 31 for t in TEXT[:20]]
    segment, found = Segment(text, 0, runner.blocks.allocate(5)), []
    usual = stack_size(256 * 1024)
    try:
        thread = Thread(target=lambda: found.append(runner.forward([segment]).logits))
        thread.start()
        thread.join()
    finally:
        stack_size(usual)
    torch.testing.assert_close(found[0], stock(str(tmp_path), text).logits[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_get_their_weights_back(paths: dict[str, str], name: str, quantization: Any) -> None:
    loaded = load_model(ModelConfig(model=paths[name], dtype="bfloat16", quantization=quantization))
    before = numbers_of(loaded.model)
    backend = FusedDecoder()
    backend.install(loaded.model)
    assert all(value.isnan().all() for key, value in loaded.model.state_dict().items() if key.endswith(".down_proj"))
    backend.uninstall()
    after = numbers_of(loaded.model)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], value) for key, value in before.items())


def numbers_of(model: Any) -> dict[str, torch.Tensor]:
    """All weights, the rounded ones in place of those that they stand for."""
    found = {key: value.clone() for key, value in model.state_dict().items() if not value.isnan().any()}
    for name, module in model.named_modules():
        if (stored := getattr(module, "quantised_weight", None)) is not None:
            found[f"{name}.quantised"], found[f"{name}.scale"] = stored.data.clone(), stored.scale.clone()
    return found


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_weights_lie_in_memory_once(paths: dict[str, str], name: str) -> None:
    runner = runner_of(paths[name], "float32")
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in runner.loaded.model.parameters()}
    embeddings = runner.loaded.model.model.embed_tokens.weight
    norms = [p for name, p in runner.loaded.model.named_parameters() if "norm" in name]
    assert sum(held.values()) <= embeddings.nbytes + sum(p.nbytes for p in norms) + 64 * 40
