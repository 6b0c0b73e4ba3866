"""Python and C agree on structures and numbers; a library that does not agree is refused, and the constant is named."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from enum import IntEnum

import pytest

from outrider.errors import KernelMismatchError
from outrider.kernels import layout, library
from outrider.kernels.library import available_sets, kernel_library

pytestmark = pytest.mark.skipif(not available_sets(), reason="the kernels are not compiled here: no C compiler at build")


class OtherFormats(IntEnum):
    REAL = 0
    BF16 = 2
    INT8 = 1
    INT4 = 3


class OtherNorms(IntEnum):
    NONE = 0
    RMS = 1
    LAYER = 3


class OtherFeedForwards(IntEnum):
    PLAIN = 0
    GATED = 3
    EXPERTS = 2


class LongerLinear(ctypes.Structure):
    _fields_ = [*layout.LinearStruct._fields_[:-1], ("added", ctypes.c_int64), layout.LinearStruct._fields_[-1]]


class ShorterPass(ctypes.Structure):
    _fields_ = layout.PassStruct._fields_[:-1]


class WiderDraw(ctypes.Structure):
    _fields_ = [*layout.DrawCall._fields_[:-1], ("threads", ctypes.c_int64 * 2)]


PLANTED = {
    "weight format BF16": ("FormatCode", OtherFormats),
    "activation gelu_tanh": ("ACTIVATIONS", {**layout.ACTIVATIONS, "gelu_tanh": 2}),
    "activation mish": ("ACTIVATIONS", {**layout.ACTIVATIONS, "mish": 6}),
    "activation silu": ("ACTIVATIONS", {k: v for k, v in layout.ACTIVATIONS.items() if k != "silu"}),
    "norm LAYER": ("NormKind", OtherNorms),
    "feed-forward GATED": ("FeedForward", OtherFeedForwards),
    # It has the same cause as another width of panels, and comes before it in the alphabet.
    "columns at once": ("INSTRUCTION_SETS", dict.fromkeys(layout.INSTRUCTION_SETS, 8)),
    "instruction set avx2": ("INSTRUCTION_SETS", {"generic": 16, "avx512": 64, "avx2": 32, "avx512bf16": 64}),
    "offset of linear.next": ("STRUCTS", {**layout.STRUCTS, "linear": LongerLinear}),
    "offset of pass.hidden_out": ("STRUCTS", {**layout.STRUCTS, "pass": ShorterPass}),
    "size of draw_call": ("STRUCTS", {**layout.STRUCTS, "draw_call": WiderDraw}),
}


@pytest.fixture
def opened_anew() -> Iterator[None]:
    """The library is opened and checked as in a new process, here and after the test."""
    caches = (library._open, library.available_sets, library.kernels_for)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("opened_anew")
@pytest.mark.parametrize("constant", PLANTED)
def test_a_constant_that_differs_is_named_when_the_library_is_opened(
    constant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, value = PLANTED[constant]
    monkeypatch.setattr(layout, name, value)
    for _ in range(2):  # not only the first time
        with pytest.raises(KernelMismatchError) as caught:
            kernel_library()
    assert caught.value.constant.startswith(f"{constant} in ")
    assert constant in str(caught.value)
    assert caught.value.compiled != caught.value.written
    monkeypatch.setenv("OUTRIDER_KERNELS", "off")
    assert kernel_library() is None


@pytest.mark.parametrize("number", range(len(layout.STRUCTS)))
def test_every_structure_is_compared(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name, struct = list(layout.STRUCTS.items())[number]
    wider = type("Wider", (ctypes.Structure,), {"_fields_": [("added", ctypes.c_int64), *struct._fields_]})
    monkeypatch.setattr(layout, "STRUCTS", {**layout.STRUCTS, name: wider})
    with pytest.raises(KernelMismatchError, match=rf"(offset|size) of {name}\b"):
        layout.check_layout(ctypes.CDLL(str(library.FILE)))


def test_a_library_without_the_lists_is_of_another_version() -> None:
    with pytest.raises(KernelMismatchError, match="Install the package again") as caught:
        layout.check_layout(ctypes.CDLL(None))
    assert caught.value.compiled is None


def test_the_library_that_is_here_agrees() -> None:
    layout.check_layout(ctypes.CDLL(str(library.FILE)))
