"""What the doctor makes of numbers: acceptance, offsets, the term that limits, and whether all is right."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from outrider.lab.cli.doctor import _facts, _show
from outrider.lab.doctor import examination
from outrider.lab.doctor.examination import Examination, MethodReport, ModelFacts, Report, Sample
from outrider.lab.doctor.measure import Writing, count_shifts, undisturbed
from outrider.lab.doctor.verdict import Acceptance, Finding, Level, Situation, Terms, judge_acceptance, judge_speed, limit
from outrider.propose.settings import PLAIN, SpeculationConfig
from outrider.results import RoundTrace

TARGET = ModelFacts("target", "bfloat16", "bfloat16", "cpu", "fused", "avx512bf16", True, 1_000, 512, 4096, None, {512: 8})


def accepted(tau: float, first: float, num_drafts: int = 100, shifts: Mapping[int, float] | None = None) -> Acceptance:
    return Acceptance(num_drafts, tau, (first, 0.5), shifts or {0: first})


def situation(**changes: Any) -> Situation:
    usual: dict[str, Any] = {
        "method": "draft_model",
        "batch": 1,
        "rows": 5.0,
        "kernels": True,
        "weight_share": 0.05,
        "pass_ratio": 0.05,
    }
    return Situation(**{**usual, **changes})


def terms(**changes: float) -> Terms:
    return Terms(**{"tokens": 2.4, "verify": 0.95, "propose": 0.1, "host": 0.1, "plain_verify": 0.9, **changes})


@pytest.mark.parametrize(
    ("method", "found", "level", "says"),
    [
        ("draft_model", accepted(2.6, 0.6), Level.OK, "Typical is 2.5 to 3.9"),
        ("draft_model", accepted(2.3, 0.6), Level.OK, "Less is still right while drafts add at least half as many tokens"),
        ("draft_model", accepted(1.6, 0.4), Level.NOTE, "Typical is 2.5 to 3.9"),
        ("draft_model", accepted(1.05, 0.05), Level.WRONG, "Check that the draft model writes sensible text"),
        ("medusa", accepted(1.02, 0.02), Level.WRONG, "the layer id"),
        ("exit", accepted(1.02, 0.02), Level.WRONG, "the normalisation"),
        ("eagle3", accepted(1.02, 0.02), Level.WRONG, "Layers or norms are probably read wrongly"),
        ("early_exit", accepted(1.02, 0.02), Level.NOTE, "Train an exit head"),
        ("suffix", accepted(1.02, 0.02), Level.OK, "No figures"),
        ("suffix", accepted(1.0, 0.0, num_drafts=0), Level.USELESS, "nothing to go by"),
        ("medusa", accepted(1.0, 0.0, num_drafts=3), Level.NOTE, "too few to judge"),
    ],
)
def test_acceptance_is_compared_with_what_is_typical(method: str, found: Acceptance, level: Level, says: str) -> None:
    judged = judge_acceptance(method, found)
    assert judged.level is level
    assert says in f"{judged.text} {judged.remedy}"


@pytest.mark.parametrize(("shift", "says"), [(1, "1 place later"), (-1, "1 place earlier"), (2, "2 places later")])
def test_a_wrong_offset_is_named(shift: int, says: str) -> None:
    judged = judge_acceptance("medusa", accepted(1.05, 0.05, shifts={0: 0.05, shift: 0.6}))
    assert judged.level is Level.WRONG
    assert says in judged.text
    assert f"offset by {abs(shift)}" in judged.remedy


def test_text_that_repeats_a_token_is_no_wrong_offset() -> None:
    judged = judge_acceptance("draft_model", accepted(2.6, 0.6, shifts={0: 0.6, 1: 0.7}))
    assert judged.level is Level.OK


@pytest.mark.parametrize("shift", [-2, -1, 0, 1, 2])
def test_drafts_are_looked_for_where_they_would_stand(shift: int) -> None:
    text = list(range(100, 140))
    rounds = [_round(place, [text[place + shift]]) for place in range(5, 30)]
    agreed, tried = Counter[int](), Counter[int]()
    count_shifts(text, rounds, agreed, tried)
    assert agreed == {shift: 25, **{other: 0 for other in (-2, -1, 0, 1, 2) if other != shift}}
    assert set(tried.values()) == {25}


def test_places_outside_of_the_text_are_not_tried() -> None:
    agreed, tried = Counter[int](), Counter[int]()
    count_shifts([7, 8, 9], [_round(2, [9]), _round(2, [])], agreed, tried)
    assert tried == {-2: 1, -1: 1, 0: 1}


def _round(position: int, token_ids: Sequence[int]) -> RoundTrace:
    size = len(token_ids)
    return RoundTrace(
        round=0,
        position=position,
        token_ids=tuple(token_ids),
        parents=tuple(range(-1, size - 1)),
        laws=("deterministic",) * size,
        drafted_by=(),
        draft_probs=(None,) * size,
        target_probs=(0.5,) * size,
        num_scratch_rows=0,
        num_sequences=1,
        rule=None,
        coins=(),
        accepted=(),
        token_id=None,
        reason="",
        seconds={},
        texts=(None,) * size,
        rows=(),
        at=0.0,
        draws=(),
    )


def test_a_pass_takes_no_longer_than_one_of_more_rows() -> None:
    assert undisturbed({1: 4.0, 2: 9.0, 4: 3.0, 8: 5.0}) == {1: 3.0, 2: 3.0, 4: 3.0, 8: 5.0}


def _writing(speed: float, per_pass: float) -> Writing:
    """A text of 100 tokens."""
    steps = round(100 / per_pass)
    return Writing(num_steps=steps, num_tokens=100, num_texts=steps, seconds=100 / speed)


def _pairs(
    monkeypatch: pytest.MonkeyPatch, plain: Sequence[float], drafted: Sequence[float], per_pass: float
) -> tuple[list[bool], tuple[float, ...], list[str]]:
    """Two rounds with these speeds, turn by turn: who wrote, the speedups that are believed, and the doubts."""
    left, order = {False: list(plain), True: list(drafted)}, []

    def write(engine: Any, tasks: Any, config: SpeculationConfig, temperature: float) -> Writing:
        drafts = config.method is not None
        order.append(drafts)
        return _writing(left[drafts].pop(0), per_pass if drafts else 1.0)

    monkeypatch.setattr(examination, "write", write)
    llm: Any = SimpleNamespace(engine=None)
    found = Examination(llm, PLAIN, Sample([[], []], "", 1.0))
    config = SpeculationConfig.of("ngram")
    return order, found._believed("ngram", found._pairs(config)), found._doubts


def test_pairs_alternate_and_one_that_cannot_be_true_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    order, speedups, doubts = _pairs(monkeypatch, [4.0, 10.0, 10.0], [10.0, 15.0, 17.0], 2.0)
    assert order == [False, True, True, False, True, False]
    assert speedups == pytest.approx((1.5, 1.7))
    assert doubts == []


@pytest.mark.parametrize("doubted", [True, False])
def test_ratios_of_passes_that_were_disturbed_are_not_told(doubted: bool) -> None:
    report = Report(TARGET, {1: 0.01, 16: 0.01}, 100.0, 1, (), "busy", ("16 rows cost nothing",) * doubted, doubted)
    with (paper := Console(width=100, file=io.StringIO())).capture() as shown:
        _show(report, paper)
    row = next(line for line in shown.get().splitlines() if line.startswith("C(n)"))
    assert ("1.00" in row) is not doubted
    assert ("?" in row) is doubted
    assert ("16 rows cost nothing" in shown.get()) is doubted
    assert report.as_json()["row_cost_ratio"] == (None if doubted else {1: 1.0, 16: 1.0})


def test_a_speed_that_stays_impossible_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    order, speedups, doubts = _pairs(monkeypatch, [4.0] * 6, [10.0] * 6, 2.0)
    assert len(order) == 12
    assert speedups == ()
    assert "more than its tokens a pass" in doubts[0]
    judged = judge_speed((), terms(), situation(), acceptance=Level.OK)
    assert judged.level is Level.NOTE
    assert "its speed is not known" in judged.text


LIMITS: list[tuple[Terms, Situation, str, str]] = [
    (terms(), situation(), "acceptance", "more must stand"),
    (terms(propose=5.0), situation(pass_ratio=1.0, weight_share=1.0), "draft", "the draft is too slow"),
    (terms(propose=3.0), situation(pass_ratio=0.5, weight_share=0.1), "target", "the target is too small"),
    (terms(propose=0.8), situation(pass_ratio=0.05), "draft", "there are many of them"),
    (terms(propose=0.8), situation(method="early_exit", pass_ratio=None, weight_share=None), "draft", "too slow"),
    (terms(verify=2.5), situation(batch=16), "batch", "the batch is too large"),
    (terms(verify=2.5), situation(kernels=False), "verification", "stock operators"),
    (terms(verify=2.5), situation(), "verification", "rows a text takes 2.50 times"),
    (terms(host=0.9), situation(), "host", "the target is too small"),
]


@pytest.mark.parametrize(("given", "around", "name", "says"), LIMITS)
def test_the_term_that_costs_most_is_named_with_a_remedy(given: Terms, around: Situation, name: str, says: str) -> None:
    found, text, remedy = limit(given, around)
    assert (found, says in text) == (name, True)
    assert remedy.endswith(".")


def test_the_prediction_is_tokens_over_time() -> None:
    given = terms(tokens=2.5, verify=1.0, propose=0.15, host=0.1)
    assert given.speedup == pytest.approx(2.0)
    assert sum(given.excess.values()) == pytest.approx(given.passes - 1.0)


@pytest.mark.parametrize(
    ("measured", "acceptance", "level"),
    [(2.0, Level.OK, Level.OK), (1.0, Level.OK, Level.USELESS), (2.0, Level.WRONG, Level.USELESS)],
)
def test_speed_that_gains_nothing_is_useless(measured: float, acceptance: Level, level: Level) -> None:
    judged = judge_speed((measured,), terms(), situation(), acceptance=acceptance)
    assert judged.level is level
    assert f"{measured:.2f} times as fast" in judged.text


@pytest.mark.parametrize(
    ("rounds", "predicted", "level"),
    [
        ((0.8, 0.95, 2.7), 1.3, Level.NOTE),  # it may gain
        ((0.8, 0.95, 1.0), 1.3, Level.USELESS),
        ((0.8, 0.95, 2.7), 0.9, Level.USELESS),  # that it cannot gain is what was expected
        ((0.8, 1.2, 2.7), 1.3, Level.OK),
    ],
)
def test_rounds_that_lie_far_apart_cannot_tell(rounds: tuple[float, ...], predicted: float, level: Level) -> None:
    judged = judge_speed(rounds, terms(tokens=predicted, verify=0.9, propose=0.0), situation(), acceptance=Level.OK)
    assert judged.level is level
    assert ("Rounds lie between 0.80 and 2.70" in judged.text) is (level is Level.NOTE)


@pytest.mark.parametrize(
    ("levels", "healthy"),
    [
        ([], True),
        ([Level.OK], True),
        ([Level.NOTE], True),
        ([Level.USELESS], False),
        ([Level.USELESS, Level.OK], True),  # one that gains is enough
        ([Level.WRONG, Level.OK], False),  # but what is broken is said
    ],
)
def test_who_is_healthy(levels: list[Level], healthy: bool) -> None:
    methods = tuple(MethodReport("m", 4, (Finding("speed", Level.OK, "a"), Finding("x", each, "b"))) for each in levels)
    assert Report(TARGET, {1: 0.01, 2: 0.012}, 100.0, 1, methods, "calm").healthy is healthy
    assert not Report(TARGET, {1: 0.01, 2: 0.012}, 100.0, 1, methods, "busy", ("rows cost nothing",)).healthy


@pytest.mark.parametrize(
    ("device", "kernels", "says", "silent"),
    [
        ("NVIDIA H200 (cuda:0)", "triton", ("NVIDIA H200", "Triton kernels", "name a method"), "batch_invariant"),
        ("cuda:0", None, ("stock operators of PyTorch", "name a method"), "batch_invariant"),
        ("cpu", None, ("stock operators of PyTorch", "batch_invariant=True"), "Triton"),
        ("cpu", "avx2", ("our kernels (avx2)",), "Triton"),
    ],
)
def test_what_computes_is_named_and_only_remedies_that_help(
    device: str, kernels: str | None, says: tuple[str, ...], silent: str
) -> None:
    paper = Console(width=400, record=True, file=io.StringIO())
    paper.print(_facts("target", replace(TARGET, device=device, kernels=kernels, invariant=False)))
    text = paper.export_text()
    assert all(words in text for words in says)
    assert silent not in text


def test_the_report_is_plain_data_with_its_ratios() -> None:
    method = MethodReport("m", 4, (), terms=terms(tokens=2.5, verify=1.0, propose=0.15, host=0.1), measured=1.9)
    found = Report(TARGET, {1: 0.01, 2: 0.012}, 100.0, 1, (method,), "calm").as_json()
    assert found["row_cost_ratio"] == pytest.approx({1: 1.0, 2: 1.2})
    assert found["methods"][0]["predicted"] == pytest.approx(2.0)
    assert found["methods"][0]["level"] == "ok"
