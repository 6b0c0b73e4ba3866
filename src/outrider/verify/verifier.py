"""Verifier: applies the rule that fits each draft, in batches.

The driver knows drafts, probabilities and keys, and nothing of requests or engines. So a proposer that verifies the guess
of its own drafter uses the same rules as the engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from outrider.draft import Draft, Law
from outrider.params import SamplingParams, TokenOrigin
from outrider.results import CoinToss
from outrider.verify.logits import argmax, target_probs
from outrider.verify.noise import Key, NoiseSource, Stream
from outrider.verify.rules import (
    Coin,
    Conversation,
    Draw,
    Tree,
    block_acceptance,
    recursive_rejection,
    residual,
    token_acceptance,
    traversal,
)

#: How a caller asks for a rule.
RuleName = Literal["auto", "walk", "token", "block", "coupled"]


class Rule(Enum):
    """Says how a draft is checked; see verify/rules.py and the docs for each rule's source."""

    WALK = auto()  # R2, and RC for coupled drafts: the target draws at each node, and the draft is followed while it agrees
    TOKEN = auto()  # R1, chains
    BLOCK = auto()  # R3, chains
    RECURSIVE = auto()  # R4, trees of any laws with sampled nodes among them
    TRAVERSAL = auto()  # R5, the same


@dataclass(frozen=True)
class CandidateKeys:
    """Says how the draws that decide on one draft are named."""

    owner: int  # sequence id
    seed: int  # of the sequence's noise
    sample: int  # sample index within the request
    round: int  # verify pass of the sequence
    position: int  # index in the text of the draft's first token
    # 0 for the engine's verification; a proposer that verifies the guess of its own drafter has another, so that its draws
    # have nothing to do with the target's.
    drafter: int = 0
    # Whether such a proposer is to choose its tokens with the target's noise nonetheless, as a coupled guess.
    coupled: bool = False

    def coin(self, draw: int, depth: int) -> Key:
        """Names the coin of a draw, whose node is `depth` tokens below the root. A position's coin may be tossed again in a
        later round, after a rejection before it; hence the round."""
        position = self.position + depth - 1
        return Key(self.owner, self.seed, self.sample, Stream.ACCEPT, position, self.round, draw, self.drafter)

    def next(self, depth: int, *, owed: bool) -> Key:
        """Names the draw of the token after a node at `depth`, from the target's own probabilities or from what they still
        owe after a rejection. The engine comes to a position once; a proposer that verifies comes again in another
        round."""
        own = Stream.GUESS if self.coupled else Stream.TARGET
        stream, position = Stream.RECOVER if owed else own, self.position + depth
        round_ = self.round if self.drafter else 0
        return Key(self.owner, self.seed, self.sample, stream, position, round_, drafter=self.drafter)


@dataclass(frozen=True)
class DraftCandidate:
    """A draft to check."""

    draft: Draft  # empty where nothing was drafted
    rows: tuple[int, int]  # (first, end) rows of the logits: the token that the draft follows, then its nodes
    sampling: SamplingParams  # the request's parameters
    keys: CandidateKeys  # names of its draws
    rule: Rule  # see `rule_for`
    coins: list[CoinToss] | None = None  # where the coins that were tossed are recorded; None where nobody asked
    # Where those probabilities [vocab_size] are recorded from which a token was drawn after a refusal, by the node that it
    # follows. Nothing is recorded where coins are not.
    residuals: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """Holds the accepted nodes and the token behind them."""

    path: tuple[int, ...]  # accepted nodes, root side first
    token_id: int  # the one more token
    origin: TokenOrigin  # how it came about
    # The target's own probability of each of these tokens, 1 where it is greedy; empty for tested chains.
    chances: tuple[float, ...] = ()


