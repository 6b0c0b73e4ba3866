"""Checks that a bug in models with an encoder must turn red: texts beside those of the stock model."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from outrider import LLM, SamplingParams
from tests.model import encoders

_LONG = [(7 * i + 2) % 61 for i in range(32)]
_GREEDY = SamplingParams(temperature=0, max_tokens=12)


def encoder_batch() -> None:
    """Texts of several sources in one batch, with trees."""
    llm = LLM(_path(), dtype="float64", speculation={"method": "token_recycling", "tree": (2, 1)})
    sources = [[9], _LONG]
    outputs = llm.generate(sources, _GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [_stock(tuple(source)) for source in sources]


def encoder_prefixes() -> None:
    """Sources that begin alike, one after another, with texts that begin alike."""
    llm = LLM(_path(), dtype="float64", speculation="none", block_size=1)
    for source in (_LONG, _LONG[:16], _LONG):
        (output,) = llm.generate([source], _GREEDY)
        assert output.outputs[0].token_ids == _stock(tuple(source))


def kernels_sources() -> None:
    """The same as `encoder_batch`, by whole passes of our kernels."""
    llm = LLM(
        _path(), dtype="float64", speculation={"method": "token_recycling", "tree": (2, 1)}, attention_backend="fused"
    )
    sources = [[9], _LONG]
    outputs = llm.generate(sources, _GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [_stock(tuple(source)) for source in sources]


def kernels_distances() -> None:
    """A text in which distances are farther than the last bucket."""
    llm = LLM(_path(), dtype="float64", speculation="none", attention_backend="fused")
    (output,) = llm.generate([_LONG], _GREEDY.replace(max_tokens=30))
    assert output.outputs[0].token_ids == tuple(encoders.greedy_by_transformers(_path(), _LONG, 31)[1:])


@cache
def _path() -> str:
    """Texts begin with two tokens, so that one of them may be found."""
    return encoders.save(Path(tempfile.mkdtemp()), forced=7)


@cache
def _stock(source: tuple[int, ...]) -> tuple[int, ...]:
    return encoders.greedy_by_transformers(_path(), list(source), 13)[1:]
