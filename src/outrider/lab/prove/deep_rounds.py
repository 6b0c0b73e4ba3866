"""Proofs of rounds whose drafts are as deep as in production: eight places over two tokens, with equal states merged.

Growth, parameters and Verifier are those of production, and two synthetic models stand for target and draft. A round is
exact where its tokens, continued by the target alone, have the target's joint distribution. Then texts of many rounds are
exact as well, since a round begins from a text and from fresh random numbers. So one round from each text is enough, and a
draft is verified once, however it came about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby
from random import Random
from typing import Any, cast

import torch
from torch import Tensor

from outrider.cache.blocks import BlockManager
from outrider.cache.memory import StateMemory
from outrider.cache.state import KVView
from outrider.draft import Draft
from outrider.lab.prove.forking import ForkedPath, ForkingNoise, Outcome, explore, name_of, total_variation
from outrider.lab.prove.running import Finding
from outrider.lab.prove.sampled import process
from outrider.params import SamplingParams
from outrider.propose.base import DraftNoise, ProposeRequest, ProposerSequence, Tokens
from outrider.propose.tree import CHAIN, StaticTree, TreeBuilder
from outrider.propose.trees.adaptive import BestFirstTree, FixedPace, JudgedChain, SequoiaTree
from outrider.propose.trees.growth import Growth, add_level
from outrider.verify.noise import Key, Stream
from outrider.verify.processing import Processing
from outrider.verify.verifier import CandidateKeys, DraftCandidate, Rule, RuleName, Verifier, rule_for

BOUND = 1e-12
#: What a setting is about has to happen with this probability at every depth that it names, or it proves nothing there.
LEAST = 0.01
_WIDTH = 1_000
_CHEAP = FixedPace({1: 1.0, 64: 1.001})
#: A row that stands less often than once in six drafts does not pay.
_DEAR = FixedPace({1: 1.0, 64: 1.0 + 63 / 6})

Context = tuple[int, ...]


@dataclass(frozen=True)
class DeepSetting:
    """One way to draft and verify a deep round."""

    name: str  # a short name for reports
    # What must happen at each depth: "stands" (a draft token is accepted), "doubted" (a path ends with a token of low
    # confidence), "unlikely" (the last row is a token of low probability), "ends" (a chain ends there, before its last
    # place), "parameters" (they change a row).
    about: str = "stands"
    depth: int = 7  # places of the longest path
    depths: tuple[int, int] = (1, 7)  # (first, last) depth at which it must happen
    rule: RuleName = "auto"  # as a caller asks for it
    # The shape: widths by depth, a name, or nothing for a chain; "judged" is a chain that ends where a row does not pay.
    tree: tuple[int, ...] | str = ()
    num_draft_tokens: int = 0  # most rows; 0 for as many as the depth
    min_confidence: float = 0.0  # nothing is drafted behind a token that is less likely
    params: dict[str, Any] = field(default_factory=dict)  # fields of SamplingParams
    greedy: bool = False  # whether the draft takes its most likely tokens
    text: Context = (0, 1, 1, 0, 1)  # what was written before the round
    vocab_size: int = 2  # two tokens keep deep drafts few. What a residual leaves to several tokens needs three.


def _second_of_three(ids: Tensor, scores: Tensor) -> Tensor:
    """A logits processor whose answer depends on every token before."""
    pushed = scores.clone()
    pushed[:, int((ids * torch.arange(1, ids.shape[1] + 1)).sum()) % scores.shape[-1]] -= 0.9
    return pushed


#: Words that begin in the text before the round, and end behind one to seven places.
_WORDS = {"bad_words_ids": tuple((1, 0, 1, *(1,) * count, 0) for count in range(1, 8))}
_PENALTIES = {"frequency_penalty": 0.35, "repetition_penalty": 1.2, "presence_penalty": -0.2}
_DOUBTED: dict[str, Any] = {"about": "doubted", "min_confidence": 0.45, "depths": (1, 6)}
_JUDGED: dict[str, Any] = {"about": "ends", "tree": "judged", "num_draft_tokens": 7, "depths": (2, 5)}
_CHANGED: dict[str, Any] = {"about": "parameters", "depths": (1, 6)}
_BRANCHED: dict[str, Any] = {"tree": (1, 1, 1, 1, 2, 1), "depth": 6, "depths": (1, 6)}

DEEP_SETTINGS = (
    DeepSetting("block, 8 places", depth=8, depths=(1, 8), rule="block"),
    DeepSetting("token, 8 places", depth=8, depths=(1, 8), rule="token"),
    DeepSetting("block, three tokens", depth=6, depths=(1, 6), rule="block", vocab_size=3),
    DeepSetting("walk", depths=(1, 6), rule="walk"),
    DeepSetting("most likely tokens, 8 places", depth=8, depths=(1, 7), greedy=True),
    DeepSetting("tree that branches deep, traversal", rule="block", **_BRANCHED),
    DeepSetting("tree that branches deep, recursive rejection", rule="token", **_BRANCHED),
    DeepSetting("tree that branches deep, walk", rule="walk", **_BRANCHED),
    DeepSetting("best-first tree", "unlikely", tree="best_first", num_draft_tokens=6, depth=6, depths=(6, 6)),
    DeepSetting("best-first tree, recursive rejection", rule="token", tree="best_first", num_draft_tokens=6, depths=(1, 5)),
    DeepSetting("Sequoia's tree", tree="sequoia", num_draft_tokens=5, depth=5, depths=(1, 3)),
    DeepSetting("lengths by their worth, block", rule="block", **_JUDGED),
    DeepSetting("lengths by their worth, token", rule="token", **_JUDGED),
    DeepSetting("low confidence, block", rule="block", **_DOUBTED),
    DeepSetting("low confidence, token", rule="token", **_DOUBTED),
    DeepSetting("bad words", params=_WORDS, **_CHANGED),
    DeepSetting("bad words, walk", rule="walk", params=_WORDS, **_CHANGED),
    DeepSetting("penalties", params=_PENALTIES, **_CHANGED),
    DeepSetting("penalties, token", rule="token", params=_PENALTIES, **_CHANGED),
    DeepSetting("a logits processor", params={"logits_processors": (_second_of_three,)}, **_CHANGED | {"depth": 6}),
    DeepSetting("fewest tokens", "parameters", depths=(1, 3), params={"stop_token_ids": (1,), "min_tokens": 9}),
)


class _Models:
    """Logits of a target and of a draft that is like it; both look at the last two tokens and at the place."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed, self._vocab_size = seed, vocab_size

    @cache  # noqa: B019  (lives as long as a proof)
    def target(self, text: Context) -> list[float]:
        random = Random(f"{self._seed} {text[-2:]} {len(text) % 3}")
        return [random.uniform(-1.0, 1.0) for _ in range(self._vocab_size)]

    @cache  # noqa: B019
    def draft(self, text: Context) -> list[float]:
        random = Random(f"draft {self._seed} {text[-1]} {len(text) % 2}")
        return [0.6 * x + random.uniform(-0.5, 0.5) for x in self.target(text)]

    @cache  # noqa: B019
    def chance(self, text: Context) -> float:
        """How likely the draft takes the token behind a text to stand, before it is chosen."""
        return Random(f"chance {self._seed} {text[-2:]} {len(text)}").uniform(0.3, 0.95)


