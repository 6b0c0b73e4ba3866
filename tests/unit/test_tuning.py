"""Tuning without a model: expected passes, traffic with bad lines, predictions, the recommendation, files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from outrider.errors import InvalidParameterError
from outrider.govern.costs import CostTable
from outrider.lab.cli.tune import _show
from outrider.lab.measure.figures import Spread
from outrider.lab.tune.results import Row, TuningResults, best, recommend, whole_paths
from outrider.lab.tune.shadow import Shadow, expected_passes
from outrider.lab.tune.traffic import read_traffic, recorded_traffic
from outrider.lab.tune.tuner import clearly_best, predict
from outrider.prompts import PromptEncoder
from outrider.records import DataSettings, Manifest, Record, TargetFacts, write_shard

LIMIT, MAX_TOKENS = 64, 16
FLAT = CostTable(dict.fromkeys((1, 2, 4, 8, 16, 32, 64), 0.1), 0.0, {"draft": {1: 0.005, 64: 0.005}})


class Letters:
    """A tokenizer with a token a letter."""

    chat_template = None

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}


# -- expected passes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("widths", [[], [1], [1, 1, 1], [3, 2]])
def test_passes_are_those_of_every_way_in_which_the_coins_may_fall(widths: Sequence[int]) -> None:
    chances = [0.9, 0.3, 0.6, 0.0, 1.0, 0.5]

    def stands(place: int, width: int) -> float:
        return min(1.0, chances[place] * width)

    wanted = [0.0, 0.0, 0.0]
    for coins in product((0, 1), repeat=len(chances)):
        chance, found = _written(coins, stands, widths)
        wanted = [known + chance * new for known, new in zip(wanted, found, strict=True)]
    assert expected_passes(stands, widths, len(chances)) == pytest.approx(wanted)


def _written(coins: Sequence[int], stands: Any, widths: Sequence[int]) -> tuple[float, tuple[int, int, int]]:
    """The chance of these coins, a coin a place, and the passes, rows and levels that they lead to. A coin that is not
    tossed counts with half its chance either way."""
    chance, passes, rows, levels, place = 1.0, 0, 0, 0, 1
    tossed: set[int] = set()
    while place < len(coins):
        used = widths[: len(coins) - place - 1]
        passes, levels = passes + 1, levels + len(used)
        size, level = 0, 1
        for width in used:
            level *= width
            size += level
        rows += size
        taken = 0
        for width in used:
            odds = stands(place + taken, width)
            tossed.add(place + taken)
            chance *= odds if coins[place + taken] else 1.0 - odds
            if not coins[place + taken]:
                break
            taken += 1
        place += taken + 1
    return chance * 0.5 ** (len(coins) - len(tossed)), (passes, rows, levels)


def test_a_draft_that_always_stands_writes_one_token_more_than_it_has() -> None:
    passes, rows, levels = expected_passes(lambda place, width: 1.0, [1] * 3, 401)
    assert (passes, rows, levels) == (100.0, 300.0, 300.0)


# -- prediction --------------------------------------------------------------------------------------------------------


def test_a_free_draft_is_worth_its_tokens() -> None:
    plain = predict(Shadow(100, 100.0, 0.0, 0.0), "plain", FLAT, 1, 10)
    assert plain.speedup == pytest.approx(1.0)
    found = predict(Shadow(100, 50.0, 200.0, 200.0), "draft", FLAT, 1, 10)
    assert (found.tokens, found.rows) == (2.0, 5.0)
    assert 1.5 < found.speedup < 2.0 / 1.2 + 0.01  # four passes of the draft cost a fifth of a pass


def test_a_batch_that_is_bound_by_arithmetic_predicts_less() -> None:
    dear = CostTable(
        {rows: 0.1 * max(1.0, rows / 8) for rows in (1, 2, 4, 8, 16, 32, 64)}, 0.0, {"d": {1: 0.005, 64: 0.005}}
    )
    shadow = Shadow(100, 50.0, 200.0, 200.0)
    speedups = [predict(shadow, "d", dear, batch, 10).speedup for batch in (1, 4, 16)]
    assert speedups == sorted(speedups, reverse=True)
    assert speedups[-1] < 1.0 < speedups[0]


def test_the_time_of_a_lookup_counts_for_every_text() -> None:
    quick, slow = (predict(Shadow(100, 50.0, 200.0, 200.0, s), "x", FLAT, 4, 10).speedup for s in (0.0, 50 * 0.025))
    assert quick > 1.6
    assert slow == pytest.approx(quick / 2, rel=0.1)  # four texts, each a quarter of a pass


# -- traffic -----------------------------------------------------------------------------------------------------------

BAD = {
    b"{": "not JSON",
    b"[1]": "no object",
    b"{}": "missing",
    b'{"prompt": ""}': "empty",
    b'{"prompt": 7}': "prompt",
    b'{"prompt": "' + b"a" * 100 + b'"}': "in a context of 64",
    b'{"prompt": "a", "max_tokens": "many"}': "max_tokens",
    b'{"prompt": "a", "max_tokens": 1}': "max_tokens",
    b'{"messages": [{"role": "user", "content": "a"}]}': "no chat template",
    b"\xff\xfe": "not JSON",
}


def read(path: Path, content: bytes, *, recorded: bool = False) -> Any:
    path.write_bytes(content)
    return read_traffic(path, PromptEncoder(Letters(), "letters"), LIMIT, MAX_TOKENS, recorded=recorded)


def test_bad_lines_are_named_and_the_others_used(tmp_path: Path) -> None:
    good = [b'{"prompt": "abc"}', b"", b'{"prompt": "abcd", "max_tokens": 5, "more": true}']
    found = read(tmp_path / "mine.jsonl", b"\n".join([*good, *BAD]))
    assert [text.name for text in found.texts] == ["line 1", "line 3"]
    assert [text.max_tokens for text in found.texts] == [MAX_TOKENS, 5]
    assert [line.split(":")[0] for line in found.bad] == [f"line {number}" for number in range(4, 4 + len(BAD))]
    for line, says in zip(found.bad, BAD.values(), strict=True):
        assert says in line


@pytest.mark.parametrize("field", ["answer", "output", "completion"])
def test_a_log_needs_answers(tmp_path: Path, field: str) -> None:
    lines = [json.dumps({"prompt": "ab", field: "x" * 9}), '{"prompt": "ab"}', json.dumps({"prompt": "ab", field: "xy"})]
    found = read(tmp_path / "log.jsonl", "\n".join(lines).encode(), recorded=True)
    (text,) = found.texts
    assert text.answer_ids == (ord("x"),) * 9
    assert "missing" in found.bad[0]
    assert "too few" in found.bad[1]


@pytest.mark.parametrize("content", [b"", b"\n\n", b"{}\n[]"])
def test_a_file_of_nothing_usable_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(InvalidParameterError, match=r"no lines|none of its lines"):
        read(tmp_path / "mine.jsonl", content)


def test_the_held_out_prompts_of_data_are_traffic(tmp_path: Path) -> None:
    lengths = [(4, 20, True), (4, 30, False), (2, 7, True), (4, 9, True), (40, 60, True), (3, 99, True)]
    records = [
        Record(bytes(16), 0, held_out, prompt, torch.arange(prompt + written)) for prompt, written, held_out in lengths
    ]
    facts = TargetFacts(name="t", vocab_size=9, hidden_size=2, num_layers=1)
    manifest = Manifest(target=facts, settings=DataSettings())
    manifest.with_shard(write_shard(tmp_path, "shard-00000.safetensors", records)).save(tmp_path)
    found = [(text.prompt_ids, text.max_tokens) for text in recorded_traffic(tmp_path, 50, 12).texts]
    assert found == [((0, 1, 2, 3), 12), ((0, 1, 2, 3), 9), ((0, 1, 2), 12)]
    with pytest.raises(InvalidParameterError, match=r"data=.*no held-out text of it has 8 written tokens"):
        recorded_traffic(tmp_path, 8, 12)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="cannot be read"):
        read_traffic(tmp_path / "no", PromptEncoder(Letters(), "letters"), LIMIT, MAX_TOKENS, recorded=False)


@pytest.mark.parametrize(
    ("count", "batch", "most", "sizes"), [(10, 1, 4, 4), (3, 1, 8, 3), (3, 8, 3, 2), (20, 4, 8, 2), (1, 1, 1, 2)]
)
def test_rounds_are_full_and_spread_over_the_traffic(tmp_path: Path, count: int, batch: int, most: int, sizes: int) -> None:
    content = "\n".join(json.dumps({"prompt": "a" * (i + 1)}) for i in range(count))
    rounds = read(tmp_path / "t.jsonl", content.encode()).rounds(batch, most)
    assert [len(texts) for texts in rounds] == [batch] * sizes
    names = {text.name for texts in rounds for text in texts}
    assert len(names) == min(count, max(most, 1))


# -- the recommendation ------------------------------------------------------------------------------------------------


def row(name: str, predicted: float | None = None, measured: float | None = None) -> Row:
    spread = None if measured is None else Spread(median=measured, low=measured - 0.1, high=measured + 0.1)
    method = "none" if name == "plain" else "suffix"
    return Row(name=name, speculation={"method": method}, predicted=predicted, measured=spread)


def test_what_was_measured_decides_where_there_is_any() -> None:
    assert best([row("plain", 1.0, 1.0), row("a", 3.0, 1.1), row("b", 1.0, 1.5), row("c", None, None)]).name == "b"
    assert best([row("plain", 1.0), row("a", 1.4), row("b", 1.2), row("c")]).name == "a"


@pytest.mark.parametrize("gain", [1.0, 1.019, 0.5])
def test_what_gains_nothing_is_not_recommended(gain: float) -> None:
    assert best([row("plain", 1.0, 1.0), row("a", 3.0, gain)]).plain


def test_the_gain_is_that_of_rounds_which_nobody_chose_by() -> None:
    again = Spread(median=1.3, low=1.2, high=1.4)
    found = recommend(row("a", 2.0, 1.9), again, 4)
    assert (found.name, found.gain, found.measured) == ("a", 1.3, True)
    assert "1.30 times" in found.said
    assert "4 texts at a time" in found.said


def test_a_winner_that_does_not_win_again_is_dropped() -> None:
    found = recommend(row("a", 2.0, 1.9), Spread(median=1.0, low=0.9, high=1.1), 1)
    assert (found.name, found.speculation["method"], found.gain) == ("plain", "none", 1.0)
    assert "a came first" in found.said


def test_a_prediction_says_that_it_is_one() -> None:
    found = recommend(row("a", 1.7), None, 1)
    assert (found.gain, found.measured) == (1.7, False)
    assert "predicted" in found.said


def results(rows: list[Row]) -> TuningResults:
    return TuningResults(
        model="m",
        dtype="float32",
        machine={},
        traffic="prompts.jsonl",
        num_texts=1,
        bad_lines=[],
        concurrency=1,
        temperature=1.0,
        rows=rows,
        recommendation=recommend(rows[1], Spread(median=1.5, low=1.5, high=1.5), 1),
    )


def test_a_profile_names_models_from_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders and files, also those of members and of a drafter; a hub id stays as it is."""
    (tmp_path / "draft.gguf").touch()
    (tmp_path / "head").mkdir()
    monkeypatch.chdir(tmp_path)
    staged = {"method": "staged", "model": "draft.gguf", "drafter": {"method": "eagle3", "model": "head"}}
    told = whole_paths({"method": "auto", "methods": [staged, {"method": "draft_model", "model": "own/draft"}]})
    first, second = told["methods"]
    assert [first["model"], first["drafter"]["model"]] == [str(tmp_path / "draft.gguf"), str(tmp_path / "head")]
    assert second["model"] == "own/draft"


