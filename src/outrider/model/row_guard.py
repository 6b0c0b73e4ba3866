"""Keeps the modules of a transformers model from computing what depends on the number of rows.

Products with packed weights and attention in our kernels have no such bits, and neither have sums over a row. What is left
are functions of single numbers (an activation, the sines of a rotary embedding) and products with weights that are no
linear layers (routers). The first pass of a model notes which kinds of modules compute them. From then on these modules,
and no others, run under `RowByRow`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from outrider.kernels.row_by_row import NotedOperators, RowByRow, fills_vectors


class GuardedKinds:
    """The kinds of modules that compute what depends on the number of rows.

    Attributes:
        kinds: Their types. Those that compute nothing but functions of the single numbers of their input are marked: most
            inputs fill whole vectors, and need no other way.
        weight_bytes: What their products with weights read in a pass; infinite where one cannot be computed row by row.
    """

    def __init__(self) -> None:
        self.kinds: dict[type, bool] = {}
        self.weight_bytes = 0.0

    def note(self, kind: type, input_size: int, operand: Tensor, weight_bytes: float) -> None:
        """A module of this kind, whose first argument has so many numbers, computes with such an operand."""
        self.kinds[kind] = self.kinds.get(kind, True) and not weight_bytes and operand.numel() == input_size
        self.weight_bytes += weight_bytes


@contextmanager
def noting_kinds(model: nn.Module) -> Iterator[GuardedKinds]:
    """Note which kinds of modules of a model, which runs within the block, compute what depends on the number of rows."""
    found, running = GuardedKinds(), [(type(model), -1)]

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        running.append((type(module), args[0].numel() if args and isinstance(args[0], Tensor) else -1))

    hooks = []
    for module in model.modules():
        hooks.append(module.register_forward_pre_hook(enter))
        hooks.append(module.register_forward_hook(lambda *_: running.pop() and None, always_call=True))
    try:
        with NotedOperators(lambda operand, weight_bytes: found.note(*running[-1], operand, weight_bytes)):
            yield found
    finally:
        for hook in hooks:
            hook.remove()


class RowGuard:
    """Lets modules of some kinds run under `RowByRow`, until it is removed.

    What such modules call runs so, too, but not larger parts that are of other kinds: a model that bounds its logits by a
    tanh should not run as a whole under a mode that is asked at every operator.
    """

    def __init__(self, model: nn.Module, kinds: Mapping[type, bool]) -> None:
        self._mode: Any = RowByRow()  # type: ignore[no-untyped-call]
        self._active = [False]  # for each module that runs, the innermost last
        self._hooks: list[Any] = []
        for module in model.modules():
            if type(module) in kinds:
                self._watch(module, self._enter_function if kinds[type(module)] else self._enter_guarded)
                for part in _parts(module):
                    if type(part) not in kinds and any(True for _ in part.children()):
                        self._watch(part, self._enter_free)

    def remove(self) -> None:
        """Let all modules compute as before."""
        for hook in self._hooks:
            hook.remove()

    def _watch(self, module: nn.Module, enter: Callable[[nn.Module, tuple[Any, ...]], None]) -> None:
        self._hooks.append(module.register_forward_pre_hook(enter))
        self._hooks.append(module.register_forward_hook(self._leave, always_call=True))

    def _enter_guarded(self, *_: Any) -> None:
        self._enter(active=True)

    def _enter_function(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        self._enter(active=not fills_vectors(args[0]))

    def _enter_free(self, *_: Any) -> None:
        self._enter(active=False)

    def _enter(self, *, active: bool) -> None:
        self._switch(self._active[-1], active)
        self._active.append(active)

    def _leave(self, *_: Any) -> None:
        self._switch(self._active.pop(), self._active[-1])

    def _switch(self, before: bool, after: bool) -> None:
        if after and not before:
            self._mode.__enter__()
        elif before and not after:
            self._mode.__exit__(None, None, None)


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that a module calls: those in its lists are its own."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield child
