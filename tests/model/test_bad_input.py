"""Bad input: a typed error with field, value and remedy; neighbours finish."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, DraftModel, SamplingParams, SpeculationConfig
from outrider.config import ModelConfig, default_model
from outrider.errors import (
    ContradictionError,
    InputError,
    InvalidParameterError,
    InvalidPromptError,
    ModelLoadError,
    OutriderError,
    UnsupportedParameterError,
    VocabularyMismatchError,
)
from outrider.loading import loader
from outrider.loading.sources import usable_device
from outrider.params import RequestOutput, StructuredOutputs
from tests.model import checkpoints


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_num_seqs=4, kv_cache_tokens=512)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"n": 0}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"temprature": 1.0}, "temprature"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logit_bias": {"x": 1.0}}, "logit_bias"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words_ids": [[]]}, "bad_words_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"logits_processors": ["not a function"]}, "logits_processors"),
        ({"logprobs": -2}, "logprobs"),
        ({"structured_outputs": "json"}, "structured_outputs"),
    ],
)
def test_parameters_out_of_range(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**values)
    assert caught.value.field == field
    assert caught.value.remedy
    assert field in str(caught.value)


@pytest.mark.parametrize("name", ["best_of", "typical_p", "no_repeat_ngram_size", "num_beams", "response_format"])
def test_parameters_that_are_no_law_or_have_another_name_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedParameterError, match=r"Use|Leave") as caught:
        SamplingParams(**{name: 1})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("values", "field", "kind"),
    [
        ({"method": "ngram", "model": "x"}, "model", InvalidParameterError),
        ({"method": "none", "model": "x"}, "model", InvalidParameterError),
        ({"method": "ngram", "min_match": 4, "max_match": 2}, "min_match", ContradictionError),
        ({"method": "ngram", "min_match": 0}, "min_match", InvalidParameterError),
        ({"method": "ngram", "tree": (2, 1)}, "tree", ContradictionError),
        ({"method": "suffix", "tree": (2, 1)}, "tree", ContradictionError),
        ({"method": "suffix", "factor": 0.0}, "factor", InvalidParameterError),
        ({"method": "draft_model", "dtype": "int8"}, "dtype", InvalidParameterError),
        ({"method": "draft_model", "model": ""}, "model", InvalidParameterError),
        ({"method": 5}, "method", InvalidParameterError),
        ({"num_draft_tokens": 0}, "num_draft_tokens", InvalidParameterError),
        ({"tree": (64, 64)}, "tree", InvalidParameterError),
        ({"tree": "widest"}, "tree", InvalidParameterError),
        ({"method": "token_recycling", "tree": "best_first"}, "tree", ContradictionError),
        ({"method": "ngram", "tree": "sequoia"}, "tree", ContradictionError),
        ({"method": "draft_model", "min_confidence": 1.5}, "min_confidence", InvalidParameterError),
        ({"method": "lookahead", "window": 200, "ngram": 9}, "window", ContradictionError),
        ({"method": "early_exit", "layers": 0}, "layers", InvalidParameterError),
        ({"method": "layer_skip", "skip": ()}, "skip", InvalidParameterError),
        ({"rule": "lossy"}, "rule", InvalidParameterError),
        ({"unknown": 1}, "unknown", InvalidParameterError),
    ],
)
def test_speculation_settings(values: dict[str, Any], field: str, kind: type[InputError]) -> None:
    with pytest.raises(kind) as caught:
        SpeculationConfig.of(values)
    assert caught.value.field == field
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("proposer", "ngram", "method='ngram'"),
        ("draft_model", "x", "method=DraftModel(model='x')"),
        ("draft_dtype", "float32", "method=DraftModel(model=..., dtype='float32')"),
        ("ngram_max", 4, "method=Ngram(max_match=4)"),
        ("ngram_min", 1, "method=Ngram(min_match=1)"),
        ("suffix_min_match", 1, "method=Suffix(min_match=1)"),
        ("suffix_factor", 3.0, "method=Suffix(factor=3.0)"),
        ("suffix_tree", True, "method=Suffix(branches=True)"),
        ("suffix_shared", True, "method=Suffix(shared=True)"),
        ("suffix_cache_mib", 8, "method=Suffix(cache_mib=8)"),
        ("num_speculative_tokens", 3, "num_draft_tokens=3"),
    ],
)
def test_settings_of_other_forms_are_refused_with_the_form_that_works(name: str, value: Any, remedy: str) -> None:
    for ask in (lambda: SpeculationConfig(**{name: value}), lambda: SpeculationConfig.of({"method": "ngram", name: value})):
        with pytest.raises(InvalidParameterError) as caught:
            ask()
        assert (caught.value.field, caught.value.value) == (name, value)
        assert f"Use {remedy}" in caught.value.remedy


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(ContradictionError):
        SamplingParams(min_tokens=5, max_tokens=4)


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ("", {}),
        ([4096], {}),
        ([-1], {}),
        ([1] * 2048, {}),
        ([1] * 300, {"max_tokens": 300}),
        ([1.5], {}),
        (7, {}),
    ],
)
def test_prompts_that_cannot_be_served(llm: LLM, prompt: Any, params: dict[str, Any]) -> None:
    good = "def f("
    outputs = llm.generate(
        [good, prompt, good],
        SamplingParams(temperature=0, max_tokens=4).replace(**params)
        if params
        else SamplingParams(temperature=0, max_tokens=4),
    )
    bad = outputs[1]
    assert isinstance(bad.error, InputError)
    assert bad.error.field
    with pytest.raises(type(bad.error)):
        _ = bad.text
    if not params:
        assert outputs[0].error is None
        assert outputs[0].token_ids == outputs[2].token_ids


def test_a_single_bad_prompt_raises(llm: LLM) -> None:
    with pytest.raises(InvalidPromptError):
        llm.generate("")
    with pytest.raises(InvalidPromptError):
        llm.stream("")


@pytest.mark.parametrize("prompts", [5, None, 1.5, True, b"bytes"])
def test_what_is_neither_a_prompt_nor_a_list_of_prompts(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidPromptError) as caught:
        llm.generate(prompts)
    assert (caught.value.field, caught.value.value) == ("prompts", prompts)
    assert caught.value.remedy == "Give a string, a list of token ids, or a list of either."
    with pytest.raises(InvalidPromptError, match="prompt="):
        llm.stream(prompts)


def test_prompts_may_come_from_an_iterator(llm: LLM) -> None:
    assert len(llm.generate((p for p in ("a", "b")), SamplingParams(max_tokens=1))) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"speculation": "sufix"}, "method"),
        ({"speculation": {"method": "eagle1", "model": "/nowhere"}}, "model"),
        ({"speculation": SpeculationConfig(method="ngram", rule="block"), "params": SamplingParams(seed=1)}, "seed"),
        ({"params": SamplingParams(n=500)}, "n"),
        ({"params": SamplingParams(stop_token_ids=(9999,))}, "stop_token_ids"),
        ({"params": SamplingParams(structured_outputs=StructuredOutputs(regex="("))}, "structured_outputs"),
        ({"params": {"temperature": 0}}, "params"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_that_concerns_the_call_is_raised_before_anything_is_written(
    llm: LLM, more: dict[str, Any], field: str
) -> None:
    finished: list[RequestOutput] = []
    with pytest.raises(InputError) as caught:
        llm.generate(["def f(", "import os"], on_finished=finished.append, **more)
    assert caught.value.field == field
    assert finished == []
    assert not llm.engine.has_work
    one_each = {name: [None, value] for name, value in more.items()}
    good, bad = llm.generate(["def f(", "import os"], **{"params": [SamplingParams(max_tokens=2)] * 2} | one_each)
    assert (good.error, type(bad.error)) == (None, type(caught.value)), "what concerns one prompt stays with it"


def test_what_cannot_be_loaded_is_raised_before_anything_is_written(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", "utf-8")
    finished: list[RequestOutput] = []
    with pytest.raises(OutriderError):
        llm.generate(["a", "b"], speculation={"method": "eagle1", "model": str(tmp_path)}, on_finished=finished.append)
    assert finished == []


def test_chat_without_a_template_is_the_models_fault(llm: LLM) -> None:
    for model, value in ((llm, "the embedded default"), (LLM(default_model("draft")), default_model("draft"))):
        with pytest.raises(InvalidParameterError, match="chat template") as caught:
            model.chat([{"role": "user", "content": "hi"}])
        assert (caught.value.field, caught.value.value) == ("model", value)
        assert "generate" in caught.value.remedy


def test_chat_uses_the_template(llm: LLM) -> None:
    template = (
        "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}# answer:{% endif %}"
    )
    assert llm.tokenizer is not None
    llm.tokenizer.chat_template = template
    try:
        ids = llm.chat_prompt([{"role": "user", "content": "hi"}])
        assert llm.tokenizer.decode(ids) == "# user: hi\n# answer:"
        assert len(llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=3, seed=0))[0].token_ids) == 3
        for messages in ("hi", 5):
            with pytest.raises(InvalidPromptError, match="not a list of messages"):
                llm.chat(messages)  # type: ignore[arg-type]
    finally:
        llm.tokenizer.chat_template = None


def test_lists_of_the_wrong_length(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="2 entries for 1 prompts"):
        llm.generate(["a"], [SamplingParams(), SamplingParams()])


def test_a_seed_and_a_rule_that_breaks_its_promise(llm: LLM) -> None:
    with pytest.raises(ContradictionError) as caught:
        llm.generate("x", SamplingParams(seed=1), speculation=SpeculationConfig(method="ngram", rule="block"))
    assert caught.value.field == "seed"


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        ({"method": "auto", "methods": ["suffix", {"method": "draft_model", "rule": "token"}]}, "methods.1.rule"),
        ({"method": "staged", "drafter": {"method": "ngram", "rule": "block"}}, "drafter.rule"),
    ],
    ids=["what the engine may choose", "a drafter"],
)
def test_a_seed_and_a_rule_inside_that_breaks_its_promise(llm: LLM, asked: dict[str, object], place: str) -> None:
    with pytest.raises(ContradictionError, match=place) as caught:
        llm.generate("x", SamplingParams(seed=1, max_tokens=2), speculation=asked)
    assert caught.value.field == "seed"
    assert llm.generate("x", SamplingParams(max_tokens=2), speculation=asked)[0].error is None


def test_unknown_methods(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="ngram") as caught:
        llm.generate("x", speculation="psychic")
    assert (caught.value.field, caught.value.value) == ("method", "psychic")
    with pytest.raises(InvalidParameterError, match="Did you mean suffix"):
        llm.generate("x", speculation={"method": "sufix"})


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0},
        {"max_num_seqs": 8, "max_num_batched_tokens": 4},
        {"block_size": 0},
        {"kv_cache_tokens": 0},
        {"state_cache_mib": -1},
        {"dtype": "int8"},
        {"attention_backend": "magic"},
        {"max_model_len": 1},
        {"max_model_len": 10**6},
    ],
)
def test_engine_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        LLM(**settings)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("max_num_sequences", "Did you mean max_num_seqs? LLM knows: activations, attention_backend, "),
        ("unheard_of", "LLM knows: activations, attention_backend, "),
        ("gpu_memory_utilization", "Use LLM(kv_cache_tokens=...)"),
        ("tensor_parallel_size", "Leave it out: a model lies on one device."),
        ("num_draft_tokens", "Give it in LLM(speculation=SpeculationConfig(num_draft_tokens=...))."),
        ("temperature", "Give it in generate(prompts, SamplingParams(temperature=...))."),
    ],
)
def test_settings_that_llm_does_not_have(name: str, remedy: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        LLM(**{name: 1})
    assert (caught.value.field, caught.value.value) == (name, 1)
    assert caught.value.remedy.startswith(remedy)
    assert "unknown" not in caught.value.remedy


def test_names_of_other_engines_show_ours(llm: LLM) -> None:
    with pytest.raises(UnsupportedParameterError, match="json_schema"):
        StructuredOutputs(json={})
    with pytest.raises(InvalidParameterError, match=r"SamplingParams\(temperature=0\)"):
        llm.generate("x", do_sample=False)  # type: ignore[arg-type]


def test_a_model_is_a_name_or_a_path() -> None:
    assert LLM(Path(default_model("draft"))).generate("x", SamplingParams(max_tokens=1))
    with pytest.raises(InvalidParameterError, match="model=5"):
        LLM(5)  # type: ignore[arg-type]


def copy_of(part: str, folder: Path) -> Path:
    shutil.copytree(default_model(part), folder)
    return folder


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks a host up fails the test, and at once."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        pytest.fail(f"asked the network for {args[0]}")

    monkeypatch.setattr("socket.getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ["/nowhere/at/all", "/nowhere", "./nowhere", "../nowhere", "~/nowhere", "a/b/c", "a/"])
def test_a_missing_folder_is_named_without_asking_the_hub(name: str) -> None:
    for field in ("model", "draft_model"):
        with pytest.raises(InvalidParameterError, match="no such folder") as caught:
            LLM(name) if field == "model" else LLM(speculation=SpeculationConfig(method=DraftModel(model=name)))
        assert (caught.value.field, caught.value.value) == (field, name)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("speculation", "field"),
    [
        ({"method": "eagle3", "model": "./nowhere"}, "model"),
        ({"method": "mtp", "model": "./nowhere"}, "model"),
        ({"method": "then", "methods": ["suffix", {"method": "medusa", "model": "./nowhere"}]}, "methods.1.model"),
        ({"method": "auto", "methods": ["suffix", {"method": "dflash", "model": "./nowhere"}]}, "methods.1.model"),
    ],
)
def test_missing_heads_are_named_before_the_target_is_loaded(speculation: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidParameterError, match="no such folder") as caught:
        LLM("no/such-target", speculation=speculation)
    assert (caught.value.field, caught.value.value) == (field, "./nowhere")


@pytest.mark.usefixtures("no_network")
def test_a_missing_draft_folder_is_named_in_a_request_too(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="no such folder") as caught:
        llm.generate("x", speculation=SpeculationConfig(method=DraftModel(model="./nowhere")))
    assert caught.value.field == "draft_model"


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(InvalidParameterError, match="neither a folder nor a GGUF file"):
        LLM(str(file))


def test_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen at once where the hub client was told to be offline, and the error says how to tell it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match=r"no folder of that name here.*HF_HUB_OFFLINE=1"):
        LLM("outrider-tests/never-uploaded")


def test_corrupt_weights(tmp_path: Path) -> None:
    folder = copy_of("draft", tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ModelLoadError, match="weights cannot be read"):
        LLM(str(folder))


def test_missing_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = copy_of("draft", tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match="missing"):
        LLM(str(folder))


def test_a_gpu_is_taken_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert usable_device(None) == torch.device("cpu")


@pytest.mark.parametrize("given", [False, True])
def test_bits_that_hold_in_any_batch_are_refused_on_a_gpu(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a weight is read, with the reason."""
    model = loader.load_model(ModelConfig(model=default_model("draft"))).model if given else default_model("draft")
    monkeypatch.setattr(loader, "usable_device", torch.device)
    with pytest.raises(ContradictionError, match="order that depends on the number of rows") as caught:
        LLM(model, device="cuda", batch_invariant=True)
    assert (caught.value.field, caught.value.value) == ("batch_invariant", True)


