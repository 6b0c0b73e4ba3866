"""The Proposer protocol: what a proposer is asked, how it draws, and what it is shown after a pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple, overload

import torch
from torch import Tensor

from outrider.cache.memory import AddedLayers
from outrider.cache.state import KVView
from outrider.draft import EMPTY, Draft, Law
from outrider.params import SamplingParams
from outrider.propose.tree import CHAIN, TreeBuilder
from outrider.verify.noise import Key, NoiseSource, Stream
from outrider.verify.processing import Processing

# --- Drawn: what was drawn for one request, so that every draw comes to its test.


#: Tokens behind the committed text, from the first one on; the empty path is the end of the text.
Path = tuple[int, ...]


class Drawn:
    """The tokens that were drawn for one request in one turn, each with its place and the probabilities it was drawn from.

    *A draw, once made, can only be tested or carried*: if it depended on a drawn token, or on what was drawn behind it,
    whether it is tested, the text would have another distribution. So every draw is noted here before a proposer sees the
    token. A proposer that raises behind a draw, leaves a drawn token out, or names other probabilities, has a fault, and
    its draft is what was drawn. Coupled guesses are not kept, since they decide nothing; they are only counted.
    """

    def __init__(self) -> None:
        self._rows: dict[Path, Tensor] = {}
        self._tokens: dict[Path, list[int]] = {}
        self._order: list[tuple[Path, int]] = []
        self._count = Counter[int]()

    @property
    def is_empty(self) -> bool:
        """Tells whether nothing was drawn yet."""
        return not self._order

    def next_branch(self, position: int) -> int:
        """The number that tells this draw from the others for the same position."""
        self._count[position] += 1
        return self._count[position] - 1

    def taken(self, path: Path) -> Sequence[int]:
        """Tokens that were drawn behind a path, in their order."""
        return self._tokens.get(path, ())

    def row(self, path: Path) -> Tensor | None:
        """The probabilities [vocab_size] that tokens were drawn from behind a path; None where none was."""
        return self._rows.get(path)

    def note(self, path: Path, row: Tensor, token: int) -> None:
        """A token was drawn behind a path.

        Args:
            row: [vocab_size] probabilities, those of the first token that was drawn there. Further ones are drawn from what
                is left of them without the tokens before.
        """
        self._rows.setdefault(path, row)
        self._tokens.setdefault(path, []).append(token)
        self._order.append((path, token))

    def draft(self, base: Path) -> Draft:
        """All that was drawn, as a draft behind `base`. Tokens on the way to a draw that nobody drew are guesses."""
        nodes: dict[Path, int] = {}
        tokens, parents, laws, rows = list[int](), list[int](), list[Law](), list[Tensor]()

        def add(path: Path, token: int, law: Law, row: Tensor) -> None:
            nodes[(*path, token)] = len(tokens)
            tokens.append(token)
            parents.append(nodes.get(path, -1))
            laws.append(law)
            rows.append(row)

        for path, token in self._order:
            row = self._rows[path]
            for end in range(len(base), len(path)):
                if path[: end + 1] not in nodes:
                    add(path[:end], path[end], Law.OPAQUE, torch.zeros_like(row))
            add(path, token, Law.SAMPLED, row)
        return Draft(tuple(tokens), tuple(parents), tuple(laws), torch.stack(rows)) if tokens else EMPTY

    def problem(self, draft: Draft, base: Path, *, draws_hold: bool = False) -> str | None:
        """Returns what a draft behind `base` says of its draws that is not so; None where it holds all of them and no
        others. `draws_hold` says that its probabilities are known to be those that are noted."""
        paths, told, rows = draft.paths, dict[Path, list[int]](), dict[int, Tensor]()
        for draw, (node, law) in enumerate(zip(draft.nodes, draft.laws, strict=True)):
            if law is not Law.SAMPLED:
                continue
            token, parent = draft.token_ids[node], draft.parents[node]
            path = base if parent < 0 else (*base, *paths[parent])
            told.setdefault(path, []).append(token)
            row = self._rows.get(path)
            if row is None or token not in self._tokens[path]:
                return f"node {node}: token {token} was not drawn through the noise that the proposer was given"
            if not draws_hold:
                rows[draw] = row
        for draw, holds in zip(rows, _are_rows(draft.draft_probs, rows), strict=True):
            if not holds:
                node = draft.nodes[draw]
                return f"node {node}: token {draft.token_ids[node]} was drawn from other probabilities"
        for path, tokens in self._tokens.items():
            if told.get(path) != tokens:
                return f"of the tokens {tokens} that were drawn behind {list(path)}, it holds {told.get(path, [])}"
        return None


def _are_rows(draft_probs: Tensor | None, rows: Mapping[int, Tensor]) -> list[bool]:
    """Tells whether the probabilities of these draws are the given rows, in one answer: the host waits for a device at
    each."""
    if not rows:
        return []
    assert draft_probs is not None
    if any(row.shape != draft_probs.shape[1:] for row in rows.values()):
        return [False] * len(rows)
    same: list[bool] = torch.stack([(draft_probs[draw].to(row) == row).all() for draw, row in rows.items()]).tolist()
    return same


def host_waits(device: torch.device) -> bool:
    """Tells whether the host waits when it asks for the numbers of a tensor."""
    return device.type != "cpu"


# --- The Proposer protocol: what a proposer is asked, and what it is shown after a pass.


class Tokens(Sequence[int]):
    """A read-only view of a sequence's committed tokens, prompt first; it grows as the sequence does."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._tokens[index]


