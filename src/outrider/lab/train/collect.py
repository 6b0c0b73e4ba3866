"""The target writes training data on prompts of the user, and what it computes is kept beside them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from outrider.draft import Draft
from outrider.errors import InvalidParameterError, InvalidPromptError, OutriderError
from outrider.llm import LLM
from outrider.model.target import Target
from outrider.params import RequestOutput, SamplingParams
from outrider.prompts import PromptEncoder
from outrider.propose.base import DraftNoise, ObservedRows, Proposer, ProposeRequest, Requirements
from outrider.propose.settings import PLAIN, Method, ProposerContext, SpeculationConfig
from outrider.records import (
    TOP_LOGITS,
    TOP_TOKENS,
    DataSettings,
    EncodedPrompt,
    Manifest,
    Record,
    TargetFacts,
    hidden_name,
    keep_witness,
    open_manifest,
    prompt_of,
    read_records,
    target_facts,
    target_witness,
    write_shard,
)

logger = logging.getLogger(__name__)

#: Texts in a file. A run that is broken off writes those of its last file again.
SHARD_RECORDS = 256
#: The sequences that a target writes at a time.
_AT_A_TIME = 64


@dataclass(frozen=True)
class Wanted:
    """A text that is to be written."""

    prompt: EncodedPrompt  # what it follows
    sample: int  # which text of the prompt it is

    def seed(self, base: int) -> int:
        """The seed of its noise: another for each text, the same whenever it is written."""
        mixed = int.from_bytes(self.prompt.digest[:8], "big") + 0x9E3779B97F4A7C15 * (self.sample + 1) + base
        return mixed % 2**63


@dataclass(frozen=True)
class Collected:
    """Holds what a run came to."""

    manifest: Manifest  # of the data that are there now
    num_written: int  # texts that this run wrote
    # Prompts that the target refused, as those that are too long: where they stand, and why.
    refused: tuple[tuple[str, str], ...]


def collect(
    sources: Sequence[Source],
    folder: Path,
    settings: DataSettings,
    *,
    target: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    activations: str | None = None,
    limit: int | None = None,
    shard_records: int = SHARD_RECORDS,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_size: Callable[[int], None] = lambda num_bytes: None,
) -> Collected:
    """Let the target write on the prompts, and keep what it writes in a folder.

    A text that is there already is not written again, so that the same call goes on where it was broken off, and more
    prompts may be added later. Each text has its own seed: which texts are written together changes nothing.

    A limit of prompts chooses them by their digests. `on_size` is called before anything is written, with the most bytes
    that will be added to the folder.
    """
    how: dict[str, Any] = {"dtype": dtype, "device": device, "activations": activations}
    with LLM(target, speculation="none", max_num_seqs=_AT_A_TIME, **how) as llm:
        facts = target_facts(llm.engine.runner.loaded)
        _check_rows(settings, facts)
        manifest = open_manifest(folder, facts, settings)
        witness = target_witness(Target(llm.engine.runner))
        encoder = PromptEncoder(llm.prompts.tokenizer, target)  # of texts of any length, since it is pieces that are taken
        prompts = encode_prompts(sources, encoder, settings.prompt_tokens)[:limit]
        there = {(record.digest, record.sample) for record in read_records(folder, manifest)}
        wanted = [Wanted(prompt, sample) for prompt in prompts for sample in range(settings.samples)]
        missing = [each for each in wanted if (each.prompt.digest, each.sample) not in there]
        writer = _Writer(llm, settings, partial(_tell, count(len(wanted) - len(missing) + 1), len(wanted), on_progress))
        itemsize = llm.engine.runner.loaded.dtype.itemsize
        on_size(sum(settings.most_bytes(len(each.prompt.token_ids), facts, itemsize) for each in missing))
        keep_witness(folder, manifest, witness)
        manifest.save(folder)
        for start in range(0, len(missing), shard_records):
            records = writer.write(missing[start : start + shard_records])
            if records:
                shard = write_shard(folder, f"shard-{len(manifest.shards):05d}.safetensors", records)
                manifest = manifest.with_shard(shard)
                manifest.save(folder)
    if not manifest.num_records:
        where, problem = writer.refused[0]
        raise InvalidParameterError(
            "prompts", where, f"the target refuses every prompt; this one: {problem.rstrip('.')}", "Change the prompts."
        )
    return Collected(manifest, len(missing) - len(writer.refused), tuple(writer.refused))


def _check_rows(settings: DataSettings, facts: TargetFacts) -> None:
    for layer in settings.hidden_states:
        if not 0 <= layer <= facts.num_layers:
            problem = f"the target has {facts.num_layers} layers"
            raise InvalidParameterError("hidden_states", layer, problem, f"Use 0 to {facts.num_layers}.")
    if settings.target_top_k > facts.vocab_size:
        problem = f"the target has {facts.vocab_size} tokens"
        raise InvalidParameterError("target_top_k", settings.target_top_k, problem, f"Use 0 to {facts.vocab_size}.")


def _tell(done: Iterator[int], total: int, tell: Callable[[int, int], None], _: object) -> None:
    """Count a text that is written, and say how many there are."""
    tell(next(done), total)


class _Writer:
    """Has texts written."""

    def __init__(self, llm: LLM, settings: DataSettings, on_finished: Callable[[object], None]) -> None:
        self._llm = llm
        self._settings = settings
        self._on_finished = on_finished
        self._recording = Recording(hidden_states=settings.hidden_states, target_top_k=settings.target_top_k)
        self.refused: list[tuple[str, str]] = []

    def write(self, wanted: Sequence[Wanted]) -> list[Record]:
        """Write these texts together; what the target refuses is noted and left out."""
        if not (self._settings.max_tokens or self._settings.keeps_rows):
            return [self._record(each, torch.tensor(each.prompt.token_ids)) for each in wanted]
        outputs = self._llm.generate(
            [list(each.prompt.token_ids) for each in wanted],
            [self._params(each) for each in wanted],
            speculation=SpeculationConfig(method=self._recording) if self._settings.keeps_rows else PLAIN,
            on_finished=self._on_finished,
        )
        pairs = zip(wanted, outputs, strict=True)
        return [record for each, output in pairs if (record := self._written(each, output)) is not None]

    def _params(self, wanted: Wanted) -> SamplingParams:
        asked = self._settings
        return SamplingParams(
            max_tokens=max(1, asked.max_tokens),  # rows need a pass, and a pass writes a token
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            seed=wanted.seed(asked.seed),
        )

    def _written(self, wanted: Wanted, output: RequestOutput) -> Record | None:
        if isinstance(output.error, OutriderError):
            self.refused.append((wanted.prompt.where, str(output.error)))
            return None
        written = output.token_ids if self._settings.max_tokens else ()
        record = self._record(wanted, torch.tensor([*wanted.prompt.token_ids, *written]))
        if self._settings.keeps_rows:
            recorder = self._llm.proposers.get(self._recording)
            assert isinstance(recorder, Recorder)
            record.rows.update(recorder.take(wanted.seed(self._settings.seed), len(record.token_ids) - 1))
        return record

    def _record(self, wanted: Wanted, token_ids: torch.Tensor) -> Record:
        prompt = wanted.prompt
        held_out = prompt.held_out(self._settings.held_out)
        return Record(prompt.digest, wanted.sample, held_out, len(prompt.token_ids), token_ids)


# --- A method that drafts nothing and keeps what the target computes: hidden states, and likely next tokens.


class Recording(Method):
    """Keeps rows of the target's passes."""

    name: ClassVar[str] = "recording"
    takes_tree: ClassVar[bool] = False

    hidden_states: tuple[int, ...] = ()  # layers whose hidden states are kept
    target_top_k: int = 0  # how many likely next tokens are kept

    def build(self, context: ProposerContext) -> Proposer:
        requires = Requirements(self.hidden_states, self.target_top_k, needs_uncached_prompt=True)
        return Recorder(requires, context.target.dtype)


