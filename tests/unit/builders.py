"""Small requests, sequences and methods without a model, for tests of the bookkeeping."""

from __future__ import annotations

from itertools import count
from typing import Any, ClassVar

from torch import Tensor

from outrider.cache.blocks import BlockManager
from outrider.cache.memory import StateMemory
from outrider.config import RequestOptions
from outrider.draft import Draft, Law
from outrider.engine.sequence import Request, Sequence
from outrider.engine.text import TextStream
from outrider.params import SamplingParams
from outrider.propose.base import Proposer, ProposeRequest
from outrider.propose.settings import PLAIN, Method, ProposerContext, SpeculationConfig

_ids = count()


class Planted(Method):
    """A method of the tests. Its tag is its identity: another tag, another proposer."""

    name: ClassVar[str] = "planted"

    tag: int = 0

    def build(self, context: ProposerContext) -> Proposer:
        return Proposer()


class PlantedTree(Planted):
    """One whose drafts may branch without being given a shape, and whose settings need rows."""

    name: ClassVar[str] = "planted_tree"
    branches_freely: ClassVar[bool] = True

    needs: int = 1

    def usual_length(self) -> int:
        return 3 * self.needs

    def least_length(self) -> int:
        return self.needs


DRAFTING = SpeculationConfig(method=Planted(), num_draft_tokens=5)


def make_request(
    prompt: int | list[int],
    *,
    blocks: BlockManager | None = None,
    speculation: SpeculationConfig = PLAIN,
    max_model_len: int = 1000,
    eos: frozenset[int] = frozenset(),
    namespace: str | None = None,
    long_rope_after: int | None = None,
    priority: int = 0,
    references: tuple[tuple[int, ...], ...] = (),
    **params: Any,
) -> Request:
    """A request of so many (or these) prompt tokens, with its sequences, whose KV is to lie in `blocks`."""
    tokens = list(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt
    memory = StateMemory(BlockManager(64, 4) if blocks is None else blocks, long_rope_after)
    sampling = SamplingParams(**params)
    seed = 1 if sampling.seed is None else sampling.seed
    options = RequestOptions(namespace=namespace, priority=priority, references=references)
    request = Request(next(_ids), None, tuple(tokens), sampling, speculation, seed, eos, options=options)
    for index in range(sampling.n):
        text = TextStream(None, ())
        seq = Sequence(next(_ids), request, index, text, max_model_len, memory.state(namespace))
        request.sequences.append(seq)
    return request


def make_sequence(prompt: int | list[int], **how: Any) -> Sequence:
    """The only sequence of a request (see `make_request`)."""
    (seq,) = make_request(prompt, **how).sequences
    return seq


def note_draws(request: ProposeRequest, draft: Draft) -> None:
    """What a draft says that it has drawn, noted as if it had been; nothing where its probabilities are malformed."""
    probs = draft.draft_probs
    if not isinstance(probs, Tensor) or not probs.is_floating_point() or len(probs) != draft.num_draws:
        return
    for draw, (node, law) in enumerate(zip(draft.nodes, draft.laws, strict=True)):
        if law is Law.SAMPLED:
            request.drawn.note((*request.path, *draft.paths[node][:-1]), probs[draw], draft.token_ids[node])