class Joined(Sequence[int]):
    """Tokens that stay, and behind them tokens that grow."""

    def __init__(self, first: Sequence[int], rest: Sequence[int]) -> None:
        self._first = first
        self._rest = rest

    def __len__(self) -> int:
        return len(self._first) + len(self._rest)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        size = len(self._first)
        if not isinstance(index, slice):
            place = range(len(self))[index]
            return self._first[place] if place < size else self._rest[place - size]
        start, stop, step = index.indices(len(self))
        assert step == 1, "tokens are read in their order"
        return [*self._first[start:stop], *self._rest[max(start - size, 0) : max(stop - size, 0)]]


@dataclass
class ProposerSequence:
    """A sequence as proposers see it."""

    seq_id: int  # unique while the engine lives
    token_ids: Tokens  # committed tokens, prompt first
    num_prompt_tokens: int  # how many of them are the prompt
    sampling: SamplingParams  # the request's parameters
    processing: Processing  # what its parameters do to logits, the target's and a draft model's alike
    seed: int  # of the request's noise
    sample: int  # sample index within the request
    # The target's KV of it, to read: blocks and how many tokens they hold. While a proposer is asked, the blocks have room
    # for the draft's rows behind these.
    kv: KVView
    round: int = 0  # verify passes so far
    namespace: str | None = None  # keeps prefix caches of unrelated callers apart
    prediction: tuple[int, ...] = ()  # tokens that the caller expects the output to have; empty where nothing is predicted
    references: tuple[tuple[int, ...], ...] = ()  # texts that the output may quote, beside the prompt
    source: tuple[int, ...] | None = None  # tokens that an encoder has read for this text; None for a decoder alone

    @cached_property
    def known_token_ids(self) -> Sequence[int]:
        """All tokens that a text may repeat, those of its source first; it grows as the text does."""
        return self.token_ids if self.source is None else Joined(self.source, self.token_ids)


def _unheard(problem: str) -> None:
    """Default fault callback: ignores the report."""


def _uncounted(stage: str, num_drafted: int, num_accepted: int) -> None:
    """Default callback for passes of stages: ignores the count."""