class Recorder(Proposer):
    """Holds the rows of every text until somebody takes them."""

    def __init__(self, requires: Requirements, dtype: torch.dtype) -> None:
        self.requires = requires
        self._dtype = dtype
        self._parts: dict[int, list[tuple[int, dict[str, Tensor]]]] = {}

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        return [Draft() for _ in requests]

    def observe(self, rows: Sequence[ObservedRows]) -> None:
        for seen in rows:
            self._parts.setdefault(seen.sequence.seed, []).append((seen.positions[0], self._kept(seen)))

    def take(self, seed: int, num_rows: int) -> dict[str, Tensor]:
        """The rows of the text with this seed, by name, [num_rows, ...], and forget them. What was computed twice, as after
        a preemption, counts once."""
        taken: dict[str, Tensor] = {}
        end = 0
        for start, part in self._parts.pop(seed):
            assert start <= end, f"rows {end} to {start} were never shown"
            end = max(end, start + len(next(iter(part.values()))))
            for name, values in part.items():
                if name not in taken:
                    taken[name] = values.new_empty((num_rows, *values.shape[1:]))
                count = min(len(values), num_rows - start)
                taken[name][start : start + max(0, count)] = values[: max(0, count)]
        assert end >= num_rows, f"rows {end} to {num_rows} were never shown"
        return taken

    def _kept(self, seen: ObservedRows) -> dict[str, Tensor]:
        found = {
            hidden_name(layer): states.to(self._dtype, copy=True).cpu() for layer, states in seen.aux_hidden_states.items()
        }
        if seen.target_top_k is not None:
            assert len(seen.target_top_k.rows) == len(seen), "every row of the text has logits"
            found[TOP_TOKENS] = seen.target_top_k.token_ids.to(torch.int32).cpu()
            found[TOP_LOGITS] = seen.target_top_k.logits.float().cpu()
        return found


