"""Methods inside methods through the real server: what they count, and bad settings of them, which disturb nobody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.running import Server, running

#: What the requests below may name.
STAGED = {"method": "staged", "drafter": {"method": "suffix", "min_match": 1}}
TESTED = {"method": "then", "methods": ["ngram", {"method": "staged", "drafter": {"method": "suffix", "rule": "token"}}]}
PROMPT = "x = [1, 2, 3]\nx = [1, 2, 3]\nx = ["
#: Settings, what else is asked for, the field that is blamed, and what the message says.
BAD: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({"method": "merge", "methods": ["ngram", "ngram"]}, {}, "speculation.methods", "not a setting of a request"),
    ({"method": "staged", "drafter": "ngram"}, {}, "speculation.drafter", "not a setting of a request"),
    ({"method": "staged", "tree": [2, 1]}, {}, "speculation.tree", "takes no tree"),
    ({"method": "merge", "rule": "token"}, {"seed": 3}, "seed", "rule='token' makes the text depend on the drafts"),
    ({"method": "then"}, {"seed": 3}, "seed", "methods.1.drafter.rule='token' makes the text depend on the drafts"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    allowed = ("merge", json.dumps(STAGED), json.dumps(TESTED))
    with running("--method", "auto", *(part for each in allowed for part in ("--allow", each))) as server:
        yield server


def asked(speculation: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "speculation": speculation, **more}


def test_an_answer_tells_what_happened_inside_a_stage(server: Server) -> None:
    found = server.post("/v1/completions", asked("staged", temperature=0)).json()["speculation"]
    (counts,) = found["stages"].values()
    assert list(found["stages"]) == ["staged.suffix"]
    assert counts["passes"] + counts["accepted_tokens"] == found["draft_tokens"]
    assert 0 < counts["accepted_tokens"] <= counts["draft_tokens"]
    assert found["by_method"] == {"staged": {name: found[name] for name in ("draft_tokens", "accepted_tokens")}}
    merged = server.post("/v1/completions", asked("merge", temperature=0)).json()["speculation"]
    assert merged["by_method"].keys() == {"suffix", "draft_model"}
    assert merged["stages"] == {}


def test_bad_settings_name_their_place_and_disturb_nobody(server: Server) -> None:
    neighbour = asked("staged", seed=5, max_tokens=96)
    alone = server.post("/v1/completions", neighbour).json()["choices"][0]["text"]
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(server.post, "/v1/completions", neighbour)
        answers = [server.post("/v1/completions", asked(settings, **more)) for settings, more, _, _ in BAD]
        assert written.result().json()["choices"][0]["text"] == alone
    for answer, (settings, _, field, said) in zip(answers, BAD, strict=True):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, field), settings
        assert said in error["message"]
    assert server.rests()
    assert server.metric("outrider:proposer_faults_total") == 0
