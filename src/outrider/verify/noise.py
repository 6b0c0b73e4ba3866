"""Keyed random numbers: the only source of chance in the engine.

Every draw names a `Key`. Bits come from the key alone (a counter-based generator, SplitMix64 finalisers over the key's
fields and the token id), never from how many draws came before, so results do not depend on batch, chunking or step.
Two verbs exist, `bernoulli` and `categorical`. A key may be used once; asking again raises, because shared noise biases
every rule but "accept iff equal". The one sanctioned sharing has its own stream: a coupled proposer *guesses* with the
target's noise (`Stream.GUESS`), and such guesses are verified by equality alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.errors import NoiseReuseError
from outrider.kernels import sampling


class Stream(IntEnum):
    """Says what a draw is for. Streams are independent, but for GUESS, which reads TARGET's noise."""

    TARGET = 0  # the target's own choice of a token
    DRAFT = 1  # a proposer's draw from its probabilities
    ACCEPT = 2  # the coin of an acceptance rule
    RECOVER = 3  # the token after a rejection, from the residual
    GUESS = 4  # a coupled proposer's prediction of TARGET at the same position


_RACING = frozenset({Stream.TARGET, Stream.GUESS})


class Key(NamedTuple):
    """Names one draw."""

    owner: int  # sequence id; keeps two requests with the same seed apart in the ledger, and is no part of the noise
    seed: int  # the request's seed
    sample: int  # sample index within the request
    stream: Stream  # what the draw is for
    position: int  # index in the sequence of the token being chosen or checked
    round: int = 0  # verify pass of the sequence; 0 for TARGET and RECOVER, which happen once a position
    branch: int = 0  # tells apart draws for one position of one round: the node of a tree. No part of a guess's noise.
    # Who draws: 0 for the target's own verification and for a sequence's first proposer, others for further proposers and
    # for the members of a nested one. No part of a guess's noise.
    drafter: int = 0


class NoiseSource(Protocol):
    """Says where chance comes from; `outrider.lab.prove` puts one that takes every branch in the place of the keyed one."""

    def bernoulli(self, probability: Tensor, keys: Sequence[Key]) -> Tensor:
        """Coins [n] bool that fall True with `probability` [n]; surely never at 0 and always at 1."""
        ...

    def categorical(self, probs: Tensor, keys: Sequence[Key]) -> Tensor:
        """Tokens [n] drawn from the rows of `probs` [n, vocab_size], which need not sum to exactly 1."""
        ...

    def forget(self, owner: int) -> None:
        """The sequence is finished: its keys will not come again."""
        ...

    def mark(self) -> None:
        """Remember this place for `rewind`."""
        ...

    def rewind(self) -> None:
        """Take back all draws since `mark`, where an error is handled. Whoever asks with the same keys again draws the same
        again. A source that cannot do so raises the error again."""
        ...


class KeyedNoise:
    """The production source.

    TARGET and GUESS draw by Gumbel-max, one exponential a token, so that close distributions under the same key mostly
    agree (a maximal-overlap coupling in the sense of Daliri et al. 2024). The other streams need no coupling and invert the
    cumulative distribution with a single uniform.
    """

    def __init__(self) -> None:
        self._used: defaultdict[int, set[Key]] = defaultdict(set)
        self._since_mark: list[Key] = []

    def bernoulli(self, probability: Tensor, keys: Sequence[Key]) -> Tensor:
        self._spend(keys)
        bits = torch.from_numpy(key_bits(keys)).to(probability.device, non_blocking=True)
        return uniform(bits) < probability

    def categorical(self, probs: Tensor, keys: Sequence[Key]) -> Tensor:
        self._spend(keys)
        bits = torch.from_numpy(key_bits(keys)).to(probs.device, non_blocking=True)
        racing = [row for row, key in enumerate(keys) if key.stream in _RACING]
        if len(racing) == len(keys):
            return gumbel_max(probs, bits)
        if not racing:
            return invert_cdf(probs, bits)
        others = [row for row, key in enumerate(keys) if key.stream not in _RACING]
        one, other = (torch.tensor(rows).to(probs.device, non_blocking=True) for rows in (racing, others))
        tokens = torch.empty_like(bits)
        tokens[one], tokens[other] = gumbel_max(probs[one], bits[one]), invert_cdf(probs[other], bits[other])
        return tokens

    def forget(self, owner: int) -> None:
        self._used.pop(owner, None)

    def mark(self) -> None:
        self._since_mark.clear()

    def rewind(self) -> None:
        for key in self._since_mark:
            self._used[key.owner].discard(key)
        self._since_mark.clear()

    def _spend(self, keys: Sequence[Key]) -> None:
        for key in keys:
            used = self._used[key.owner]
            if key in used:
                raise NoiseReuseError(f"{key} was used before")
            used.add(key)
            self._since_mark.append(key)


