"""Proposers at work for texts: they are asked and shown rows, their answers are inspected, and their faults contained.

The engine hosts proposers for its texts, and a stage hosts its drafter. A proposer that raises, or answers nonsense, has a
fault with the texts concerned. What it drew before stays in the draft (see `Drawn`), and the rest is cut by the first
faulty row, never by what the tokens say (see `sound_prefix`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from outrider.draft import EMPTY, NO_SCRATCH, Draft, Law, ScratchRows
from outrider.errors import Contained
from outrider.model.runner import ForwardOutput
from outrider.propose.base import (
    DraftNoise,
    ObservedRows,
    Proposer,
    ProposeRequest,
    ProposerSequence,
    Requirements,
    RowStatus,
    TopK,
    host_waits,
    rows_at,
)

# --- Asks a proposer: a fault costs speed and never a token.


class HostedText(Protocol):
    """The standing of a proposer with one text."""

    @property
    def believed(self) -> bool:
        """True if the laws that it gives for its draws are believed."""

    def report_fault(self, problem: str, *, useless: bool = True) -> None:
        """Count a fault; a useless one leaves nothing of a draft."""


def blaming(texts: Iterable[HostedText], doing: str) -> Contained:
    """A block in which a proposer works for texts: if it raises, it has a fault with each of them."""

    def report(error: BaseException) -> None:
        for text in texts:
            text.report_fault(f"{doing} raised {error!r}")

    return Contained(report)


@dataclass(eq=False)
class ProposerHost:
    """One proposer, and those who ask it."""

    proposer: Proposer
    vocab_size: int  # width of the target's logits

    def ask(self, texts: Sequence[HostedText], requests: Sequence[ProposeRequest], noise: DraftNoise) -> list[Draft]:
        """A sound draft for each request. Whether the laws are believed is decided before anything is drawn."""
        believed = [text.believed for text in texts]
        answers: list[object] = []
        with Contained(lambda error: answers.extend([error] * len(requests))):
            found = list(self.proposer.propose(requests, noise))
            if len(found) != len(requests):
                raise ValueError(f"{len(found)} drafts for {len(requests)} requests")
            answers += found
        drafts = list[Draft]()
        hold = draws_hold(requests, answers, self.vocab_size)
        for text, request, answer, truthful, holds in zip(texts, requests, answers, believed, hold, strict=True):
            sound, problem = inspected(request, answer, self.vocab_size, holds)
            if problem is not None:
                text.report_fault(problem, useless=not sound.num_rows)
            drafts.append(sound if truthful else sound.opaque())
        return drafts


# --- Shows a proposer the rows that a pass computed.


@dataclass
class PassRows:
    """The rows of one text in a pass, after the verdict: tokens of the text, then the draft behind the last of them."""

    sequence: ProposerSequence
    start: int  # position of the first row
    num_due: int  # rows of the text
    draft: Draft
    accepted: Collection[int]  # nodes of the draft that entered the text
    place: int  # of its segment in the pass

    def shown(self, needed: Requirements, out: ForwardOutput, scratch: Iterable[int] = ()) -> ObservedRows:
        """The rows as a proposer is shown them: those of its own scratch rows, and no others' ones."""
        draft, num_due, own = self.draft, self.num_due, list(scratch)
        root, first_node, first_scratch = num_due - 1, num_due, num_due + len(draft)
        rows = [*range(first_scratch), *(first_scratch + row for row in own)]
        places = {row: place for place, row in enumerate(rows)}
        parents = [row - 1 for row in range(num_due)]
        parents += [root if parent < 0 else first_node + parent for parent in draft.row_parents]
        depths: list[int] = []
        for row, parent in enumerate(parents):
            depths.append(row if row < num_due else depths[parent] + 1)
        accepted = frozenset(self.accepted)
        statuses = [RowStatus.TEXT] * num_due
        statuses += [RowStatus.ACCEPTED if node in accepted else RowStatus.REJECTED for node in range(len(draft))]
        statuses += [RowStatus.SCRATCH] * len(own)
        tokens = (*self.sequence.token_ids[self.start : self.start + num_due], *draft.row_token_ids)
        return ObservedRows(
            sequence=self.sequence,
            token_ids=tuple(tokens[row] for row in rows),
            positions=tuple(self.start + depths[row] for row in rows),
            parents=tuple(places[parents[row]] if parents[row] >= 0 else -1 for row in rows),
            statuses=tuple(statuses),
            aux_hidden_states=self._hidden_states(needed, rows, out),
            target_top_k=self._top_k(needed, rows, out),
        )

    def _hidden_states(self, needed: Requirements, rows: list[int], out: ForwardOutput) -> dict[int, Tensor]:
        if not needed.aux_layers:
            return {}
        first = out.row_spans[self.place][0]
        chosen = rows_at([first + row for row in rows])
        return {layer: out.aux_hidden_states[layer][chosen] for layer in needed.aux_layers}

    def _top_k(self, needed: Requirements, rows: list[int], out: ForwardOutput) -> TopK | None:
        if not needed.target_top_k:
            return None
        (begin, end), first_row = out.logits_spans[self.place], out.logits_first_rows[self.place]
        found = [(place, row) for place, row in enumerate(rows) if 0 <= row - first_row < end - begin]
        logits = out.logits[rows_at([begin + row - first_row for _, row in found])]
        values, tokens = largest(logits, min(needed.target_top_k, out.logits.shape[-1]))
        return TopK(tuple(place for place, _ in found), tokens, values)


