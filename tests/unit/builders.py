"""Small requests and sequences without a model, for tests of the bookkeeping."""

from __future__ import annotations

from itertools import count
from typing import Any

from outrider.config import PLAIN, SpeculationConfig
from outrider.engine.detokenizer import TextStream
from outrider.engine.sequence import Request, Sequence
from outrider.params import SamplingParams
from outrider.propose.base import Proposer

_ids = count()

DRAFTING = SpeculationConfig(proposer="stub", num_draft_tokens=5)


def make_request(
    prompt: int | list[int],
    *,
    proposer: Proposer | None = None,
    speculation: SpeculationConfig | None = None,
    max_model_len: int = 1000,
    eos: frozenset[int] = frozenset(),
    **params: Any,
) -> Request:
    """A request of so many (or these) prompt tokens, with its sequences."""
    tokens = list(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt
    config = speculation or (DRAFTING if proposer is not None else PLAIN)
    sampling = SamplingParams(**params)
    seed = 1 if sampling.seed is None else sampling.seed
    request = Request(next(_ids), None, tuple(tokens), sampling, config, proposer, seed, eos)
    for index in range(sampling.n):
        request.sequences.append(Sequence(next(_ids), request, index, TextStream(None, ()), max_model_len))
    return request


def make_sequence(prompt: int | list[int], **how: Any) -> Sequence:
    """The only sequence of a request (see `make_request`)."""
    (seq,) = make_request(prompt, **how).sequences
    return seq
