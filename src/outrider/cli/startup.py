"""Imports the parts of transformers that the command needs, and leaves out the others, so that it starts quickly.

transformers imports PyTorch's compiler, the sharding of tensors over several computers, and scipy, before it loads any
model. PyTorch imports sympy for the shapes of tensors that have no memory yet. That takes longer than all the rest, and the
command uses none of it. A library may not decide that for others, so only the command does: its process is its own.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

#: PyTorch's compiler, and a part of it that transformers imports by name.
_COMPILER = ("torch._dynamo", "torch._dynamo._trace_wrapped_higher_order_op")
#: What PyTorch imports to find out whether a size is a symbol.
_SYMBOLS = ("sympy", "torch.fx.experimental.symbolic_shapes")


@contextmanager
def light_imports() -> Iterator[None]:
    """Within the block, transformers is imported and loads models without what the command does not use.

    What is imported already stays as it is. The search for unused objects pauses: imports make a million objects that all
    stay, and searching them again and again takes a quarter of their time.
    """
    gc.disable()
    try:
        import torch

        if "transformers.modeling_utils" not in sys.modules:
            # As on systems for which PyTorch is built without it. It stays so, since transformers looks more than once.
            torch.distributed.is_available = _no
        with _without_scipy(), _compiler_left_out(), _symbols_left_out():
            yield
    finally:
        gc.freeze()  # what was made stays, and is not searched later either
        gc.enable()


def _no() -> bool:
    return False


@contextmanager
def _without_scipy() -> Iterator[None]:
    """Nobody who looks for scipy within the block finds it."""
    if "scipy" in sys.modules:
        yield
        return
    sys.modules["scipy"] = None  # type: ignore[assignment]  # Python's own way to say that a module is not there
    try:
        yield
    finally:
        del sys.modules["scipy"]


@contextmanager
def _compiler_left_out() -> Iterator[None]:
    """Within the block, a stand-in takes the place of PyTorch's compiler, unless more than a mark is asked of it."""
    if _COMPILER[0] in sys.modules:
        yield
        return
    sys.modules.update({name: _StandIn(name) for name in _COMPILER})
    try:
        yield
    finally:
        _remove_stand_ins()


def _remove_stand_ins() -> None:
    for name in _COMPILER:
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]


class _StandIn(ModuleType):
    """A module of the compiler that has not been imported. It has functions of every name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def used(*args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], FunctionType):  # a mark on a function, and it is never compiled
                return args[0]
            if args and args[0] is None:  # the same, with settings
                return _unmarked
            _remove_stand_ins()
            return getattr(import_module(self.__name__), name)(*args, **kwargs)

        return used


def _unmarked(function: Any) -> Any:
    return function


@contextmanager
def _symbols_left_out() -> Iterator[None]:
    """Within the block, no size is a symbol, unless more is asked than whether one is."""
    if any(name in sys.modules for name in _SYMBOLS):
        yield
        return
    sys.modules.update({name: _NoSymbols(name) for name in _SYMBOLS})
    try:
        yield
    finally:
        _remove_no_symbols()


def _remove_no_symbols() -> None:
    for name in _SYMBOLS:
        if isinstance(sys.modules.get(name), _NoSymbols):
            del sys.modules[name]


#: What is asked of conditions and sizes, and the answers for those that are no symbols.
_ANSWERS: dict[str, Callable[..., bool]] = {
    "expect_true": bool,
    "guard_or_false": bool,
    "guard_or_true": bool,
    "guard_size_oblivious": bool,
    "is_nested_int": lambda _: False,
    "statically_known_true": bool,
    "sym_eq": lambda one, other: one == other,
    "sym_and": lambda *conditions: all(conditions),
    "sym_or": lambda *conditions: any(conditions),
}


def _plain(value: Any) -> bool:
    """Tells whether a value is a condition, a size or a shape, in which nothing is a symbol."""
    return isinstance(value, int) or (isinstance(value, tuple) and all(isinstance(size, int) for size in value))


class _NoSymbols(ModuleType):
    """A module of symbols that has not been imported. Whatever else is asked of it is asked of the module itself."""

    class Basic:
        """The class of all symbols, which nothing is."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if not name.islower():
            return self._real(name)

        def asked(*args: Any, **kwargs: Any) -> Any:
            if name in _ANSWERS and all(map(_plain, args)) and not kwargs:
                return _ANSWERS[name](*args)
            return self._real(name)(*args, **kwargs)

        return asked

    def _real(self, name: str) -> Any:
        _remove_no_symbols()
        return getattr(import_module(self.__name__), name)