def rule_for(draft: Draft, rule_name: RuleName, *, coupled: bool = False) -> Rule:
    """The rule by the draft's laws: only nodes drawn from known probabilities gain from a ratio test; all else is walked.

    Which of the two ratio tests is taken follows from what was asked for alone: R1 is R4 on a chain, and R3 is R5 on a
    chain. If nodes that another proposer adds behind drawn ones changed the test, it would depend on what was drawn.
    """
    laws = set(draft.laws)
    if coupled or Law.SAMPLED not in laws or Law.COUPLED in laws or rule_name in ("walk", "coupled"):
        return Rule.WALK
    one_by_one = draft.is_chain and draft.num_draws == len(draft) and laws == {Law.SAMPLED}
    if rule_name == "token":
        return Rule.TOKEN if one_by_one else Rule.RECURSIVE
    return Rule.BLOCK if one_by_one else Rule.TRAVERSAL


class Verifier:
    """Checks all drafts of a step."""

    def __init__(self, noise: NoiseSource) -> None:
        self.noise = noise

    def verify(
        self, candidates: Sequence[DraftCandidate], logits: Tensor, best: Sequence[int] | None = None
    ) -> list[Verdict]:
        """Verdicts in the order of `candidates`.

        Args:
            logits: [num_logits, vocab_size] as `Processing.apply` left them, finite or minus infinity.
            best: The most likely token of each row [num_logits], from whoever has looked for them already.
        """
        verdicts: dict[int, Verdict] = {}
        walkers, chains, trees = [], defaultdict(list), []
        for index, candidate in enumerate(candidates):
            if candidate.rule is Rule.WALK or candidate.sampling.greedy:
                walkers.append(index)
            elif candidate.rule in (Rule.TOKEN, Rule.BLOCK):
                chains[candidate.rule, len(candidate.draft)].append(index)
            else:
                trees.append(index)
        verdicts.update(zip(walkers, self._walk([candidates[i] for i in walkers], logits, best), strict=True))
        for (rule, length), members in chains.items():
            found = self._test_chains(rule, length, [candidates[i] for i in members], logits)
            verdicts.update(zip(members, found, strict=True))
        verdicts.update(self._test_trees({i: candidates[i] for i in trees}, logits))
        return [verdicts[i] for i in range(len(candidates))]

    def _walk(self, candidates: Sequence[DraftCandidate], logits: Tensor, best: Sequence[int] | None) -> list[Verdict]:
        """Depth by depth over all trees at once, drawing only at rows that are reached."""
        rows = _TargetRows(candidates, logits, best)
        paths: list[list[int]] = [[] for _ in candidates]
        chances: list[list[float]] = [[] for _ in candidates]
        verdicts: dict[int, Verdict] = {}
        alive = list(range(len(candidates)))
        while alive:
            nodes = [paths[i][-1] if paths[i] else -1 for i in alive]
            drawn = self._draw(rows, alive, nodes, [len(paths[i]) for i in alive])
            for i, node, (token, chance) in zip(alive, nodes, drawn, strict=True):
                draft = candidates[i].draft
                child = draft.child(node, token)
                chances[i].append(chance)
                if child is None:
                    verdicts[i] = Verdict(tuple(paths[i]), token, _origin(draft, node), tuple(chances[i]))
                else:
                    paths[i].append(child)
            alive = [i for i in alive if i not in verdicts]
        return [verdicts[i] for i in range(len(candidates))]

    def _draw(self, rows: _TargetRows, members: list[int], nodes: list[int], depths: list[int]) -> list[tuple[int, float]]:
        """The target's own choice after each node, its most likely token or a draw, and the chance of it."""
        found = [(0, 1.0)] * len(members)
        drawing = []
        for place, (member, node) in enumerate(zip(members, nodes, strict=True)):
            if rows.candidates[member].sampling.greedy:
                found[place] = rows.best(member, node), 1.0
            else:
                drawing.append(place)
        if drawing:
            probs = _stacked([rows.probs(members[p], nodes[p]) for p in drawing])
            keys = [rows.candidates[members[p]].keys.next(depths[p], owed=False) for p in drawing]
            tokens = self.noise.categorical(probs, keys)
            chances = probs.gather(-1, tokens[:, None])[:, 0]
            for place, token, chance in zip(drawing, tokens.tolist(), chances.tolist(), strict=True):
                found[place] = token, chance
        return found

    def _test_chains(self, rule: Rule, length: int, candidates: Sequence[DraftCandidate], logits: Tensor) -> list[Verdict]:
        """Rules R1 and R3 on chains of one length."""
        params = [c.sampling for c in candidates for _ in range(*c.rows)]
        flat = target_probs(_rows_of(candidates, logits), params)
        p = flat.view(len(candidates), length + 1, -1)  # [b, length + 1, vocab_size]
        q = _stacked([_draft_probs(c.draft) for c in candidates]).to(p)  # [b, length, vocab_size]
        x = torch.tensor([c.draft.token_ids for c in candidates]).to(p.device, non_blocking=True)  # [b, length]
        if rule is Rule.TOKEN:
            chances, weights = token_acceptance(p, q, x), p.new_ones(p.shape[:2])
        else:
            chances, weights = block_acceptance(p, q, x)
        keys = [c.keys.coin(node, node + 1) for c in candidates for node in range(length)]
        coins = self.noise.bernoulli(chances.reshape(-1), keys).view(-1, length)
        _record_chains(candidates, chances, coins)
        lengths = [_num_standing(rule, fallen) for fallen in coins.tolist()]
        wanted = [p[i, k] for i, k in enumerate(lengths)]  # after a rejection, only what the target still owes
        rejected = {i: k for i, k in enumerate(lengths) if k < length}
        if rejected:
            parts = ([each[i, k] for i, k in rejected.items()] for each in (p, q, weights))
            for i, owed in zip(rejected, residual(*(_stacked(rows) for rows in parts)), strict=True):
                _record_residual(candidates[i], lengths[i] - 1, owed)
                wanted[i] = owed
        keys = [c.keys.next(k, owed=k < length) for c, k in zip(candidates, lengths, strict=True)]
        tokens: list[int] = self.noise.categorical(_stacked(wanted), keys).tolist()
        return [
            Verdict(tuple(range(k)), token, _origin(c.draft, k - 1))
            for c, k, token in zip(candidates, lengths, tokens, strict=True)
        ]

    def _test_trees(self, candidates: dict[int, DraftCandidate], logits: Tensor) -> dict[int, Verdict]:
        """Rules R4 and R5: all trees talk at once, and each round of questions is answered in one go."""
        verdicts: dict[int, Verdict] = {}
        probs = {i: _tree_probs(candidate, logits) for i, candidate in candidates.items()}
        talks = {i: _open(candidate, probs[i]) for i, candidate in candidates.items()}
        answers: dict[int, int | None] = dict.fromkeys(talks)
        while talks:
            coins: dict[int, Coin] = {}
            draws: dict[int, Draw] = {}
            for i in list(talks):
                try:
                    question = talks[i].send(answers[i])  # type: ignore[arg-type]  # None opens a conversation
                except StopIteration as end:
                    path, token = end.value
                    draft = candidates[i].draft
                    tokens = [*(draft.token_ids[node] for node in path), token]
                    chances = probs[i][[0, *(1 + node for node in path)], tokens].tolist()
                    verdicts[i] = Verdict(path, token, _origin(draft, path[-1] if path else -1), tuple(chances))
                    del talks[i]
                    continue
                (coins if isinstance(question, Coin) else draws)[i] = question  # type: ignore[assignment]
            answers = {**self._toss(coins, candidates), **self._draw_next(draws, candidates)}
        return verdicts

    def _toss(self, coins: dict[int, Coin], candidates: dict[int, DraftCandidate]) -> dict[int, int | None]:
        if not coins:
            return {}
        keys = [
            candidates[i].keys.coin(coin.draw, _depth(candidates[i].draft, candidates[i].draft.nodes[coin.draw]))
            for i, coin in coins.items()
        ]
        fallen = self.noise.bernoulli(torch.stack([coin.probability for coin in coins.values()]), keys).tolist()
        for (i, coin), fell in zip(coins.items(), fallen, strict=True):
            _record(candidates[i], coin.draw, coin.probability, fell)
        return dict(zip(coins, fallen, strict=True))

    def _draw_next(self, draws: dict[int, Draw], candidates: dict[int, DraftCandidate]) -> dict[int, int | None]:
        if not draws:
            return {}
        keys = [
            candidates[i].keys.next(_depth(candidates[i].draft, draw.node), owed=draw.owed) for i, draw in draws.items()
        ]
        for i, draw in draws.items():
            if draw.owed:
                _record_residual(candidates[i], draw.node, draw.probs)
        tokens = self.noise.categorical(torch.stack([draw.probs for draw in draws.values()]), keys)
        return dict(zip(draws, tokens.tolist(), strict=True))


