"""Layers with a running state: in a whole pass of the kernels, and as rows of a text (native/mixer.inc)."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.layout import Decay, MixerKind, MixerRowsStruct, MixerStruct, RecurrenceCall
from outrider.kernels.library import KernelLibrary

# --- Layers with a running state in a whole pass of the kernels (native/mixer.inc).
#
# The rows of a pass leave a tape: the inputs of the convolution, and what each row does to the matrices behind it. A
# pass reads the states of the texts and never writes them; it leaves the states behind the rows that are asked for.


#: The widest convolution that the kernels know.
MOST_TAPS = 16


@dataclass(frozen=True)
class Mixer:
    """Holds what a layer with a running state has beside its two projections.

    The projection into a layer begins with the channels of the convolution. Behind a delta rule's queries, keys and values
    stand gates, shares and steps; behind a scan's queries (C), keys (B) and values (x) stand gates and steps. A convolution
    alone has gates of what enters it, and gates of what leaves it.
    """

    kind: MixerKind  # what it computes
    taps: Tensor  # [width, num_channels] the factors of the convolution, those of the row itself last
    tap_bias: Tensor | None = None  # [num_channels], or None
    num_heads: int = 0  # the sizes of the matrices; 0 without any
    num_key_heads: int = 0  # the sizes of the matrices; 0 without any
    key_dim: int = 0  # the sizes of the matrices; 0 without any
    value_dim: int = 0  # the sizes of the matrices; 0 without any
    rates: Tensor | None = None  # [num_heads] the logarithm of what a step of 1 leaves of a matrix
    step_bias: Tensor | None = None  # [num_heads], added to steps before their softplus
    step_limits: tuple[float, float] = (0.0, float("inf"))  # the least and the most that a step may be
    skip: Tensor | None = None  # [num_heads] the share of a value that is added to what its matrix says, or None
    norm_weight: Tensor | None = None  # [num_heads * value_dim]
    norm_size: int = 0  # how many numbers are normalised together
    gates_first: bool = False  # whether gates come before the norm
    epsilon: float = 0.0  # what is added to the mean square

    @property
    def width(self) -> int:
        """Returns how many inputs of a channel are added up."""
        return len(self.taps)

    @property
    def num_channels(self) -> int:
        """Returns the number of channels of the convolution."""
        return self.taps.shape[1]


class MixerWeights:
    """The numbers of a mixer where the kernels read them."""

    def __init__(self, mixer: Mixer, real: torch.dtype) -> None:
        given = (mixer.taps, mixer.tap_bias, mixer.rates, mixer.step_bias, mixer.skip, mixer.norm_weight)
        self._kept = [None if values is None else values.detach().to(real).contiguous() for values in given]
        self.struct = MixerStruct(
            mixer.kind,
            mixer.num_channels,
            mixer.width,
            mixer.num_heads,
            mixer.num_key_heads,
            mixer.key_dim,
            mixer.value_dim,
            mixer.norm_size,
            mixer.gates_first,
            mixer.epsilon,
            *mixer.step_limits,
            *(None if values is None else values.data_ptr() for values in self._kept),
        )


class MixerRows:
    """The rows of a pass in one layer: what they read, and what they leave.

    Attributes:
        inputs: [num_rows, num_channels] the tape of the convolution.
        updates: The tape of the matrices, in the order of `recurrence.MatrixUpdates`; empty without matrices.
    """

    def __init__(self, mixer: Mixer, num_rows: int, real: torch.dtype) -> None:
        self.inputs = torch.empty(num_rows, mixer.num_channels, dtype=real)
        self.updates: tuple[Tensor, ...] = ()
        if mixer.kind is not MixerKind.CONVOLUTION:
            heads = mixer.num_heads
            shapes = [(mixer.num_key_heads, mixer.key_dim), (heads, mixer.value_dim), (heads, 1)]
            shapes += [(heads, 1)] if mixer.kind is MixerKind.DELTA else []
            self.updates = tuple(torch.empty(num_rows, *shape, dtype=real) for shape in shapes)
        self._windows, self._states = _Places(num_rows), _Places(num_rows)

    def read(self, window: Tensor, state: Tensor | None) -> None:
        """The next text goes on from these."""
        self._windows.read(window)
        if state is not None:
            self._states.read(state)

    def keep_windows(self, like: Tensor, first: int, rows: Collection[int]) -> dict[int, Tensor]:
        """Returns where the windows behind some rows go, which are counted from row `first` of the pass."""
        return self._windows.keep(like, first, rows)

    def keep_states(self, like: Tensor, first: int, rows: Collection[int]) -> dict[int, Tensor]:
        """Keeps the states of matrices behind rows."""
        return self._states.keep(like, first, rows)

    @property
    def struct(self) -> MixerRowsStruct:
        """For the kernels; it lives no longer than these rows."""
        updates = [each.data_ptr() for each in self.updates]
        before = (self._windows.before(), self._states.before())
        kept = (self._windows.kept.ctypes.data, self._states.kept.ctypes.data)
        return MixerRowsStruct(self.inputs.data_ptr(), *updates, *[None] * (4 - len(updates)), *before, *kept)


class _Places:
    """Says where states lie: those before the pass by text, and those behind rows by row."""

    def __init__(self, num_rows: int) -> None:
        self._read: list[Tensor] = []
        self._pointers = np.empty(0, np.uint64)
        self.kept = np.zeros(num_rows, np.uint64)

    def read(self, state: Tensor) -> None:
        self._read.append(state.contiguous())

    def before(self) -> int:
        self._pointers = np.array([state.data_ptr() for state in self._read], np.uint64)
        return self._pointers.ctypes.data

    def keep(self, like: Tensor, first: int, rows: Collection[int]) -> dict[int, Tensor]:
        states = {row: torch.empty_like(like) for row in rows}
        for row, state in states.items():
            self.kept[first + row] = state.data_ptr()
        return states


def mixer_structs(mixed: Sequence[MixerRows | None]) -> ctypes.Array[MixerRowsStruct]:
    """Returns what layers read and leave, in the order in which they run; None for those without a running state."""
    structs = (MixerRowsStruct() if rows is None else rows.struct for rows in mixed)
    return (MixerRowsStruct * len(mixed))(*structs)


# --- Rows of a text over a running state of matrices, by the compiled kernel.
#
# `outrider.model` has the same in operators of PyTorch, which define what is right.


@dataclass(frozen=True)
class MatrixUpdates:
    """Holds what rows do to the matrices of a text, [num_heads, key_dim, value_dim].

    A row multiplies the matrix of a head by its decay, and adds the key times the value to it; or the key times a share
    of the difference between the value and what the matrix says of the key. The same key serves num_heads / num_key_heads
    heads in a row.
    """

    keys: Tensor  # [num_rows, num_key_heads, key_dim]
    values: Tensor  # [num_rows, num_heads, value_dim]
    decays: Tensor  # [num_rows, num_heads, 1], [num_rows, num_heads, key_dim] or [num_rows, num_heads, key_dim, value_dim]
    shares: Tensor | None = None  # [num_rows, num_heads, 1]; None where values are added as they are

    @property
    def decay(self) -> Decay:
        """Returns what has a factor of its own."""
        if self.decays.dim() == 4:
            return Decay.OF_ALL
        return Decay.OF_HEADS if self.decays.shape[-1] == 1 else Decay.OF_KEYS


def usable(state: Tensor) -> bool:
    """Tells whether the kernel takes this state."""
    return state.device.type == "cpu" and state.dtype in (torch.float32, torch.float64)


def advance(
    library: KernelLibrary,
    state: Tensor,  # [num_heads, key_dim, value_dim]
    rows: MatrixUpdates,
    queries: Tensor,  # [num_rows, num_key_heads, key_dim]
    parents: tuple[int, ...] | None,
    wanted: Collection[int],
) -> tuple[Tensor, dict[int, Tensor]]:
    """Compute rows one after another.

    Args:
        parents: The row before each one, -1 for the state; None for a chain.
        wanted: Rows behind which the state is asked for.

    Returns:
        What they read [num_rows, num_heads, value_dim], and the states by row.
    """
    num_rows, num_heads, value_dim = rows.values.shape
    key_heads, key_dim = rows.keys.shape[1:]
    threads, real = library.num_threads, state.dtype
    given = [
        None if t is None else t.contiguous() for t in (state, rows.keys, rows.values, rows.decays, rows.shares, queries)
    ]
    states = {row: torch.empty(state.shape, dtype=real) for row in wanted}
    kept = np.zeros(num_rows, np.uint64)
    for row, found in states.items():
        kept[row] = found.data_ptr()
    order = None if parents is None else np.array(parents, np.int64)
    out = torch.empty(num_rows, num_heads, value_dim, dtype=real)
    in_columns = key_dim * library.panel(real)
    scratch = torch.empty(threads * in_columns * (1 if parents is None else num_rows + 1), dtype=real)
    call = RecurrenceCall(
        num_rows,
        num_heads,
        key_heads,
        key_dim,
        value_dim,
        rows.decay,
        *(None if t is None else t.data_ptr() for t in given),
        None if order is None else order.ctypes.data,
        kept.ctypes.data,
        out.data_ptr(),
        scratch.data_ptr(),
        threads,
    )
    library.function("advance_rows", real)(ctypes.byref(call))
    return out, states