class _ChainNoise(ForkingNoise):
    """Forks on what a rule reads from the coins of a chain, and not on each of them. R1 reads how many fall True before the
    first that does not, and R3 which is the last one that falls True. All other coins make no difference, so they are given
    a value that would make one under the other rule."""

    def __init__(self, rule: RuleName) -> None:
        super().__init__()
        self._rule = rule

    def bernoulli(self, probability: Tensor, keys: Sequence[Key]) -> Tensor:
        coins: list[bool] = []
        for _, tossed in groupby(zip(probability.tolist(), keys, strict=True), key=lambda pair: pair[1].owner):
            chances, names = zip(*tossed, strict=True)
            coins += [self._toss(chances[0], names[0])] if len(names) == 1 else self._fall(chances, names)
        return torch.tensor(coins, dtype=torch.bool)

    def _race(self, path: ForkedPath, key: Key, probs: list[float], total: float) -> int:
        """A draw whose noise nobody guesses here."""
        return self._fork(path, name_of(key), [(token, p / total) for token, p in enumerate(probs) if p > 0.0])

    def _fall(self, chances: Sequence[float], names: Sequence[Key]) -> list[bool]:
        path = self._spend(names[0])
        for name in names[1:]:
            self._spend(name)
        if self._rule == "token":
            weights = [_product(chances[:k]) * (1.0 - chances[k]) for k in range(len(chances))] + [_product(chances)]
        else:
            lost = [_product([1.0 - chance for chance in chances[k:]]) for k in range(len(chances) + 1)]
            weights = [lost[0], *(chances[k] * lost[k + 1] for k in range(len(chances)))]
        accepted = self._fork(path, name_of(names[0]), [(k, weight) for k, weight in enumerate(weights) if weight > 0.0])
        if self._rule == "token":
            return [place != accepted for place in range(len(chances))]
        return [place == accepted - 1 or (place < accepted and place % 2 == 0) for place in range(len(chances))]


def _product(chances: Sequence[float]) -> float:
    result = 1.0
    for chance in chances:
        result *= chance
    return result


