"""Which rule checks which draft, and the batched verdicts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from outrider.engine.sequence import Sequence
from outrider.params import TokenOrigin
from outrider.propose.draft import Draft, Law
from outrider.verify.logits import RowParams, argmax, forbid, target_probs
from outrider.verify.noise import Key, NoiseSource, Stream
from outrider.verify.rules import block_acceptance, residual, token_acceptance


class Rule(Enum):
    """How a draft is checked; see verify/rules.py and the docs for each rule's source."""

    WALK = auto()  # R2, and RC for coupled drafts: the target draws at each node, and the draft is followed while it agrees
    TOKEN = auto()  # R1
    BLOCK = auto()  # R3


@dataclass(frozen=True)
class Candidate:
    """A draft to check.

    Attributes:
        seq: Whose.
        draft: Empty where nothing was drafted.
        rows: (first, end) rows of the logits: the last committed token, then the nodes.
    """

    seq: Sequence
    draft: Draft
    rows: tuple[int, int]


@dataclass(frozen=True)
class Verdict:
    """What stands.

    Attributes:
        path: Accepted nodes, root side first.
        token_id: The one more token.
        origin: How it came about.
    """

    path: tuple[int, ...]
    token_id: int
    origin: TokenOrigin


def rule_for(draft: Draft, rule_name: str) -> Rule:
    """The dispatcher by law: only a chain drawn from known laws gains from a ratio test; all else is walked.

    Args:
        draft: The draft.
        rule_name: SpeculationConfig.rule; "auto" takes block verification where it applies.
    """
    if draft.uniform_law() is not Law.SAMPLED or not draft.is_chain or rule_name in ("walk", "coupled"):
        return Rule.WALK
    return Rule.TOKEN if rule_name == "token" else Rule.BLOCK


class Verifier:
    """Checks all drafts of a step.

    Args:
        noise: The only source of chance.
    """

    def __init__(self, noise: NoiseSource) -> None:
        self.noise = noise

    def verify(self, candidates: Seq[Candidate], logits: Tensor) -> list[Verdict]:
        """Verdicts in the order of `candidates`.

        Args:
            candidates: One for each sequence whose next token is due.
            logits: [num_logits, vocab_size], finite.
        """
        verdicts: dict[int, Verdict] = {}
        walkers, ratio = [], defaultdict(list)
        for index, candidate in enumerate(candidates):
            rule = rule_for(candidate.draft, candidate.seq.request.speculation.rule)
            if rule is Rule.WALK or candidate.seq.request.params.greedy:
                walkers.append(index)
            else:
                ratio[rule, len(candidate.draft)].append(index)
        verdicts.update(zip(walkers, self._walk([candidates[i] for i in walkers], logits), strict=True))
        for (rule, length), members in ratio.items():
            found = self._ratio_test(rule, length, [candidates[i] for i in members], logits)
            verdicts.update(zip(members, found, strict=True))
        return [verdicts[i] for i in range(len(candidates))]

    def _walk(self, candidates: Seq[Candidate], logits: Tensor) -> list[Verdict]:
        """Depth by depth over all trees at once, drawing only at rows that are reached."""
        laws = _Laws(candidates, logits)
        paths: list[list[int]] = [[] for _ in candidates]
        verdicts: dict[int, Verdict] = {}
        alive = list(range(len(candidates)))
        while alive:
            nodes = [paths[i][-1] if paths[i] else -1 for i in alive]
            tokens = self._draw(laws, alive, nodes)
            for i, node, token in zip(alive, nodes, tokens, strict=True):
                draft = candidates[i].draft
                child = draft.child(node, token)
                if child is None:
                    verdicts[i] = Verdict(tuple(paths[i]), token, _origin(draft, node))
                else:
                    paths[i].append(child)
            alive = [i for i in alive if i not in verdicts]
        return [verdicts[i] for i in range(len(candidates))]

    def _draw(self, laws: _Laws, members: list[int], nodes: list[int]) -> list[int]:
        """The target's own choice after each node: its most likely token, or a draw."""
        tokens = [0] * len(members)
        drawing = []
        for place, (member, node) in enumerate(zip(members, nodes, strict=True)):
            if laws.candidates[member].seq.request.params.greedy:
                tokens[place] = laws.best(member, node)
            else:
                drawing.append(place)
        if drawing:
            probs = torch.stack([laws.probs(members[p], nodes[p]) for p in drawing])
            keys = [_target_key(laws.candidates[members[p]], nodes[p]) for p in drawing]
            for place, token in zip(drawing, self.noise.categorical(probs, keys).tolist(), strict=True):
                tokens[place] = token
        return tokens

    def _ratio_test(self, rule: Rule, length: int, candidates: Seq[Candidate], logits: Tensor) -> list[Verdict]:
        """Rules R1 and R3 on chains of one length."""
        rows = torch.tensor([range(*c.rows) for c in candidates], device=logits.device)  # [b, length + 1]
        params = [p for c in candidates for p in _row_params(c)]
        flat = target_probs(logits[rows.reshape(-1)], params)
        p = flat.view(*rows.shape, -1)  # [b, length + 1, vocab_size]
        q = torch.stack([_draft_probs(c.draft) for c in candidates]).to(p)  # [b, length, vocab_size]
        x = torch.tensor([c.draft.token_ids for c in candidates], device=p.device)  # [b, length]
        if rule is Rule.TOKEN:
            chances, weights = token_acceptance(p, q, x), p.new_ones(rows.shape)
        else:
            chances, weights = block_acceptance(p, q, x)
        keys = [_coin_key(c, i) for c in candidates for i in range(length)]
        coins = self.noise.bernoulli(chances.reshape(-1), keys).view(-1, length)
        if rule is Rule.TOKEN:
            accepted = coins.long().cumprod(1).sum(1)
        else:
            accepted = (coins * torch.arange(1, length + 1, device=p.device)).amax(1)
        lane = torch.arange(len(candidates), device=p.device)
        q_next = torch.cat([q, torch.zeros_like(q[:, :1])], 1)[lane, accepted]
        laws = residual(p[lane, accepted], q_next, weights[lane, accepted])
        lengths: list[int] = accepted.tolist()
        keys = [_next_key(c, k, length) for c, k in zip(candidates, lengths, strict=True)]
        tokens: list[int] = self.noise.categorical(laws, keys).tolist()
        return [
            Verdict(tuple(range(k)), token, _origin(c.draft, k - 1))
            for c, k, token in zip(candidates, lengths, tokens, strict=True)
        ]


