"""Every branch of a torch program that draws from torch's global generator.

Two calls of torch are taken over while a program runs. `multinomial` becomes a decision with one branch a token. Uniform
numbers become *intervals*: at first only [0, 1) is known of each. A comparison with a threshold t inside [low, high) is a
decision with the chances (t - low) / (high - low) and its complement, after which the number lies in the part chosen; a
threshold outside decides nothing. That is exact for any series of comparisons whose thresholds do not depend on the number
itself, and nothing but comparisons is allowed. A call that draws some other way moves the state of torch's, numpy's or
Python's global generator; all three are looked at after every path, so chance from there cannot go unnoticed.

Numbers are taken for continuous. Real ones are multiples of 2**-24 in float32, so a test `u <= 0` that is false here is
true once in 16 million times there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from outrider.errors import UnforkableError
from outrider.prove.engines.branches import Branches, walk
from outrider.prove.forking import Law, Outcome

_DRAWS = (torch.multinomial, Tensor.multinomial)
_RAND, _RAND_LIKE = torch.rand, torch.rand_like
_ENGINE = "torch program"
_REMEDY = "Prove it by sampling instead."


def explore_torch(run: Callable[[], Outcome], *, max_paths: int = 100_000) -> Law:
    """The exact law of what `run` returns, over all that torch's global generator could say.

    Args:
        run: The program; called once for each path.
        max_paths: Give up beyond.

    Raises:
        UnforkableError: The program uses random numbers in a way that cannot be followed.
        AssertionError: More than `max_paths` ways through it, or the program is not deterministic but for its draws.
    """

    def forked(branches: Branches) -> Outcome:
        before = _generators()
        with _ForkingTorch(branches):
            outcome = run()
        if _generators() != before:
            raise UnforkableError(_ENGINE, "random numbers were drawn by a call that is not followed", _REMEDY)
        return outcome

    return walk(forked, max_paths=max_paths)


def _generators() -> tuple[Any, ...]:
    """States of the global generators."""
    _, words, place, *rest = np.random.get_state(legacy=True)
    return torch.get_rng_state().numpy().tobytes(), np.asarray(words).tobytes(), place, rest, random.getstate()


class Uniforms:
    """Uniform numbers of which only the answers to comparisons are known: one interval an element.

    Args:
        shape: Of the tensor it stands for.
        branches: Where decisions are made.
    """

    def __init__(self, shape: torch.Size, branches: Branches) -> None:
        self.shape = shape
        self._branches = branches
        self._intervals = [(0.0, 1.0)] * math.prod(shape)

    def __lt__(self, thresholds: Any) -> Tensor:
        return self._compare(thresholds, below=True)

    def __gt__(self, thresholds: Any) -> Tensor:
        return self._compare(thresholds, below=False)

    __le__, __ge__ = __lt__, __gt__  # equality has no chance

    def _compare(self, thresholds: Any, *, below: bool) -> Tensor:
        """Which numbers lie on the asked side of their threshold; `thresholds` broadcast to this shape."""
        wanted = torch.as_tensor(thresholds, dtype=torch.float64).expand(self.shape).flatten().tolist()
        # NaN is on no side, as in torch.
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
    """torch with its chance taken over, for the thread and the time of a `with` block."""

    def __init__(self, branches: Branches) -> None:
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
            raise UnforkableError(_ENGINE, "draws several samples of one law, or from a generator of its own", _REMEDY)
        rows = probs.reshape(-1, probs.shape[-1]).tolist()
        return torch.tensor([self._draw(row) for row in rows]).reshape(*probs.shape[:-1], 1)

    def _draw(self, weights: list[float]) -> int:
        total = sum(weights)
        if not 0.0 < total < math.inf or min(weights) < 0.0:  # what torch refuses too
            raise RuntimeError("probability tensor contains either inf, nan or element < 0, or sums to 0")
        possible = [token for token, weight in enumerate(weights) if weight > 0.0]
        if len(possible) == 1:
            return possible[0]
        return possible[self._branches.choose([weights[token] / total for token in possible])]
