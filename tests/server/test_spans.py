"""OpenTelemetry's spans of a real server: one for each request for texts, with its rounds as events."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import TEMPLATE, Server, running
from tests.waiting import wait_until

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
BODY: Any = {"prompt": "def f(x):\n", "temperature": 0, "max_tokens": 24, "speculation": "draft_model"}


class Spans:
    """The spans of a server, one after the other."""

    def __init__(self, server: Server, path: Path) -> None:
        self.server, self._path, self._seen = server, path, 0

    def next(self) -> Any:
        """The next one, which is the only one that there is."""
        lines = wait_until(lambda: self._lines()[self._seen :], "span of the request")
        assert len(lines) == 1
        self._seen += 1
        return json.loads(lines[0])

    def _lines(self) -> list[str]:
        return self._path.read_text("utf-8").splitlines() if self._path.exists() else []


@pytest.fixture(scope="module")
def spans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spans]:
    folder = tmp_path_factory.mktemp("spans")
    (folder / "template.jinja").write_text(TEMPLATE, "utf-8")
    arguments = ("--method", "draft_model", "--chat-template", str(folder / "template.jinja"))
    with running(*arguments, module="tests.server.traced_server", SPANS=str(folder / "spans.jsonl")) as server:
        yield Spans(server, folder / "spans.jsonl")


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_a_span_tells_of_the_request_and_of_its_rounds(spans: Spans, streamed: bool) -> None:
    asked = {**BODY, "stream": streamed}
    with spans.server.stream("/v1/completions", asked, headers=HEADERS) as response:
        told = response.read()
    assert b'"trace"' not in told, "the client has asked for none"
    span = spans.next()
    assert (span["name"], span["kind"]) == ("text_completion outrider-embedded", "SpanKind.SERVER")
    assert (span["context"]["trace_id"], span["parent_id"]) == (f"0x{TRACE}", f"0x{PARENT}")
    found = span["attributes"]
    assert (
        found.items()
        >= {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "outrider",
            "gen_ai.request.model": "outrider-embedded",
            "gen_ai.request.max_tokens": 24,
            "gen_ai.request.temperature": 0.0,
            "gen_ai.request.stream": streamed,
            "gen_ai.usage.output_tokens": 24,
            "gen_ai.response.finish_reasons": ["length"],
            "http.response.status_code": 200,
            "outrider.method": "draft_model",
        }.items()
    )
    assert ("gen_ai.response.time_to_first_chunk" in found) is streamed
    rounds = [event["attributes"] for event in span["events"] if event["name"] == "outrider.round"]
    assert [each["outrider.round"] for each in rounds] == list(range(len(rounds)))
    assert {method for each in rounds for method in each["outrider.methods"]} == {"draft_model"}
    for name in ("outrider.drafted", "outrider.accepted"):
        assert sum(each[name] for each in rounds) == found[name] > 0
    times = [event["timestamp"] for event in span["events"]]
    assert times == sorted(times)
    assert span["start_time"] <= times[0] <= times[-1] <= span["end_time"]


def test_a_chat_has_one_with_a_trace_of_its_own(spans: Spans) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "n": 2, "seed": 5}
    assert spans.server.post("/v1/chat/completions", body).status_code == 200
    span = spans.next()
    assert (span["name"], span["parent_id"]) == ("chat outrider-embedded", None)
    assert span["attributes"].items() >= {"gen_ai.request.choice.count": 2, "gen_ai.request.seed": 5}.items()
    assert {event["attributes"]["outrider.sample"] for event in span["events"]} == {0, 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 4}),
    ],
)
def test_what_is_said_again_as_a_chat_has_the_span_of_one(spans: Spans, path: str, body: dict[str, Any]) -> None:
    assert spans.server.post(path, body).status_code == 200
    span = spans.next()
    assert span["name"] == "chat outrider-embedded"
    assert span["attributes"]["gen_ai.usage.output_tokens"] == 4


def test_what_is_refused_says_why(spans: Spans) -> None:
    assert spans.server.post("/v1/completions", {**BODY, "max_tokens": -2}, headers=HEADERS).status_code == 400
    span = spans.next()
    assert span["attributes"].items() >= {"http.response.status_code": 400}.items()
    assert span["attributes"]["error.type"]
    assert span["status"]["status_code"] == "UNSET"


def test_other_routes_and_what_the_client_traces_for_itself(spans: Spans) -> None:
    assert spans.server.get("/v1/models").status_code == 200
    answer = spans.server.post("/v1/completions", {**BODY, "trace": True}).json()
    assert len(answer["choices"][0]["trace"]["rounds"]) == len(spans.next()["events"])
