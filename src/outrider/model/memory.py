"""Computes how many KV blocks a model gets, and how many running states its prefix cache may keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from outrider.cache.blocks import BlockManager
from outrider.cache.kept_states import STATE_SPACING, KeptStates
from outrider.cache.running import MOST_STATES
from outrider.cache.state import SequenceState
from outrider.config import CacheConfig, SchedulerConfig
from outrider.errors import ModelTooLargeError
from outrider.model.loading.available import available_bytes
from outrider.model.loading.loaded_model import LoadedModel

#: The part of the memory beside the states of running texts that states of the prefix cache get.
_STATES_SHARE = 1 / 16
#: The part that blocks get. The rest is for what passes compute with, and on a CPU for other work on the machine.
_BLOCKS_SHARE = {"cuda": 0.8}
_USUAL_BLOCKS_SHARE = 0.25
#: Free memory of a device that does not say how much it has.
_UNKNOWN = 2**31


@dataclass(frozen=True)
class TextBytes:
    """What texts take of memory, in bytes.

    Attributes:
        by_token: Keys and values of a token.
        by_text: Running states of a text, at most; 0 for a model without them.
        by_state: Running states behind one token of a text.
        by_row: The inputs of a draft row, which are kept until it is known whether the row stands; 0 for a model without
            running states.
    """

    by_token: int
    by_text: int = 0
    by_state: int = 0
    by_row: int = 0

    @classmethod
    def of(cls, state: SequenceState, by_token: int) -> Self:
        """What texts of the same model take, for a state that holds one. A pass reads what the pass before it has left, and
        leaves as much again before that is given back."""
        records = state.running.records.values()
        by_state = sum(record.state_bytes for record in records)
        return cls(by_token, 2 * MOST_STATES * by_state, by_state, 2 * sum(record.row_bytes for record in records))

    def running(self, scheduling: SchedulerConfig) -> int:
        """All running states that there can be at a time, and the inputs of all draft rows. Every text that runs takes part
        in every pass, so the rows are those of one pass."""
        return scheduling.max_num_seqs * self.by_text + scheduling.max_num_batched_tokens * self.by_row


@dataclass(frozen=True)
class Beside:
    """What other parts of an engine will take of the same memory, in bytes.

    Attributes:
        by_token: For each token of the model: layers that proposers add, and keys and values in draft models.
        weights: Draft models that are not loaded yet.
        keys: Keys and values of the target that have no memory yet, since it comes with the first pass.
    """

    by_token: int = 0
    weights: int = 0
    keys: int = 0


NOTHING = Beside()


def make_blocks(
    loaded: LoadedModel, cache: CacheConfig, scheduling: SchedulerConfig, taken: TextBytes, beside: Beside
) -> BlockManager:
    """The blocks of a model: as many as were asked for, or as every running sequence could fill, within a share of what
    running states and other parts of the engine leave free. The states that its prefix cache keeps get a smaller share,
    unless their size was given.

    Raises:
        ModelTooLargeError: There is no memory for the blocks beside the running states of so many texts, and beside what
            other parts of the engine take.
    """
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
    if cache.num_tokens is not None:
        tokens = cache.num_tokens
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
    blocks = (cache.num_tokens or cache.block_size) * (taken.by_token + beside.by_token)
    if running + kept + blocks + beside.weights + beside.keys <= free:
        return
    needed = {
        f"the running states of max_num_seqs={scheduling.max_num_seqs} texts": running,
        "those of the prefix cache": kept,
        "keys and values": blocks if cache.num_tokens is not None or not running else 0,
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
    ways += ["a smaller kv_cache_tokens"] if cache.num_tokens is not None else []
    ways += ["a smaller draft model"] if beside.weights or beside.keys else []
    problem = f"it needs {parts}, and {free / 1e9:.2f} GB of memory are available"
    remedy = f"Use {', '.join([*ways, 'or a machine with more memory'] if ways else ['a machine with more memory'])}."
    raise ModelTooLargeError(loaded.name, problem, remedy, beside.weights, blocks + beside.keys, free, running)
