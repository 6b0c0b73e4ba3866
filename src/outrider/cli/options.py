"""Options that several verbs share, the objects they stand for, and what is shown while a model loads."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from outrider.cli.flags import Flags
from outrider.cli.startup import light_imports
from outrider.errors import ContradictionError, InvalidParameterError, MissingExtraError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.status import Status

    from outrider.llm import LLM
    from outrider.loading.gguf.header import ShowReading
    from outrider.params import SamplingParams

# --- Options that several verbs share, and the objects they stand for.


def _file_is_there(model: str | None) -> str | None:
    """Tell a wrong path now: what loads a model takes seconds to import."""
    if model is not None:
        from outrider.config import check_file

        check_file("model", model)
    return model


Model = Annotated[
    str | None,
    typer.Argument(
        help="Local folder, GGUF file or hub id; without one, the embedded pair.",
        show_default=False,
        callback=_file_is_there,
    ),
]
Wide = Annotated[
    bool, typer.Option("--wide", help="The embedded target tiled to 0.36 B parameters, where speculation gains.")
]
Method = Annotated[
    str | None,
    typer.Option(
        help="Who drafts: draft_model, cross_vocabulary, early_exit, layer_skip, medusa, blockwise, exit, eagle1, eagle3, "
        "mtp, dflash, dspark, peagle, gemma4_assistant, ngram, suffix, token_recycling, lookahead, prediction (the text "
        "that a request predicts), merge (several in one tree), then (one behind the other), staged (a drafter for the "
        "draft model), auto (the engine chooses), none, a plug-in, module:Class of your own, "
        'or settings like {"method": "suffix", "branches": true}.'
    ),
]
DraftModel = Annotated[str | None, typer.Option(help="Folder, GGUF file or hub id of a draft model, or of a head.")]
NumDraftTokens = Annotated[int | None, typer.Option("--num-draft-tokens", "-k", help="Most draft tokens a step.")]
Profile = Annotated[Path | None, typer.Option(help="A file that outrider tune wrote: who drafts, and how much.")]
ChatTemplate = Annotated[Path | None, typer.Option(help="A file with a chat template, in place of the model's.")]
NoColor = Annotated[bool, typer.Option("--no-color", help="Plain text.")]


@dataclass(frozen=True)
class Drafting:
    """These options say who drafts."""

    method: Method = None
    draft_model: DraftModel = None
    num_draft_tokens: NumDraftTokens = None
    rule: Annotated[str | None, typer.Option(help="auto, block, token, walk or coupled.")] = None

    def config(self) -> Any:
        """Makes the settings that they come to; see `speculation`."""
        return speculation(**vars(self))


@dataclass(frozen=True)
class TreeDrafting(Drafting):
    """These options say who drafts, where trees may be drafted."""

    tree: Annotated[
        str | None, typer.Option(help="Draft trees: children by depth, like 3,2,1, or best_first, or sequoia.")
    ] = None


DraftingT = TypeVar("DraftingT", bound=Drafting)
Sampling = Annotated[dict[str, Any], Flags(("outrider.params:SamplingParams",), are_open=True)]
Loading = Annotated[
    dict[str, Any], Flags(tuple(f"outrider.config:{kind}Config" for kind in ("Model", "Scheduler", "Cache")))
]


# --- The objects that options stand for.


@light_imports()  # a draft model is looked at with transformers
def speculation(
    method: str | None, draft_model: str | None, num_draft_tokens: int | None, rule: str | None, tree: str | None = None
) -> Any:
    """A SpeculationConfig from what was given. A draft model without a method is one to choose from. Where only fields of a
    draft were given, these, for the draft model of the embedded pair; None where nothing was."""
    from outrider.propose.compositions import Auto
    from outrider.propose.defaults import with_draft_model
    from outrider.propose.settings import SpeculationConfig

    widths = None if tree is None else _widths(tree)
    changes = {"num_draft_tokens": num_draft_tokens, "rule": rule, "tree": widths}
    changes = {name: value for name, value in changes.items() if value is not None}
    settings = {} if method is None else method_settings(method)
    if draft_model is not None and method is None and not changes:
        return with_draft_model(Auto.name, draft_model)
    if draft_model is not None and settings.get("method", "draft_model") not in ("draft_model", "cross_vocabulary"):
        return with_draft_model(SpeculationConfig.of({**settings, **changes}), draft_model)
    if draft_model is not None:
        settings = {"method": "draft_model", **settings, "model": draft_model}
    if not settings and not changes:
        return None
    config = SpeculationConfig.of({"method": "draft_model", **settings, **changes})  # what does not fit is refused now
    return config if settings else changes


def method_settings(text: str) -> dict[str, Any]:
    """A method's settings from the command line: its name, module:Class, or JSON that holds either as its "method"."""
    from outrider.propose import settings as registry

    settings = _json_settings(text) if text.lstrip().startswith("{") else {"method": text}
    if ":" in settings["method"]:
        settings["method"] = registry.load(settings["method"]).name
    return settings