@dataclass(frozen=True)
class ProposeRequest:
    """One sequence that wants a draft."""

    sequence: ProposerSequence  # whose
    budget: int  # most rows it may have, scratch rows included; decided before anything is drawn
    # Longest path that may be of use; as many as `budget` for a chain, fewer near the end of a text.
    max_depth: int = 1 << 30
    # Tokens behind the committed ones that another proposer drafted in this step; the draft goes on behind them.
    path: tuple[int, ...] = ()
    builder: TreeBuilder = CHAIN  # shapes the draft as the caller asked for; `Growth` follows it
    greedy: bool = False  # whether the caller asked for the most likely tokens instead of drawn ones
    coupled: bool = False  # whether drafts are to guess with the target's noise
    drafter: int = 0  # whose draws these are; part of their keys
    # Counts a fault of a proposer that drafts for the one that is asked, and logs what happened. It costs the one that is
    # asked nothing.
    report: Callable[[str], None] = field(default=_unheard, compare=False)
    # Counts one pass of a stage inside the one that is asked: the name of the drafter there, how many tokens it guessed,
    # and how many of them entered the stage's draft.
    count_stage: Callable[[str, int, int], None] = field(default=_uncounted, compare=False)
    # What is drawn for it. Who asks a proposer of its own for something else than this draft gives a new one.
    drawn: Drawn = field(default_factory=Drawn, compare=False)

    @property
    def length(self) -> int:
        """Tokens that the draft follows: committed ones, then those of `path`."""
        return len(self.sequence.token_ids) + len(self.path)

    def text(self, start: int) -> list[int]:
        """The tokens that the draft follows, from a position on."""
        size = len(self.sequence.token_ids)
        return [*self.sequence.token_ids[start:], *self.path[max(start - size, 0) :]]

    @property
    def last_token_id(self) -> int:
        """The token that the draft follows."""
        return self.path[-1] if self.path else self.sequence.token_ids[-1]


@dataclass(frozen=True)
class PromptRows:
    """Holds what the target computes of a text in this step, before the text is drafted for."""

    sequence: ProposerSequence  # whose
    stop: int  # how many leading tokens of the text the target will have computed after this step


#: Members that one nested proposer may have; keys count them in this base.
_MOST_MEMBERS = 15
#: Bits of a key's drafter that name a sequence's own proposer; those of its members come above.
_DRAFTER_BITS = 20


class DraftNoise:
    """Chance for proposers: draws under keys that are theirs alone, or guesses with the target's noise when coupled."""

    def __init__(self, source: NoiseSource, members: tuple[int, ...] = ()) -> None:
        self.source = source
        self._members = members

    def member(self, index: int) -> DraftNoise:
        """Noise for member `index` (from 0) of a nested proposer, independent of its own and of other members'."""
        assert 0 <= index < _MOST_MEMBERS, f"a nested proposer has up to {_MOST_MEMBERS} members"
        return DraftNoise(self.source, (*self._members, index))

    def drafter(self, request: ProposeRequest) -> int:
        """The number that names in keys who draws here for `request`."""
        number = 0
        for index in self._members:
            number = number * (_MOST_MEMBERS + 1) + index + 1
        return (number << _DRAFTER_BITS) + request.drafter

    def law(self, request: ProposeRequest) -> Law:
        """The law that tokens drawn here for `request` have."""
        return Law.COUPLED if request.coupled else Law.SAMPLED

    def categorical(self, probs: Tensor, requests: Sequence[ProposeRequest], paths: Sequence[Path]) -> list[int]:
        """Draw one token a row. Several draws behind one path are made without replacement, one after another: tokens that
        were drawn there before have no probability any more. Coupled guesses for one place share the target's noise for it.

        Args:
            probs: [n, vocab_size] probabilities of each row; behind one path always the same.

        Returns:
            Tokens [n]; -1 where no token is left.
        """
        places = [(*request.path, *path) for request, path in zip(requests, paths, strict=True)]
        left, alive = _left(probs, [r.drawn.taken(place) for r, place in zip(requests, places, strict=True)])
        tokens = [-1] * len(places)
        if alive:
            keys = [self._key(requests[i], len(paths[i])) for i in alive]
            drawn = self.source.categorical(left if len(alive) == len(left) else left[alive], keys).tolist()
            for i, token in zip(alive, drawn, strict=True):
                requests[i].drawn.note(places[i], probs[i], token)
                tokens[i] = token
        return tokens

    def ahead(self, probs: Tensor, requests: Sequence[ProposeRequest], depth: int) -> Tensor:
        """Draw one token a row, as `categorical` does, behind paths of so many tokens that nothing was drawn behind before.

        The host does not wait for the tokens [n], which stay on the device of the rows. Whoever asks notes them later.
        """
        return self.source.categorical(probs, [self._key(request, depth) for request in requests])

    def chain(self, probs: Tensor, request: ProposeRequest) -> list[int]:
        """Draw a chain of tokens [n] from rows [n, vocab_size] that do not depend on the tokens before them."""
        path = list[int]()
        for row in probs:
            path += self.categorical(row[None], [request], [tuple(path)])
        return path

    def _key(self, request: ProposeRequest, depth: int) -> Key:
        return Key(
            request.sequence.seq_id,
            request.sequence.seed,
            request.sequence.sample,
            Stream.GUESS if request.coupled else Stream.DRAFT,
            request.length + depth,
            request.sequence.round,
            request.drawn.next_branch(request.length + depth),
            self.drafter(request),
        )