class _TargetRows:
    """The target's probabilities after each node of the candidates, computed in one go."""

    def __init__(self, candidates: Sequence[DraftCandidate], logits: Tensor, best: Sequence[int] | None) -> None:
        self.candidates = candidates
        self._first: list[int] = []
        num_rows = 0
        for candidate in candidates:
            self._first.append(num_rows)
            num_rows += candidate.rows[1] - candidate.rows[0]
        if best is None and any(c.sampling.greedy for c in candidates):
            best = argmax(logits).tolist()
        self._best = best or ()
        if not all(c.sampling.greedy for c in candidates):
            params = [c.sampling for c in candidates for _ in range(*c.rows)]
            self._probs = target_probs(_rows_of(candidates, logits), params)

    def best(self, member: int, node: int) -> int:
        return self._best[self.candidates[member].rows[0] + node + 1]

    def probs(self, member: int, node: int) -> Tensor:
        return self._probs[self._first[member] + node + 1]


def _num_standing(rule: Rule, coins: list[bool]) -> int:
    """Draft tokens of a chain that stand, by their coins: up to the first that fell False under R1, and up to the last
    that fell True under R3."""
    if rule is Rule.TOKEN:
        return coins.index(False) if False in coins else len(coins)
    return max((place for place, fell in enumerate(coins, 1) if fell), default=0)


