"""Drafts of layers that checkpoints carry to predict several tokens, in the whole engine, against a reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, NemotronHConfig

from outrider import LLM, Mtp, SpeculationConfig
from outrider.errors import InvalidParameterError, ModelError, ModelLoadError, UnsupportedModelError
from outrider.heads import mtp
from outrider.heads.formats.mtp import read_mtp_config
from outrider.heads.mtp import FusedMtp, MtpLayer
from outrider.heads.runner import HeadRunner
from outrider.lab.prove.own_model import KV_BOUND, CacheAudit
from outrider.lab.prove.tiny_heads import save_random_mtp
from outrider.propose import eagle
from tests.model import checkpoints
from tests.model.core import DRAFTING, core
from tests.model.mtp_reference import MtpReference
from tests.model.preempted import found_again
from tests.model.test_feature_heads import BOUND, GREEDY, PROMPTS, SEEDED, Watch, faults, proposer_of, texts
from tests.model.test_target import Oracle


class Family(NamedTuple):
    """A family of checkpoints with such layers, the layout that they have, and how many there are."""

    name: str
    layout: str
    num_layers: int = 1


QWEN, DEEPSEEK, MIMO = (
    Family("qwen3_next", "qwen3_next"),
    Family("deepseek_v3", "deepseek_v3"),
    Family("mimo_v2_flash", "mimo_v2", 3),
)
#: What MiMo-7B is, but for the name of its type, and what the speculators package makes.
MIMO_7B, SPECULATORS = Family("qwen2", "mimo_7b"), Family("qwen3", "speculators")
#: A family of whole passes in the kernels, which nobody publishes with such layers.
LLAMA, ONE_LLAMA = Family("llama", "deepseek_v3", 2), Family("llama", "deepseek_v3")
QWEN_3_5 = Family("qwen3_5_text", "qwen3_next")
EXPERTS, TWO_OF_EXPERTS = (Family("qwen3_5_moe_text", "qwen3_next", count) for count in (1, 2))
MORE = (
    QWEN_3_5,
    EXPERTS,
    TWO_OF_EXPERTS,
    Family("glm4_moe", "deepseek_v3"),
    Family("deepseek_v3", "deepseek_v3", 2),
)


def made(family: Family, folder: Path) -> str:
    """A checkpoint of the family with random layers."""
    path = checkpoints.save(family.name, folder / f"{family.name}_{family.num_layers}", seed=3)
    return save_random_mtp(Path(path), path, family.layout, family.num_layers, scale=0.15)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint without such layers."""
    return checkpoints.save("llama", tmp_path_factory.mktemp("llama"), seed=3)


def load(path: str, **how: Any) -> LLM:
    return LLM(path, **{"dtype": "float64", "block_size": 4, "speculation": "none", **how})


def way(**settings: Any) -> SpeculationConfig:
    return SpeculationConfig(method=Mtp(), **(settings if "tree" in settings else {"num_draft_tokens": 4, **settings}))


def watched(family: Family, path: str, patch: pytest.MonkeyPatch) -> Watch:
    return Watch(MtpReference(path, family.layout, family.num_layers, Oracle(path).model), patch)


SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in (SPECULATORS, LLAMA, QWEN, *MORE)]