def _left(probs: Tensor, taken: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
    """Probabilities [n, vocab_size] without the tokens that were taken of each row, and the rows that have some left."""
    if not any(taken):
        return probs, list(range(len(probs)))
    left = probs.clone()
    for row, tokens in enumerate(taken):
        left[row, list(tokens)] = 0.0
    return left, [row for row, mass in enumerate(left.sum(-1).tolist()) if mass > 0.0]


@dataclass(frozen=True)
class Requirements:
    """Holds what a proposer wants to be shown after each pass."""

    aux_layers: tuple[int, ...] = ()  # hidden states by transformers' index: 0 is the embeddings, i the input of layer i
    target_top_k: int = 0  # how many of the target's most likely next tokens, for the rows that have logits
    # Whether every row of the text is needed, from its first token. Such a sequence is computed without prefix-cache hits
    # on the target, and where `target_top_k` is asked for, prompt rows get logits too. Without, what was computed anyway is
    # shown, and nothing is computed for it.
    needs_uncached_prompt: bool = False
    # Its own layers beside the target's (`Target.add_layers`). A text begins with no more of another one than these hold,
    # and every other row is shown.
    added_layers: AddedLayers | None = None


class RowStatus(StrEnum):
    """Holds what became of a row of the pass."""

    TEXT = "text"  # a committed token that was due: of the prompt, or the last one written
    ACCEPTED = "accepted"  # a draft token that entered the text
    REJECTED = "rejected"  # a draft token that did not
    SCRATCH = "scratch"  # a row that the proposer itself asked for


class TopK(NamedTuple):
    """The target's most likely next tokens."""

    rows: tuple[int, ...]  # which of the shown rows these are; rows without logits have none
    token_ids: Tensor  # [len(rows), k], most likely first
    logits: Tensor  # [len(rows), k], of the target itself, before any parameter


@dataclass(frozen=True)
class ObservedRows:
    """Rows of one sequence in the pass that has just ended. After a preemption rows of the text come again."""

    sequence: ProposerSequence  # whose; its `token_ids` hold what was accepted already
    token_ids: tuple[int, ...]  # token of each row
    positions: tuple[int, ...]  # position of each row
    # Which of these rows each one follows; -1 where it follows what was computed in earlier passes.
    parents: tuple[int, ...]
    statuses: tuple[RowStatus, ...]  # what became of each row
    # By layer index: [num_rows, hidden_size]. They may be views of the whole pass: what is kept is cloned.
    aux_hidden_states: dict[int, Tensor] = field(default_factory=dict)
    target_top_k: TopK | None = None  # None unless asked for

    def __len__(self) -> int:
        return len(self.token_ids)

    def where(self, *statuses: RowStatus) -> list[int]:
        """Indices of the rows with one of these statuses, in order."""
        return [row for row, status in enumerate(self.statuses) if status in statuses]


def rows_at(places: Sequence[int]) -> slice | list[int]:
    """Returns what selects rows of a tensor: a slice, which copies nothing, where they lie one behind another."""
    together = bool(places) and list(places) == list(range(places[0], places[0] + len(places)))
    return slice(places[0], places[-1] + 1) if together else list(places)


class Proposer:
    """Guesses what the target will write. A wrong guess costs time, never a token.

    Subclass it, return drafts from `propose`, and give it a Method that builds it. Only `propose` must be written; see
    docs/how-to/write_a_proposer.md.
    """

    #: What `observe` must bring; None for a proposer that is shown nothing.
    requires: Requirements | None = None
    #: Whether it tells drafts how likely places stand (`Growth.chances`), and leaves to the engine where a chain ends.
    judges: bool = False
    #: Whether it must read rows as soon as it is shown them. In a stage it must, because the draft model counts on it.
    keeps_up: bool = False

    def begin(self, sequence: ProposerSequence) -> None:
        """The sequence will be drafted for; called before anything else is told or asked of it, maybe late in its text."""

    def fork(self, parent: ProposerSequence, child: ProposerSequence) -> None:
        """Another sample of the same prompt begins where `parent` stands: its prompt is computed but for the last token.
        A proposer that has learnt from the prompt's rows copies what it knows; `begin` is not called for `child`."""
        self.begin(child)

    def prefill(self, prompts: Sequence[PromptRows]) -> None:
        """The target computes chunks of these prompts in this step. A proposer that must read a text before it can draft
        may read as much of it now, and be ready when the prompt ends. Called before `propose`."""

    def propose(self, requests: Sequence[ProposeRequest], noise: DraftNoise) -> Sequence[Draft]:
        """Guess for every request, in order; an empty Draft is always allowed. Called once a step and turn.

        Tokens drawn from probabilities must be drawn through `noise`, and none may be dropped for what it turned out to be.
        """
        raise NotImplementedError

    def observe(self, rows: Sequence[ObservedRows]) -> None:
        """Receives what the pass computed for the sequences of this proposer, as `requires` asked."""

    def finish(self, sequence: ProposerSequence) -> None:
        """The sequence has ended or was cancelled; forget it."""

    def lag(self, sequence: ProposerSequence) -> int:
        """Tokens of the text that a model of its own must read before it can draft; 0 where there is nothing to read."""
        return 0

    def overlaps(self, sequence: ProposerSequence, target_probs: Sequence[float]) -> list[float]:
        """Returns how often draft tokens would have stood in text that is committed, where that can be told without
        drafting.

        Returns:
            For as many of the last tokens as it has to read anyway: min(1, q / p) for the probability q that it gives to
            the token. The mean over what the target writes is the chance that a drawn token stands.
        """
        return []

    @property
    def tells_overlaps(self) -> bool:
        """Whether `overlaps` can tell anything. Who cannot is tried now and then where the engine chooses who drafts."""
        return type(self).overlaps is not Proposer.overlaps

    def snapshot(self) -> object | None:
        """Returns what drafts depend on beside the sequences that are alive, such as texts of earlier requests; None for
        nothing. Taken while no sequence is alive."""
        return None

    def restore(self, state: object) -> None:
        """Go back to what `snapshot` returned, so that the proofs can start every path from the same state."""

    def check_integrity(self) -> None:
        """Raise AssertionError where internal books disagree; for tests."""

    def check_rest(self) -> None:
        """Raise AssertionError where something is kept for a sequence that has ended. Called while no sequence is alive."""
