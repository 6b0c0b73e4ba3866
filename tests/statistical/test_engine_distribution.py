"""The joint distribution of LLM.generate on a real checkpoint under every setting, with controls that must turn red."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.model.core import DRAFTING, core
from tests.mutation.killers import least_allowed
from tests.statistical import planted

from outrider.draft import Draft, Law
from outrider.engine import verification
from outrider.engine.drafting import drafting
from outrider.engine.drafting.asking import StepDraft
from outrider.engine.drafting.choices import ChoiceSets
from outrider.govern.acceptance import POSITIONS, Experience, Shares
from outrider.lab.prove.engine import BOUND, EngineProof
from outrider.lab.prove.settings import SETTINGS
from outrider.lab.prove.target_settings import CROSSED_SETTINGS, PARAMETER_SETTINGS, STRUCTURE_SETTINGS
from outrider.lab.prove.tiny import CROSSED_PIECES, save_tiny_llama
from outrider.propose import host
from outrider.propose.base import DraftNoise
from outrider.propose.suffix import SuffixProposer
from outrider.propose.trees import growth
from outrider.structured.grammar import GrammarState
from outrider.verify import verifier

#: Whether there is a guess depends on the drawn tokens, and the rule must not.
GUESS_BEHIND = "two drawn tokens, then a lookup that sometimes finds nothing behind them"
BY_NAME = {setting.name: setting for setting in (*SETTINGS, *PARAMETER_SETTINGS)}
CROSSED = {setting.name: setting for setting in CROSSED_SETTINGS}
STRUCTURED = {setting.name: setting for setting in STRUCTURE_SETTINGS}


@pytest.fixture(scope="module")
def proof(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors
    folder = tmp_path_factory.mktemp("tiny")
    yield EngineProof(save_tiny_llama(folder / "target", 1), save_tiny_llama(folder / "draft", 2))
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def speaking(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speaking")
    pair = [save_tiny_llama(folder / part, seed, speaks=True) for part, seed in (("target", 1), ("draft", 2))]
    return EngineProof(*pair, speaks=True)


@pytest.fixture(scope="module")
def crossed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("crossed")
    pair = [
        save_tiny_llama(folder / part, seed, speaks=True, pieces=CROSSED_PIECES[part])
        for part, seed in (("target", 1), ("draft", 2))
    ]
    return EngineProof(*pair, speaks=True, crossed=True)


@pytest.mark.parametrize("name", CROSSED)
def test_joint_distribution_of_drafts_from_another_vocabulary(crossed, name):
    crossed.llm.stats.reset()
    assert crossed.prove(CROSSED[name], 3).measured <= BOUND
    assert crossed.llm.stats.finished.num_accepted_tokens > 0
    assert crossed.llm.stats.finished.num_proposer_faults == 0


@pytest.mark.parametrize("name", ["other vocabulary", "other vocabulary, tree"])
def test_control_probabilities_before_they_are_renormalised_over_shared_tokens(crossed, name, monkeypatch):
    """The draft keeps to the shared tokens but claims what it said of all its tokens, in the places of the target's."""
    real = verifier._draft_probs

    def before(draft):
        probs = real(draft) + 0.0
        probs[:, 1] = 0.3  # the target's "aa", which the draft does not have
        return probs / probs.sum(-1, keepdim=True)

    monkeypatch.setattr(verifier, "_draft_probs", before)
    assert crossed.prove(CROSSED[name], 3).measured > 1e-4


#: Rows behind an end inside a draft: what ends the text is read where drafts are verified, in whatever way.
LIKE_OTHER_ENDS = (
    *(f"nothing may follow a stop string, {way}" for way in ("block", "tree", "coupled")),
    *(f"nothing may follow an end of text, {way}" for way in ("block", "coupled")),
)


@pytest.mark.parametrize("name", core(STRUCTURED, STRUCTURED.keys() - LIKE_OTHER_ENDS))
def test_joint_distribution_of_structured_outputs(speaking, name):
    assert speaking.prove(STRUCTURED[name], 5).measured <= BOUND


@pytest.mark.parametrize("name", [name for name in STRUCTURED if name.startswith("forced")])
def test_forced_tokens_are_drafted_and_stand(speaking, name):
    """Otherwise their distributions would be those of plain decoding, and the proof would say nothing."""
    speaking.llm.stats.reset()
    assert speaking.prove(STRUCTURED[name], 5).measured <= BOUND
    stats = speaking.llm.stats.finished
    drafted, accepted = stats.drafted_by_method["forced"], stats.accepted_by_method["forced"]
    assert 0 < accepted < drafted if "stop string" in name else 0 < accepted == drafted


