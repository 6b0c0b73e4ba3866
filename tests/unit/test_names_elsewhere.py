"""Options of llama.cpp's commands, and keywords of their names, are answered with what they are called here."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from outrider import LLM
from outrider.cli.app import app
from outrider.errors import InvalidParameterError
from outrider.options import named_elsewhere
from outrider.propose.settings import LLAMA_CPP_TYPES, find

#: Options of llama.cpp's common/arg.cpp that say how to draft.
DRAFTING = (
    "--spec-type", "--spec-draft-n-max", "--spec-draft-p-min", "--draft-p-min", "--spec-draft-model", "-md",
    "--model-draft", "--spec-draft-hf", "-hfd", "--draft", "--draft-n", "--draft-max", "--spec-ngram-mod-n-match",
    "--mtp-draft-model", "--spec-ngram-simple-size-n", "--spec-ngram-map-k-size-n",
)  # fmt: skip


def told(*given: str) -> str:
    error = CliRunner().invoke(app, [*given]).exception
    assert isinstance(error, InvalidParameterError), error
    assert error.problem == "an option of llama.cpp"
    return error.remedy.removeprefix("Use ").removesuffix(".")


@pytest.mark.parametrize("option", DRAFTING)
def test_options_that_say_how_to_draft_have_a_setting_here(option: str) -> None:
    assert named_elsewhere(option) == named_elsewhere(option.lstrip("-").replace("-", "_"))
    assert named_elsewhere(option) is not None


@pytest.mark.parametrize(
    ("given", "here"),
    [
        (("generate", "m.gguf", "--spec-type", "draft-mtp"), "--method mtp"),
        (("chat", "m.gguf", "--spec-type=none"), "--method none"),
        (("serve", "m.gguf", "--spec-type", "draft-simple"), "--draft-model FILE"),
        (("serve", "--spec-type", "ngram-mod,draft-mtp"), '--method \'{"method": "auto", "methods": ["suffix", "mtp"]}\''),
        (("serve", "--spec-type", "draft-eagle3"), '--method \'{"method": "eagle3", "model": "FOLDER"}\''),
        (("generate", "-md", "d.gguf", "m.gguf"), "--draft-model d.gguf"),
        (("generate", "--spec-draft-n-max=5"), "--num-draft-tokens 5"),
        (("chat", "--draft-max", "5"), "--num-draft-tokens 5"),
        (("bench", "--draft-max", "5"), "--way draft_model:5"),
        (("bench", "--spec-type", "draft-mtp"), "--way mtp"),
        (("bench", "--spec-type", "none"), "--way plain"),
        (("serve", "--spec-draft-p-min", "0.75"), '--method \'{"method": "draft_model", "min_confidence": 0.75}\''),
        (("serve", "--mtp-draft-model", "mtp.gguf"), '--method \'{"method": "mtp", "model": "mtp.gguf"}\''),
        (("serve", "--ctx-size", "4096"), "--max-model-len 4096"),
        (("generate", "--temp", "0.3"), "--temperature 0.3"),
        (("generate", "--ctx-size", "4096"), "Leave it out: --max-model-len is an option of outrider serve alone"),
        (("serve", "--draft-min", "1"), "Leave it out: a draft ends where it no longer pays"),
    ],
    ids=str,
)
def test_a_verb_says_its_own_option(given: tuple[str, ...], here: str) -> None:
    assert told(*given) == here


def test_all_options_of_llama_cpp_in_a_line_are_answered_at_once() -> None:
    error = (
        CliRunner().invoke(app, ["serve", "-m", "m.gguf", "--port", "1", "--ctx-size=512", "-np", "4", "--zzz"]).exception
    )
    assert str(error) == (
        "-m='m.gguf': an option of llama.cpp, and so are --ctx-size, -np. -m: Give the model without an option. "
        "--ctx-size: Use --max-model-len 512. -np: Use --max-num-seqs 4."
    )


def test_every_kind_of_drafting_is_a_method() -> None:
    for kind, method in LLAMA_CPP_TYPES.items():
        assert method == "none" or find(method).name == method
        assert method in told("bench", "--spec-type", kind).replace("plain", "none").replace("draft-model", "draft_model")


def test_what_nobody_knows_is_refused_as_before() -> None:
    for verb in ("generate", "bench"):
        result = CliRunner().invoke(app, [verb, "--nonsense", "1"])
        assert (result.exit_code, isinstance(result.exception, SystemExit)) == (2, True)


@pytest.mark.parametrize(
    ("keyword", "here"),
    [
        ({"spec_type": "draft-mtp"}, "Use speculation={'method': 'mtp'}."),
        ({"draft_max": 4}, "Use speculation={'num_draft_tokens': 4}."),
        ({"model_draft": "d.gguf"}, "Use speculation={'method': 'draft_model', 'model': 'd.gguf'}."),
        ({"ctx_size": 512}, "Use LLM(max_model_len=512)."),
        ({"n_predict": 5}, "Use SamplingParams(max_tokens=5)."),
    ],
    ids=str,
)
def test_keywords_of_these_names_are_answered(keyword: dict[str, object], here: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        LLM("m.gguf", **keyword)  # type: ignore[arg-type]
    assert (caught.value.problem, caught.value.remedy) == ("a name of llama.cpp", here)