def _rows_of(candidates: Sequence[DraftCandidate], logits: Tensor) -> Tensor:
    """Logits of all rows of the candidates; not copied where they follow one another."""
    spans = [c.rows for c in candidates]
    if all(before[1] == after[0] for before, after in pairwise(spans)):
        return logits[spans[0][0] : spans[-1][1]]
    rows = torch.tensor([row for span in spans for row in range(*span)])
    return logits[rows.to(logits.device, non_blocking=True)]


def _stacked(rows: list[Tensor]) -> Tensor:
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)


def _tree_probs(candidate: DraftCandidate, logits: Tensor) -> Tensor:
    """The target's probabilities [1 + num_nodes, vocab_size] behind the text and behind each node of a candidate."""
    return target_probs(logits[slice(*candidate.rows)], [candidate.sampling] * (len(candidate.draft) + 1))


def _open(candidate: DraftCandidate, probs: Tensor) -> Conversation:
    """Start a tree rule on one candidate; `probs` as `_tree_probs` says."""
    rule = recursive_rejection if candidate.rule is Rule.RECURSIVE else traversal
    return rule(Tree.of(candidate.draft), probs, _draft_probs(candidate.draft).to(probs))


def _draft_probs(draft: Draft) -> Tensor:
    assert draft.draft_probs is not None, "a sampled draft carries its probabilities"
    return draft.draft_probs


def _origin(draft: Draft, node: int) -> TokenOrigin:
    """Origin of the token written after `node`: a bonus where the draft has nothing more to say there."""
    if not len(draft):
        return TokenOrigin.PLAIN
    return TokenOrigin.RECOVERED if draft.children(node) else TokenOrigin.BONUS


def _depth(draft: Draft, node: int) -> int:
    return 0 if node < 0 else draft.depths[node]


def _record_chains(candidates: Sequence[DraftCandidate], chances: Tensor, coins: Tensor) -> None:
    for index, candidate in enumerate(candidates):
        if candidate.coins is not None:
            for draw, (chance, fell) in enumerate(zip(chances[index], coins[index].tolist(), strict=True)):
                _record(candidate, draw, chance, fell)


def _record_residual(candidate: DraftCandidate, node: int, probs: Tensor) -> None:
    if candidate.coins is not None:
        candidate.residuals[node] = probs


def _record(candidate: DraftCandidate, draw: int, probability: Tensor, fell: bool) -> None:
    if candidate.coins is not None:
        toss = CoinToss(candidate.draft.nodes[draw], float(probability), bool(fell), candidate.draft.members[draw])
        candidate.coins.append(toss)
