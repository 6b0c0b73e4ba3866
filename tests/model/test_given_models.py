"""A model that the caller has loaded: his own stays as it is, to the bit, and ours writes the same as from its folder."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from outrider import LLM, DraftModel, SamplingParams, SpeculationConfig
from outrider.config import default_model
from outrider.errors import ContradictionError, InvalidParameterError, ModelLoadError, VocabularyMismatchError
from outrider.kernels.library import available_sets
from outrider.loading import hf_modules
from tests.model import checkpoints

IDS = [5, 17, 3, 44, 9, 2, 30]
PARAMS = SamplingParams(temperature=0, max_tokens=8)
#: Of every backend at least one, and those whose loading changes more than weights: longrope and experts.
FAMILIES = ("llama", "gemma2", "gpt2", "longrope", "mixtral")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder: Path = tmp_path_factory.mktemp("given")
    return {family: checkpoints.save(family, folder / family) for family in FAMILIES}


def model_from(path: str, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.tensor([IDS])).logits
    return found


def settings_of(model: Any) -> dict[str, Any]:
    """What of a model may not change, beside what it computes."""
    return {
        "config": model.config.to_json_string(),
        "attention": model.config._attn_implementation,
        "experts": getattr(model.config, "_experts_implementation", None),
        "training": [m.training for m in model.modules()],
        "types": [type(m) for m in model.modules()],
        "forwards": [m.__dict__.get("forward") for m in model.modules()],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "weights": [(n, id(p), p.data_ptr(), p.dtype, p.requires_grad) for n, p in model.named_parameters()],
        "tied": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_callers_model_stays_as_it_is(paths: dict[str, str], family: str, dtype: torch.dtype) -> None:
    model = model_from(paths[family], dtype).eval()
    if family == "mixtral" and dtype == torch.float64:
        hf_modules.use_plain_experts(model)  # the stock forward needs it too
    before, settings = logits(model), settings_of(model)
    with LLM(model, kv_cache_tokens=512) as llm:
        if family == "llama":
            assert llm.engine.runner.backend.name == ("fused" if available_sets() else "paged")
        first = llm.generate(IDS, PARAMS)[0].token_ids
        assert torch.equal(logits(model), before)
        assert settings_of(model) == settings
        assert llm.generate(IDS, PARAMS)[0].token_ids == first
    assert torch.equal(logits(model), before)
    assert settings_of(model) == settings
    with LLM(paths[family], dtype=dtype, kv_cache_tokens=512) as by_path:
        assert by_path.generate(IDS, PARAMS)[0].token_ids == first


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_model_in_training_goes_on_training(paths: dict[str, str], family: str) -> None:
    model = model_from(paths[family]).train()
    frozen = next(model.parameters()).requires_grad_(False)
    model(torch.tensor([IDS])).logits.sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    before, settings = logits(model), settings_of(model)
    with LLM(model, kv_cache_tokens=512) as llm:
        llm.generate(IDS, PARAMS)
    assert settings_of(model) == settings
    assert torch.equal(logits(model), before)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.requires_grad is (parameter is not frozen)
        assert (parameter.grad is None) if gradient is None else torch.equal(parameter.grad, gradient)


def test_what_the_caller_changes_later_is_not_ours(paths: dict[str, str]) -> None:
    model = model_from(paths["llama"])
    llm = LLM(model, kv_cache_tokens=512)
    first = llm.generate(IDS, PARAMS)[0].token_ids
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert llm.generate(IDS, PARAMS, namespace="anew")[0].token_ids == first


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_another_dtype_converts_our_copy_as_loading_would(paths: dict[str, str], family: str) -> None:
    model = model_from(paths[family]).eval()
    before, settings = logits(model), settings_of(model)
    with LLM(model, dtype="bfloat16", kv_cache_tokens=512) as llm, LLM(paths[family], dtype="bfloat16") as by_path:
        ours, loaded = (x.engine.runner.loaded.model for x in (llm, by_path))
        assert {n: b.dtype for n, b in ours.named_buffers()} == {n: b.dtype for n, b in loaded.named_buffers()}
        assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
        ask = PARAMS.replace(prompt_logprobs=0)
        assert llm.generate(IDS, ask)[0].prompt_logprobs == by_path.generate(IDS, ask)[0].prompt_logprobs
    assert torch.equal(logits(model), before)
    assert settings_of(model) == settings


def test_hooks_of_the_caller_are_part_of_what_the_model_computes(paths: dict[str, str]) -> None:
    def steer(module: nn.Module, inputs: Any, output: Any) -> Any:
        return output * 0.5

    model = model_from(paths["llama"]).eval()
    plain = LLM(model, kv_cache_tokens=512).generate(IDS, PARAMS.replace(prompt_logprobs=0))[0].prompt_logprobs
    model.model.layers[1].mlp.register_forward_hook(steer)
    law = logits(model)[0].log_softmax(-1)
    steered = LLM(model, kv_cache_tokens=512).generate(IDS, PARAMS.replace(prompt_logprobs=0))[0].prompt_logprobs
    assert steered != plain
    assert steered is not None
    for row, (token, entry) in enumerate(zip(IDS[1:], steered[1:], strict=True)):
        assert entry is not None
        assert entry[token].logprob == pytest.approx(float(law[row, token]), abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_consume_takes_the_module_itself(paths: dict[str, str], family: str) -> None:
    model = model_from(paths[family])
    embeddings = model.get_input_embeddings().weight.data_ptr()
    matrix = weakref.ref(model.model.layers[0].mlp.up_proj.weight)
    llm = LLM(model, consume=True, kv_cache_tokens=512)
    assert llm.engine.runner.loaded.model is model
    if family == "llama":  # where they are the head's too, they are packed with it
        assert model.get_input_embeddings().weight.data_ptr() == embeddings
    assert (matrix() is None) is bool(available_sets())  # packed for the kernels, and freed here
    with LLM(paths[family], dtype="float32", kv_cache_tokens=512) as by_path:
        assert llm.generate(IDS, PARAMS)[0].token_ids == by_path.generate(IDS, PARAMS)[0].token_ids
    for consume in (False, True):
        with pytest.raises(InvalidParameterError, match="taken by consume=True"):
            LLM(model, consume=consume)


def test_what_is_refused_is_not_consumed(paths: dict[str, str]) -> None:
    model = model_from(paths["llama"])
    before = logits(model)
    for settings in ({"max_model_len": 10**6}, {"tokenizer": 5}, {"device": "nowhere"}):
        with pytest.raises(InvalidParameterError):
            LLM(model, consume=True, **settings)  # type: ignore[arg-type]
    assert torch.equal(logits(model), before)
    assert LLM(model, consume=True, kv_cache_tokens=512).generate(IDS, PARAMS)[0].token_ids


def test_consume_converts_in_place(paths: dict[str, str]) -> None:
    model = model_from(paths["gpt2"])
    LLM(model, consume=True, dtype="bfloat16", kv_cache_tokens=512)
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("given", [None, "folder"])
def test_consume_needs_a_module(given: str | None, paths: dict[str, str]) -> None:
    with pytest.raises(ContradictionError) as caught:
        LLM(given and paths["llama"], consume=True)
    assert caught.value.field == "consume"


@pytest.mark.parametrize("name", ["revision", "trust_remote_code"])
def test_a_loaded_model_has_no_source(paths: dict[str, str], name: str) -> None:
    with pytest.raises(ContradictionError, match="loaded already") as caught:
        LLM(model_from(paths["llama"]), **{name: "main" if name == "revision" else True})
    assert caught.value.field == name


def test_modules_that_are_no_causal_language_model(paths: dict[str, str]) -> None:
    headless = AutoModel.from_pretrained(paths["llama"])
    for module in (nn.Linear(2, 2), headless):
        with pytest.raises(InvalidParameterError, match=f"model=.*{type(module).__name__}.*not a causal") as caught:
            LLM(module)
        assert "AutoModelForCausalLM" in caught.value.remedy


def test_a_model_with_an_encoder_may_be_given() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    tiny = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(tiny).eval()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    (output,) = LLM(model, speculation="ngram").generate([[5, 3]], params)
    want = model.generate(torch.tensor([[5, 3]]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert output.outputs[0].token_ids == tuple(want[0, 1:].tolist())


def test_weights_must_be_there(paths: dict[str, str]) -> None:
    with pytest.raises(InvalidParameterError, match="lie on meta"):
        LLM(model_from(paths["llama"]).to("meta"))
    split = model_from(paths["llama"])
    split.lm_head.to("meta")
    with pytest.raises(InvalidParameterError, match="lie on cpu and meta"):
        LLM(split)


def test_adapters_must_be_merged(paths: dict[str, str]) -> None:
    """As transformers and PEFT mark a model that carries some."""
    model = model_from(paths["llama"])
    model._hf_peft_config_loaded = True
    with pytest.raises(InvalidParameterError, match="adapters") as caught:
        LLM(model)
    assert "merge_and_unload" in caught.value.remedy


def test_a_model_that_cannot_be_copied(paths: dict[str, str]) -> None:
    model = model_from(paths["llama"])
    model.scaled = model.lm_head.weight * 2  # a tensor with a history
    with pytest.raises(ModelLoadError, match=r"LlamaForCausalLM.*cannot be copied.*consume=True"):
        LLM(model)


# -- draft models ------------------------------------------------------------------------------------------------------


def test_a_draft_model_that_is_given_loaded_drafts_as_its_folder_does(paths: dict[str, str]) -> None:
    own = model_from(paths["llama"])
    before, kept = settings_of(own), [weight.clone() for weight in own.parameters()]
    sampled = SamplingParams(seed=3, max_tokens=12)
    texts, drafts = [], []
    for draft in (paths["llama"], own):
        with LLM(model_from(paths["llama"]), draft_model=draft, speculation="draft_model", kv_cache_tokens=512) as llm:
            (found,) = llm.generate([IDS], sampled)[0].outputs
            texts.append(found.token_ids)
            drafts.append((found.stats.num_draft_tokens, found.stats.num_accepted_tokens))
            if draft is own:
                assert "draft_model=LlamaForCausalLM (given loaded)" in repr(llm)
                asked = {"method": "draft_model", "min_confidence": 0.5}  # another proposer, of another copy
                assert llm.generate([IDS], sampled, speculation=asked)[0].token_ids == found.token_ids
    assert texts[0] == texts[1]
    assert drafts[0] == drafts[1]
    assert drafts[1][1] > 0  # it drafts for itself
    assert settings_of(own) == before
    assert all(torch.equal(a, b) for a, b in zip(own.parameters(), kept, strict=True))


def test_the_engine_may_choose_a_draft_model_that_is_given_loaded(paths: dict[str, str]) -> None:
    with LLM(paths["llama"], draft_model=model_from(paths["llama"]), kv_cache_tokens=512) as llm:
        methods = llm.speculation.method.methods  # type: ignore[union-attr]
        assert [member.name for member in methods] == ["draft_model", "suffix", "then"]
        assert llm.generate([IDS], PARAMS)[0].token_ids


def test_a_draft_model_that_is_given_loaded_is_checked_before_anything_is_loaded(paths: dict[str, str]) -> None:
    with pytest.raises(InvalidParameterError, match=r"draft_model=.*not a causal language model"):
        LLM("/no/such/folder", draft_model=nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match=r"draft_model=.*lie on meta"):
        LLM("/no/such/folder", draft_model=model_from(paths["llama"]).to("meta"))
    with pytest.raises(InvalidParameterError, match=r"draft_model=3.*neither a path nor a loaded model"):
        LLM("/no/such/folder", draft_model=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match="draft_model"):  # the words for it name no folder
        LLM(paths["llama"], draft_model="LlamaForCausalLM (given loaded)")


def test_a_draft_model_that_is_given_loaded_must_have_as_many_tokens(paths: dict[str, str]) -> None:
    other = model_from(default_model("draft"))
    with pytest.raises(VocabularyMismatchError, match=r"LlamaForCausalLM \(given loaded\).*4,?096 tokens"):
        LLM(paths["llama"], draft_model=other, speculation="draft_model", kv_cache_tokens=512)


# -- tokenizers --------------------------------------------------------------------------------------------------------

PROMPT = "def parse(line):\n"


@pytest.fixture(scope="module")
def expected() -> tuple[int, ...]:
    with LLM(default_model("target"), kv_cache_tokens=512) as llm:
        return llm.generate(PROMPT, PARAMS)[0].token_ids


def test_a_tokenizer_is_given_beside_the_model(expected: tuple[int, ...]) -> None:
    model = AutoModelForCausalLM.from_pretrained(default_model("target"), dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(default_model("target"))
    for given in (tokenizer, default_model("target"), Path(default_model("target"))):
        llm = LLM(model=model, tokenizer=given, kv_cache_tokens=512)
        assert llm.generate(PROMPT, PARAMS)[0].token_ids == expected
        assert llm.tokenizer is not tokenizer
    drafting = SpeculationConfig(method=DraftModel(model=default_model("draft")))
    llm = LLM(model=model, tokenizer=tokenizer, speculation=drafting, kv_cache_tokens=512)
    output = llm.generate(PROMPT, PARAMS)[0]
    assert output.token_ids == expected
    assert output.stats.num_accepted_tokens > 0
    assert repr(llm).startswith("<LLM model=LlamaForCausalLM dtype=bfloat16 ")
    llm.close()
    assert repr(llm) == "<LLM model=LlamaForCausalLM closed>"


def test_without_one_prompts_are_token_ids(paths: dict[str, str]) -> None:
    llm = LLM(model_from(paths["llama"]), kv_cache_tokens=512)
    assert llm.tokenizer is None
    assert llm.generate(IDS, PARAMS)[0].token_ids


def test_a_tokenizer_for_a_folder(tmp_path: Path, expected: tuple[int, ...]) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(default_model("target"), bare, ignore=shutil.ignore_patterns("tokenizer*"))
    assert LLM(bare, kv_cache_tokens=512).tokenizer is None
    for given in (default_model("target"), AutoTokenizer.from_pretrained(default_model("target"))):
        assert LLM(bare, tokenizer=given, kv_cache_tokens=512).generate(PROMPT, PARAMS)[0].token_ids == expected


@pytest.mark.parametrize(
    ("given", "problem"), [(5, "neither a tokenizer"), (len, "neither"), ("./nowhere", "no such folder")]
)
def test_what_is_no_tokenizer(given: Any, problem: str) -> None:
    with pytest.raises(InvalidParameterError, match=problem) as caught:
        LLM(default_model("draft"), tokenizer=given)
    assert (caught.value.field, caught.value.value) == ("tokenizer", given)
