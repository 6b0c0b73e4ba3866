"""Drafts of Gemma 4's assistants in the whole engine, against transformers' own forward pass."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from outrider import LLM, Gemma4Assistant, Ngram, SpeculationConfig
from outrider.engine.drafting.planning import as_requested
from outrider.errors import HeadMismatchError, ModelLoadError, UnsupportedModelError
from outrider.heads import assistant as heads
from outrider.lab.cli.doctor import _facts
from outrider.lab.doctor.examination import model_facts
from outrider.lab.prove.tiny_heads import save_random_dflash, save_random_eagle
from outrider.loading import hf_modules
from outrider.propose import assistant
from outrider.propose.defaults import drafter_at
from tests.model import checkpoints
from tests.model.checkpoints import VOCAB_SIZE, WINDOW
from tests.model.core import DRAFTING, core
from tests.model.gguf_heads import write_assistant, write_block_head
from tests.model.test_feature_heads import BOUND, GREEDY, LAYERS, PROMPTS, SEEDED, faults, load, texts
from tests.model.test_hostile_heads import change, exchange
from tests.model.test_target import Oracle

#: As published: layers that look back a window, and a last one that sees the whole text; with clusters or without.
ASSISTANTS: dict[str, dict[str, Any]] = {
    "all tokens": {},
    "clusters": {"use_ordered_embeddings": True, "num_centroids": VOCAB_SIZE, "centroid_intermediate_top_k": 9},
}
LAYER_TYPES = ["sliding_attention", "sliding_attention", "full_attention"]
#: Types of text models, and the types of assistants beside them.
KINDS = {text: kind for kind, text in hf_modules.ASSISTANTS.items()}
#: How targets differ from checkpoints of their types: layers before those that are read keep keys and values of their own,
#: and texts are not the same token again and again.
TARGETS: dict[str, dict[str, Any]] = {
    "gemma4_text": {"num_kv_shared_layers": 1},
    "gemma4_unified_text": {"tie_word_embeddings": False},
}
#: What makes the parts that see small.
EYES: dict[str, dict[str, Any]] = {
    "gemma4_text": {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16,
    },
    "gemma4_unified_text": {"mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 16},
}  # fmt: skip


def _all_share(config: Any) -> list[str | None]:
    """What transformers 5.23 raises for where all layers share."""
    return ["reuse"] * config.num_hidden_layers


@contextmanager
def mended_configurations() -> Iterator[None]:
    """A block in which transformers 5.23 builds assistants, as other versions do."""

    def mended(stock: Any) -> property:
        def modes(config: Any) -> Any:
            return _all_share(config) if config.num_kv_shared_layers == config.num_hidden_layers else stock.fget(config)

        return property(modes)

    with pytest.MonkeyPatch.context() as patch:
        for kind in KINDS:
            text = CONFIG_MAPPING[kind]
            patch.setattr(text, "kv_sharing_modes", mended(text.kv_sharing_modes))
        yield


@pytest.fixture(scope="module", autouse=True)
def _mended() -> Iterator[None]:
    """The oracle is an assistant of transformers."""
    with mended_configurations():
        yield


def save_assistant(folder: Path, path: str, seed: int = 5, kind: str | None = None, **fields: Any) -> str:
    """Write an assistant with random weights for a target, or for one of another type; returns its folder."""
    torch.manual_seed(seed)
    target = AutoConfig.from_pretrained(path).get_text_config()
    kind, every = kind or target.model_type, hf_modules.key_heads(target)
    narrow, wide = (every[target.layer_types.index(layer)] for layer in ("sliding_attention", "full_attention"))
    alike = ("vocab_size", "num_attention_heads", "rope_parameters", "attention_k_eq_v")
    of_tokens = ("hidden_size_per_layer_input", "vocab_size_per_layer_input") if kind == "gemma4_text" else ()
    text = AutoConfig.for_model(
        kind, hidden_size=24, intermediate_size=32, num_hidden_layers=len(LAYER_TYPES), layer_types=LAYER_TYPES,
        sliding_window=WINDOW, num_kv_shared_layers=len(LAYER_TYPES), num_key_value_heads=narrow.num,
        head_dim=narrow.width, num_global_key_value_heads=wide.num, global_head_dim=wide.width,
        **dict.fromkeys(of_tokens, 0), **{name: getattr(target, name) for name in alike},
    )  # fmt: skip
    config = AutoConfig.for_model(KINDS[kind], text_config=text, backbone_hidden_size=target.hidden_size, **fields)
    model: Any = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.1 if "norm" in name else 0.3)
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(target.vocab_size))
    model.save_pretrained(folder)
    return str(folder)


class Reference:
    """An assistant of transformers beside the stock target; every draft is computed from its whole text."""

    def __init__(self, folder: str, target: Any, dtype: torch.dtype = torch.float64) -> None:
        self.target = target
        for layer in _last_of_its_type(target):  # transformers 5.23 keeps what they have for layers of the target alone
            layer.self_attn.store_full_length_kv = True
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self.model.set_attn_implementation("eager")

    @torch.no_grad()
    def logits(self, text: tuple[int, ...], path: tuple[int, ...]) -> Tensor:
        """Logits [vocab_size] of the token behind a text that the target has computed but for its last token, and a path
        that was drafted behind it."""
        out = self.target(
            torch.tensor([text[:-1]]), output_hidden_states=True, return_shared_kv_states=True, use_cache=False
        )
        state, seen = out.hidden_states[-1][:, -1:], dict(out.shared_kv_states)
        place = torch.tensor([[len(text) - 1]])
        for token in (text[-1], *path):
            embedding = self.target.get_input_embeddings()(torch.tensor([[token]]))
            read = torch.cat([embedding, state], -1)
            found = self.model(inputs_embeds=read, position_ids=place, shared_kv_states=seen)
            state = found.last_hidden_state
        logits: Tensor = found.logits[0, 0]
        return logits


def _last_of_its_type(target: Any) -> Iterable[Any]:
    """The layers whose keys and values an assistant reads."""
    own = (layer for layer in target.get_decoder().layers if not layer.self_attn.is_kv_shared_layer)
    return {layer.self_attn.layer_type: layer for layer in own}.values()


class Watch:
    """Compares the logits behind every node of every draft with the reference."""

    def __init__(self, reference: Reference, patch: pytest.MonkeyPatch) -> None:
        self.worst, self.num_rows, self.deepest = 0.0, 0, 0
        stock: Any = assistant.add_level

        def watched(growths: Any, logits: Tensor, noise: Any) -> None:
            places = [(growth, node) for growth in growths for node in growth.level]
            for (growth, node), row in zip(places, logits, strict=True):
                request = growth.request
                path = (*request.path, *growth.path(node))
                want = reference.logits(tuple(request.sequence.token_ids), path)
                scored = row > -1e29
                assert bool((want[~scored] == want.min()).all()), "tokens of other clusters are not drafted"
                difference = (row[scored].double() - want[scored]).abs().max() / want[scored].abs().max()
                self.worst = max(self.worst, float(difference.nan_to_num(torch.inf)))
                self.num_rows, self.deepest = self.num_rows + 1, max(self.deepest, len(path))
            stock(growths, logits, noise)

        patch.setattr(assistant, "add_level", watched)


class Made(NamedTuple):
    """A target and assistants of it."""

    kind: str
    path: str
    oracle: Oracle
    folders: dict[str, str]

    @property
    def other(self) -> str:
        """The type of text models that its assistants do not fit."""
        return next(kind for kind in KINDS if kind != self.kind)

    def way(self, name: str, **settings: Any) -> SpeculationConfig:
        settings = settings if "tree" in settings else {"num_draft_tokens": 3, **settings}
        return SpeculationConfig(method=Gemma4Assistant(model=self.folders[name]), **settings)

    def reference(self, name: str) -> Reference:
        return Reference(self.folders[name], self.oracle.model)


#: The unified type has other sizes, and its layers are computed by the same code.
@pytest.fixture(
    scope="module", params=core(KINDS, ["gemma4_text"], *DRAFTING, "src/outrider/loading/", "src/outrider/model/")
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("assistants")
    path = checkpoints.save(request.param, folder / "target", seed=3, **TARGETS[request.param])
    folders = {name: save_assistant(folder / name, path, **how) for name, how in ASSISTANTS.items()}
    return Made(request.param, path, Oracle(path), folders)


# -- what is drafted ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ASSISTANTS)
def test_logits_are_those_of_the_reference(made: Made, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, llm = Watch(made.reference(name), monkeypatch), load(made)
    outputs = llm.generate(PROMPTS, GREEDY.replace(max_tokens=20), speculation=made.way(name, num_draft_tokens=5))
    assert faults(outputs) == 0
    assert watch.worst <= BOUND
    assert watch.num_rows > 50
    assert watch.deepest == 4
    assert max(len(prompt) for prompt in PROMPTS) + 20 > WINDOW + 2, "a window is left behind"


@pytest.mark.parametrize("name", ASSISTANTS)
@pytest.mark.parametrize("shape", [{"tree": (2, 1)}, {"tree": "best_first", "num_draft_tokens": 5}], ids=str)
def test_every_draft_is_what_the_reference_says(
    made: Made, name: str, shape: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After rejected drafts, prefix hits, preemptions and forks, in too little memory for all texts."""
    llm = load(made, kv_cache_tokens=120, max_num_batched_tokens=48)
    watch, way = Watch(made.reference(name), monkeypatch), made.way(name, **shape)
    params = [GREEDY, SEEDED.replace(temperature=0, n=2), SEEDED] * 2
    outputs = llm.generate([*PROMPTS, *PROMPTS], params, speculation=way)
    assert faults(outputs) == 0
    assert watch.worst <= BOUND
    assert watch.num_rows > 50
    assert llm.stats.finished.num_preemptions > 0
    assert texts(outputs) == texts(llm.generate([*PROMPTS, *PROMPTS], params, speculation="none"))
    llm.engine.check_integrity()
    llm.engine.check_rest()