@pytest.mark.parametrize("name", ["regex, nobody drafts", "regex, block", "regex, tree", "regex, coupled", "regex, lookup"])
def test_what_is_called_forced_is_a_guess_that_is_verified(speaking, name, monkeypatch):
    """The least token that may follow is called forced, whether or not others may follow too."""
    monkeypatch.setattr(GrammarState, "only", least_allowed)
    speaking.llm.stats.reset()
    assert speaking.prove(STRUCTURED[name], 5).measured <= BOUND
    stats = speaking.llm.stats.finished
    assert 0 < stats.accepted_by_method["forced"] < stats.drafted_by_method["forced"]


def test_control_what_is_called_forced_is_written_unverified(speaking, monkeypatch):
    monkeypatch.setattr(GrammarState, "only", least_allowed)
    monkeypatch.setattr(Draft, "child", lambda draft, node, token: next(iter(draft.children(node)), None))
    assert speaking.prove(STRUCTURED["regex, nobody drafts"], 5).measured > 1e-4


#: What others prove at less cost: of the same code under another rule, over fewer tokens, or with the noise of a seed.
REPEATS = (
    *("lookahead", "best-first tree, seeded", "the same in a best-first tree", "auto, seeded, two samples"),
    *("merge, the same under the token rule", "merge, the same, longer", "merge, the same, recursive rejection"),
    *("merge, two samples", "merge, penalties", "then, behind a merge"),
    *("staged, a drawn drafter", "staged, a drawn tree, token rule", "staged, two stages, walked", "staged, two samples"),
    *("staged, a drafter that keeps what the target held likely", "staged, in a merge"),
    *(f"staged, the drafter's fault: {fault}" for fault in ("raises", "truncated", "token outside")),
    *("the engine chooses", "the engine chooses, two samples"),
    *("the engine chooses, a merge under the token rule", "block, fault: raises"),
    *("coupled drafts, or block by what was drafted", "coupled drafts, or token on a tree by what was drafted"),
)
#: Crossings of many paths, which show what is wrong where drafts are made and verified, and of nothing else.
OF_DRAFTING = (
    *("Sequoia's tree", "the same in a tree", "the same under the token rule", "a drawn tree behind a drawn chain"),
    *("tree, walk", "tree, coupled", "tree, recursive rejection", "best-first tree, traversal", "all together, staged"),
    *("merge, drawn trees that collide", "merge, a chain and a tree of one draft model", "merge, one goes on inside"),
    *("merge, one draft model at two lengths", "merge, two drawn members of equal laws"),
    *("the engine chooses, a lookup first", "the engine chooses, a merge of two drawn members"),
    "the engine chooses, a merge or its lookup",
    *(f"a fault behind a drawn token, {way}" for way in ("the drafter of a stage", "merge", "walk", "recursive")),
    *("token, fault: truncated", "coupled, fault: raises", "coupled drafts, or token by what was drafted"),
    *("staged, a drawn tree", "staged, a lookup with branches", "staged, a drawn drafter under the token rule"),
    *("staged, two stages", "staged, the drafter's fault: nan row", "staged, behind a token of low confidence"),
    *("lookahead, seeded", "lookahead, two samples"),
    *(f"{parameter}, coupled" for parameter in ("frequency_penalty", "presence_penalty", "repetition_penalty")),
    *("logits_processors, coupled", "logit_bias, coupled"),
)
#: Parameters that a stage reads as others do, once for its own rows and once for those of its draft model.
STAGED_LIKE_OTHERS = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logits_processors")


def repeats(setting):
    """Whether others prove the same code; rules of the same shape read parameters alike."""
    parameter, _, way = setting.name.rpartition(", ")
    if setting in PARAMETER_SETTINGS:
        alike = way in ("token", "recursive") and parameter != "all together"
        return alike or (way == "staged" and parameter in STAGED_LIKE_OTHERS)
    return setting.name in REPEATS


