"""The model card of a draft says how it is loaded, in words that work."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.config import default_model
from outrider.lab.train.run import _argument


def test_the_target_is_written_as_it_is_loaded(tmp_path: Path) -> None:
    assert _argument(default_model("target")) == ""
    assert _argument("some/model") == '"some/model", '
    assert _argument(str(tmp_path)) == '"FOLDER_OF_THE_TARGET", '


@pytest.mark.parametrize("target", ["some/model", default_model("target"), str(Path(__file__).parent)])
def test_what_the_card_says_can_be_read_by_python(target: str) -> None:
    compile(f"LLM({_argument(target)}speculation={{}})", "card", "eval")