_GOLDEN = 0x9E3779B97F4A7C15
_ALL = 2**64 - 1
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
#: Keys whose bits are mixed sooner by array operations than one after another.
_MANY = 24


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant


def key_bits(keys: Sequence[Key]) -> np.ndarray:
    """64 well-mixed bits a key, as int64 [n]. GUESS keys get the bits of TARGET at the same position."""
    if len(keys) < _MANY:
        return np.array([_mix_one(_fields(key)) for key in keys], np.uint64).view(np.int64)
    # Methods deep within others have numbers beyond 64 bits.
    return mix_fields(np.array([[field & _ALL for field in _fields(key)] for key in keys], np.uint64))


def _fields(k: Key) -> tuple[int, ...]:
    if k.stream is Stream.GUESS:
        return (k.seed, k.sample, int(Stream.TARGET), k.position, 0)
    return (k.seed, k.sample, int(k.stream) + (k.drafter << 8), k.position, k.round + (k.branch << 32))


def _mix_one(fields: tuple[int, ...]) -> int:
    """`mix_fields` of one key: for a few, array operations cost more than the work."""
    state = 0
    for field in fields:
        x = (state + field + _GOLDEN) & _ALL
        x = ((x ^ (x >> 30)) * _MIX[0]) & _ALL
        x = ((x ^ (x >> 27)) * _MIX[1]) & _ALL
        state = x ^ (x >> 31)
    return state


def mix_fields(fields: np.ndarray) -> np.ndarray:
    """64 well-mixed bits a row, int64 [n], from (seed, sample, stream and drafter, position, round and branch) as
    uint64 [n, 5]; for many rows at once."""
    state = np.zeros(len(fields), np.uint64)
    for column in fields.T:
        state = _mix_numpy(state + column + np.uint64(_GOLDEN))
    bits: np.ndarray = state.view(np.int64)
    return bits


def _mix_numpy(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX[0])
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX[1])
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def _mix_torch(x: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele et al. 2014) on int64, whose right shift must be made logical."""
    for shift, factor in zip((30, 27), _MIX, strict=True):
        x = (x ^ _shift_right(x, shift)) * _signed(factor)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, by: int) -> Tensor:
    return (x >> by) & ((1 << (64 - by)) - 1)


def uniform(bits: Tensor) -> Tensor:
    """int64 bits to float64 uniforms strictly inside (0, 1)."""
    return (_shift_right(bits, 12).to(torch.float64) + 0.5) * 2.0**-52


def gumbel_max(probs: Tensor, bits: Tensor) -> Tensor:
    """Tokens [n] from `probs` [n, vocab_size]: who wins an exponential race run on per-token noise of `bits` [n]."""
    if sampling.usable(probs):
        return sampling.race(probs, bits)
    tokens = torch.arange(1, probs.shape[-1] + 1, device=probs.device)
    noise = uniform(_mix_torch(bits[:, None] + tokens * _signed(_GOLDEN)))
    return (probs.to(torch.float64) / -noise.log()).argmax(-1)


def invert_cdf(probs: Tensor, bits: Tensor) -> Tensor:
    """Tokens [n] from `probs` [n, vocab_size] by one uniform each, made of `bits` [n]; never one of probability 0."""
    if sampling.usable(probs):
        return sampling.invert(probs, bits)
    mass = probs.to(torch.float64).cumsum(-1)
    total = mass[:, -1:]
    below = torch.minimum(uniform(bits)[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(mass, below, right=True)
    return tokens.clamp_(max=probs.shape[-1] - 1).squeeze(-1)
