"""The short form of the soak, and the defects that it must find."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.running import running
from tests.server.soak import COMMAND, Load, Task, make_tasks, report, soak

LOAD = Load(clients=24, seconds=2.0, most_tokens=48)
FEW = (*COMMAND, "--max-num-seqs", "6", "--max-queue", "32")


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    return make_tasks(LOAD)


def test_many_clients_get_their_texts_and_nothing_is_left(tasks: list[Task], tmp_path: Path) -> None:
    with running(*FEW) as server:
        found = soak(server, LOAD, tasks)
    assert found.problems() == []
    kinds = {request.kind for request in found.asked if request.num_tokens}
    methods = {request.method for request in found.asked}
    assert kinds == {"steady", "slow", "leaving"}
    assert methods == {"draft_model", "off", "suffix", "ngram", "token_recycling", "faulty"}
    assert found.after["proposer_faults"] > 0
    report(found, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"soak.json", "soak.md", "soak.png"}
    assert "| problems | 0 |" in (tmp_path / "soak.md").read_text("utf-8")
    assert max(row["num_requests_waiting"] for row in found.seen) > 0, "more was asked for than runs at a time"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "problem"),
    [
        ("a place is kept", "queue_full"),
        ("a piece is told twice", "AssertionError"),
        ("a block is lost", "kv_cache_usage_perc"),
        ("the draft model keeps a text", "the draft model still has memory"),
        ("the newest comes first", "later requests were served before another one"),
    ],
)
def test_the_soak_finds_what_is_planted(tasks: list[Task], defect: str, problem: str) -> None:
    with running(*FEW, module="tests.server.broken_server", OUTRIDER_PLANTED=defect) as server:
        found = soak(server, LOAD, tasks)
    assert any(problem in line for line in found.problems()), found.problems()
