"""The command line as a shell sees it: real processes, the embedded pair, exit codes and clean streams."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import Result
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from outrider.cli import generate, render
from outrider.cli import main as interrupts
from outrider.cli.app import app
from outrider.cli.main import main
from outrider.cli.options import speculation, structure
from outrider.cli.render import Wrapped, ending, warning, write
from outrider.config import default_model
from outrider.errors import ContradictionError, InvalidParameterError, VocabularyMismatchError
from outrider.lab.prove.tiny import save_tiny_llama
from outrider.llm import LLM
from outrider.params import CompletionOutput, RequestOutput, SamplingParams, StructuredOutputs, TokenOrigin
from outrider.propose.settings import SpeculationConfig
from outrider.results import RequestStats
from tests.model.vocabularies import save_random, sentencepiece_like
from tests.warm import warm_python

ROOT = Path(__file__).parents[2]
COLOURS = {"FORCE_COLOR": "1", "COLORTERM": "truecolor", "TERM": "xterm-256color"}


def nested(*names: str) -> Any:
    """Methods inside methods."""
    return {"method": names[0], "methods": ["suffix", nested(*names[1:])]} if names else "ngram"


#: Settings of methods inside methods that do not fit together, and what is said of them.
BAD_NESTINGS: list[tuple[dict[str, Any], str]] = [
    ({"method": "merge", "methods": ["ngram", "ngram"]}, "methods.1='ngram': methods.0 has the same settings"),
    ({"method": "merge", "methods": ["ngram"]}, "methods=1: merge needs two methods or more"),
    ({"method": "then", "methods": ["ngram", {"method": "staged"}]}, "methods.1.drafter={}: field required"),
    (nested("merge", "then", "merge", "then", "merge"), "methods='merge': methods stand 5 deep inside each other"),
    ({"method": "then", "methods": ["ngram", {"method": "suffix", "rule": "coupled"}]}, "methods.1.rule='coupled'"),
]


def outrider(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which has imported torch before."""
    return warm_python().run("outrider.cli.main", *arguments, stdin=stdin, **{"COLUMNS": "100", **environment})