#: Settings that draft without a model.
LOOKUPS = ("suffix", "token recycling", "lookahead")
#: What the engine chooses in a proof, and how many tokens of it; otherwise the proof would not be about a choice.
CHOSEN = {
    "the engine chooses": {("none", 0), ("draft_model", 2)},
    "the engine chooses, a lookup first": {("none", 0), ("ngram", 2)},
    "the engine chooses, a merge of two drawn members": {("none", 0), ("merge", 2)},
    "the engine chooses, a merge or its lookup": {("none", 0), ("ngram", 1)},
    "the engine chooses, then or a draft": {("none", 0), ("then", 1)},
    "the engine chooses, a nesting or a stage": {("none", 0), ("staged", 1)},
}
#: Tokens that end texts where there are many paths otherwise: in every place each token is still drafted, tested and drawn.
ENDS = {
    "the engine chooses, a lookup first": (2,),
    "the engine chooses, a merge of two drawn members": (0,),
    "a fault behind a drawn token, the drafter of a stage": (1, 2),
    "merge, one goes on inside": (2,),
    **dict.fromkeys(
        (
            "merge, drawn trees that collide",
            *("merge, a chain and a tree of one draft model", "merge, two drawn members of equal laws"),
            *(f"a fault behind a drawn token, {way}" for way in ("merge", "recursive", "walk", "tree", "best-first tree")),
            *("best-first tree, recursive rejection", "best-first tree, traversal"),
        ),
        (1,),
    ),
}


def with_ends(name, ends):
    """The setting whose texts these tokens end, too."""
    setting = BY_NAME[name]
    return replace(setting, params={**setting.params, "stop_token_ids": ends})


@pytest.mark.parametrize(
    "name",
    core(
        BY_NAME,
        BY_NAME.keys() - OF_DRAFTING,
        *DRAFTING,
        slow=[name for name, setting in BY_NAME.items() if repeats(setting)],
    ),
)
def test_joint_distribution_of_generate(proof, name):
    proof.llm.stats.reset()
    setting = with_ends(name, ENDS[name]) if name in ENDS else BY_NAME[name]
    assert proof.prove(setting, 3).measured <= BOUND
    stats = proof.llm.stats
    if "fault" not in name:
        assert stats.finished.num_proposer_faults == 0, "drafts that are dropped prove nothing"
    if setting.fails_behind is not None:
        assert stats.finished.num_proposer_faults > 0, "no draw failed"
    assert CHOSEN.get(name, set()) <= stats.chosen.keys()
    if name.startswith(LOOKUPS):
        assert stats.finished.num_accepted_tokens > 0, "the distribution is that of plain decoding, and proves nothing"
    if name.startswith("best-first tree, traversal"):
        assert stats.finished.accepted_per_rank[1] > 0, "the distribution is that of chains, and proves nothing of trees"


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_joint_distribution_of_texts_that_nothing_ends(proof, name):
    assert proof.prove(BY_NAME[name], 3).measured <= BOUND


@pytest.mark.parametrize(
    "name", core(["plain", "block", "ngram", "greedy drafts", GUESS_BEHIND], ["plain", "ngram", "greedy drafts"], *DRAFTING)
)
def test_joint_distribution_of_four_tokens(proof, name):
    assert proof.prove(with_ends(name, (1,)), 4).measured <= BOUND


def test_every_setting_has_a_name_of_its_own():
    assert len(BY_NAME) == len(SETTINGS) + len(PARAMETER_SETTINGS)
    assert len(STRUCTURED) == len(STRUCTURE_SETTINGS)
    assert len(CROSSED) == len(CROSSED_SETTINGS)
    assert BY_NAME.keys() > {*REPEATS, *CHOSEN, *ENDS}


@pytest.mark.parametrize("name", ["stop behind a token of low confidence", "the same in a tree"])
def test_low_confidence_ends_some_drafts_and_not_all(proof, name):
    """Otherwise the setting would prove nothing of it."""
    proof.llm.stats.reset()
    proof.prove(BY_NAME[name], 3)
    first, second = proof.llm.stats.finished.drafted_per_position[:2]
    assert 0.05 * first < second < 0.95 * first


def test_control_wrong_residual(proof, monkeypatch):
    monkeypatch.setattr(verifier, "residual", lambda p, q, weight: p)
    assert proof.prove(BY_NAME["block"], 3).measured > 1e-4


def test_control_raw_draft_probabilities_reported_for_a_truncated_draw(proof, monkeypatch):
    real = verifier._draft_probs

    def flattened(draft):
        probs = real(draft) + 0.2
        return probs / probs.sum(-1, keepdim=True)

    monkeypatch.setattr(verifier, "_draft_probs", flattened)
    assert proof.prove(BY_NAME["block, top_k"], 3).measured > 1e-4


