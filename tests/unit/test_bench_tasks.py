"""The tasks that the benchmark reads: its own workloads, and files that may be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.errors import InvalidParameterError
from outrider.lab.measure.tasks import (
    LEAST,
    LONG_WORKLOADS,
    MOST,
    WORKLOADS,
    Task,
    built_in,
    long_tasks,
    num_tokens,
    read_prompts,
    read_replay,
    read_spec_bench,
)
from outrider.lab.measure.writing import copy_tasks


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_holds_enough_different_prompts(workload: str) -> None:
    tasks = built_in(workload)
    assert len({task.prompt for task in tasks}) >= 16
    assert len({task.name for task in tasks}) == len(tasks)
    assert all(task.workload == workload and task.answer is None for task in tasks)
    assert max(len(task.prompt) for task in tasks) < 800  # short enough for a context of 1024 tokens


@pytest.mark.by_change("src/outrider/lab/measure/", "src/outrider/lab/bench/")
@pytest.mark.parametrize("workload", LONG_WORKLOADS)
def test_long_prompts_have_the_tokens_that_were_promised(workload: str) -> None:
    tasks = long_tasks(workload)
    sizes = [num_tokens(task.prompt) for task in tasks]
    assert LEAST <= min(sizes) < LEAST + 100
    assert MOST - 100 < max(sizes) <= MOST
    assert 1_400 < sum(sizes[:3]) / 3 < 1_700  # a run of three prompts stands for the middle
    assert len({task.prompt for task in tasks}) == len({task.name for task in tasks}) == 16
    assert tasks == long_tasks(workload)
    assert all(task.workload == workload and task.answer is None for task in tasks)


def test_a_passage_holds_the_answer_to_its_question() -> None:
    for task in long_tasks("long_passages"):
        book, _, question = task.prompt.partition("\n\nQuestion: ")
        opening = question.rpartition("\nAnswer: ")[2]
        assert question.startswith(opening.partition(",")[0])
        assert f"{opening} brought " in book


@pytest.mark.by_change("src/outrider/lab/measure/", "src/outrider/lab/bench/")
def test_a_diff_is_one_for_the_file_before_it() -> None:
    for task in long_tasks("long_diffs"):
        before, _, rest = task.prompt.partition("\n\n# A diff for ")
        diff = rest.partition("\n\n\n# ")[0].split("\n")[1:]
        removed = [line[1:] for line in diff if line.startswith("-") and not line.startswith("---")]
        added = [line[1:] for line in diff if line.startswith("+") and not line.startswith("+++")]
        assert len(removed) == len(added) >= 3
        for old, new in zip(removed, added, strict=True):
            assert old in before.split("\n")
            assert new.replace("new_", "") == old.replace("new_", "")


def test_the_replay_set_copies_all_but_a_name() -> None:
    tasks = copy_tasks()
    assert len(tasks) >= 16
    for task in tasks:
        assert task.answer is not None
        renamed = task.answer.count("the_")
        assert renamed
        assert task.answer != task.prompt.split("\n\n\n")[0]
        assert len(task.prompt) + len(task.answer) < 2000


def test_prompts_take_names_and_workloads(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": "b", "name": "x", "workload": "w"}\n', "utf-8")
    assert read_prompts(file) == [Task("line-1", "mine", "a"), Task("x", "w", "b")]


def test_spec_bench_gives_first_turns_by_category(tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["first", "second"], "reference": ["r"]},
        {"question_id": 300, "category": "math_reasoning", "turns": ["sum"]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    assert read_spec_bench(file) == [
        Task("writing-81", "spec_bench/writing", "first"),
        Task("math_reasoning-300", "spec_bench/math_reasoning", "sum"),
    ]


def test_recorded_texts_are_labelled(tmp_path: Path) -> None:
    file = tmp_path / "mail.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}', "utf-8")
    assert read_replay(file) == [Task("line-1", "replay/mail", "a", "b")]


@pytest.mark.parametrize(
    ("read", "line", "says"),
    [
        (read_prompts, "not json", "not JSON"),
        (read_prompts, '["prompt"]', "not an object"),
        (read_prompts, '{"text": "a"}', "'prompt' is missing"),
        (read_prompts, '{"prompt": ""}', "'prompt' is no text"),
        (read_prompts, '{"prompt": "a", "name": 3}', "'name' is no text"),
        (read_prompts, "", "no lines"),
        (read_replay, '{"prompt": "a"}', "'answer' is missing"),
        (read_spec_bench, '{"question_id": 1, "category": "c"}', "no turns"),
        (read_spec_bench, '{"question_id": 1, "category": "c", "turns": []}', "no turns"),
        (read_spec_bench, '{"category": "c", "turns": ["a"]}', "question_id"),
        (read_spec_bench, '{"question_id": 1, "turns": ["a"]}', "'category' is missing"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, read: Callable[[Path], list[Task]], line: str, says: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(line, "utf-8")
    with pytest.raises(InvalidParameterError, match=says) as caught:
        read(file)
    assert caught.value.field in ("prompts", "replay", "spec_bench")
    assert "bad.jsonl" in str(caught.value.value)
    assert caught.value.remedy


def test_the_number_of_the_bad_line_is_said(tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "a"}\n\n{"prompt": 3}\n', "utf-8")
    with pytest.raises(InvalidParameterError, match=r"bad\.jsonl:3"):
        read_prompts(file)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="cannot be read"):
        read_prompts(tmp_path / "nowhere")
    (tmp_path / "latin1").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(InvalidParameterError, match="cannot be read"):
        read_prompts(tmp_path / "latin1")