def from_nothing(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The same as a shell starts it."""
    command = [sys.executable, "-m", "outrider.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def invoked(*arguments: str, stdin: str = "", **environment: str) -> Result:
    """The same command in this process, where torch is loaded already."""
    return CliRunner().invoke(app, arguments, input=stdin, env={"COLUMNS": "200", **environment})


def inside(*arguments: str, stdin: str = "", **environment: str) -> str:
    """Its standard output."""
    result = invoked(*arguments, stdin=stdin, **environment)
    assert result.exit_code == 0, result.output
    return result.stdout


def as_json(*arguments: str, **kwargs: Any) -> Any:
    return json.loads(inside("generate", "--json", *arguments, **kwargs))


def sample_json(*arguments: str, **kwargs: Any) -> Any:
    """The only sample of the only prompt."""
    ((sample,),) = (request["samples"] for request in as_json(*arguments, **kwargs)["requests"])
    return sample


@pytest.mark.parametrize("arguments", [("--help",), ("chat", "-h")])
def test_help(arguments: tuple[str, ...]) -> None:
    result = outrider(*arguments)
    assert result.returncode == 0
    assert "Usage" in result.stdout


def test_help_and_the_page_tell_the_exit_codes() -> None:
    told, page = invoked("--help").stdout, (ROOT / "docs" / "how-to" / "command.md").read_text("utf-8")
    for code in (0, 1, 2, 130):
        assert f" {code} " in told.partition("Exit codes:")[2]
        assert f"| {code} |" in page


@pytest.mark.parametrize(("typed", "said"), [
    ("serv", "No such command 'serv'. Did you mean 'serve'?"),
    ("loaf", "No such command 'loaf'. The commands are generate"),
])  # fmt: skip
def test_an_unknown_command_is_answered_with_those_that_there_are(typed: str, said: str) -> None:
    result = invoked(typed)
    assert result.exit_code == 2
    assert said in result.stderr
    assert "--help' for help" in result.stderr


@pytest.mark.parametrize(("typed", "said"), [("run", "outrider chat MODEL"), ("pull", "GGUF files"), ("show", "doctor")])
def test_a_command_of_ollama_is_answered(typed: str, said: str) -> None:
    error = invoked(typed, "llama3.2:1b").exception
    assert isinstance(error, InvalidParameterError)
    assert (error.value, error.problem) == (typed, "a command of Ollama")
    assert said in error.remedy


def _verbs(group: Any, *names: str) -> dict[tuple[str, ...], Any]:
    """All commands by what is typed, those inside others too."""
    found = {names: group}
    for name, command in getattr(group, "commands", {}).items():
        found |= _verbs(command, *names, name)
    return found


VERBS = _verbs(get_command(app))


@pytest.mark.by_change("src/outrider/cli/", "src/outrider/lab/cli/")
@pytest.mark.parametrize("names", VERBS, ids=" ".join)
def test_help_cuts_no_name_at_80_columns(names: tuple[str, ...]) -> None:
    shown = invoked(*names, "--help", COLUMNS="80").output
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    options = [name for each in VERBS[names].params for name in each.opts if name.startswith("--")]
    assert [name for name in options if name not in shown.split()] == []


def test_vocabulary(tmp_path: Path) -> None:
    pair = default_model("target"), default_model("draft")
    shown = inside("vocabulary", *pair)
    assert "4,096, 100.0% of the target's" in shown
    assert f"--draft-model {pair[1]}" in shown
    sample = tmp_path / "sample.txt"
    sample.write_text("def f(x):\n    return x\n", "utf-8")
    other = save_random(tmp_path / "other", sentencepiece_like(), eos_token="</s>", unk_token="<unk>")
    found = json.loads(inside("vocabulary", pair[0], other, "--text", str(sample), "--json"))
    assert found["num_text_tokens"] < 20
    assert 0 < found["share_of_text"] < 1
    assert found["match"] == "tokens"
    assert '"method": "cross_vocabulary"' in inside("vocabulary", pair[0], other)


@pytest.mark.parametrize(
    ("field", "arguments"), [("draft", ("nowhere/at/all",)), ("text", (default_model("draft"), "--text", "nowhere"))]
)
def test_vocabulary_of_what_is_not_there(field: str, arguments: tuple[str, ...]) -> None:
    error = invoked("vocabulary", default_model("target"), *arguments).exception
    assert isinstance(error, InvalidParameterError)
    assert error.field == field


def test_a_draft_model_goes_into_methods_that_are_made_of_others() -> None:
    merged = speculation("merge", "DRAFT", None, None)
    assert [member.name for member in merged.method.methods] == ["suffix", "draft_model"]
    assert merged.method.methods[1].method.model == "DRAFT"
    stage = speculation('{"method": "staged", "drafter": "suffix"}', "DRAFT", 3, None)
    assert (stage.method.model, stage.num_draft_tokens) == ("DRAFT", 3)
    with pytest.raises(ContradictionError):
        speculation('{"method": "merge", "methods": ["suffix", "ngram"]}', "DRAFT", None, None)


def test_a_draft_model_may_have_another_vocabulary() -> None:
    how = speculation("cross_vocabulary", "DRAFT", None, None)
    assert how.method.name == "cross_vocabulary"
    assert how.method.model == "DRAFT"


def test_version() -> None:
    from outrider import __version__

    assert outrider("--version").stdout.split() == ["outrider", __version__]


def test_help_loads_no_torch() -> None:
    code = "import sys, outrider.cli.app; print(sorted({'torch', 'transformers', 'pydantic', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "[]"


def test_json_is_one_object_with_everything() -> None:
    given = ("-p", "def f(", "--max-tokens", "12", "--seed", "3", "--dtype", "float64")
    answer = as_json(*given, "--method", "draft_model")
    assert set(answer["time_shares"]) == {"propose", "forward", "verify", "host"}
    assert answer["tokens_per_second"] > 0
    ((sample,),) = (request["samples"] for request in answer["requests"])
    assert len(sample["token_ids"]) == len(sample["origins"]) == 12
    assert set(sample["origins"]) <= {"plain", "accepted", "recovered", "bonus"}
    assert sample["finish_reason"] == "length"
    stats = sample["stats"]
    assert stats["num_accepted_tokens"] == sample["origins"].count("accepted")
    assert stats["mean_acceptance_length"] == pytest.approx(1 + stats["num_accepted_tokens"] / stats["num_drafts"])
    plain = sample_json(*given, "--method", "none")
    assert plain["text"] == sample["text"]
    assert set(plain["origins"]) == {"plain"}


@pytest.mark.by_change("src/outrider/cli/", "src/outrider/lab/cli/")
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("prompts", [["def f("], ["def f(", ""], [""], ["a", "b"]])
def test_json_has_one_shape(prompts: list[str], samples: int) -> None:
    given = [part for prompt in prompts for part in ("-p", prompt)]
    result = invoked("generate", "--json", *given, "-n", str(samples), "--max-tokens", "3")
    assert result.exit_code == (1 if "" in prompts else 0)
    answer = json.loads(result.stdout)
    assert set(answer) == {"requests", "tokens_per_second", "time_shares"}
    assert [request["prompt"] for request in answer["requests"]] == prompts
    for request in answer["requests"]:
        if request["prompt"]:
            assert set(request) == {"prompt", "samples"}
            assert [len(sample["token_ids"]) for sample in request["samples"]] == [3] * samples
        else:
            assert set(request) == {"prompt", "error"}
            assert request["error"]["type"] == "InvalidPromptError"
            assert "prompt=''" in request["error"]["message"]


def test_prompts_from_files_and_standard_input(tmp_path: Path) -> None:
    file = tmp_path / "prompt.py"
    file.write_text("class A:\n", "utf-8")
    common = ("--max-tokens", "4", "-t", "0")
    from_file = sample_json("--file", str(file), *common)
    from_stdin = sample_json(*common, stdin="class A:\n")
    assert from_file["token_ids"] == from_stdin["token_ids"]


def test_text_goes_to_standard_output_without_colours() -> None:
    given = ("-p", "def f(", "--max-tokens", "8", "--seed", "1", "--method", "draft_model")
    result = from_nothing("generate", *given)
    assert result.returncode == 0
    answer = sample_json(*given)
    assert result.stdout == f"def f({answer['text']}\n"
    assert "\x1b" not in result.stdout
    assert "tokens/s" in result.stderr
    assert "mean acceptance length" in result.stderr


def test_text_is_kept_character_for_character() -> None:
    prompt = "if x:\n\treturn d[:smile:] [bold]a[/bold]\x0c\n"
    assert inside("generate", "-p", prompt, "--max-tokens", "2").startswith(prompt)
    paper = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=10)
    write(paper, [("\tlonger than the paper is wide \x0c", "accepted"), (":smile:\n", "plain")])
    assert re.sub(r"\x1b\[[0-9;]*m", "", paper.file.getvalue()) == "\tlonger than the paper is wide \x0c:smile:\n"  # type: ignore[attr-defined]


@pytest.mark.by_change("src/outrider/cli/", "src/outrider/lab/cli/")
def test_colours_only_on_a_terminal_that_wants_them() -> None:
    command = ("generate", "-p", "def f(", "--max-tokens", "8", "-t", "0", "--method", "draft_model")
    assert "38;2;18;160;122" in inside(*command, **COLOURS)
    assert "38;2" not in inside(*command, **COLOURS, NO_COLOR="1")
    assert "38;2" not in inside(*command, "--no-color", **COLOURS)


@pytest.mark.by_change("src/outrider/cli/", "src/outrider/lab/cli/")
def test_logprobs_are_shown_as_text_too() -> None:
    command = ("-p", "def f(", "--max-tokens", "4", "-t", "0", "--logprobs", "1")
    entries = sample_json(*command)["logprobs"]
    for samples in ("1", "2"):
        shown = inside("generate", *command, "-n", samples).splitlines()
        heads = [place for place, line in enumerate(shown) if line.split() == ["token", "logprob", "rank", "others"]]
        assert len(heads) == int(samples)
        for line, (own, *others) in zip(shown[heads[-1] + 1 :], entries, strict=True):
            assert line.startswith(f"{own['token']!r} ")
            assert line.endswith("".join(f"   {other['token']!r} {other['logprob']:.3f}" for other in others))
            assert f" {own['logprob']:.3f}     {own['rank']}" in line
    assert "logprob" not in inside("generate", *command[:-2])


def test_compare_shows_the_speedup() -> None:
    result = invoked("generate", "-p", "def f(", "--max-tokens", "8", "--seed", "1", "--dtype", "float64", "--compare")
    assert "from one run of each" in result.stderr
    assert "8 of 8 tokens identical" in result.stderr
    answer = as_json("-p", "x", "--max-tokens", "4", "--compare")
    assert answer["speedup"] > 0
    assert answer["identical"] is None  # unseeded samples promise the same distribution, not the same text


@pytest.mark.parametrize(("seconds", "said", "warns"), [
    (1.1, "no difference seen from one run", True), (0.5, "speedup about 2.0x", False), (2.0, "speedup about 0.5x", True),
])  # fmt: skip
def test_a_comparison_has_the_digits_that_one_run_bears(seconds: float, said: str, warns: bool) -> None:
    notes = Console(file=io.StringIO(), width=200)
    llm = cast(LLM, SimpleNamespace(is_embedded=True))
    tokens = CompletionOutput(0, "", (1,) * 100, (TokenOrigin.PLAIN,) * 100, "length", None, RequestStats())
    run = generate._Run([cast(RequestOutput, SimpleNamespace(outputs=[tokens]))], 1.0, {})
    generate._show_comparison(notes, llm, run, 100 / seconds)
    assert isinstance(notes.file, io.StringIO)
    assert said in notes.file.getvalue()
    assert ("too small to gain" in notes.file.getvalue()) is warns


def test_a_comparison_says_where_texts_part() -> None:
    runs = [invoked("generate", "-p", "def f(", "--max-tokens", "12", "--compare", *more) for more in ((), ("-n", "2"))]
    for run, what in zip(runs, ("", " of text "), strict=True):
        assert f"{what}" in run.stderr
        assert "the texts differ from token" in run.stderr
        assert "without --seed they are two draws" in run.stderr


def test_lines_of_a_chat_break_between_words() -> None:
    paper = Console(file=io.StringIO(), force_terminal=True, width=20, color_system=None)
    wrapped = Wrapped(paper)
    pieces = (
        "The quick br",
        "own fox ju",
        "mps over",
        " the lazy dog.",
        "\nAn",
        "other line\t",
        "supercalifragilistic",
        "!",
    )
    for piece in pieces:
        wrapped.write([(piece, "plain")])
    wrapped.finish()
    assert isinstance(paper.file, io.StringIO)
    lines = paper.file.getvalue().split("\n")
    assert [line.rstrip() for line in lines] == [
        "The quick brown fox", "jumps over the lazy", "dog.", "Another line", "supercalifragilistic!",
    ]  # fmt: skip
    pipe = Console(file=io.StringIO(), width=20)
    Wrapped(pipe).write([("The quick brown fox jumps over", "plain")])
    assert isinstance(pipe.file, io.StringIO)
    assert pipe.file.getvalue() == "The quick brown fox jumps over"


@pytest.mark.by_change("src/outrider/cli/", "src/outrider/lab/cli/")
def test_the_closing_line_says_how_the_text_ended() -> None:
    cut = invoked("generate", "-p", "def f(", "--max-tokens", "6", "--ignore-eos")
    assert (cut.exit_code, "cut off at 6 tokens (--max-tokens)" in cut.stderr) == (0, True)
    stopped = invoked("generate", "-p", "def f(", "-t", "0", "--max-tokens", "200", "--stop", ":\n")
    assert (stopped.exit_code, "stopped at ':\\n'" in stopped.stderr) == (0, True)
    ended = invoked("generate", "-p", "x = ", "--regex", "[0-9]{3}", "--max-tokens", "20")
    assert (ended.exit_code, "stopped at its end" in ended.stderr) == (0, True)
    several = invoked("generate", "-p", "def f(", "-n", "3", "--max-tokens", "4", "--ignore-eos")
    assert "3 texts cut off at 4 tokens (--max-tokens)" in several.stderr


def test_a_full_context_is_not_blamed_on_max_tokens() -> None:
    stats = RequestStats()
    output = CompletionOutput(0, "ab", (1, 2), (TokenOrigin.PLAIN,) * 2, "length", None, stats)
    assert ending(output, SamplingParams(max_tokens=2)) == "cut off at 2 tokens (--max-tokens)"
    params = SamplingParams(max_tokens=3)
    assert ending(output, params) == "cut off at 2 tokens (the model's context is full)"
    assert warning(output, params).endswith("Give a shorter prompt: the model's context is full.")


def test_members_have_colours_and_a_legend_of_their_own() -> None:
    method = {"method": "merge", "methods": ["suffix", {"method": "draft_model", "model": "d"}]}
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
    members = render.members_of(SpeculationConfig.of(method), params)
    assert members == ["suffix", "draft_model", "forced"]
    styles = render.palette(members)
    assert len({styles[each] for each in (*members, "recovered", "bonus", "plain", "prompt")}) == 7
    assert [word for word in str(render.legend(members)).split() if word in styles] == [*members, "recovered", "bonus"]
    alone = render.members_of(SpeculationConfig.of("suffix"), SamplingParams())
    assert alone == ["suffix"]
    assert str(render.legend(alone)).startswith("accepted draft token")
    assert render.palette(alone)["suffix"] == render.STYLES["accepted"]
    assert render.members_of(SpeculationConfig(), SamplingParams()) == []


STRUCTURE = ("generate", "-p", "x = ", "--json-schema", '{"type": "string", "minLength": 60}')


@pytest.mark.by_change("src/outrider/cli/", "src/outrider/lab/cli/")
@pytest.mark.parametrize("more", [(), ("-n", "2"), ("--json",)])
def test_a_structure_that_was_cut_off_is_a_failure(more: tuple[str, ...]) -> None:
    cut = invoked(*STRUCTURE, *more, "--max-tokens", "3")
    assert cut.exit_code == 1
    assert cut.stderr.count("the output is incomplete") == (2 if "-n" in more else 1)
    assert "Raise --max-tokens." in cut.stderr
    assert cut.stderr.count("prompt 1, sample 2: the output is incomplete") == ("-n" in more)


def test_a_structure_that_is_complete_at_the_last_token_is_none() -> None:
    whole = invoked("generate", "-p", "x = ", "--regex", "[0-9]+", "--max-tokens", "1")
    assert (whole.exit_code, "cut off at 1 tokens" in whole.stderr) == (0, True)
    assert "incomplete" not in whole.stderr


def test_a_comparison_of_nothing_is_left_out() -> None:
    result = invoked("generate", "-p", "", "-p", "", "--compare")
    assert (result.exit_code, "speedup" in result.stderr) == (1, False)
    result = invoked("generate", "-p", "", "--compare", "--json")
    assert (result.exit_code, json.loads(result.stdout)["speedup"]) == (1, None)


def test_one_bad_prompt_among_several() -> None:
    result = invoked("generate", "-p", "def f(", "-p", "", "--max-tokens", "4")
    assert result.exit_code == 1
    assert "prompt 1" in result.stdout
    assert "prompt 2: prompt=''" in result.stderr


@pytest.mark.by_change("src/outrider/cli/", "src/outrider/lab/cli/")
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("generate", "-p", "x", "--temperature", "-1"), 2, "temperature=-1.0"),
        (("generate", "-p", "x", "--method", "psychic"), 2, "Known: "),
        (("generate", "-p", "x", "--method", "ngram", "--draft-model", "y"), 2, "--draft-model='y'"),
        (("generate", "-p", "x", "--seed", "1", "--rule", "block"), 2, "seed"),
        (("generate", "-p", "x", "--frobnicate"), 2, "No such option"),
        (("generate", "-p", "x", "-k", "0"), 2, "--num-draft-tokens=0"),
        (("generate", "/nowhere/at/all", "-p", "x", "-k", "3"), 2, "nothing drafts"),
        (("generate", "-f", "/nowhere/at/all"), 2, "cannot be read"),
        (("generate", "-p", os.fsdecode(b"half\xff")), 2, "not valid Unicode"),
        (
            ("generate", "-p", "x", "--json-schema", "./nowhere.json"),
            2,
            "--json-schema='./nowhere.json': it cannot be",
        ),
        (("generate", "-p", "x", "--regex", "("), 2, "--regex='(': it is malformed"),
        (("generate", "-p", "x", "--grammar", str(ROOT / "LICENSE")), 2, "LICENSE': it is malformed"),
        (("generate", "-p", "x", "--regex", "a", "--grammar", "b"), 2, "--regex='a': --grammar is given, too"),
        (("generate", "-p", "x", "--dtype", "int8"), 2, "Use --quantization int8."),
        (("train", "data", "--prompts", "./nowhere", "--out", "./o"), 2, "--prompts='nowhere': it cannot be read"),
        (("generate",), 2, "stdin='': it is empty. Give a prompt there, or with --prompt or --file."),
        (("generate", "-f", "-"), 2, "stdin='': it is empty"),
        (("generate", "-f", os.devnull), 2, f"file='{os.devnull}': it is empty"),
        (("generate", "/nowhere/at/all", "-p", "x"), 2, "model='/nowhere/at/all': no such folder"),
        (("generate", "-p", "x", "--draft-model", "./nowhere"), 2, "--draft-model='./nowhere': no such folder"),
        (("bench", "--draft-model", "./nowhere"), 2, "--draft-model='./nowhere': no such folder"),
        (("generate", "./nowhere.gguf", "-p", "x"), 2, "model='./nowhere.gguf': no such file"),
        (("prove", "./nowhere"), 2, "model='./nowhere': no such folder"),
        (("chat",), 2, "model='the embedded default': it has no chat template"),
        *(
            ((*command, "--method", json.dumps(asked)), 2, says)
            for command in (("generate", "-p", "x"), ("serve",))
            for asked, says in BAD_NESTINGS
        ),
    ],
)
def test_failures_are_one_clear_line(
    arguments: tuple[str, ...], code: int, says: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["outrider", *arguments])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setattr(interrupts, "watch", lambda: None)  # signals are those of the tests
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as left:
        main()
    told = capfd.readouterr()
    assert left.value.code == code
    assert says in told.err
    assert "Traceback" not in told.err
    assert told.out == ""


def test_a_process_that_fails_says_so_in_one_line() -> None:
    result = outrider("generate", "-p", "x", "--temperature", "-1")
    assert (result.returncode, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert "temperature=-1.0" in result.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"caf\xe9", "cannot be read ('utf-8' codec"),
        (b'{"type":', "not JSON (Expecting value: line 1 column 9"),
        (b"[1]", "no JSON schema"),
    ],
)
def test_a_schema_file_that_holds_none_is_named(tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "schema.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidParameterError) as caught:
        structure(str(file), None, None)
    assert (caught.value.field, caught.value.value) == ("json_schema", str(file))
    assert says in caught.value.problem


def test_structure_is_given_itself_or_in_a_file(tmp_path: Path) -> None:
    for name, text in {"json_schema": '{"type": "object"}', "grammar": 'start: "a"'}.items():
        (tmp_path / name).write_text(text, "utf-8")
        for value in (text, str(tmp_path / name)):
            assert getattr(structure(**{"json_schema": None, "regex": None, "grammar": None, name: value}), name) == text
    with pytest.raises(InvalidParameterError, match=r"grammar='nowhere\.lark': it cannot be read"):
        structure(None, None, "nowhere.lark")


@pytest.mark.by_change("src/outrider/cli/", "src/outrider/lab/cli/")
def test_bytes_that_are_no_text_spoil_only_their_own_prompt(tmp_path: Path) -> None:
    result = outrider("generate", "-p", os.fsdecode(b"half\xff"), "-p", "def f(", "--max-tokens", "2")
    assert result.returncode == 1
    assert "prompt 2" in result.stdout
    (tmp_path / "latin1").write_bytes(b"caf\xe9")
    assert outrider("generate", "-f", str(tmp_path / "latin1")).returncode == 2


def test_debug_shows_the_traceback() -> None:
    result = outrider("--debug", "generate", "/nowhere/at/all", "-p", "x")
    assert result.returncode == 2
    assert "Traceback" in result.stderr


@pytest.mark.by_change("src/outrider/cli/", "src/outrider/lab/cli/")
def test_an_interrupt_leaves_quietly() -> None:
    command = [
        sys.executable,
        "-m",
        "outrider.cli.main",
        "generate",
        "-p",
        "def f(",
        "--max-tokens",
        "1900",
        "--ignore-eos",
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1) == "d"
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(60) == 130
        assert process.stderr.read() == ""


TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"


def conversing(folder: Path) -> Path:
    """The embedded target with a chat template."""
    model = folder / "conversing"
    shutil.copytree(default_model("target"), model)
    settings = json.loads((model / "tokenizer_config.json").read_text("utf-8"))
    settings["chat_template"] = TEMPLATE
    (model / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return model


def test_generate_answers_where_the_model_has_a_chat_template(tmp_path: Path) -> None:
    asked = ("generate", str(conversing(tmp_path)), "-t", "0", "--max-tokens", "6", "--method", "none")
    question, whole = "x = 1", "# user: x = 1\n"
    answered, raw = invoked(*asked, "-p", question), invoked(*asked, "--raw", "-p", whole)
    assert "--raw goes on from the prompt itself" in answered.stderr
    assert "chat template" not in raw.stderr
    assert raw.stdout.removeprefix(whole) == answered.stdout, "the same tokens, and a question is not echoed"
    several = json.loads(invoked(*asked, "-p", question, "-p", "y", "--json").stdout)["requests"]
    assert [each["prompt"] for each in several] == [question, "y"]
    assert several[0]["samples"][0]["text"] == answered.stdout.removesuffix("\n")
    batch = invoked(*asked, "-p", question, "-p", "y", "--compare")
    assert batch.exit_code == 0, batch.output
    assert answered.stdout.strip() in batch.stdout


def test_what_the_model_says_of_sampling_holds(tmp_path: Path) -> None:
    model = tmp_path / "own"
    shutil.copytree(default_model("target"), model)
    (model / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": 1}), "utf-8")
    asked = ("generate", str(model), "-p", "def f(", "--max-tokens", "12", "--method", "none")
    assert invoked(*asked).stdout == invoked(*asked, "-t", "0").stdout, "only the likeliest token is left"
    assert invoked(*asked, "--seed", "1", "--top-k", "0").stdout != invoked(*asked).stdout


def test_chat_goes_on_after_a_question_that_cannot_be_served(tmp_path: Path) -> None:
    model = conversing(tmp_path)
    questions = f"hello\n{'word ' * 3000}\n/clear\nhello\n/help\n/bye\nnever asked\n"
    result = outrider("chat", str(model), "--max-tokens", "4", "-t", "0", "--quantization", "int8", stdin=questions)
    assert result.returncode == 0
    assert result.stderr.count("tokens/s, cut off at 4 tokens (--max-tokens)") == 2
    assert result.stderr.count("outrider: ") == 1
    assert result.stderr.count("/save FILE, /load FILE") == 1, "on /help"
    answers = [answer for answer in map(str.strip, result.stdout.split("> ")) if answer]
    assert len(answers) == 2
    assert answers[0] == answers[1]  # /clear forgot the first


def test_a_chat_takes_the_template_of_a_file(tmp_path: Path) -> None:
    model, template, how = (
        conversing(tmp_path),
        tmp_path / "own.jinja",
        ("--max-tokens", "6", "-t", "0", "--method", "none"),
    )
    template.write_text(TEMPLATE, "utf-8")
    own = outrider("chat", str(model), *how, stdin="hello\n/bye\n")
    given = outrider("chat", "--chat-template", str(template), *how, stdin="hello\n/bye\n")
    assert given.stdout == own.stdout
    assert own.stdout.strip("> \n")
    refused = outrider("chat", "--chat-template", str(tmp_path / "none"), stdin="")
    assert refused.returncode == 2
    assert "No such file or directory). Give a file in UTF-8 that holds a Jinja template." in refused.stderr


def test_commands_of_a_chat(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    lines = [
        "/stats", "/nonsense and more", "/set temperature hot", "/set temperature -1", "/set temperature 0", "/set depth 3",
        "/set max_tokens 3", "/set system Be short.", '"""/not a command', 'but two lines"""', f"/save {file}", "/clear",
        f"/load {file}", "/usr/bin is a path", "/stats", f"/save {file}", "/load /nowhere/at/all", "/load", "/bye",
    ]  # fmt: skip
    result = outrider("chat", str(conversing(tmp_path)), "--method", "none", stdin="\n".join(lines))
    assert result.returncode == 0
    said = result.stderr
    assert "nothing was answered yet" in said
    assert "there is no command /nonsense. /help shows those that there are" in said
    assert "temperature='hot': no number" in said
    assert "temperature=-1" in said
    assert "depth" in said
    assert "/nowhere/at/all" in said
    assert "there is no name of a file" in said
    assert said.count("tokens/s, cut off at 3 tokens") == 2
    assert re.search(r"the conversation has \d+ of 2,048 tokens, in 4 messages", said)
    kept = json.loads(file.read_text("utf-8"))
    assert [each["role"] for each in kept] == ["system", "user", "assistant", "user", "assistant"]
    assert [kept[place]["content"] for place in (0, 1, 3)] == [
        "Be short.",
        "/not a command\nbut two lines",
        "/usr/bin is a path",
    ]


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ("hello\r", [("hello", False)]),
        ("one\x1b\rtwo\r", [("one\ntwo", False)]),
        ("\x1b[200~pasted\nlines\n\x1b[201~ and more\r", [("pasted\nlines\n and more", False)]),
        ('"""/a\rb"""\r', [("/a\nb", True)]),
        ("dropped\x03kept\r", [("kept", False)]),
        ("abc\x1b[D\x1b[DX\r\x04", [("aXbc", False), None]),
    ],
    ids=["line", "alt-enter", "paste", "quotes", "interrupt", "editing"],
)
def test_lines_are_edited_in_a_terminal(
    typed: str, messages: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prompt_toolkit.application import create_app_session
    from prompt_toolkit.input import create_pipe_input
    from prompt_toolkit.output import DummyOutput

    from outrider.cli import lines

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        ask = lines._editor(Console(quiet=True))
        pipe.send_text(typed)
        for message in messages:
            found = ask()
            assert (found if message is None else (found.text, found.is_quoted)) == message  # type: ignore[union-attr]
    history = tmp_path / "outrider" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "\n+" in history.read_text("utf-8"), "for the next conversation"


@pytest.mark.parametrize(
    ("typed", "later", "messages"),
    [
        ("one\n", "", [("one", False)]),
        ("one\ntwo\n\nthree\n", "", [("one\ntwo\n\nthree", False)]),
        ("one\nand the be", "ginning\n", [("one\nand the beginning", False)]),
        ('"""/a\nb"""\n', "", [("/a\nb", True)]),
    ],
    ids=["line", "paste", "paste without an end", "quotes"],
)
def test_pasted_lines_are_one_message_where_nothing_can_be_edited(
    typed: str, later: str, messages: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.cli import lines

    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "r", encoding="utf-8", buffering=1) as terminal:
        console = Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"})

        def ask(prompt: str) -> str:
            if not prompt.strip("[]bold/"):
                os.write(ours, later.encode())
            return os.read(theirs, 4096).decode().removesuffix("\n")  # a terminal gives line by line

        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr(console, "input", ask)
        read = lines.reader(console, console)
        os.write(ours, typed.encode())
        for message in messages:
            found = read()
            assert found is not None
            assert (found.text, found.is_quoted) == message
        os.write(ours, b"and alone\n")
        assert read() == lines.Typed("and alone")
    os.close(ours)


def test_an_interrupt_stops_an_answer_and_leaves_no_mark_in_it(tmp_path: Path) -> None:
    """In a terminal of its own, whose driver would write ^C."""
    ours, theirs = pty.openpty()
    file = tmp_path / "talk.json"
    command = [
        sys.executable,
        "-m",
        "outrider",
        "chat",
        str(conversing(tmp_path)),
        "--max-tokens",
        "1800",
        "--method",
        "none",
    ]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
                          preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
                          env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm",
                                   "PROMPT_TOOLKIT_NO_CPR": "1"}) as process:  # fmt: skip
        os.close(theirs)
        shown, prompts = b"", 0

        def until(wanted: bytes, times: int = 1) -> None:
            nonlocal shown
            while shown.count(wanted) < times:
                assert select.select([ours], [], [], 60)[0], shown
                shown += os.read(ours, 65536)

        def type_in(line: str) -> None:
            """What is typed before the prompt is whole may be lost, or is read as if it was pasted."""
            nonlocal prompts
            prompts += 1
            until(b"\x1b[?2004h", prompts)
            drawn = shown[: shown.rindex(b"\x1b[?2004h")].count(b"\x1b[?25h")
            until(b"\x1b[?25h", drawn + 1)
            os.write(ours, line.encode())

        try:
            type_in("x = 1\r")
            until(b"def")  # it writes code
            os.write(ours, b"\x03")
            until(b"stopped")
            type_in(f"/save {file}\r")
            until(b"written to")
            type_in("/bye\r")
            assert process.wait(60) == 0
        finally:
            process.kill()
    os.close(ours)
    assert b"^C" not in shown
    question, answer = json.loads(file.read_text("utf-8"))
    assert (question["content"], answer["role"]) == ("x = 1", "assistant")
    assert "stopped" not in answer["content"]


@pytest.mark.by_change("src/outrider/cli/", "src/outrider/lab/cli/")
def test_unreadable_output_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m outrider.cli.main generate -p x --max-tokens 30 | head -c 1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in result.stderr


def test_prove_of_another_engine_exits_by_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.lab.peers.assisted import AssistedGeneration
    from outrider.lab.prove.running import Finding

    verdicts = ((Finding(0.0, 0.5, "a"), 0), (Finding(1.0, 0.5, "b"), 1), (Finding(1.0, 0.5, "c", informs=True), 0))
    for finding, code in verdicts:
        monkeypatch.setattr(AssistedGeneration, "proofs", lambda *a, finding=finding, **k: [("claim [x]", lambda: finding)])
        result = CliRunner().invoke(app, ["prove", "--engine", "transformers", "--json"])
        assert result.exit_code == code
        assert json.loads(result.stdout)["engine"].startswith("transformers ")
        assert "claim [x]" in CliRunner().invoke(app, ["prove", "--engine", "transformers"]).stdout
        assert "| claim [x] |" in CliRunner().invoke(app, ["prove", "--engine", "transformers", "--markdown"]).stdout


def test_prove_reports_and_exits_by_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.lab.prove import suite
    from outrider.lab.prove.running import Finding

    for measured, code in ((0.0, 0), (1.0, 1)):
        finding = Finding(measured, 0.5, "planted")
        monkeypatch.setattr(suite, "proofs", lambda *a, finding=finding, **k: iter([("claim", lambda: finding)]))
        result = CliRunner().invoke(app, ["prove", "--quick", "--json"])
        assert result.exit_code == code
        assert json.loads(result.stdout)["passed"] is (code == 0)
        assert "claim" in CliRunner().invoke(app, ["prove", "--quick"]).stdout


def test_those_who_draft_together_are_counted_below_the_text() -> None:
    asked = ("generate", "-p", "x = [1, 2, 3, 1, 2, 3,", "-t", "0", "--max-tokens", "24", "--ignore-eos", "--method")
    stage = {"method": "staged", "drafter": {"method": "suffix", "min_match": 1}}
    said = invoked(*asked, json.dumps({"method": "merge", "methods": ["token_recycling", stage]})).stderr
    assert re.search(r"draft tokens accepted by method: staged \d+ of \d+, token_recycling \d+ of \d+\n", said)
    assert re.search(r"staged\.suffix: [1-9]\d* passes of the draft model, which kept \d+ of \d+ guessed tokens\n", said)
    alone = invoked(*asked, "suffix").stderr
    assert "by method" not in alone
    assert "passes of the draft model" not in alone


def test_a_model_of_another_vocabulary_is_named_by_its_place(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "other", 1)
    other = {"method": "staged", "drafter": {"method": "draft_model", "model": folder}}
    result = invoked("generate", "-p", "x", "--method", json.dumps({"method": "then", "methods": ["ngram", other]}))
    assert isinstance(result.exception, VocabularyMismatchError)
    assert str(result.exception).startswith("methods.1.drafter.model: ")
    result = invoked("generate", "-p", "x", "--draft-model", folder)
    assert isinstance(result.exception, VocabularyMismatchError)
    assert str(result.exception).startswith(f"--draft-model={folder!r}: it has 3 tokens")
    result = invoked("generate", folder, "-p", "x", "--method", "draft_model")
    assert str(result.exception) == "--draft-model: --method draft_model needs one. Use --draft-model."