class _Laws:
    """The target's law after each node of the candidates, computed in one go."""

    def __init__(self, candidates: Seq[Candidate], logits: Tensor) -> None:
        self.candidates = candidates
        self._first: list[int] = []
        rows: list[int] = []
        params: list[RowParams] = []
        for candidate in candidates:
            self._first.append(len(rows))
            rows += range(*candidate.rows)
            params += _row_params(candidate)
        if not rows:
            return
        chosen = logits[torch.tensor(rows, device=logits.device)]
        self._best: list[int] = argmax(forbid(chosen, params)).tolist()
        if not all(p.sampling.greedy for p in params):
            self._probs = target_probs(chosen, params)

    def best(self, member: int, node: int) -> int:
        return self._best[self._first[member] + node + 1]

    def probs(self, member: int, node: int) -> Tensor:
        return self._probs[self._first[member] + node + 1]


def _row_params(candidate: Candidate) -> list[RowParams]:
    """Parameters after the last committed token and after each node, by its depth."""
    view = candidate.seq.view
    base = len(view.token_ids)
    return [RowParams(view.sampling, view.forbidden_at(base + depth)) for depth in (0, *candidate.draft.depths)]


def _draft_probs(draft: Draft) -> Tensor:
    assert draft.draft_probs is not None, "a sampled draft carries its law"
    return draft.draft_probs


def _origin(draft: Draft, node: int) -> TokenOrigin:
    """Origin of the token written after `node`: a bonus where the draft has nothing more to say there."""
    if not len(draft):
        return TokenOrigin.PLAIN
    has_child = any(p == node and law is not Law.SCRATCH for p, law in zip(draft.parents, draft.laws, strict=True))
    return TokenOrigin.RECOVERED if has_child else TokenOrigin.BONUS


def _key(candidate: Candidate, stream: Stream, depth: int, round: int) -> Key:
    view = candidate.seq.view
    return Key(view.seq_id, view.seed, view.sample, stream, len(view.token_ids) + depth, round)


def _target_key(candidate: Candidate, node: int) -> Key:
    depth = 0 if node < 0 else candidate.draft.depths[node]
    return _key(candidate, Stream.TARGET, depth, 0)


def _coin_key(candidate: Candidate, row: int) -> Key:
    # A position's coin may be tossed again in a later round after a rejection before it, hence the round.
    return _key(candidate, Stream.ACCEPT, row, candidate.seq.view.round)


def _next_key(candidate: Candidate, accepted: int, length: int) -> Key:
    return _key(candidate, Stream.TARGET if accepted == length else Stream.RECOVER, accepted, 0)