def _json_settings(text: str) -> dict[str, Any]:
    remedy = 'Use a form like {"method": "suffix", "branches": true}.'
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParameterError("method", text, f"it is not JSON ({error})", remedy) from None
    if not isinstance(settings, dict) or not isinstance(settings.get("method"), str):
        raise InvalidParameterError("method", text, "it names no method", remedy)
    return settings


def _widths(tree: str) -> str | tuple[int, ...]:
    if tree in ("best_first", "sequoia"):
        return tree
    try:
        return tuple(int(width) for width in tree.split(","))
    except ValueError:
        raise InvalidParameterError(
            "tree", tree, "not a list of whole numbers", "Use a form like 3,2,1, best_first or sequoia."
        ) from None


def structure(json_schema: str | None = None, regex: str | None = None, grammar: str | None = None) -> Any:
    """StructuredOutputs from the options that were given; None where none was."""
    from outrider.params import StructuredOutputs

    asked = {"json_schema": json_schema, "regex": regex, "grammar": grammar}
    given = {name: value for name, value in asked.items() if value is not None}
    if len(given) > 1:
        first, *others = given
        names = " and ".join(f"--{name}" for name in others)
        problem = f"{names} {'is' if len(others) == 1 else 'are'} given, too, and an output has one structure"
        raise ContradictionError(first, given[first], problem, "Leave all but one out.")
    read: dict[str, Callable[[str], Any]] = {"json_schema": _json_schema, "regex": str, "grammar": _grammar}
    return StructuredOutputs(**{name: read[name](value) for name, value in given.items()}) if given else None


def _grammar(value: str) -> str:
    return _text("grammar", value, ":", "a grammar (Lark or GBNF)")


def _json_schema(value: str) -> str:
    text = _text("json_schema", value, "{", "a JSON schema")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidParameterError("json_schema", value, f"it is not JSON ({error})", "Correct it.") from None
    if not isinstance(schema, dict | bool):
        remedy = 'Give an object, like {"type": "object"}.'
        raise InvalidParameterError("json_schema", value, "it is JSON, but no JSON schema", remedy)
    return text


def _text(field: str, value: str, mark: str, kind: str) -> str:
    """The value itself where it holds the mark that all of its kind have; else what the file of that name holds."""
    if mark in value and not os.path.exists(value):
        return value
    try:
        return Path(value).read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        remedy = f"Give a file in UTF-8 that holds {kind}, or its text."
        raise InvalidParameterError(field, value, f"it cannot be read ({reason})", remedy) from None


def wide_pair(model: str | None, drafting: DraftingT, dtype: str) -> tuple[str, DraftingT]:
    """The wide copy of the embedded target, and the embedded draft model unless another one or another method drafts."""
    if model is not None:
        raise ContradictionError("wide", True, "it is a copy of the embedded target", "Leave MODEL or --wide out.")
    from outrider.config import default_model
    from outrider.widen import wide_target

    drafts = drafting.draft_model is None and drafting.method in (None, "draft_model")
    target = wide_target("bfloat16" if dtype == "auto" else dtype)  # "auto" is the embedded checkpoint's own
    return target, replace(drafting, draft_model=default_model("draft")) if drafts else drafting


def sampling(given: dict[str, Any]) -> SamplingParams:
    """Makes the parameters that the options of a command come to."""
    from outrider.params import SamplingParams, StructuredOutputs

    inner = {name: given[name] for name in given.keys() & StructuredOutputs.model_fields.keys()}
    values = {name: value for name, value in given.items() if name not in inner and value not in (None, [])}
    structured = structure(**inner)
    return SamplingParams(**values) if structured is None else SamplingParams(**values, structured_outputs=structured)


#: What decides how a token is drawn, and what llama.cpp takes for it where neither its user nor a file says anything.
_LLAMA_CPP = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def usual_sampling(llm: LLM, asked: SamplingParams, notes: Console) -> SamplingParams:
    """The parameters that were asked for, and what the model's own files say of the others. Where they say nothing of
    sampling, as most GGUF files, tokens are drawn as by llama.cpp: the whole vocabulary of a model of 4 bits reads
    badly."""
    usual, given = llm.default_params, {name: getattr(asked, name) for name in asked.model_fields_set}
    says = _LLAMA_CPP.keys() & usual.model_fields_set
    if llm.engine.runner.loaded.file is not None and not says:
        usual = usual.replace(**_LLAMA_CPP)
        taken = {name: value for name, value in _LLAMA_CPP.items() if name not in given}
        if taken and given.get("temperature") != 0:
            said = ", ".join(f"{name} {value:g}" for name, value in taken.items())
            notes.print(f"the file says nothing of sampling, so as llama.cpp does: {said}", style="dim")
    return usual.replace(**given)


