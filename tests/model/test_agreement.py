"""What rounding costs is measured against the model as it was."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from typer.testing import CliRunner

from outrider import LLM
from outrider.cli.app import app
from outrider.config import default_model
from outrider.lab.measure.agreement import Agreement, MeasuredLaws, agreement, measure_rounding, read
from tests.model.core import of_formats

pytestmark = of_formats
TEXTS = [
    "import os\n\n\ndef read(path):\n    with open(path) as file:\n        return file.read()\n",
    "class Reader:\n    pass\n",
]


def test_distances_are_total_variation() -> None:
    def reading(laws: list[list[float]], scores: list[float]) -> MeasuredLaws:
        return MeasuredLaws(torch.tensor(scores).log(), torch.tensor(laws).log(), 1)

    before = reading([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125]], [0.5, 0.125])
    after = reading([[0.25, 0.5, 0.25], [0.125, 0.75, 0.125]], [0.25, 0.125])
    found = agreement(before, after)
    assert (found.tokens, found.compared, found.same_choice) == (2, 2, 0.5)
    assert (found.distance, found.worst_distance) == pytest.approx((0.125, 0.25))
    assert (found.original, found.rounded) == pytest.approx((4.0, 32**0.5))
    assert found.divergence == pytest.approx(0.25 * torch.tensor(2.0).log().item() / 2)


def test_texts_are_read_in_windows_and_single_tokens_are_left_out() -> None:
    seen: list[list[int]] = []

    def forward(window: torch.Tensor) -> torch.Tensor:
        seen.append(window.tolist())
        return torch.zeros(len(window), 513)

    found = read([[1], [2, 3], list(range(513)), [4, 5, 6]], forward)
    assert seen == [[2, 3], list(range(512)), [4, 5, 6]]
    assert len(found.scores) == 1 + 511 + 2
    assert found.scores.tolist() == pytest.approx([-torch.tensor(513.0).log().item()] * 514)
    seen.clear()
    assert [read([[2, 3]] * 3, forward, *bound).windows for bound in ((), (2,), (2, -1.0))] == [3, 2, 1]
    assert len(seen) == 6, "nothing was read for nothing"


@pytest.fixture(scope="module")
def found() -> list[Agreement]:
    """With weights of 16, 8 and 4 bits, and with rows of 8 bits, too."""
    measured = []
    for quantization, activations in ((None, None), ("int8", None), ("int4-g32", None), ("int4-g32", "int8")):
        with LLM(
            default_model("draft"), dtype="bfloat16", quantization=quantization, activations=activations, speculation="none"
        ) as llm:
            rounding = measure_rounding(llm, [llm.tokenizer.encode(text) for text in TEXTS])
        assert rounding.speed > 0
        assert str(rounding.agreement) in str(rounding)
        measured.append(rounding.agreement)
    return measured


def test_fewer_bits_lie_farther_from_the_model_as_it_was(found: list[Agreement]) -> None:
    unrounded, *rounded = found
    assert unrounded.distance == unrounded.worst_distance == 0
    assert unrounded.same_choice == 1
    assert unrounded.original == unrounded.rounded
    assert len({each.original for each in found}) == 1, "the model as it was is the same in all"
    assert all(fewer.distance > more.distance for more, fewer in pairwise([unrounded, rounded[0], rounded[1]]))
    assert rounded[2].distance not in (0, rounded[1].distance), "rows are rounded, too"


def test_doctor_says_what_rounding_costs() -> None:
    asked = ["doctor", default_model("draft"), "--method", "ngram", "-n", "1", "--max-tokens", "8", "--json"]
    plain = json.loads(CliRunner().invoke(app, asked).stdout)
    assert (plain["target_is_rounded"], plain["rounding"]) == (False, None)
    rounded = json.loads(CliRunner().invoke(app, [*asked, "--quantization", "int4-g32"]).stdout)
    assert rounded["rounding"]["speed"] > 0
    assert 0 < rounded["rounding"]["agreement"]["distance"] < rounded["rounding"]["agreement"]["worst_distance"] <= 1
