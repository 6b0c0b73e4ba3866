"""`outrider serve --wide`: the wide copy of the embedded target, and who drafts for it."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.cli import serve
from outrider.config import default_model
from outrider.errors import ContradictionError


class Stop(Exception):
    """Ends the command where it would load a model."""


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the command would load: the model and the settings of speculation."""
    found: list[Any] = []

    def load(model: str, settings: Any, template: str | None, **given: Any) -> None:
        found.append((model, settings))
        raise Stop

    monkeypatch.setattr(serve, "_load", load)
    monkeypatch.setattr("outrider.widen.wide_target", lambda dtype: f"wide-{dtype}")
    monkeypatch.setattr("outrider.server.run.listen", lambda *_: None)
    monkeypatch.setattr("outrider.server.errors.write_logs", lambda: None)
    return found


def test_the_embedded_draft_model_drafts_for_it(loaded: list[Any]) -> None:
    for given in ({}, {"method": "draft_model"}, {"dtype": "float32"}):
        with pytest.raises(Stop):
            serve.serve(wide=True, **given)
        model, settings = loaded.pop()
        assert model == f"wide-{given.get('dtype', 'bfloat16')}"
        draft = settings.method.methods[0] if "method" not in given else settings
        assert (draft.method.name, draft.method.model) == ("draft_model", default_model("draft"))


def test_another_method_may(loaded: list[Any]) -> None:
    with pytest.raises(Stop):
        serve.serve(wide=True, method="suffix")
    assert loaded.pop()[1].method.name == "suffix"


def test_a_model_beside_it_is_refused(loaded: list[Any]) -> None:
    with pytest.raises(ContradictionError, match="copy of the embedded target"):
        serve.serve(model="some-model", wide=True)
    assert not loaded