def check_installed(verb: str, packages: Iterable[str], remedy: str) -> None:
    """Raise MissingExtraError where a verb needs a package that is missing."""
    for name in packages:
        if util.find_spec(name) is None:
            raise MissingExtraError(f"outrider {verb}", f"the package {name} is not installed", remedy)


def template(path: Path | None) -> str | None:
    """The chat template in a file."""
    try:
        return None if path is None else path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"it cannot be read ({getattr(error, 'strerror', None) or error})"
        remedy = "Give a file in UTF-8 that holds a Jinja template."
        raise InvalidParameterError("chat_template", str(path), problem, remedy) from None


def use_template(llm: LLM, text: str | None) -> None:
    """Let a model write its conversations with this template, where there is one."""
    if text is None:
        return
    if llm.tokenizer is None:
        raise InvalidParameterError("chat_template", "...", "the model has no tokenizer", "Leave it out.")
    llm.tokenizer.chat_template = text


def load(console: Console, model: str | None, settings: Any, *, chats: bool, **options: Any) -> LLM:
    """Load the target and its proposer behind a spinner, or a bar where a GGUF file is read.

    Args:
        settings: A SpeculationConfig, fields of a draft of the embedded pair, or None.
    """
    changes = settings if isinstance(settings, dict) else {}
    if settings is not None and options.get("profile") is not None:
        problem = "it says who drafts, and other options do too"
        raise ContradictionError("profile", str(options["profile"]), problem, "Leave one of them out.")
    if changes and model is not None:
        name, value = next(iter(changes.items()))
        raise ContradictionError(name, value, "nothing drafts for this model", "Add --method or --draft-model.")
    with shown_loading(console, f"loading {model or 'the embedded pair'}") as show, light_imports():
        from outrider.building import carried_layers
        from outrider.llm import LLM
        from outrider.loading.gguf.header import is_gguf, watched_reading
        from outrider.loading.templates import start_renderer

        if chats and model is not None:  # the embedded pair has no template
            start_renderer()
        with watched_reading(show):
            llm = LLM(model, speculation={"method": "draft_model", **changes} if changes else settings, **options)
    if model is not None and is_gguf(model):
        loaded = llm.engine.runner.loaded
        as_well = "; --activations none leaves rows as they are" if loaded.rounds_rows else ""
        console.print(f"{model}: {loaded.arithmetic}{as_well}", style="dim", markup=False)
    said = carried_layers(llm.engine.runner.loaded, llm.speculation)
    if said and settings != "none":  # instruments say themselves what they measure
        console.print(f"{model}: {said}", style="dim", markup=False)
    return llm


# --- What a terminal shows while a model is loaded: a spinner, and a bar of the bytes of a file that is read.


@contextmanager
def shown_loading(console: Console, text: str) -> Iterator[ShowReading]:
    """Show `text` beside a spinner within the block, and a bar in its place while a file is read.

    Nothing is shown where the console is no terminal.

    Yields:
        What is to be told of bytes that have been read.
    """
    if not console.is_terminal:
        yield lambda name, done, total: None
        return
    with console.status(text) as status:
        bar = _Bar(console, status)
        try:
            yield bar.show
        finally:
            bar.end()


#: Characters of a file's name, so that a line of 80 has room for all that stands behind it.
_NAME = 34


class _Bar:
    """Takes turns with a spinner, since a console shows one moving thing at a time."""

    def __init__(self, console: Console, status: Status) -> None:
        self._console, self._status = console, status
        self._bars: Progress | None = None

    def show(self, name: str, done: int, total: int) -> None:
        if self._bars is None:
            self._begin(name, total)
        assert self._bars is not None, "it has begun"
        self._bars.update(self._bars.task_ids[0], completed=done)
        if done >= total:
            self.end()
            self._status.start()

    def end(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _begin(self, name: str, total: int) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        self._status.stop()
        columns = (TextColumn("{task.description}"), BarColumn(12), DownloadColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, console=self._console, transient=True)
        shown = name if len(name) <= _NAME else f"{name[: _NAME // 2]}…{name[-_NAME // 2 + 1 :]}"
        self._bars.add_task(shown, total=total)
        self._bars.start()
