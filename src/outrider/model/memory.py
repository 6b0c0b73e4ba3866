"""The memory and the time of a model's passes: how many KV blocks it gets, and how long a pass of n rows takes."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Self

import torch

from outrider.cache.blocks import STATE_SPACING, BlockManager, KeptStates
from outrider.cache.running import MOST_STATES, RunningText
from outrider.cache.state import SequenceState
from outrider.config import CacheConfig, SchedulerConfig
from outrider.errors import ModelTooLargeError
from outrider.loading.fit import available_bytes
from outrider.loading.loaded_model import LoadedModel
from outrider.model.batch import Segment
from outrider.model.runner import ModelRunner

# --- Computes how many KV blocks a model gets, and how many running states its prefix cache may keep.


#: The part of the memory beside the states of running texts that states of the prefix cache get.
_STATES_SHARE = 1 / 16
#: The part that blocks get. The rest is for what passes compute with, and on a CPU for other work on the machine.
_BLOCKS_SHARE = {"cuda": 0.8}
_USUAL_BLOCKS_SHARE = 0.25
#: Free memory of a device that does not say how much it has.
_UNKNOWN = 2**31


@dataclass(frozen=True)
class TextBytes:
    """Holds what texts take of memory, in bytes."""

    by_token: int  # keys and values of a token
    by_text: int = 0  # running states of a text, at most; 0 for a model without them
    by_state: int = 0  # running states behind one token of a text
    # The inputs of a draft row, which are kept until it is known whether the row stands; 0 for a model without running
    # states.
    by_row: int = 0

    @classmethod
    def of(cls, state: SequenceState, by_token: int) -> Self:
        """Returns what texts of the same model take, for a state that holds one. A pass reads what the pass before it has
        left, and leaves as much again before that is given back."""
        records = state.running.records.values()
        by_state = sum(record.state_bytes for record in records)
        return cls(by_token, 2 * MOST_STATES * by_state, by_state, 2 * sum(record.row_bytes for record in records))

    def running(self, scheduling: SchedulerConfig) -> int:
        """All running states that there can be at a time, and the inputs of all draft rows. Every text that runs takes part
        in every pass, so the rows are those of one pass."""
        return scheduling.max_num_seqs * self.by_text + scheduling.max_num_batched_tokens * self.by_row


@dataclass(frozen=True)
class Beside:
    """Holds what other parts of an engine will take of the same memory, in bytes."""

    by_token: int = 0  # for each token of the model: layers that proposers add, and keys and values in draft models
    weights: int = 0  # draft models that are not loaded yet
    keys: int = 0  # keys and values of the target that have no memory yet, since it comes with the first pass


NOTHING = Beside()


def make_blocks(
    loaded: LoadedModel, cache: CacheConfig, scheduling: SchedulerConfig, taken: TextBytes, beside: Beside
) -> BlockManager:
    """The blocks of a model: as many as were asked for, or as every running sequence could fill, within a share of what
    running states and other parts of the engine leave free. The states that its prefix cache keeps get a smaller share,
    unless their size was given."""
    free, running = available_bytes(loaded.device), taken.running(scheduling)
    if free is not None:
        _check_fit(loaded, cache, scheduling, taken, beside, free)
    left = (_UNKNOWN if free is None else free) - running - beside.weights - beside.keys
    by_token = taken.by_token + beside.by_token
    states = None
    if taken.by_state:
        kept = int(_STATES_SHARE * left) if cache.state_cache_mib is None else cache.state_cache_mib * 2**20
        states = KeptStates(kept // taken.by_state, max(1, STATE_SPACING // cache.block_size) * cache.block_size)
        left -= states.capacity * taken.by_state
    if cache.kv_cache_tokens is not None:
        tokens = cache.kv_cache_tokens
    else:
        share = _BLOCKS_SHARE.get(loaded.device.type, _USUAL_BLOCKS_SHARE)
        longest_source = 0 if loaded.encoder is None else loaded.encoder.max_source_len
        tokens = scheduling.max_num_seqs * (loaded.max_model_len + longest_source)
        if by_token:  # a model without attention keeps nothing of single tokens
            tokens = min(tokens, int(share * left) // by_token)
    count = max(1, tokens // cache.block_size)
    return BlockManager(count, cache.block_size, prefix_caching=cache.prefix_caching, states=states)


def _check_fit(
    loaded: LoadedModel,
    cache: CacheConfig,
    scheduling: SchedulerConfig,
    taken: TextBytes,
    beside: Beside,
    free: int,
) -> None:
    """Raise ModelTooLargeError where running states, the blocks that there must be, and other parts take more than is
    free."""
    running, kept = taken.running(scheduling), (cache.state_cache_mib or 0) * 2**20
    blocks = (cache.kv_cache_tokens or cache.block_size) * (taken.by_token + beside.by_token)
    if running + kept + blocks + beside.weights + beside.keys <= free:
        return
    needed = {
        f"the running states of max_num_seqs={scheduling.max_num_seqs} texts": running,
        "those of the prefix cache": kept,
        "keys and values": blocks if cache.kv_cache_tokens is not None or not running else 0,
        "the weights of draft models": beside.weights,
        "the target's keys and values": beside.keys,
    }
    parts = " and ".join(f"{size / 1e9:.2f} GB for {name}" for name, size in needed.items() if size)
    ways = []
    if running:
        others = kept + blocks + beside.weights + beside.keys + scheduling.max_num_batched_tokens * taken.by_row
        most = (free - others) // taken.by_text
        ways.append(f"max_num_seqs={most} or less" if most > 0 else "a smaller max_num_seqs and max_num_batched_tokens")
    ways += ["a smaller state_cache_mib"] if kept else []
    ways += ["a smaller kv_cache_tokens"] if cache.kv_cache_tokens is not None else []
    ways += ["a smaller draft model"] if beside.weights or beside.keys else []
    problem = f"it needs {parts}, and {free / 1e9:.2f} GB of memory are available"
    remedy = f"Use {', '.join([*ways, 'or a machine with more memory'] if ways else ['a machine with more memory'])}."
    raise ModelTooLargeError(loaded.name, problem, remedy, beside.weights, blocks + beside.keys, free, running)


# --- Times passes of a model at any place of a long text.


#: The rows of a pass that computes context which is not timed.
_FILLING_ROWS = 512


def synchronise(device: torch.device) -> None:
    """Wait for the device, so that a clock that is read afterwards counts all of its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PassTimer:
    """A text of arbitrary tokens in a KV memory of its own, whose parts may be computed again and again.

    A token depends on its position alone. So a pass that is timed leaves the keys and values that were there before, and
    the places may be timed in any order. Running states take the same time whatever their numbers are, and are those that
    the pass before has left.
    """

    def __init__(self, runner: ModelRunner, num_tokens: int) -> None:
        self._runner = runner.with_own_memory(num_tokens)
        self._state = self._runner.memory.room_for(num_tokens)
        self._running = RunningText(is_arbitrary=True)

    @property
    def device(self) -> torch.device:
        """Returns where the passes are computed."""
        return self._runner.loaded.device

    def compute(self, num_tokens: int) -> None:
        """Compute so many tokens from the beginning of the text, as far as they are not there yet."""
        while self._state.num_computed < num_tokens:
            start = self._state.num_computed
            size = min(_FILLING_ROWS, num_tokens - start)
            self._runner.forward([self._segment(start, size, size)])
            self._state.commit(start, range(size))

    def seconds(self, start: int, num_rows: int, *, logits: bool) -> float:
        """The time of one pass."""
        segment = self._segment(start, num_rows, 0 if logits else num_rows - 1)
        synchronise(self._runner.loaded.device)
        began = perf_counter()
        self._runner.forward([segment])
        synchronise(self._runner.loaded.device)
        return perf_counter() - began

    def _segment(self, start: int, num_rows: int, logits_from: int) -> Segment:
        vocab_size = self._runner.loaded.vocab_size
        tokens = [(7919 * position + 1) % vocab_size for position in range(start, start + num_rows)]
        segment = Segment.of(self._state, tokens, start, logits_from=logits_from)
        self._running = self._running.moved_to(start)
        return replace(segment, running=self._running)


