"""Options that several verbs share, and the objects they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.errors import ContradictionError

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.llm import LLM

Model = Annotated[
    str | None, typer.Argument(help="Local folder or hub id; without one, the embedded default pair.", show_default=False)
]
Proposer = Annotated[str | None, typer.Option(help="Who drafts: draft_model, ngram, none, or a plug-in.")]
DraftModel = Annotated[str | None, typer.Option(help="Folder or hub id of a draft model.")]
NumDraftTokens = Annotated[int | None, typer.Option("--num-draft-tokens", "-k", help="Most draft tokens a step.")]
Rule = Annotated[str | None, typer.Option(help="auto, block, token, walk or coupled.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to write.")]
Temperature = Annotated[float | None, typer.Option("--temperature", "-t", help="0 is greedy.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[float | None, typer.Option(help="Keep the most likely tokens up to this mass.")]
MinP = Annotated[float | None, typer.Option(help="Keep tokens at least this likely, relative to the best.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text, with any proposer or none.")]
DType = Annotated[str, typer.Option(help="auto, bfloat16, float16, float32 or float64.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
Backend = Annotated[str, typer.Option("--attention-backend", help="auto, paged or gather.")]
NoColor = Annotated[bool, typer.Option("--no-color", help="Plain text.")]


def speculation(proposer: str | None, draft_model: str | None, num_draft_tokens: int | None, rule: str | None) -> Any:
    """A SpeculationConfig from what was given; None where nothing was, which leaves the choice to LLM."""
    from outrider.config import SpeculationConfig

    if proposer is None and draft_model is not None:
        proposer = "draft_model"
    given: dict[str, Any] = {
        "proposer": proposer,
        "draft_model": draft_model,
        "num_draft_tokens": num_draft_tokens,
        "rule": rule,
    }
    given = {name: value for name, value in given.items() if value is not None}
    config = SpeculationConfig(**given)  # also where only changes are given: refused now, not after loading
    return config if given.keys() - {"num_draft_tokens", "rule"} else (given or None)


def sampling(**given: Any) -> Any:
    """SamplingParams from the options that were given."""
    from outrider.params import SamplingParams

    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def load(console: Console, model: str | None, settings: Any, **options: Any) -> LLM:
    """Load the target and its proposer behind a spinner.

    Args:
        console: Where the spinner turns.
        model: As LLM takes it.
        settings: A SpeculationConfig, a dict of changes to LLM's own choice, or None.
        options: Passed on to LLM.
    """
    changes = settings if isinstance(settings, dict) else {}
    if changes and model is not None:
        name, value = next(iter(changes.items()))
        raise ContradictionError(name, value, "nothing drafts for this model", "Add --proposer or --draft-model.")
    with _spinner(console, f"loading {model or 'the embedded pair'}"):
        from transformers.utils import logging as hf_logging

        from outrider.llm import LLM

        hf_logging.disable_progress_bar()
        llm = LLM(model, speculation=None if changes else settings, **options)
        if changes:
            llm.speculation = llm.speculation.replace(**changes)
        return llm


@contextmanager
def _spinner(console: Console, text: str) -> Iterator[None]:
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        yield