def test_control_draft_dropped_for_what_it_says(proof, monkeypatch):
    real = host.sound_prefix

    def choosy(draft, *limits):
        return (host.EMPTY, None) if len(draft) and draft.token_ids[0] == 1 else real(draft, *limits)

    monkeypatch.setattr(host, "sound_prefix", choosy)
    assert proof.prove(BY_NAME["token"], 3).measured > 1e-4


def test_control_target_noise_shared_with_the_recovered_token(proof, monkeypatch):
    real = verifier.CandidateKeys.next
    monkeypatch.setattr(
        verification, "rule_for", lambda d, n, coupled: verifier.Rule.TOKEN if len(d) else verifier.Rule.WALK
    )
    monkeypatch.setattr(verifier.CandidateKeys, "next", lambda keys, depth, owed: real(keys, depth, owed=False))
    assert proof.prove(BY_NAME["coupled"], 3).measured > 1e-4


def test_control_other_tokens_than_were_drawn_are_a_fault(proof, monkeypatch):
    """A draft that is kept or changed for its content shows, even if its tokens are called sampled."""
    real = DraftNoise.categorical

    def picky(self, probs, requests, paths):
        tokens = real(self, probs, requests, paths)
        return [int(row.argmax()) if token == 2 else token for row, token in zip(probs, tokens, strict=True)]

    monkeypatch.setattr(DraftNoise, "categorical", picky)
    assert planted.is_a_fault(proof, BY_NAME["token"])


@pytest.mark.parametrize("name", ["suffix", "suffix, branches", "suffix, shared texts"])
def test_control_a_lookup_that_claims_to_have_been_drawn_is_a_fault(proof, monkeypatch, name):
    real = SuffixProposer.propose

    def claimed(self, requests, noise):
        drafts = real(self, requests, noise)
        probs = [torch.full((len(d), 3), 1 / 3, dtype=torch.float64) for d in drafts]
        return [Draft(d.token_ids, d.parents, (Law.SAMPLED,) * len(d), p) for d, p in zip(drafts, probs, strict=True)]

    monkeypatch.setattr(SuffixProposer, "propose", claimed)
    assert planted.is_a_fault(proof, BY_NAME[name])


@pytest.mark.parametrize("name", ["best-first tree, traversal", "best-first tree, recursive rejection"])
def test_a_best_first_tree_that_looks_at_a_token_before_it_keeps_its_row_has_faults(proof, name, monkeypatch):
    """Planted: a row whose drawn token is unlikely is taken out again."""
    stock = growth._draw

    def choosy(families, noise):
        stock(families, noise)
        for family in families:
            row = family.growth.laws[family.parent].row
            family.tokens = [token for token in family.tokens if float(row[token]) > 0.34]

    monkeypatch.setattr(growth, "_draw", choosy)
    assert planted.is_a_fault(proof, BY_NAME[name], 2)


def test_a_choice_that_is_made_after_the_draw_is_noticed(proof, monkeypatch):
    """The engine may choose by anything that it knew before a draft was drawn, and by nothing that came after."""
    ask = drafting.propose_all

    def peeking(*args):
        return [StepDraft() if 2 in step.draft.token_ids else step for step in ask(*args)]

    monkeypatch.setattr(drafting, "propose_all", peeking)
    assert proof.prove(BY_NAME["the engine chooses, token rule"], 3).measured > 1e-3


def test_what_earlier_processes_learnt_shapes_choices_and_never_the_law(proof, monkeypatch):
    real, chosen = ChoiceSets.new_governor, []
    setting = replace(BY_NAME["the engine chooses, a lookup first"], params={"max_tokens": 4})
    for chance in (0.02, 0.98):
        counted = Shares((30.0,) * POSITIONS, (30.0 * chance,) * POSITIONS, 60.0 * chance)
        known = dict.fromkeys(("draft_model", "ngram"), Experience(counted, counted))
        monkeypatch.setattr(ChoiceSets, "new_governor", lambda self, *told, known=known: real(self, *told[:3], known))
        proof.llm.stats.reset()
        assert proof.prove(setting, 3).measured <= BOUND
        chosen.append(dict(proof.llm.stats.chosen))
    assert chosen[0] != chosen[1]
