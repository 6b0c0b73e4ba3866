"""Walks every branch of a torch program that draws from torch's global generator."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from outrider.errors import UnforkableError
from outrider.lab.prove.forking import Distribution, ForkingNoise, Outcome, explore

# --- Calls of torch that draw, as decisions.
#
# Two kinds of calls are replaced while a program runs. `multinomial` becomes a decision with one branch for each token.
# Uniform numbers become *intervals*: at first, all that is known of a number is that it lies in [0, 1). A comparison
# with a threshold t inside [low, high) is a decision with the probabilities (t - low) / (high - low) and its
# complement. After it, the number lies in the chosen part. A threshold outside the interval decides nothing. This is
# exact for any series of comparisons whose thresholds do not depend on the number itself, and only comparisons are
# allowed. A call that draws in another way moves the state of torch's, numpy's or Python's global generator. All three
# are checked after every path, so such a call is noticed.
#
# Uniform numbers are treated as continuous. Real ones are multiples of 2**-24 in float32, so a test `u <= 0` is never
# true here, and true once in 16 million times there.


_DRAWS = (torch.multinomial, Tensor.multinomial)
_RAND, _RAND_LIKE = torch.rand, torch.rand_like
_ENGINE = "torch program"
_REMEDY = "Prove it by sampling instead."


#: Rounding in float32 makes branches of a few 1e-8 where exact numbers have none. They are counted, but not followed.
FLOOR = 1e-6


def explore_torch(run: Callable[[], Outcome], *, max_paths: int = 100_000) -> Distribution:
    """The exact distribution of what `run` returns, over everything that torch's global generator can draw."""
    noise = ForkingNoise(FLOOR)

    def forked(_: int) -> Iterator[Outcome]:
        before = _generators()
        with _ForkingTorch(noise):
            yield run()
        if _generators() != before:
            raise UnforkableError(_ENGINE, "random numbers were drawn by a call that is not followed", _REMEDY)

    return explore(forked, noise, max_paths=max_paths)


def _generators() -> tuple[Any, ...]:
    """The states of the global generators."""
    _, words, place, *rest = np.random.get_state(legacy=True)
    return torch.get_rng_state().numpy().tobytes(), np.asarray(words).tobytes(), place, rest, random.getstate()


class Uniforms:
    """Uniform numbers that are known only by the answers to comparisons. Each element has one interval."""

    def __init__(self, shape: torch.Size, branches: ForkingNoise) -> None:
        self.shape = shape
        self._branches = branches
        self._intervals = [(0.0, 1.0)] * math.prod(shape)

    def __lt__(self, thresholds: Any) -> Tensor:
        return self._compare(thresholds, below=True)

    def __gt__(self, thresholds: Any) -> Tensor:
        return self._compare(thresholds, below=False)

    __le__, __ge__ = __lt__, __gt__  # equality has probability 0

    def _compare(self, thresholds: Any, *, below: bool) -> Tensor:
        """Which numbers lie below (or above) their threshold. `thresholds` broadcast to this shape."""
        wanted = torch.as_tensor(thresholds, dtype=torch.float64).expand(self.shape).flatten().tolist()
        # A number is neither below nor above NaN, as in torch.
        answers = [t == t and self._is_below(i, t) == below for i, t in enumerate(wanted)]
        return torch.tensor(answers, dtype=torch.bool).reshape(self.shape)

    def _is_below(self, index: int, threshold: float) -> bool:
        low, high = self._intervals[index]
        if threshold <= low or threshold >= high:
            return threshold >= high
        share = (threshold - low) / (high - low)
        below = self._branches.choose((share, 1.0 - share)) == 0
        self._intervals[index] = (low, threshold) if below else (threshold, high)
        return below

    def __getattr__(self, name: str) -> Any:
        raise UnforkableError(_ENGINE, f"asks {name!r} of a uniform number, which only comparisons may touch", _REMEDY)

    def _refuse(self, *ignored: Any) -> Any:
        raise UnforkableError(_ENGINE, "calculates with uniform numbers, which only comparisons may touch", _REMEDY)

    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __add__ = __radd__ = __sub__ = __rsub__ = __neg__ = _refuse
    __getitem__ = __iter__ = __len__ = __bool__ = __float__ = _refuse

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Tensor:
        name = getattr(function, "__name__", str(function)).strip("_")
        if name not in ("lt", "le", "gt", "ge") or len(args) != 2 or kwargs:
            raise UnforkableError(_ENGINE, f"calls {name!r} on uniform numbers, which only comparisons may touch", _REMEDY)
        left, right = args
        if isinstance(left, Uniforms):
            return left._compare(right, below=name in ("lt", "le"))
        assert isinstance(right, Uniforms)
        return right._compare(left, below=name in ("gt", "ge"))


class _ForkingTorch(TorchFunctionMode):
    """Replaces the random draws of torch in this thread, within a `with` block."""

    def __init__(self, branches: ForkingNoise) -> None:
        super().__init__()
        self._branches = branches

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _DRAWS:
            return self._multinomial(*args, **kwargs)
        if function in (_RAND, _RAND_LIKE):
            if kwargs.get("generator") is not None:
                raise UnforkableError(_ENGINE, "draws from a generator of its own", _REMEDY)
            shape = args[0].shape if function is _RAND_LIKE else torch.empty(*args).shape
            return Uniforms(shape, self._branches)
        return function(*args, **kwargs)

    def _multinomial(self, probs: Tensor, num_samples: int, replacement: bool = False, **options: Any) -> Tensor:
        if num_samples != 1 or options.get("generator") is not None:
            raise UnforkableError(_ENGINE, "draws several samples of one row, or from a generator of its own", _REMEDY)
        rows = probs.reshape(-1, probs.shape[-1]).tolist()
        return torch.tensor([self._draw(row) for row in rows]).reshape(*probs.shape[:-1], 1)

    def _draw(self, weights: list[float]) -> int:
        total = sum(weights)
        if not 0.0 < total < math.inf or min(weights) < 0.0:  # torch refuses it too
            raise RuntimeError("probability tensor contains either inf, nan or element < 0, or sums to 0")
        possible = [token for token, weight in enumerate(weights) if weight > 0.0]
        if len(possible) == 1:
            return possible[0]
        return possible[self._branches.choose([weights[token] / total for token in possible])]