@pytest.mark.parametrize("family", [DEEPSEEK, MIMO, MIMO_7B, *SLOW], ids=str)
def test_logits_are_those_of_the_reference_over_ten_levels(
    family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(family, tmp_path)
    dtype = "float64" if family.layout == "qwen3_next" else "float32"  # a delta rule adds up what is rounded
    watch, llm = watched(family, path, monkeypatch), load(path, dtype=dtype)
    outputs = llm.generate(PROMPTS[:1], GREEDY.replace(max_tokens=13), speculation=way(num_draft_tokens=11))
    assert faults(outputs) == 0
    assert watch.worst <= BOUND
    assert watch.num_rows > 10
    assert watch.deepest == 10


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        (LLAMA, {"tree": (2, 2, 1)}),
        (ONE_LLAMA, {"tree": (2, 2, 1)}),
        (QWEN, {"num_draft_tokens": 11}),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((LLAMA, {}), (QWEN, {"tree": (2, 2, 1)}))),
    ],
    ids=str,
)
def test_every_draft_is_what_the_reference_says(
    family: Family, shape: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After rejected drafts, prefix hits, preemptions and forks."""
    path = made(family, tmp_path)
    watch, llm = watched(family, path, monkeypatch), load(path, kv_cache_tokens=72, max_num_batched_tokens=48)
    found = found_again(monkeypatch)
    params = [each.replace(max_tokens=10) for each in (GREEDY, SEEDED.replace(temperature=0, n=2), SEEDED) * 2]
    outputs = llm.generate([*PROMPTS, *PROMPTS], params, speculation=way(**shape))
    stats = llm.stats.finished
    assert faults(outputs) == 0
    # Running states are float32 in stock transformers, whatever the dtype of the model.
    assert watch.worst <= (10 * BOUND if family is QWEN else BOUND)
    assert watch.num_rows > 50
    assert stats.num_preemptions > 0
    assert sum(found) > 0
    assert stats.num_draft_tokens > stats.num_accepted_tokens
    assert texts(outputs) == texts(llm.generate([*PROMPTS, *PROMPTS], params, speculation="none"))
    llm.engine.check_integrity()
    llm.engine.check_rest()


HELD = ([(LLAMA,), (ONE_LLAMA,), (MIMO,)], [(LLAMA,), (ONE_LLAMA,)])


@pytest.mark.parametrize("family", core(*HELD, *DRAFTING, "src/outrider/model/"), ids=str)
def test_the_added_layers_hold_what_a_fresh_prefill_gives(family: Family, tmp_path: Path) -> None:
    llm = load(made(family, tmp_path), kv_cache_tokens=60)
    for prompt in PROMPTS:
        llm.engine.add_request(tuple(prompt), SEEDED.replace(n=2, max_tokens=8), way(tree=(2, 1)))
    audit = CacheAudit(llm.engine)
    audit.run()
    assert audit.num_checked > 20
    assert audit.worst <= KV_BOUND
    (added,) = llm.engine.runner.memory.added
    assert added.shape.num_layers == family.num_layers
    per_token = Mtp().added_token_bytes(llm.engine.runner.loaded)
    assert per_token == added.shape.numbers_per_token * 8


def watch_logits(patch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Returns a list that gets the logits behind the tokens of every draft, level by level."""
    rows: list[torch.Tensor] = []
    stock: Any = vars(eagle)["add_level"]

    def watched(growths: Any, logits: torch.Tensor, noise: Any) -> None:
        rows.append(logits.clone())
        stock(growths, logits, noise)

    patch.setattr(eagle, "add_level", watched)
    return rows


def drafted(path: str, kind: type[HeadRunner[Any]], **how: Any) -> list[torch.Tensor]:
    """Logits behind the tokens of every draft of a text, from a runner of this kind."""
    llm = load(path, **how)
    with pytest.MonkeyPatch.context() as patch:
        rows = watch_logits(patch)
        assert faults(llm.generate(PROMPTS[:1], GREEDY.replace(max_tokens=5), speculation=way())) == 0
    assert type(proposer_of(llm, way())._head) is kind
    return rows


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [MIMO_7B, EXPERTS], ids=str)
def test_our_kernels_compute_a_layer_as_its_module_does(
    family: Family, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(family, tmp_path)
    ours = drafted(path, FusedMtp, dtype=dtype)
    monkeypatch.setattr(mtp, "_is_fused", lambda *about: False)
    theirs = drafted(path, HeadRunner, dtype=dtype)
    for found, want in zip(ours[:4], theirs[:4], strict=True):  # of the first draft, whose texts are the same
        assert (found - want).abs().max() <= (1e-5 if dtype == "float32" else 2**-6) * want.abs().max()


def test_several_layers_of_experts_draft_in_bfloat16(tmp_path: Path) -> None:
    """Their gates are given rows as our kernels leave them."""
    assert drafted(made(TWO_OF_EXPERTS, tmp_path), HeadRunner, dtype="bfloat16")


def test_layers_that_our_kernels_do_not_know_stay_modules(tmp_path: Path) -> None:
    for family in (DEEPSEEK, MIMO, LLAMA):
        assert drafted(made(family, tmp_path), HeadRunner)


def _takes_out(name: str) -> Callable[[dict[str, torch.Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_takes_out("model.layers.4.eh_proj.weight"), "has no eh_proj.weight"),
        (_takes_out("model.layers.4.mlp.up_proj.weight"), "layers.0.mlp.up_proj.weight is missing"),
        (lambda t: t.update({"model.layers.4.mlp.up_proj.bias": torch.zeros(48)}), "mlp.up_proj.bias is of no known use"),
        (lambda t: t.update({"model.layers.4.self_attn.k_proj.weight": torch.zeros(3, 4)}), "is of another shape"),
        (lambda t: t.update({"model.layers.4.hnorm.weight": torch.zeros(7)}), "hidden_norm of shape [7], and [32]"),
        (lambda t: t.update({"model.layers.6.hnorm.weight": torch.zeros(32)}), "number 5 is missing"),
        (lambda t: t.update({"model.layers.4.hnorm.weight": torch.full((32,), torch.nan)}), "holds NaN"),
    ],
)
def test_layers_that_cannot_be_read_are_refused(
    spoil: Callable[[dict[str, torch.Tensor]], Any], told: str, llama: str, tmp_path: Path
) -> None:
    folder = save_random_mtp(tmp_path, llama, "deepseek_v3")
    tensors = load_file(tmp_path / "model.safetensors")
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError) as caught:
        load(llama).generate([1, 2], GREEDY, speculation=SpeculationConfig(method=Mtp(model=folder)))
    assert told in caught.value.problem
    assert caught.value.remedy.endswith(".")


