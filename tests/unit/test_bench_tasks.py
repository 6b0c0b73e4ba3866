"""The tasks that the benchmark reads: its own workloads, and files that may be wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pyarrow import Table, parquet

from outrider.config import ModelConfig, default_model
from outrider.errors import InvalidParameterError
from outrider.lab.measure.tasks import (
    LEAST,
    LONG_WORKLOADS,
    MOST,
    MULTI_TURN,
    WORKLOADS,
    Task,
    built_in,
    long_tasks,
    num_tokens,
    read_prompts,
    read_replay,
)
from outrider.lab.measure.writing import copy_tasks, encoded_tasks
from outrider.loading.tokenizers import read_tokenizer


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


def _questions(*categories: str) -> list[dict[str, object]]:
    return [
        {"question_id": 80 + i, "category": category, "turns": [f"first {i}", "second"], "reference": ["r"]}
        for i, category in enumerate(categories)
    ]


def _asked(question: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": question},)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_questions_are_asked_by_category(tmp_path: Path, ending: str) -> None:
    """The categories of MT-bench are one beside others, as Spec-Bench has them."""
    file = tmp_path / f"question.{ending}"
    for given, workloads in (
        (["writing", "math_reasoning", "stem"], [MULTI_TURN, "math_reasoning", MULTI_TURN]),
        (["writing", "stem"], ["writing", "stem"]),
    ):
        lines = _questions(*given)
        if ending == "parquet":
            parquet.write_table(Table.from_pylist(lines), file)
        else:
            file.write_text("\n".join(map(json.dumps, lines)), "utf-8")
        assert read_prompts(file) == [
            Task(f"{80 + i}", workload, f"first {i}", messages=_asked(f"first {i}")) for i, workload in enumerate(workloads)
        ]


def test_conversations_are_prompts(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    file.write_text(json.dumps({"messages": messages, "workload": "greetings"}), "utf-8")
    assert read_prompts(file) == [Task("line-1", "greetings", "", messages=tuple(messages))]


def test_questions_go_through_the_chat_template(tmp_path: Path) -> None:
    """Without one they are texts to go on from, and conversations are refused."""
    shutil.copytree(default_model("target"), folder := tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    settings["chat_template"] = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    asked = Task("1", "w", "Hello", messages=_asked("Hello"))
    whole = Task("2", "w", "", messages=({"role": "system", "content": "Be brief."}, *_asked("Hello")))

    def text(task: Task) -> str:
        (encoded,) = encoded_tasks(str(folder), 1024, {"w": [task]}, 4)["w"]
        return read_tokenizer(ModelConfig(model=str(folder))).decode(encoded.prompt_ids, skip_special_tokens=True)

    assert text(asked) == text(Task("1", "w", "Hello")) == "Hello"
    with pytest.raises(InvalidParameterError, match="chat template"):
        text(whole)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    assert text(asked) == "[user] Hello"
    assert text(whole) == "[system] Be brief.[user] Hello"
    assert text(Task("1", "w", "Hello")) == "Hello"


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
        (read_prompts, '{"question_id": 1, "category": "c"}', "'prompt' is missing"),
        (read_prompts, '{"question_id": 1, "category": "c", "turns": []}', "'turns' are no texts"),
        (read_prompts, '{"question_id": 1, "category": "c", "turns": [3]}', "'turns' are no texts"),
        (read_prompts, '{"question_id": 1, "category": 3, "turns": ["a"]}', "'category' is no text"),
        (read_prompts, '{"messages": []}', "'messages' are no conversation"),
        (read_prompts, '{"messages": ["a"]}', "'messages' are no conversation"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, read: Callable[[Path], list[Task]], line: str, says: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(line, "utf-8")
    with pytest.raises(InvalidParameterError, match=says) as caught:
        read(file)
    assert caught.value.field in ("prompts", "replay")
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
    (tmp_path / "no.parquet").write_bytes(b"PAR1")
    with pytest.raises(InvalidParameterError, match="cannot be read"):
        read_prompts(tmp_path / "no.parquet")
    (tmp_path / "latin1").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(InvalidParameterError, match="cannot be read"):
        read_prompts(tmp_path / "latin1")