def test_at_80_columns_a_range_is_not_broken() -> None:
    rows = [
        row("plain", 1.0, 1.0).model_copy(update={"tokens_per_second": 1234.5, "measured_tokens": 1.0}),
        row("draft_model (4,2,1,1) k=9", 1.5, 1.5).model_copy(update={"tokens_per_second": 1234.5, "measured_tokens": 2.5}),
    ]
    with (paper := Console(width=80, file=io.StringIO())).capture() as shown:
        _show(results(rows), Path("out"), paper)
    text = shown.get()
    assert text.startswith("1 text (prompts.jsonl), ")
    assert "1.40 to 1.60" in text
    assert "0.90 to 1.10" in text


def test_the_table_is_kept_as_csv_too() -> None:
    rows = [row("plain", 1.0, 1.0), row("draft_model (3,2) k=9", None, 1.5)]
    found = results(rows)
    lines = list(csv.DictReader(io.StringIO(found.as_csv())))
    assert [line["way"] for line in lines] == [each.name for each in rows]
    assert (lines[1]["predicted"], lines[1]["measured"]) == ("", "1.5")
    assert TuningResults.model_validate_json(found.model_dump_json()) == found


# -- an early end ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spreads", "left"),
    [
        ({"none": (1.0, 1.0), "a": (0.7, 0.9), "b": (0.5, 0.99)}, ["none"]),
        ({"none": (1.0, 1.0), "a": (1.4, 1.6), "b": (1.1, 1.3)}, ["a"]),
        ({"none": (1.0, 1.0), "a": (1.4, 1.6), "b": (1.1, 1.5)}, ["a", "b"]),
        ({"none": (1.0, 1.0), "a": (0.9, 1.2), "b": (0.8, 0.95)}, ["none", "a"]),
        ({"none": (1.0, 1.0), "a": None, "b": (1.1, 1.2)}, ["a", "b"]),
    ],
    ids=["plain", "one", "two", "near plain", "disturbed"],
)
def test_a_way_stops_when_another_one_is_clearly_faster(
    spreads: dict[str, Any], left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all rounds of a way are slower than all rounds of another one; one whose rounds cannot be true goes on."""

    def spread(own: Any, plain: Any) -> Spread | None:
        found = spreads[own[0]]
        return None if found is None else Spread(median=sum(found) / 2, low=found[0], high=found[1])

    monkeypatch.setattr("outrider.lab.tune.tuner.believed_speedup", spread)
    runs: Any = {name: [name] * 3 for name in spreads}
    assert clearly_best(runs, "none") == left
    assert clearly_best({**runs, "stopped": ["none"]}, "none") == left, "one that has stopped does not come back"
