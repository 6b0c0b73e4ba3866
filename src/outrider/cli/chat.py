"""`outrider chat`: a conversation in the terminal, through the tokenizer's own chat template."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli import options
from outrider.errors import OutriderError

if TYPE_CHECKING:
    from types import FrameType

    from rich.console import Console

    from outrider.llm import LLM
    from outrider.params import SamplingParams

_HELP = "/help shows this, /reset forgets the conversation, /exit, /quit or Ctrl-D leaves, Ctrl-C stops an answer"


def chat(
    model: options.Model = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    method: options.Method = None,
    draft_model: options.DraftModel = None,
    num_draft_tokens: options.NumDraftTokens = None,
    rule: options.Rule = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    seed: options.Seed = None,
    dtype: options.DType = "auto",
    device: options.Device = None,
    attention_backend: options.Backend = "auto",
    quantization: options.Quantization = None,
    activations: options.Activations = None,
    draft_quantization: options.DraftQuantization = None,
    no_color: options.NoColor = False,
) -> None:
    """Talk with a model that has a chat template (the embedded pair has none)."""
    from rich.console import Console

    console = Console(no_color=no_color or None, highlight=False, soft_wrap=True)
    params = options.sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
    )
    settings = options.speculation(method, draft_model, num_draft_tokens, rule)
    notes = Console(stderr=True, no_color=no_color or None, highlight=False, soft_wrap=True)
    llm = options.load(
        notes,
        model,
        settings,
        dtype=dtype,
        device=device,
        attention_backend=attention_backend,
        quantization=quantization,
        activations=activations,
        draft_quantization=draft_quantization,
    )
    params = options.usual_sampling(llm, params, notes)
    opening = [{"role": "system", "content": system}] if system else []
    llm.chat_prompt([*opening, {"role": "user", "content": "hello"}])  # refuse now, not after the first question
    notes.print(_HELP, style="dim")
    _converse(llm, opening, params, console, notes)


def _converse(llm: LLM, opening: list[dict[str, str]], params: SamplingParams, console: Console, notes: Console) -> None:
    messages = list(opening)
    while True:
        try:
            question = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if question in ("/exit", "/quit"):
            return
        if question == "/help":
            notes.print(_HELP, style="dim")
        elif question == "/reset":
            messages = list(opening)
        elif question:
            messages = _turn(llm, [*messages, {"role": "user", "content": question}], params, console, notes)


def _turn(
    llm: LLM, messages: list[dict[str, str]], params: SamplingParams, console: Console, notes: Console
) -> list[dict[str, str]]:
    """The conversation after one answer; a question that cannot be answered is reported and forgotten."""
    try:
        return [*messages, {"role": "assistant", "content": _answer(llm, messages, params, console, notes)}]
    except OutriderError as error:
        notes.print(f"outrider: {error}", style="red", markup=False)
        return messages[:-1]


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams, console: Console, notes: Console) -> str:
    """Stream one turn; an interrupt ends it between two steps and keeps what was written so far."""
    from outrider.cli.render import Wrapped, ending, write_closing

    start, written, paper = perf_counter(), "", Wrapped(console)
    stream = llm.stream(llm.chat_prompt(messages), params)
    with _interrupts() as interrupted:
        for piece in stream:
            paper.write(piece.spans)
            written += piece.text
            if piece.output is not None:
                paper.finish()
                console.print()
                spent = perf_counter() - start
                ended = ending(piece.output, params)
                write_closing(notes, len(piece.output.token_ids), spent, piece.output.stats, ended)
            elif interrupted():
                stream.close()  # type: ignore[attr-defined]
                paper.finish()
                console.print(" [dim](stopped)[/dim]")
                break
    return written


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Note the first Ctrl-C instead of breaking off in the middle of an engine step; the second one breaks off."""
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(caught)
    finally:
        signal.signal(signal.SIGINT, before)