# --- Reads prompts: JSON lines, logs of conversations, texts, and folders of all these.


_FORM = 'Give {"prompt": text}, {"prompt_token_ids": [...]}, {"messages": [...]} or {"text": a long text} a line.'


@dataclass(frozen=True)
class Source:
    """Holds what was read of one place, before any tokenizer has seen it."""

    where: str  # file and line, for errors
    # "prompt" is one prompt; "text" is cut into prompts; "messages" is a conversation, in which every turn of the user ends
    # a prompt.
    kind: str
    content: Any  # a text, token ids, or messages
    tools: Any = None  # the functions that a conversation may call


def read_sources(path: Path, *, without: Path | None = None) -> list[Source]:
    """Read a file, or every file of a folder. Files that end in .jsonl hold one object a line; all others are texts. In a
    folder, hidden files and files that are no text in UTF-8 are left out."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        files = [file for file in files if without is None or not file.resolve().is_relative_to(without.resolve())]
        found = [source for file in files for source in _read_file(file, required=False)]
    else:
        found = list(_read_file(path, required=True))
    if not found:
        raise InvalidParameterError("prompts", str(path), "it holds no prompts", _FORM)
    return found


def encode_prompts(sources: Sequence[Source], encoder: PromptEncoder, num_tokens: int) -> list[EncodedPrompt]:
    """Prompts in the target's tokens, each once, in the order of their digests: any first so many are a fair sample."""
    prompts = {prompt.digest: prompt for source in sources for prompt in _encoded(source, encoder, num_tokens)}
    return [prompts[digest] for digest in sorted(prompts)]


