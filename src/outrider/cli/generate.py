"""`outrider generate`: complete prompts, coloured by where each token came from."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options
from outrider.cli.flags import with_options

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Console

    from outrider.llm import LLM
    from outrider.params import CompletionOutput, RequestOutput, SamplingParams

#: A text to go on from, or a conversation to answer.
_Prompt = str | list[dict[str, str]]
#: A ratio of single runs that is nearer to 1 tells nothing.
_NOISE = 0.15


@with_options()
def generate(
    model: options.Model = None,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be repeated.")] = None,
    file: Annotated[
        list[Path] | None, typer.Option("--file", "-f", help="A file that holds one prompt; - is standard input.")
    ] = None,
    *,
    drafting: options.TreeDrafting,
    drawing: options.Sampling,
    loading: options.Loading,
    raw: Annotated[
        bool, typer.Option("--raw", help="Go on from the prompts themselves, also where the model has a chat template.")
    ] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Also decode plainly, and show the speedup.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object instead of text: requests with their samples.")
    ] = False,
    no_color: options.NoColor = False,
) -> None:
    """Complete prompts from --prompt, --file or standard input. A model with a chat template answers them."""
    from rich.console import Console

    notes = Console(stderr=True, no_color=no_color or None, highlight=False, soft_wrap=True)
    prompts = _prompts(prompt or [], file or [])
    params = options.sampling(drawing)
    llm = options.load(notes, model, drafting.config(), chats=not raw, **loading)
    told = Console(stderr=True, quiet=True) if as_json else notes  # what follows is for people
    params, asked = options.usual_sampling(llm, params, told), _asked(llm, prompts, told, raw=raw)
    if not _answer(llm, prompts, asked, params, notes, as_json=as_json, compare=compare, no_color=no_color):
        raise typer.Exit(1)


def _asked(llm: LLM, prompts: list[str], notes: Console, *, raw: bool) -> list[_Prompt]:
    """The prompts as the model was trained to read them: as questions, where it has a chat template."""
    if raw or getattr(llm.tokenizer, "chat_template", None) is None:
        return list(prompts)
    notes.print("answered through the model's chat template; --raw goes on from the prompt itself", style="dim")
    return [[{"role": "user", "content": prompt}] for prompt in prompts]


def _answer(
    llm: LLM,
    prompts: list[str],
    asked: list[_Prompt],
    params: SamplingParams,
    notes: Console,
    *,
    as_json: bool,
    compare: bool,
    no_color: bool,
) -> bool:
    """Write what was asked for in the form that fits it; returns whether every text is there and whole."""
    if compare and not llm.speculation.enabled:
        notes.print("no method: plain decoding beside itself. Give --draft-model, or --method suffix.", style="yellow")
    if as_json:
        return _as_json(llm, prompts, asked, params, notes, compare=compare)
    if len(asked) == 1 and params.n == 1:
        return _stream(llm, asked[0], params, notes, no_color=no_color, compare=compare)
    given = asked if len(asked) > 1 else asked[0]
    return _batch(llm, given, params, notes, no_color=no_color, compare=compare)


@dataclass(frozen=True)
class _Run:
    """One timed run over all prompts."""

    outputs: list[RequestOutput]
    seconds: float
    shares: dict[str, float]

    @property
    def num_tokens(self) -> int:
        return sum(len(c.token_ids) for o in self.outputs for c in o.outputs)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / max(self.seconds, 1e-9)


def _prompts(given: list[str], files: list[Path]) -> list[str]:
    from outrider.errors import InvalidPromptError

    prompts = [*given, *(_standard_input() if str(path) == "-" else _from_file(path) for path in files)]
    if not prompts and not sys.stdin.isatty():
        prompts.append(_standard_input())
    if not prompts:
        raise InvalidPromptError("prompt", None, "there is none", "Use --prompt, --file or standard input.")
    return prompts


def _from_file(path: Path) -> str:
    from outrider.errors import InvalidPromptError

    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidPromptError("file", str(path), f"cannot be read ({error})", "Give a text file in UTF-8.") from None
    if not text:
        raise InvalidPromptError("file", str(path), "it is empty", "Give a file that holds a prompt.")
    return text


def _standard_input() -> str:
    from outrider.errors import InvalidPromptError

    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidPromptError("stdin", "...", f"cannot be read ({error})", "Give text in UTF-8.") from None
    if not text:
        raise InvalidPromptError("stdin", text, "it is empty", "Give a prompt there, or with --prompt or --file.")
    return text


def _stream(llm: LLM, prompt: _Prompt, params: SamplingParams, notes: Console, *, no_color: bool, compare: bool) -> bool:
    """One prompt, shown as it is written; closing line on standard error. One that cannot be served raises."""
    from rich.console import Console

    from outrider.cli.render import ending, legend, members_of, palette, sources, write, write_closing, write_logprobs

    paper = Console(no_color=no_color or None, highlight=False, soft_wrap=True)
    if compare:
        _warm_up(llm, prompt, params)
    members = members_of(llm.speculation, params)
    styles = palette(members)
    start, final = perf_counter(), None
    read = prompt if isinstance(prompt, str) else llm.chat_prompt(prompt)
    stream = llm.stream(read, params)  # a prompt that is refused is not echoed
    if notes.is_terminal and members:
        notes.print(legend(members))
    if isinstance(prompt, str) and llm.engine.runner.loaded.encoder is None:  # else the text does not go on from it
        write(paper, [(prompt, "prompt")])
    for piece in stream:
        write(paper, sources(piece), styles)
        final = piece.output or final
    seconds = perf_counter() - start
    paper.print()
    assert final is not None
    write_logprobs(paper, final.logprobs)
    write_closing(notes, len(final.token_ids), seconds, final.stats, ending(final, params))
    if compare:
        plain = _run(llm, prompt, params, speculation="none")
        _show_comparison(notes, llm, plain, len(final.token_ids) / max(seconds, 1e-9))
        _show_sameness(notes, llm, params, plain.outputs[0].outputs, (final,))
    return _all_whole(llm, params, {"": final}, notes)


def _batch(
    llm: LLM, prompts: _Prompt | list[_Prompt], params: SamplingParams, notes: Console, *, no_color: bool, compare: bool
) -> bool:
    """Several prompts or samples: a progress bar, then the texts; returns as _answer does."""
    from rich.console import Console

    from outrider.cli.render import endings, legend, members_of, palette, write, write_closing, write_logprobs

    paper = Console(no_color=no_color or None, highlight=False, soft_wrap=True)
    if compare:
        _warm_up(llm, prompts, params)
    members = members_of(llm.speculation, params)
    styles = palette(members)
    run = _run_with_progress(llm, prompts, params, notes)
    if notes.is_terminal and len(members) > 1:
        notes.print(legend(members))
    for place, output in enumerate(run.outputs):
        if output.error is not None:
            notes.print(f"prompt {place + 1}: {output.error}", style="red", markup=False)
        for completion in output.outputs:
            paper.print(f"── {_name(place, completion, params)} ──", style="bold" if paper.is_terminal else None)
            write(paper, _spans_of(llm, completion), styles)
            paper.print()
            write_logprobs(paper, completion.logprobs)
    if samples := _samples(run):
        ended = endings(samples, params)
        write_closing(notes, run.num_tokens, run.seconds, llm.stats.finished, ended)
    if compare and samples:
        plain = _run(llm, prompts, params, speculation="none")
        _show_comparison(notes, llm, plain, run.tokens_per_second)
        _show_sameness(notes, llm, params, _samples(plain), samples)
    return _all_served(llm, params, run, notes)


def _name(place: int, completion: CompletionOutput, params: SamplingParams) -> str:
    """Returns the name of a text among several."""
    return f"prompt {place + 1}" + (f", sample {completion.index + 1}" if params.n > 1 else "")


def _all_served(llm: LLM, params: SamplingParams, run: _Run, notes: Console) -> bool:
    """Tells whether every prompt of a run was served with whole texts."""
    several = len(run.outputs) > 1 or params.n > 1
    texts = {
        f"{_name(place, completion, params)}: " if several else "": completion
        for place, output in enumerate(run.outputs)
        for completion in output.outputs
    }
    return _all_whole(llm, params, texts, notes) and all(output.error is None for output in run.outputs)


def _all_whole(llm: LLM, params: SamplingParams, texts: Mapping[str, CompletionOutput], notes: Console) -> bool:
    """Tells whether no structure was cut off; a warning for each that was, after the name of the text."""
    from outrider.cli.render import is_incomplete, warning

    cut = {name: completion for name, completion in texts.items() if is_incomplete(llm, completion, params)}
    for name, completion in cut.items():
        notes.print(f"{name}{warning(completion, params)}", style="yellow")
    return not cut


def _spans_of(llm: LLM, completion: CompletionOutput) -> Iterator[tuple[str, str]]:
    """A finished text with the sources of its tokens, replayed token by token and cut where a stop string cut it."""
    from outrider.engine.text import TextStream

    stream = TextStream[str](llm.tokenizer, ())
    for token, origin, member in zip(completion.token_ids, completion.origins, completion.members, strict=True):
        stream.push(token, member or str(origin), watch=False)
    stream.finish()
    left = len(completion.text)
    for piece, source in stream.release():
        yield piece[:left], source
        left -= min(left, len(piece))


def _is_one(prompts: _Prompt | list[_Prompt]) -> bool:
    return isinstance(prompts, str) or isinstance(prompts[0], dict)


def _run(llm: LLM, prompts: _Prompt | list[_Prompt], params: SamplingParams, **kwargs: Any) -> _Run:
    """Generate for all prompts; one that fails raises where it is given by itself and not in a list."""
    llm.stats.reset()
    start = perf_counter()
    first = prompts if _is_one(prompts) else prompts[0]
    write: Any = llm.generate if isinstance(first, str) else llm.chat
    outputs = write(prompts, params, **kwargs)
    return _Run(outputs, perf_counter() - start, llm.stats.shares())


def _warm_up(llm: LLM, prompts: _Prompt | list[_Prompt], params: SamplingParams) -> None:
    """A few tokens either way, so that a comparison gives the first run no cold start and the second no cached prompt."""
    short = params.replace(max_tokens=4, min_tokens=0)
    _run(llm, prompts, short)
    _run(llm, prompts, short, speculation="none")


def _run_with_progress(llm: LLM, prompts: _Prompt | list[_Prompt], params: SamplingParams, notes: Console) -> _Run:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("writing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notes, transient=True, disable=not notes.is_terminal) as progress:
        task = progress.add_task("", total=1 if _is_one(prompts) else len(prompts))
        return _run(llm, prompts, params, on_finished=lambda _: progress.advance(task))


def _as_json(
    llm: LLM, prompts: list[str], asked: list[_Prompt], params: SamplingParams, notes: Console, *, compare: bool
) -> bool:
    """One object, of one shape whatever was given; returns as _answer does."""
    if compare:
        _warm_up(llm, asked, params)
    run = _run(llm, asked, params)
    answer: dict[str, Any] = {
        "requests": [_request_json(prompt, output) for prompt, output in zip(prompts, run.outputs, strict=True)],
        "tokens_per_second": run.tokens_per_second,
        "time_shares": run.shares,
    }
    if compare:
        plain = _run(llm, asked, params, speculation="none")
        answer["plain_tokens_per_second"] = plain.tokens_per_second
        answer["speedup"] = run.tokens_per_second / plain.tokens_per_second if plain.num_tokens else None
        answer["identical"] = _identical(params, _samples(plain), _samples(run))
    sys.stdout.write(json.dumps(answer, ensure_ascii=False) + "\n")
    return _all_served(llm, params, run, notes)


def _request_json(prompt: str, output: RequestOutput) -> dict[str, Any]:
    """A prompt with its samples, or with the error that says why there are none."""
    from outrider.cli.render import completion_json

    if output.error is not None:
        error = {"type": type(output.error).__name__, "message": str(output.error)}
        return {"prompt": prompt, "error": error}
    return {"prompt": prompt, "samples": [completion_json(completion) for completion in output.outputs]}


def _show_comparison(notes: Console, llm: LLM, plain: _Run, tokens_per_second: float) -> None:
    """One run of each tells a large difference from none, and no digits."""
    ratio = tokens_per_second / plain.tokens_per_second
    if abs(ratio - 1) < _NOISE:
        found, style = "no difference seen", "dim"
    else:
        found, style = f"speedup about {ratio:.1f}x", "bold green" if ratio > 1 else "bold red"
    notes.print(f"plain decoding: {plain.tokens_per_second:.1f} tokens/s, {found} from one run of each", style=style)
    if llm.is_embedded and ratio < 1 + _NOISE:
        notes.print(
            "the embedded target is too small to gain: its passes take hardly longer than a guess. "
            "outrider bench --wide measures one that gains",
            style="yellow",
        )


def _samples(run: _Run) -> list[CompletionOutput]:
    return [completion for output in run.outputs for completion in output.outputs]


def _identical(
    params: SamplingParams, plain: Sequence[CompletionOutput], drafted: Sequence[CompletionOutput]
) -> bool | None:
    """Tells whether two runs wrote the same tokens; None where unseeded sampling promises no such thing."""
    if not params.greedy and params.seed is None:
        return None
    return [c.token_ids for c in plain] == [c.token_ids for c in drafted]


def _show_sameness(
    notes: Console, llm: LLM, params: SamplingParams, plain: Sequence[CompletionOutput], drafted: Sequence[CompletionOutput]
) -> None:
    """Shows how many tokens are the same, or where the texts part and why."""
    pairs = [(one.token_ids, other.token_ids) for one, other in zip(plain, drafted, strict=False)]
    total, same = sum(max(map(len, pair)) for pair in pairs), sum(map(_common, pairs))
    if same == total:
        notes.print(f"{same} of {total} tokens identical", style="dim")
        return
    place, pair = next((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])
    where = f" of text {place + 1}" if len(pairs) > 1 else ""
    head = f"the texts differ from token {_common(pair) + 1}{where} on"
    dtype = str(llm.engine.runner.loaded.dtype).removeprefix("torch.")
    if _identical(params, plain, drafted) is None:
        notes.print(f"{head}: without --seed they are two draws from the same probabilities", style="dim")
        return
    notes.print(
        f"{head}: in {dtype} the last bits of a logit depend on the number of rows, which can turn a near tie. "
        "With --dtype float64 or --batch-invariant they do not",
        style="bold red" if dtype == "float64" else "dim",
    )


def _common(pair: tuple[Sequence[int], Sequence[int]]) -> int:
    """Tokens that two texts begin with alike."""
    return next((place for place, (one, other) in enumerate(zip(*pair, strict=False)) if one != other), min(map(len, pair)))