# --- Measures how long a pass of n rows takes on this machine, and how much longer behind a context.


#: Numbers of rows that are timed.
SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
#: Rounds over all sizes; the fastest pass of each counts, since whatever disturbs one makes it longer.
_ROUNDS = 5
#: Seconds after which further rounds time only the first sizes, those of most drafts.
_PATIENCE, _FIRST_SIZES = 5.0, 5
#: Tokens of the context behind which a row is timed, and seconds that reading it may take.
_CONTEXT, _READING = 1024, 3.0


def sizes_of(runner: ModelRunner) -> list[int]:
    """The numbers of rows that are timed of a model: those that fit its context."""
    longest = _longest(runner)
    return [size for size in SIZES if size <= longest] or [1]


def measure_passes(runner: ModelRunner) -> dict[int, float]:
    """Seconds of a pass of one short text by its number of rows, in a memory apart from that of the texts."""
    sizes = sizes_of(runner)
    timer, begun = PassTimer(runner, sizes[-1]), perf_counter()
    timer.seconds(0, sizes[-1], logits=True)  # the first pass also makes what later ones find made
    found = dict.fromkeys(sizes, float("inf"))
    for turn in range(_ROUNDS):
        is_late = turn > 0 and perf_counter() - begun > _PATIENCE
        for size in sizes[:_FIRST_SIZES] if is_late else sizes:
            found[size] = min(found[size], timer.seconds(0, size, logits=True))
    return found


def measure_context(runner: ModelRunner, passes: dict[int, float]) -> float:
    """Seconds that a pass takes longer for each token before its rows; 0 where finding out would take too long.

    Args:
        passes: What its passes take, by rows.
    """
    context = min(_CONTEXT, _longest(runner) - 1)
    if not context or passes[max(passes)] * context / max(passes) > _READING:
        return 0.0
    timer = PassTimer(runner, context + 1)
    timer.compute(context)
    pairs = [[timer.seconds(start, 1, logits=True) for start in (context, 0)] for _ in range(_ROUNDS)]
    return max(0.0, min(far for far, _ in pairs) - min(near for _, near in pairs)) / context


def _longest(runner: ModelRunner) -> int:
    return min(runner.loaded.max_model_len, runner.loaded.long_rope_after or runner.loaded.max_model_len)


# --- The name of the processor, and of the device that a model lies on.


def processor_name() -> str:
    """The name that the system gives to the processor; empty where it gives none."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text("utf-8").splitlines() if facts.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def device_name(device: torch.device) -> str:
    """The name of the GPU that a device is, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def is_mixture(model: Any) -> bool:
    """Tells whether a model is a mixture of experts, so that what a token reads and computes depends on the token."""
    config = model.config.get_text_config()
    return any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))


def weight_bytes(model: Any) -> int | None:
    """The bytes of weights that decoding one token reads.

    These are all weights once; the table of input embeddings counts only where it is the output head too. The answer is
    None for a mixture of experts, where it depends on the token.
    """
    if is_mixture(model):
        return None
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is table
    weights = {id(w): w for w in model.parameters() if tied or w is not table}
    return sum(int(w.numel() * w.element_size()) for w in weights.values())