@dataclass(frozen=True)
class DeepRound:
    """Holds what a round may write, and what happens in it."""

    probs: dict[Context, float]  # of the tokens that it writes
    happens: list[float]  # by depth from 1, how likely it is that what the setting is about happens there
    num_drafts: int  # number of different drafts
    num_paths: int  # number of paths through their verification
    dropped: float  # an upper bound of what was too unlikely to follow


def prove_deep(setting: DeepSetting, seed: int = 1) -> Finding:
    """Total variation between a deep round, continued by the target alone, and the target's own distribution; what the
    setting is about must happen at every depth that it names."""
    found = deep_round(setting, seed)
    length = setting.depth + 1
    exact = _continued({(): 1.0}, setting, seed, length)
    distance = total_variation(_continued(found.probs, setting, seed, length), exact) + found.dropped
    first, last = setting.depths
    rarest = min(found.happens[first - 1 : last])
    detail = (
        f"{found.num_drafts} drafts of up to {setting.depth} places, {found.num_paths} paths; "
        f"{setting.about} at depths {first} to {last} with probability {rarest:.2g} and more"
    )
    return Finding(distance, BOUND, detail, distance <= BOUND and rarest >= LEAST)


def deep_round(setting: DeepSetting, seed: int = 1) -> DeepRound:
    """One round behind `setting.text`."""
    models = _Models(seed, setting.vocab_size)
    drafts, drafting = _drafts(setting, models)
    rows = [_target_rows(setting, models, draft) for draft, _ in drafts]
    weights = torch.tensor([[weight for _, weight in drafts]], dtype=torch.float64)
    noise = _ChainNoise(setting.rule)

    def run(count: int) -> Iterator[Outcome]:
        picks = noise.categorical(
            weights.expand(count, -1), [Key(owner, 0, 0, Stream.DRAFT, 0, drafter=99) for owner in range(count)]
        ).tolist()
        candidates, start = [], 0
        for owner, pick in enumerate(picks):
            end = start + len(rows[pick])
            candidates.append(_candidate(setting, owner, drafts[pick][0], (start, end)))
            start = end
        verdicts = Verifier(noise).verify(candidates, torch.cat([rows[pick] for pick in picks]))
        for pick, verdict in zip(picks, verdicts, strict=True):
            yield (*(drafts[pick][0].token_ids[node] for node in verdict.path), verdict.token_id)

    found = explore(run, noise, width=_WIDTH)
    probs = cast(dict[Context, float], found.probs)
    happens = _happens(setting, models, drafts, probs)
    return DeepRound(probs, happens, len(drafts), found.num_paths, found.dropped + drafting)


def _sequence(setting: DeepSetting, seq_id: int) -> ProposerSequence:
    params = SamplingParams(**{"max_tokens": 64, **setting.params})
    shown, kv = Tokens([0, *setting.text]), KVView(StateMemory(BlockManager(1, 1)).state())  # nothing is ever kept in it
    processing = Processing(params, shown, 1, params.stop_token_ids, params.bad_words_ids)
    return ProposerSequence(seq_id, shown, 1, params, processing, 0, 0, kv)


_ADAPTIVE: dict[str, Callable[[], TreeBuilder]] = {
    "best_first": partial(BestFirstTree, _CHEAP),
    "sequoia": partial(SequoiaTree, _CHEAP),
    "judged": partial(JudgedChain, _DEAR),
}


def _builder(setting: DeepSetting) -> TreeBuilder:
    if isinstance(setting.tree, str):
        return _ADAPTIVE[setting.tree]()
    return StaticTree.of_widths(setting.tree) if setting.tree else CHAIN


def _drafts(setting: DeepSetting, models: _Models) -> tuple[list[tuple[Draft, float]], float]:
    """All drafts with their probabilities, and an upper bound of what was dropped."""
    noise, made = ForkingNoise(), dict[Outcome, Draft]()
    budget = setting.num_draft_tokens or (len(_shape(setting)) or setting.depth)

    def run(count: int) -> Iterator[Outcome]:
        builder = _builder(setting)
        growths = []
        for owner in range(count):
            sequence = _sequence(setting, owner)
            request = ProposeRequest(sequence, budget, setting.depth, builder=builder, greedy=setting.greedy)
            growths.append(Growth.of(request, budget, setting.depth, setting.min_confidence))
        while growing := [growth for growth in growths if growth.growing]:
            texts = [(0, *setting.text, *growth.path(node)) for growth in growing for node in growth.level]
            told = iter(texts)
            for growth in growing:
                growth.chances |= {node: models.chance(next(told)) for node in growth.level}
            add_level(growing, _tensor([models.draft(text) for text in texts]), DraftNoise(noise))
        for growth in growths:
            draft = growth.draft()
            made[draft.token_ids, draft.parents] = draft
            yield draft.token_ids, draft.parents

    # Trees that adapt weigh a row by the number of drafts that grow together, which must not differ between paths. And
    # paths that draw nothing cannot be told apart.
    alone = isinstance(setting.tree, str) or setting.greedy
    found = explore(run, noise, width=1 if alone else _WIDTH)
    return [(made[drawn], weight) for drawn, weight in found.probs.items()], found.dropped