def _read_file(path: Path, *, required: bool) -> Iterator[Source]:
    """Returns what a file holds; one that cannot be read as text yields nothing unless it is required."""
    try:
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        if required:
            reason = error.strerror if isinstance(error, OSError) else error
            remedy = "Give a file in UTF-8, or a folder of such files."
            raise InvalidParameterError("prompts", str(path), f"it cannot be read ({reason})", remedy) from None
        logger.info("%s is left out: it is no text in UTF-8", path)
        return
    if path.suffix == ".jsonl":
        yield from _read_lines(path, text)
    elif text.strip():
        yield Source(path.name, "text", text)


def _read_lines(path: Path, text: str) -> Iterator[Source]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield _read_line(f"{path.name}:{number}", line)


def _read_line(where: str, line: str) -> Source:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidParameterError("prompts", where, f"not JSON ({error})", _FORM) from None
    if not isinstance(value, dict):
        raise InvalidParameterError("prompts", where, "not an object", _FORM)
    given = [key for key in ("prompt", "prompt_token_ids", "messages", "text") if key in value]
    if len(given) != 1:
        problem = f"it holds {' and '.join(given)}" if given else "it holds no prompt"
        raise InvalidParameterError("prompts", where, problem, _FORM)
    content = value[given[0]]
    if given[0] in ("prompt", "text") and not (isinstance(content, str) and content.strip()):
        raise InvalidParameterError("prompts", where, f"its {given[0]!r} is no text", _FORM)
    if given[0] == "prompt_token_ids" and not (
        isinstance(content, list) and all(type(token) is int and 0 <= token < 2**31 for token in content)
    ):
        raise InvalidParameterError("prompts", where, "its 'prompt_token_ids' are no list of token ids", _FORM)
    if given[0] == "messages":
        _check_messages(where, content)
        return Source(where, "messages", content, value.get("tools"))
    return Source(where, "prompt" if given[0] == "prompt_token_ids" else given[0], content)


def _check_messages(where: str, messages: Any) -> None:
    is_list = isinstance(messages, list) and all(isinstance(message, dict) for message in messages)
    if not is_list or not any(message.get("role") == "user" for message in messages):
        remedy = 'Give "messages" as a list of {"role": ..., "content": ...} with a turn of the user.'
        raise InvalidParameterError("prompts", where, "it holds no conversation", remedy)


def _encoded(source: Source, encoder: PromptEncoder, num_tokens: int) -> Iterator[EncodedPrompt]:
    try:
        if source.kind == "messages":
            yield from _turns(source, encoder)
        elif source.kind == "text":
            yield from _pieces(source, encoder, num_tokens)
        else:
            tokens = encoder.encode(source.content)[1]
            yield prompt_of(source.where, tokens, tokens)
    except InvalidPromptError as error:
        raise InvalidParameterError("prompts", source.where, error.problem, error.remedy) from error


def _turns(source: Source, encoder: PromptEncoder) -> Iterator[EncodedPrompt]:
    """One prompt for each turn of the user: the conversation up to there. They stand on one side of the split."""
    messages, first = source.content, None
    for place, message in enumerate(messages):
        if message.get("role") == "user":
            tokens = encoder.encode_conversation(messages[: place + 1], tools=source.tools)[1]
            first = tokens if first is None else first
            yield prompt_of(source.where, tokens, first)


def _pieces(source: Source, encoder: PromptEncoder, num_tokens: int) -> Iterator[EncodedPrompt]:
    """The text cut into prompts of so many tokens, each behind the tokens that begin a text; a short rest is left out
    unless it is all there is."""
    whole = encoder.encode(source.content)[1]
    body = encoder.encode(source.content, add_special_tokens=False)[1]
    extra = len(whole) - len(body)
    prefix = whole[:extra] if extra > 0 and whole[extra:] == body else ()
    for start in range(0, len(body), num_tokens):
        piece = body[start : start + num_tokens]
        if start == 0 or 2 * len(piece) >= num_tokens:
            yield prompt_of(source.where, (*prefix, *piece), piece)
