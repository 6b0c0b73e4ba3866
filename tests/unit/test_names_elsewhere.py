"""Options of llama.cpp's commands and vLLM's, and keywords of their names, are answered with what they are called here."""

from __future__ import annotations

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from outrider import LLM
from outrider.cli.app import app
from outrider.cli.elsewhere import _ANSWER, _RENAMED, _SPECULATIVE, _answer
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
    assert error.problem == "an option of llama.cpp or vLLM"
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


@pytest.mark.parametrize(
    ("given", "here"),
    [
        ("{'model': 'd', 'num_speculative_tokens': 5}", "--draft-model d --num-draft-tokens 5"),
        ("{'model': 'd', 'method': 'eagle3'}", "--draft-model d"),
        ("{'method': 'ngram', 'num_speculative_tokens': 4}", "--method ngram --num-draft-tokens 4"),
        ("{'method': 'deepseek_mtp'}", "--method mtp"),
        ("{}", "--draft-model FOLDER or --method NAME"),
        ("[1]", "--draft-model FOLDER or --method NAME"),
        ("oops", "--draft-model FOLDER or --method NAME"),
    ],
)
def test_a_mapping_of_vllm_is_said_in_options(given: str, here: str) -> None:
    given = given.replace("'", '"')
    assert told("serve", "--speculative-config", given) == told("chat", "-sc", given) == here


def test_options_without_a_setting_are_answered_too() -> None:
    for option in (*_RENAMED, *_ANSWER, *_SPECULATIVE):
        with pytest.raises(InvalidParameterError, match=r"(Use|Set|Give|Leave) .*\.$") as caught:
            _answer(["m", option, "4"], _RENAMED.values())
        assert caught.value.field == option


def test_what_they_are_renamed_to_is_an_option_of_serve() -> None:
    serve = next(each for each in get_command(app).commands.values() if each.name == "serve")  # type: ignore[attr-defined]
    named = {name for option in serve.params for name in option.opts}
    for answer in (*_RENAMED.values(), *(word.rstrip(".,:;") for each in _ANSWER.values() for word in each.split())):
        assert not answer.startswith("--") or answer in named, answer


def test_an_option_that_is_read_as_the_value_of_a_short_one_is_answered() -> None:
    assert told("generate", "m.gguf", "-ngl", "99").startswith("Leave it out: a model lies on one device")


def test_all_options_of_other_engines_in_a_line_are_answered_at_once() -> None:
    line = [
        "serve",
        "-m",
        "m.gguf",
        "--port",
        "1",
        "--ctx-size=512",
        "-ngl",
        "9",
        "-tp",
        "1",
        "--api-key",
        "secret",
        "--zzz",
    ]
    assert str(CliRunner().invoke(app, line).exception) == (
        "-m, --ctx-size, -ngl, -tp, --api-key: options of llama.cpp or vLLM.\n"
        "  -m: Give the model without an option.\n"
        "  --ctx-size: Use --max-model-len 512.\n"
        "  -ngl, -tp: Leave it out: a model lies on one device, and --device chooses it.\n"
        "  --api-key: Set OUTRIDER_API_KEYS in the environment, or use --api-key-file FILE."
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