#: Entries of a row that `largest` looks at together, and of how many a row has to be for that.
_TOGETHER, _LONG_ROW = 512, 1 << 16


def largest(rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest entries [n, count] of each row [n, size], the largest first, and their places.

    A sort of a whole vocabulary takes milliseconds. All that is looked for stands in the parts with the largest maxima.
    """
    parts, rest = divmod(rows.shape[-1], _TOGETHER)
    if rows.shape[-1] < _LONG_ROW or parts < count:
        values, places = rows.topk(count, -1)
        return values, places
    whole = rows[:, : rows.shape[-1] - rest]
    best = whole.reshape(-1, parts, _TOGETHER).amax(-1).topk(count, -1).indices  # [n, count]
    places = (best[..., None] * _TOGETHER + torch.arange(_TOGETHER, device=rows.device)).flatten(1)
    behind = torch.arange(rows.shape[-1] - rest, rows.shape[-1], device=rows.device)
    places = torch.cat((places, behind.expand(len(rows), -1)), -1)
    values, chosen = rows.gather(-1, places).topk(count, -1)
    return values, places.gather(-1, chosen)


# --- Inspects drafts: what of a proposer's answer is sound, row by row.
#
# Every proposer's draft is inspected by itself, before it is joined with those of others. So a bad proposer costs its own
# draws and nobody else's. What was drawn for it is not left to its word (see `Drawn`).


#: How far the probabilities of a draw may sum from 1 (float32 rounding over a large vocabulary).
_MASS_TOLERANCE = 1e-3


def inspected(
    request: ProposeRequest, answer: object, vocab_size: int, draws_hold: bool = False
) -> tuple[Draft, str | None]:
    """The draft that is verified for a request, from what the proposer answered or raised, and what is wrong with the
    answer; None where nothing is. All that was drawn stays in it with its probabilities, as far as the budget reaches.
    `draws_hold` is the word of the function of that name on the answer."""
    limits = request.budget, request.max_depth, vocab_size
    found: list[tuple[Draft, str | None]] = [(EMPTY, repr(answer))] if isinstance(answer, BaseException) else []
    with Contained(lambda error: found.append((EMPTY, repr(error)))):  # of an answer so malformed that looking at it raises
        found = found or [sound_prefix(answer, *limits, draws_hold)]
    ((sound, problem),) = found
    if request.coupled:
        return sound, problem  # guesses are compared with what the target draws, and decide nothing
    undrawn = request.drawn.problem(sound, request.path, draws_hold=draws_hold)
    if undrawn is None:
        return sound, problem
    drawn = request.drawn.draft(request.path)
    return sound_prefix(drawn, *limits)[0] if len(drawn) else sound.opaque(), problem or undrawn


def sound_prefix(
    draft: object, budget: int, max_depth: int, vocab_size: int, draws_hold: bool = False
) -> tuple[Draft, str | None]:
    """The rows before the first faulty one, and what is wrong with that one (None for a sound draft). Draws that are known
    to hold are not looked at.

    Cutting there is exact as long as a fault does not depend on what was drawn: nodes before it were drawn from the
    probabilities they claim, whatever came later.
    """
    if not isinstance(draft, Draft):
        return EMPTY, f"returned {type(draft).__name__} instead of a Draft"
    malformed = _malformed(draft)
    if malformed is not None:
        return EMPTY, malformed
    shape = draft.num_draws, vocab_size
    fitting = isinstance(draft.draft_probs, Tensor) and draft.draft_probs.shape == shape
    if Law.SAMPLED in draft.laws and not fitting:
        return EMPTY, f"draft_probs is not {list(shape)}"
    draft = _plain(draft, draft.draft_probs if fitting else None)
    bad_draws = {} if draws_hold else _unsound_draws(draft, vocab_size)
    node, problem = _first_problem(draft, bad_draws, budget, max_depth, vocab_size)
    sound = draft if problem is None else draft.first(node) if node else EMPTY
    node, misdrawn = _misdrawn(sound, draws_hold)
    if misdrawn is not None:
        return _distinct(sound.first(node)), f"node {node}: {misdrawn}"
    if problem is not None:
        return _distinct(sound), problem
    sound, problem = _sound_scratch(sound, budget, max_depth, vocab_size)
    return _distinct(sound), problem


def _malformed(draft: Draft) -> str | None:
    """The reason why nobody can tell which draw is of which node."""
    size = len(draft.token_ids)
    if size != len(draft.parents) or not len(draft.laws) == len(draft.nodes) == len(draft.members):
        return "token_ids and parents, or laws, nodes and members, differ in length"
    if not all(map(_is_int, (*draft.nodes, *draft.members))) or set(draft.nodes) != set(range(size)):
        return "token_ids, parents and laws differ in length, or a node was drawn by nobody"
    return None


def _first_problem(
    draft: Draft, bad_draws: Mapping[int, str], budget: int, max_depth: int, vocab_size: int
) -> tuple[int, str | None]:
    """The first faulty node, and what is wrong with it; None where all are sound."""
    depths: list[int] = []
    for node in range(len(draft)):
        problem = _row_problem(draft.token_ids[node], draft.parents[node], node, vocab_size) or bad_draws.get(node)
        if problem is None and node >= budget:
            problem = f"more than {budget} nodes"
        if problem is None:
            depths.append(1 + (depths[draft.parents[node]] if draft.parents[node] >= 0 else 0))
            problem = f"deeper than {max_depth}" if depths[-1] > max_depth else None
        if problem is not None:
            return node, f"node {node}: {problem}"
    return len(draft), None


def _distinct(draft: Draft) -> Draft:
    """The draft with one node for siblings of equal token, which then has the draws of both."""
    return EMPTY.joined(draft, -1)[0] if len(draft) else draft


def _plain(draft: Draft, draft_probs: Tensor | None) -> Draft:
    """The draft with tuples in the place of whatever sequences its proposer used, and probabilities only if they fit."""
    scratch = draft.scratch
    if isinstance(scratch, ScratchRows):
        scratch = ScratchRows(tuple(scratch.token_ids), tuple(scratch.parents))
    tokens, parents, laws = tuple(draft.token_ids), tuple(draft.parents), tuple(draft.laws)
    confidences = tuple(draft.confidences) if len(draft.confidences) == len(laws) else ()
    plain = replace(draft, token_ids=tokens, parents=parents, laws=laws, draft_probs=draft_probs, scratch=scratch)
    return replace(plain, confidences=confidences, nodes=tuple(draft.nodes), members=tuple(draft.members))


def _sound_scratch(draft: Draft, budget: int, max_depth: int, vocab_size: int) -> tuple[Draft, str | None]:
    """The draft with the scratch rows before the first faulty one, and what is wrong with that one."""
    scratch, size, depths = draft.scratch, len(draft), draft.depths
    if not isinstance(scratch, ScratchRows):
        return replace(draft, scratch=NO_SCRATCH), f"its scratch rows are {type(scratch).__name__} instead of ScratchRows"
    if len(scratch.token_ids) != len(scratch.parents):
        return draft.with_scratch(0), "token_ids and parents of its scratch rows differ in length"
    for row, (token, parent) in enumerate(zip(scratch.token_ids, scratch.parents, strict=True)):
        problem = _row_problem(token, parent, size + row, vocab_size)
        if problem is None and size + row >= budget:
            problem = f"more than {budget} rows"
        if problem is None:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
            problem = f"deeper than {max_depth}" if depths[-1] > max_depth else None
        if problem is not None:
            return draft.with_scratch(row), f"scratch row {row}: {problem}"
    return draft, None


def _misdrawn(draft: Draft, draws_hold: bool) -> tuple[int, str | None]:
    """The first node with a draw that its member cannot have made one after another, without replacement, from the
    probabilities of its elder siblings; and why. Those of draws that hold are the same, as they are noted once a place."""
    eldest: dict[tuple[int, int], int] = {}
    seen: set[tuple[int, int, int]] = set()
    problems: dict[int, str] = {}
    for draw, (node, member, law) in enumerate(zip(draft.nodes, draft.members, draft.laws, strict=True)):
        if law is not Law.SAMPLED:
            continue
        parent, token, probs = draft.parents[node], draft.token_ids[node], draft.draft_probs
        elder = eldest.setdefault((member, parent), draw)
        if (member, parent, token) in seen:
            problems.setdefault(node, f"token {token} was drawn before among its siblings")
        elif not draws_hold and probs is not None and elder != draw and not torch.equal(probs[elder], probs[draw]):
            of = draft.nodes[elder]
            problems.setdefault(node, f"its probabilities are not those its elder sibling {of} was drawn from")
        seen.add((member, parent, token))
    return min(problems.items(), default=(len(draft), None))


def _row_problem(token: object, parent: object, row: int, vocab_size: int) -> str | None:
    if not isinstance(token, int) or isinstance(token, bool):
        return f"token {token!r} is no int"
    if not 0 <= token < vocab_size:
        return f"token {token} is outside the vocabulary of {vocab_size}"
    if not isinstance(parent, int) or isinstance(parent, bool) or not -1 <= parent < row:
        return f"parent {parent!r} does not come before it"
    return None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _unsound_draws(draft: Draft, vocab_size: int) -> dict[int, str]:
    """Nodes with a draw of no law, or of probabilities that are none or could not have drawn the token."""
    problems = {
        node: f"law {law!r} is no Law"
        for node, law in zip(draft.nodes, draft.laws, strict=True)
        if not isinstance(law, Law)
    }
    sampled = [draw for draw, law in enumerate(draft.laws) if law is Law.SAMPLED]
    if not sampled or draft.draft_probs is None:
        return problems
    tokens = [draft.token_ids[node] for node in draft.nodes]
    tokens = [token if _is_int(token) and 0 <= token < vocab_size else 0 for token in tokens]  # others are faulty rows
    numbers = _numbers(draft.draft_probs, tokens).tolist()
    for draw in sampled:
        problem = _number_problem(tokens[draw], *numbers[draw])
        if problem is not None:
            problems[draft.nodes[draw]] = problem
    return problems


def _numbers(probs: Tensor, tokens: Sequence[int]) -> Tensor:
    """What is asked of the probabilities of draws, [n, 3], all at once since the host waits for a device at every answer:
    their sum, the least of them, and that of the token."""
    index = torch.tensor(tokens).to(probs.device, non_blocking=True)
    wide = torch.promote_types(probs.dtype, torch.float32)
    own = probs.gather(-1, index[:, None])[:, 0]
    return torch.stack([probs.sum(-1, dtype=wide), probs.amin(-1).to(wide), own.to(wide)], -1)


def _number_problem(token: int, mass: float, least: float, chance: float) -> str | None:
    if not (abs(mass - 1.0) <= _MASS_TOLERANCE and least >= 0.0):
        return f"its probabilities sum to {mass}, least entry {least}"
    return None if chance > 0.0 else f"token {token} has probability 0 among those it was drawn from"


# --- Looks at the draws of all answers together. Most steps have no faulty draw, and none is looked at by itself then.


@dataclass(frozen=True)
class _Draws:
    """Draws of one draft or of several."""

    told: Tensor  # [n, vocab_size] what each one was made from, as the draft says
    noted: list[Tensor]  # [vocab_size] the same as it was noted when it was made
    tokens: list[int]

    def numbers(self) -> Tensor:
        """Those of `_numbers`, and 1 where what is told is what was noted; [n, 4]."""
        if host_waits(self.told.device):
            same = (self.told == torch.stack(self.noted)).all(-1)
        else:  # quicker than a comparison that is stored
            same = torch.tensor([torch.equal(*rows) for rows in zip(self.told, self.noted, strict=True)])
        numbers = _numbers(self.told, self.tokens)
        return torch.cat([numbers, same[:, None].to(numbers)], -1)


def draws_hold(requests: Sequence[ProposeRequest], answers: Sequence[object], vocab_size: int) -> list[bool]:
    """Tells of each answer whether all its nodes were drawn, and from the very probabilities that it tells. The host waits
    once for all of them. Who gets no such word is inspected by itself, and may be sound nonetheless."""
    found: dict[int, _Draws] = {}
    holding = [False] * len(answers)
    for place, (request, answer) in enumerate(zip(requests, answers, strict=True)):
        with Contained(_inspect_alone):
            draws = _draws_of(request, answer, vocab_size)
            if draws is not None:
                found[place] = draws
    with Contained(_inspect_alone):
        for place, holds in zip(found, _hold(list(found.values())), strict=True):
            holding[place] = holds
    return holding


def _inspect_alone(error: BaseException) -> None:
    """What cannot be looked at together is inspected by itself, and blamed there."""


def _draws_of(request: ProposeRequest, answer: object, vocab_size: int) -> _Draws | None:
    """The draws of a draft; None where it has others, or where its rows or its probabilities are none."""
    if request.coupled or not isinstance(answer, Draft) or _malformed(answer) is not None:
        return None
    told, rows = answer.draft_probs, zip(answer.token_ids, answer.parents, strict=True)
    if not isinstance(told, Tensor) or told.shape != (answer.num_draws, vocab_size) or not told.is_floating_point():
        return None
    if any(_row_problem(token, parent, row, vocab_size) is not None for row, (token, parent) in enumerate(rows)):
        return None
    if any(law is not Law.SAMPLED for law in answer.laws):
        return None
    paths = answer.paths
    before = [request.path if parent < 0 else (*request.path, *paths[parent]) for parent in answer.parents]
    noted = [row for row in (request.drawn.row(before[node]) for node in answer.nodes) if row is not None]
    alike = all((row.shape, row.dtype, row.device) == (told.shape[1:], told.dtype, told.device) for row in noted)
    if len(noted) < answer.num_draws or not alike:
        return None
    return _Draws(told, noted, [answer.token_ids[node] for node in answer.nodes])


def _hold(each: list[_Draws]) -> list[bool]:
    """Tells of the draws of each draft whether they hold. On a device they are put together first, as what is launched
    there costs more than the copies; on a CPU these would leave its caches."""
    if not each:
        return []
    parts = each
    if host_waits(each[0].told.device):
        noted, tokens = [row for draws in each for row in draws.noted], [token for draws in each for token in draws.tokens]
        parts = [_Draws(torch.cat([draws.told for draws in each]), noted, tokens)]
    numbers = iter(torch.cat([draws.numbers() for draws in parts]).tolist())
    return [_all_hold(draws.tokens, list(islice(numbers, len(draws.tokens)))) for draws in each]


def _all_hold(tokens: list[int], numbers: list[list[float]]) -> bool:
    rows = zip(tokens, numbers, strict=True)
    return all(same and _number_problem(token, *found) is None for token, (*found, same) in rows)