def test_corrupt_configuration(tmp_path: Path) -> None:
    folder = copy_of("draft", tmp_path / "m")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="configuration"):
        LLM(str(folder))


@pytest.mark.parametrize("name", ["cuda:77", "gpu"])
def test_unusable_device(name: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        LLM(device=name)
    assert (caught.value.field, caught.value.value) == ("device", name)


@pytest.mark.parametrize(
    ("devices", "built", "name", "remedy"),
    [
        (0, False, "cuda", "Use cpu, or install a PyTorch that is built for CUDA."),
        (0, True, "cuda:1", "Use cpu."),
        (0, False, "gpu", "Use cpu."),
        (1, True, "cuda:7", "Use cpu or cuda."),
        (2, True, "cuda:7", "Use cpu or cuda:0 to cuda:1."),
    ],
)
def test_the_remedy_for_a_device_is_one_that_works(
    monkeypatch: pytest.MonkeyPatch, devices: int, built: bool, name: str, remedy: str
) -> None:
    """Never the one that just failed."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such device\nand many more lines")

    monkeypatch.setattr("torch.empty", refuse)
    monkeypatch.setattr("torch.cuda.is_available", lambda: devices > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices)
    monkeypatch.setattr("torch.backends.cuda.is_built", lambda: built)
    with pytest.raises(InvalidParameterError, match="cannot be used here") as caught:
        usable_device(name)
    assert caught.value.remedy == remedy
    assert "\n" not in str(caught.value)


def test_vocabularies_of_different_size(tmp_path: Path) -> None:
    other = checkpoints.save("llama", tmp_path / "other", layers=1)
    with pytest.raises(VocabularyMismatchError):
        LLM(speculation=SpeculationConfig(method=DraftModel(model=other)))


def test_vocabularies_that_name_tokens_differently(tmp_path: Path) -> None:
    folder = copy_of("draft", tmp_path / "m")
    tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    vocab = tokenizer["model"]["vocab"]
    a, b = list(vocab)[300:302]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    with pytest.raises(VocabularyMismatchError, match="2 differ"):
        LLM(speculation=SpeculationConfig(method=DraftModel(model=str(folder))))


def test_every_error_is_an_outrider_error(llm: LLM) -> None:
    with pytest.raises(OutriderError):
        llm.generate("x", params="hot")  # type: ignore[arg-type]


FEW_ROWS = {"max_num_batched_tokens": 12, "max_num_seqs": 4}


@pytest.mark.parametrize(
    ("speculation", "how", "field", "kind"),
    [
        (
            {"method": "draft_model", "tree": (3, 3)},
            {"max_num_batched_tokens": 12, "max_num_seqs": 4},
            "tree",
            ContradictionError,
        ),
        ({"method": "draft_model", "tree": (1,) * 16}, {"max_model_len": 16}, "tree", ContradictionError),
        ({"method": "early_exit", "layers": 99}, {}, "layers", InvalidParameterError),
        ({"method": "layer_skip", "skip": (99,)}, {}, "skip", InvalidParameterError),
    ],
)
def test_a_draft_that_could_never_fit_is_refused_before_any_work(
    speculation: dict[str, Any], how: dict[str, Any], field: str, kind: type[InputError]
) -> None:
    llm = LLM(**how)
    with pytest.raises(kind) as caught:
        llm.generate("a", SamplingParams(max_tokens=4), speculation=speculation)
    assert caught.value.field == field
    assert caught.value.remedy
    assert not llm.engine.has_work
    assert len(llm.generate("a", SamplingParams(max_tokens=4))[0].token_ids) > 0