def _shape(setting: DeepSetting) -> tuple[int, ...]:
    return StaticTree.of_widths(setting.tree).shape if setting.tree and not isinstance(setting.tree, str) else ()


def _target_rows(setting: DeepSetting, models: _Models, draft: Draft) -> Tensor:
    """The target's logits behind the text and behind each node, as production processes them."""
    paths = [(), *draft.paths]
    raw = _tensor([models.target((0, *setting.text, *path)) for path in paths])
    return _sequence(setting, 0).processing.apply(raw, paths).logits


def _candidate(setting: DeepSetting, owner: int, draft: Draft, rows: tuple[int, int]) -> DraftCandidate:
    params = SamplingParams(**{"max_tokens": 64, **setting.params})
    keys = CandidateKeys(owner, 0, 0, 0, len(setting.text) + 1)
    return DraftCandidate(draft, rows, params, keys, rule_for(draft, setting.rule) if len(draft) else Rule.WALK)


def _continued(probs: dict[Context, float], setting: DeepSetting, seed: int, length: int) -> dict[Context, float]:
    """The distribution of `length` tokens that begin with `probs` and go on by the target alone, by definition."""
    models, params = _Models(seed, setting.vocab_size), SamplingParams(**{"max_tokens": 64, **setting.params})
    laws: dict[Context, list[float]] = {}
    whole: dict[Context, float] = {}
    alive = sorted(probs.items(), key=lambda item: len(item[0]))
    while alive:
        merged: dict[Context, float] = {}
        for tokens, weight in alive:
            merged[tokens] = merged.get(tokens, 0.0) + weight
        alive = []
        for tokens, weight in merged.items():
            if len(tokens) >= length:
                whole[tokens] = whole.get(tokens, 0.0) + weight
                continue
            if tokens not in laws:
                written = (*setting.text, *tokens)
                laws[tokens] = process(models.target((0, *written)), params, (0,), written, set(params.stop_token_ids))
            alive += [((*tokens, token), weight * p) for token, p in enumerate(laws[tokens]) if p > 0.0]
    return whole


def _happens(
    setting: DeepSetting, models: _Models, drafts: Sequence[tuple[Draft, float]], probs: dict[Context, float]
) -> list[float]:
    if setting.about == "stands":
        return [sum(p for tokens, p in probs.items() if len(tokens) > depth) for depth in range(1, setting.depth + 1)]
    event: Callable[[DeepSetting, _Models, Draft, int], bool] = {
        "doubted": _is_doubted,
        "unlikely": _is_unlikely,
        "ends": _ends,
        "parameters": _is_changed,
    }[setting.about]
    return [
        sum(weight for draft, weight in drafts if event(setting, models, draft, depth))
        for depth in range(1, setting.depth + 1)
    ]


def _is_doubted(setting: DeepSetting, models: _Models, draft: Draft, depth: int) -> bool:
    """Tells whether a token of low confidence stands at this depth and ends its path."""
    return any(
        at == depth and not draft.children(node) and _confidence(draft, node) < setting.min_confidence
        for node, at in enumerate(draft.depths)
    )


def _is_unlikely(setting: DeepSetting, models: _Models, draft: Draft, depth: int) -> bool:
    """Tells whether the last row has this depth, and its token was the less likely one."""
    last = len(draft) - 1
    return last >= 0 and draft.depths[last] == depth and _confidence(draft, last) < 0.5


def _ends(setting: DeepSetting, models: _Models, draft: Draft, depth: int) -> bool:
    """Tells whether the draft ends with this depth, before its last place."""
    return len(draft) == depth < setting.depth


def _is_changed(setting: DeepSetting, models: _Models, draft: Draft, depth: int) -> bool:
    """Tells whether the parameters change a row behind a token at this depth."""
    rows = _target_rows(setting, models, draft)
    return any(
        at == depth and rows[node + 1].tolist() != models.target((0, *setting.text, *path))
        for node, (at, path) in enumerate(zip(draft.depths, draft.paths, strict=True))
    )


def _confidence(draft: Draft, node: int) -> float:
    assert draft.draft_probs is not None, "its tokens are drawn"
    return float(draft.draft_probs[node, draft.token_ids[node]])


def _tensor(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)