def test_a_draft_behind_another_proposers_takes_in_its_tokens(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, llm = Watch(made.reference("all tokens"), monkeypatch), load(made)
    lookup, way = SpeculationConfig(method=Ngram(min_match=1), num_draft_tokens=2), made.way("all tokens")
    llm.engine.drafting.planner = lambda seq: (lookup, way)
    outputs = llm.generate(PROMPTS, GREEDY, speculation=way)
    llm.engine.drafting.planner = as_requested
    assert faults(outputs) == 0
    assert watch.worst <= BOUND
    assert watch.deepest == 4
    assert texts(outputs) == texts(llm.generate(PROMPTS, GREEDY, speculation="none"))


def test_a_target_that_reads_pictures_too_lends_what_its_language_model_keeps(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = made.oracle.model
    said = text.config.to_dict() | {"pad_token_id": 0}  # which stands for pictures, too
    parts = {"text_config": said, "vision_config": EYES[made.kind], "tie_word_embeddings": said["tie_word_embeddings"]}
    whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(made.kind.removesuffix("_text"), **parts)).double()
    whole.get_decoder().load_state_dict(text.get_decoder().state_dict())
    whole.get_output_embeddings().load_state_dict(text.get_output_embeddings().state_dict())
    whole.save_pretrained(tmp_path)
    watch, llm = Watch(made.reference("all tokens"), monkeypatch), load(made._replace(path=str(tmp_path)))
    outputs = llm.generate(PROMPTS, GREEDY, speculation=made.way("all tokens"))
    assert faults(outputs) == 0
    assert watch.worst <= BOUND
    assert watch.num_rows > 20
    assert texts(outputs) == texts(load(made).generate(PROMPTS, GREEDY, speculation="none"))


def test_it_runs_in_the_precision_of_its_target(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ASSISTANTS:
        with load(made, dtype="bfloat16") as llm:
            outputs = llm.generate(PROMPTS, GREEDY, speculation=made.way(name))
            assert faults(outputs) == 0
            assert llm.stats.finished.num_draft_tokens > 0


def test_a_gguf_file_drafts_as_the_folder_does(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_assistant(made.folders["all tokens"], tmp_path / "assistant.gguf")
    watch, llm = Watch(made.reference("all tokens"), monkeypatch), load(made)
    drafts = []
    for path in (file, made.folders["all tokens"]):
        way = SpeculationConfig(method=Gemma4Assistant(model=path), num_draft_tokens=4)
        outputs = llm.generate(PROMPTS, SEEDED, speculation=way, trace=True)
        assert faults(outputs) == 0
        drafts.append([found.token_ids for output in outputs for found in output.first.rounds or ()])
    assert drafts[0] == drafts[1]
    assert any(map(len, drafts[0]))
    assert watch.worst <= BOUND
    assert isinstance(drafter_at(file), Gemma4Assistant)


def test_a_gguf_file_of_something_else_is_no_assistant(made: Made, tmp_path: Path) -> None:
    llama = checkpoints.save("llama", tmp_path / "llama", seed=3, layers=LAYERS)
    head = save_random_dflash(tmp_path / "head", llama, "deepspec")
    file = write_block_head(head, tmp_path / "head.gguf")
    assert not heads.is_assistant(file)
    with pytest.raises(UnsupportedModelError) as caught:
        heads.read_assistant_config(file)
    assert "its architecture is dflash" in caught.value.problem


# -- planted bugs ------------------------------------------------------------------------------------------------------


def _moves_on(patch: pytest.MonkeyPatch) -> None:
    """Every token of a draft has a place of its own."""
    stock = assistant._Drafting.rows

    def rows(self: Any) -> Any:
        found = stock(self)
        depth = self.growth.node(self.growth.level[0]).depth
        return heads.AssistantRows(found.tokens, found.states, found.position + depth, found.seen)

    patch.setattr(assistant._Drafting, "rows", rows)


def _has_no_window(patch: pytest.MonkeyPatch) -> None:
    stock = heads.Assistant.look

    def look(self: Any, kv: Any, stop: int) -> Any:
        found = stock(self, kv, stop)
        found["sliding_attention"] = self._target.read(kv, self._sources["sliding_attention"], 0, stop)
        return found

    patch.setattr(heads.Assistant, "look", look)


def _reads_an_earlier_layer(patch: pytest.MonkeyPatch) -> None:
    stock = heads._sources

    def sources(config: Any, target: Any) -> dict[str, int]:
        found = stock(config, target)
        return found | {"sliding_attention": found["sliding_attention"] - 2}

    patch.setattr(heads, "_sources", sources)


@pytest.mark.by_change("tests/model/")  # of the tests themselves: it plants what they must see
@pytest.mark.parametrize("plant", [_moves_on, _has_no_window, _reads_an_earlier_layer])
def test_control_an_assistant_that_reads_something_else_is_seen(
    made: Made, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    watch = Watch(made.reference("all tokens"), monkeypatch)
    outputs = load(made).generate(PROMPTS, GREEDY, speculation=made.way("all tokens"))
    assert faults(outputs) == 0
    assert watch.worst > 100 * BOUND


# -- what is refused ---------------------------------------------------------------------------------------------------


def _set(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda mapping: mapping.update(fields)


def _text(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda mapping: mapping["text_config"].update(fields)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_set(model_type="gemma4"), "model_type='gemma4': it is no assistant"),
        (_set(text_config=None), "text_config=None: it describes no layers"),
        (_set(backbone_hidden_size=0), "backbone_hidden_size=0: no size"),
        (_set(num_centroids=7), "num_centroids=7: 61 tokens are not divided so"),
        (_set(centroid_intermediate_top_k="9"), "centroid_intermediate_top_k='9': no size"),
        (_set(model_type=["gemma4_assistant"]), "model_type=['gemma4_assistant']: it is no assistant"),
        (_set(use_ordered_embeddings="no"), "use_ordered_embeddings='no': neither true nor false"),
        (_text(sliding_window=0), "sliding_window=0: no window"),
        (_text(rms_norm_eps=float("nan")), "rms_norm_eps=nan: no number above 0"),
        (_text(hidden_size_per_layer_input=8), "hidden_size_per_layer_input=8: assistants have no such part"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(
    made: Made, spoil: Callable[[dict[str, Any]], Any], told: str, tmp_path: Path
) -> None:
    folder = save_assistant(tmp_path, made.path, **ASSISTANTS["clusters"])
    change(folder, spoil)
    with pytest.raises(ModelLoadError) as caught:
        heads.read_assistant_config(folder)
    drafter_at(folder)  # whatever the file says, it can be asked what it is
    assert told in caught.value.problem
    assert caught.value.remedy.endswith(".")


def test_an_assistant_that_does_not_belong_is_refused(made: Made, tmp_path: Path) -> None:
    wide, short, twice, real, broad = (
        save_assistant(tmp_path / name, made.path, **ASSISTANTS["clusters"])
        for name in ("wide", "short", "twice", "real", "broad")
    )
    exchange(real, "masked_embedding.token_ordering", torch.arange(VOCAB_SIZE).float())
    change(broad, _text(head_dim=2 * json.loads((Path(broad) / "config.json").read_text())["text_config"]["head_dim"]))
    change(wide, _set(backbone_hidden_size=99))
    exchange(short, "post_projection.weight", None)
    file = Path(twice) / "model.safetensors"
    tensors = load_file(file)
    tensors["masked_embedding.token_ordering"][0] = tensors["masked_embedding.token_ordering"][1]
    save_file(tensors, file, {"format": "pt"})
    llm = load(made)
    for folder, kind, told in (
        (wide, HeadMismatchError, "it was made for a target with hidden_size=99"),
        (short, ModelLoadError, "it has no tensor post_projection.weight"),
        (twice, ModelLoadError, "names a token twice"),
        (real, ModelLoadError, "masked_embedding.token_ordering in model.safetensors holds torch.float32"),
        (broad, HeadMismatchError, "its layers of sliding_attention read keys that are"),
    ):
        with pytest.raises(kind) as caught:
            llm.generate([1, 2, 3], GREEDY, speculation=SpeculationConfig(method=Gemma4Assistant(model=folder)))
        assert told in caught.value.problem
    other = checkpoints.save("llama", tmp_path / "llama", seed=3)
    hidden = json.loads((Path(other) / "config.json").read_text())["hidden_size"]
    change(short, _set(backbone_hidden_size=hidden))
    with LLM(other, speculation="none") as llama, pytest.raises(HeadMismatchError) as caught:
        llama.generate([1, 2, 3], GREEDY, speculation=SpeculationConfig(method=Gemma4Assistant(model=short)))
    assert "is a llama" in caught.value.problem


def test_an_assistant_of_the_other_type_is_refused_by_its_field(made: Made, tmp_path: Path) -> None:
    """But beside a target from a GGUF file, which does not tell one type from the other."""
    folder, file = save_assistant(tmp_path / "other", made.path, kind=made.other), tmp_path / "target.gguf"
    with pytest.raises(HeadMismatchError) as caught:
        load(made).generate([1, 2, 3], GREEDY, speculation=SpeculationConfig(method=Gemma4Assistant(model=folder)))
    assert (caught.value.field, caught.value.needed, caught.value.found) == ("model_type", made.other, made.kind)
    file.touch()
    heads.check_target(heads.read_assistant_config(folder), str(file), made.oracle.model.config, VOCAB_SIZE)


def test_an_assistant_is_refused_as_a_target(made: Made) -> None:
    with pytest.raises(UnsupportedModelError, match=r"for a target \(method gemma4_assistant\).* as draft_model"):
        LLM(made.folders["clusters"])


def test_doctor_offers_what_lies_beside_a_target(made: Made, tmp_path: Path) -> None:
    """An assistant that fits, and a head that names the target; and nothing else."""
    target = str(tmp_path / "models" / "gemma")
    shutil.copytree(made.path, target)
    own = save_assistant(tmp_path / "models" / "gemma-assistant", target)
    wide = save_assistant(tmp_path / "models" / "other-assistant", target)
    change(wide, _set(backbone_hidden_size=99))
    save_assistant(tmp_path / "models" / "foreign-assistant", target, kind=made.other)
    (tmp_path / "models" / "broken").mkdir()
    (tmp_path / "models" / "broken" / "config.json").write_text("{")
    llama = checkpoints.save("llama", tmp_path / "models" / "llama", seed=3, layers=LAYERS)
    head = save_random_dflash(tmp_path / "models" / "dspark", llama, "speculators dspark", draft_tokens=(1, 2, 3))
    with LLM(target, speculation="none") as llm:
        facts = model_facts(llm.engine.runner)
    assert facts.beside == (own,)
    table = Console(width=400, file=io.StringIO())
    table.print(_facts("target", facts))
    assert f"--draft-model {own}" in table.file.getvalue()
    with LLM(llama, speculation="none") as llm:
        assert model_facts(llm.engine.runner).beside == (head,)


# -- named as a draft model ----------------------------------------------------------------------------------------------


def test_what_is_given_as_a_draft_model_drafts_as_what_it_is(made: Made, tmp_path: Path) -> None:
    """An assistant or a head drafts as such, beside a lookup and behind it, and under `auto` from the first text."""
    llama = checkpoints.save("llama", tmp_path / "llama", seed=3, layers=LAYERS)
    block = save_random_dflash(tmp_path / "dspark", llama, "deepspec")
    file = write_block_head(block, tmp_path / "dspark.gguf")
    eagle = save_random_eagle(tmp_path / "eagle", llama, "safeailab")
    draft = checkpoints.save("llama", tmp_path / "draft", seed=4, layers=1)
    for target, given, name in (
        (made.path, made.folders["clusters"], "gemma4_assistant"),
        (llama, block, "dspark"),
        (llama, file, "dspark"),
        (llama, eagle, "eagle3"),
        (llama, draft, "draft_model"),
    ):
        with LLM(target, draft_model=given, dtype="float64") as llm:
            config = llm.speculation
            assert [each.name for each in config.candidates] == [name, "suffix", "then"]
            (output,) = llm.generate([PROMPTS[0]], GREEDY)
            assert len(output.token_ids) == GREEDY.max_tokens
        with LLM(target, draft_model=given, speculation="then", dtype="float64") as llm:
            outputs = llm.generate(PROMPTS, GREEDY)
            assert faults(outputs) == 0
            assert llm.stats.finished.drafted_by_method[name] > 0