def test_a_checkpoint_without_such_layers_is_refused(llama: str, tmp_path: Path) -> None:
    for how, told in (({}, "carries no layers"), ({"model": str(tmp_path)}, "has no model.safetensors")):
        with pytest.raises(ModelError, match=told):
            load(llama).generate([1, 2], GREEDY, speculation=SpeculationConfig(method=Mtp(**how)))
    with pytest.raises(InvalidParameterError, match="no such folder"):
        load(llama).generate([1, 2], GREEDY, speculation=SpeculationConfig(method=Mtp(model=str(tmp_path / "none"))))
    module = AutoModelForCausalLM.from_pretrained(llama)
    with pytest.raises(UnsupportedModelError, match="not in a folder"):
        LLM(module, speculation="none").generate([1, 2], GREEDY, speculation=way())


def test_layers_that_are_not_computed_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"mtp.layers.0.eh_proj.weight": torch.zeros(4, 8)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="is two layers in a nemotron_h"):
        read_mtp_config(str(tmp_path), NemotronHConfig())


def _before_the_final_norm(patch: pytest.MonkeyPatch) -> None:
    stock = HeadRunner.__init__

    def init(self: HeadRunner[Any], *args: Any, **more: Any) -> None:
        stock(self, *args, **more)
        self.aux_layers = (self.aux_layers[0] - 1,)

    patch.setattr(HeadRunner, "__init__", init)


def _halves_swapped(patch: pytest.MonkeyPatch) -> None:
    stock = MtpLayer.enter
    patch.setattr(MtpLayer, "enter", lambda self, embeddings, features: stock(self, features, embeddings))


def _prompt_not_read(patch: pytest.MonkeyPatch) -> None:
    stock = HeadRunner._keep

    def keep(self: Any, added: Any, texts: Any, layer: int, *kept: Any, **how: Any) -> Any:
        prompt = texts[0].start == 0
        return stock(self, added, texts, layer, *(torch.zeros_like(each) if prompt else each for each in kept), **how)

    patch.setattr(HeadRunner, "_keep", keep)


@pytest.mark.by_change("tests/model/")  # of the tests themselves: it plants what they must see
@pytest.mark.parametrize("plant", [_before_the_final_norm, _halves_swapped, _prompt_not_read])
def test_control_a_head_that_reads_something_else_is_seen(
    plant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(LLAMA, tmp_path)
    watch, llm = watched(LLAMA, path, monkeypatch), load(path)
    plant(monkeypatch)
    assert faults(llm.generate(PROMPTS[:2], GREEDY, speculation=way())) == 0
    assert watch.worst > 100 * BOUND
