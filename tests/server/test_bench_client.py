"""`outrider bench --bench-client`: the benchmark against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.errors import ContradictionError, EngineAnswerError, InvalidParameterError
from outrider.lab.bench.client import AS_SERVED, Answer, ClientSession
from outrider.lab.bench.results import Results
from outrider.lab.bench.settings import BenchSettings
from outrider.lab.measure.tasks import Task
from tests.server.running import TEMPLATE, Server, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE, "utf-8")
    with running("--chat-template", str(template)) as found:
        yield found


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("questions") / "question.jsonl"
    lines: list[dict[str, Any]] = [
        {"question_id": number, "category": category, "turns": [f"def parse_{number}(line):", "second"]}
        for number, category in enumerate(["qa", "qa", "rag"])
    ]
    lines.append({"prompt": "import os", "workload": "code"})
    path.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    return path


def measured(server: Server, questions: Path, **more: Any) -> Results:
    return ClientSession(BenchSettings(bench_client=server.url, prompts=questions, max_tokens=12, **more)).run()


def test_our_own_server_also_decodes_plainly_and_tells_its_drafts(server: Server, questions: Path) -> None:
    found = measured(server, questions, ways=("suffix:4",), batches=(1, 2))
    assert [(c.workload, c.batch, c.num_prompts) for c in (r.cell for r in found.cells.values())] == [
        ("qa", 1, 2),
        ("qa", 2, 4),
        ("rag", 1, 1),
        ("rag", 2, 4),
        ("code", 1, 1),
        ("code", 2, 4),
    ]
    for result in found.cells.values():
        plain, drafted = result.ways
        assert (plain.name, drafted.name) == ("plain", "suffix k=4")
        assert plain.tau is None
        assert plain.tokens_per_pass == 1.0
        assert 0 < plain.num_tokens <= 12 * result.cell.num_prompts
        assert plain.num_tokens == drafted.num_tokens, "greedy texts are the same"
        assert plain.tokens_per_second is not None
        assert plain.time_to_first_token is not None


def test_without_ways_it_is_measured_as_it_serves(server: Server, questions: Path, tmp_path: Path) -> None:
    found = measured(server, questions, num_prompts=1, out=tmp_path)
    assert {tuple(way.name for way in result.ways) for result in found.cells.values()} == {("plain", AS_SERVED)}
    kept = Results.model_validate_json((tmp_path / "results.json").read_text("utf-8"))
    assert kept.cells.keys() == found.believed.cells.keys()  # what other work disturbed is not kept


@pytest.mark.parametrize("chat", [False, True])
def test_a_text_that_shows_nothing_is_measured_too(server: Server, questions: Path, chat: bool) -> None:
    session = ClientSession(BenchSettings(bench_client=server.url, prompts=questions))
    task = Task("0", "qa", "def", messages=({"role": "user", "content": "def"},) if chat else None)
    answer = session._ask(task, {"max_tokens": 4, "temperature": 0, "logit_bias": {"0": 100}})  # it ends at once
    assert len(answer.arrivals) == 1


def test_what_goes_wrong_is_said(server: Server, questions: Path) -> None:
    with pytest.raises(EngineAnswerError, match=r"answers 400.*no_such_method"):
        measured(server, questions, ways=("no_such_method",))
    with pytest.raises(EngineAnswerError, match=r"answers 404.*another"):
        measured(server, questions, model="another")
    with pytest.raises(EngineAnswerError, match="does not answer"):
        ClientSession(BenchSettings(bench_client="http://127.0.0.1:9", prompts=questions)).run()
    for way in ("plain", "suffix:0", "draft_model=FOLDER:3"):
        with pytest.raises(InvalidParameterError, match="a server cannot be asked"):
            measured(server, questions, ways=(way,))


@pytest.mark.parametrize(
    "more", [{"wide": True}, {"draft_model": "m"}, {"dtypes": ("int8",)}, {"num_threads": 1}, {"peers": ("all",)}]
)
def test_what_belongs_to_an_engine_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ContradictionError, match="a server is measured as it is"):
        BenchSettings(bench_client="http://127.0.0.1:8000", **more)


def test_an_address_is_an_address() -> None:
    with pytest.raises(InvalidParameterError, match="bench_client"):
        BenchSettings(bench_client="127.0.0.1:8000")


def test_other_servers_count_tokens_at_the_end_or_not_at_all() -> None:
    """As vLLM and llama.cpp stream, with several tokens in one part."""
    answer = Answer()
    for now, delta in enumerate([{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b c"}, {}]):
        answer.take({"choices": [{"delta": delta}]}, float(now))
    assert (answer.arrivals, answer.num_tokens, answer.drafts) == ([1.0, 2.0], 2, None)
    answer.take({"choices": [], "usage": {"completion_tokens": 3}}, 4.0)
    assert (answer.arrivals, answer.num_tokens) == ([1.0, 2.0], 3)
    answer.take({"error": {"message": "no room"}}, 5.0)
    assert "no room" in answer.said
