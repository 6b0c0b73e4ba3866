"""Prompts that are read, and data that the target writes: whole, each text once, however often it is broken off."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.errors import ContradictionError, InputError, InvalidParameterError, StorageError
from outrider.files import write_text, write_whole
from outrider.lab.train import collect as collecting
from outrider.lab.train.batches import Batches, load_data
from outrider.lab.train.collect import Collected, collect, encode_prompts, read_sources
from outrider.lab.train.target import FrozenTarget
from outrider.prompts import PromptEncoder
from outrider.records import TOP_LOGITS, TOP_TOKENS, WITNESS, DataSettings, Record, hidden_name, read_manifest, read_records
from tests.train.markov import LAYERS, save_markov_target

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [2, 3], [11], [12, 1], [13, 14, 15], [16], [17, 2], [9, 9]]
SETTINGS = DataSettings(max_tokens=6, held_out=0.3)


class Letters:
    """A tokenizer: a token for each letter, a token that begins a text, and a chat template."""

    chat_template = "..."

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": [0] * add_special_tokens + [ord(letter) for letter in text]}

    def apply_chat_template(self, messages: Any, **how: Any) -> dict[str, list[int]]:
        return {"input_ids": [1, *(ord(letter) for m in messages for letter in m["content"]), 2]}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_markov_target(tmp_path_factory.mktemp("target"), sharpness=1.0)


def lines(path: Path, *values: Any) -> Path:
    path.write_text("".join(f"{value if isinstance(value, str) else json.dumps(value)}\n" for value in values))
    return path


def encoded(path: Path, num_tokens: int = 4) -> list[tuple[int, ...]]:
    prompts = encode_prompts(read_sources(path), PromptEncoder(Letters(), None), num_tokens)
    return sorted(prompt.token_ids for prompt in prompts)


# -- prompts -----------------------------------------------------------------------------------------------------------


@pytest.mark.core
def test_lines_hold_prompts_tokens_texts_and_conversations(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    path = lines(
        tmp_path / "p.jsonl", {"prompt": "ab"}, {"prompt_token_ids": [7, 8]}, {"text": "abcdefg"}, {"messages": turns}, ""
    )
    a, b, c, d = map(ord, "abcd")
    rest = (0, *map(ord, "efg"))
    assert encoded(path) == sorted([(0, a, b), (7, 8), (0, a, b, c, d), rest, (1, a, 2), (1, a, b, c, 2)])


def test_a_folder_is_read_as_a_whole_without_what_is_no_text(tmp_path: Path) -> None:
    lines(tmp_path / "p.jsonl", {"prompt": "ab"})
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "code.py").write_text("x=1")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    (tmp_path / ".hidden").write_text("no")
    assert encoded(tmp_path) == sorted([(0, *map(ord, "ab")), (0, *map(ord, "x=1"))])


def test_what_is_made_of_a_folder_may_lie_in_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text("{}")
    assert len(read_sources(tmp_path)) == 2
    assert [source.where for source in read_sources(tmp_path, without=tmp_path / "data")] == ["a.txt"]


def test_equal_prompts_are_one(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"prompt": "ab"}, {"prompt_token_ids": [0, 97, 98]}, {"prompt": "ab"})
    assert len(encoded(path)) == 1


def test_turns_of_a_conversation_stand_on_one_side_of_the_split(tmp_path: Path) -> None:
    talks = [{"messages": [{"role": "user", "content": f"{talk} {turn}"} for turn in range(3)]} for talk in range(40)]
    found = encode_prompts(read_sources(lines(tmp_path / "p.jsonl", *talks)), PromptEncoder(Letters(), None), 4)
    sides: dict[bytes, set[bool]] = {}
    for prompt in found:
        sides.setdefault(prompt.group, set()).add(prompt.held_out(0.5))
    assert len(found) == 120
    assert len(sides) == 40
    assert {len(side) for side in sides.values()} == {1}
    assert {True, False} == {next(iter(side)) for side in sides.values()}


def test_the_first_prompts_are_no_worse_a_sample_of_the_split_than_all(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", *({"prompt": f"text {i}"} for i in range(400)))
    found = encode_prompts(read_sources(path), PromptEncoder(Letters(), None), 4)
    assert 0.1 < sum(prompt.held_out(0.2) for prompt in found[:200]) / 200 < 0.3


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        ("[1]", "not an object"),
        ({"question": "?"}, "holds no prompt"),
        ({"prompt": "a", "text": "b"}, "holds prompt and text"),
        ({"prompt": 3}, "is no text"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "no conversation"),
        ({"prompt_token_ids": "abc"}, "no list of token ids"),
        ({"prompt_token_ids": [1, -1]}, "no list of token ids"),
        ({"prompt_token_ids": [10**30]}, "no list of token ids"),
        ({"prompt_token_ids": [True]}, "no list of token ids"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path: Path, line: Any, problem: str) -> None:
    path = lines(tmp_path / "p.jsonl", {"prompt": "good"}, "", line)
    with pytest.raises(InvalidParameterError, match=r"p\.jsonl:3.*" + problem):
        read_sources(path)


def test_a_prompt_that_cannot_be_encoded_is_named_too(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"prompt_token_ids": ["x"]})
    with pytest.raises(InvalidParameterError, match=r"p\.jsonl:1"):
        encoded(path)


@pytest.mark.parametrize("name", ["empty.jsonl", "blank.txt", "nothing", "folder"])
def test_no_prompts_is_an_error(tmp_path: Path, name: str) -> None:
    if name == "folder":
        (tmp_path / name).mkdir()
    elif name != "nothing":
        (tmp_path / name).write_text("\n \n")
    with pytest.raises(InvalidParameterError, match=r"holds no prompts|cannot be read"):
        read_sources(tmp_path / name)


# -- what the target writes --------------------------------------------------------------------------------------------


def run(target: str, tmp_path: Path, prompts: Sequence[Sequence[int]] = PROMPTS, **how: Any) -> Collected:
    path = lines(tmp_path / "p.jsonl", *({"prompt_token_ids": list(prompt)} for prompt in prompts))
    how = {"settings": SETTINGS, "shard_records": 3, **how}
    folder = how.pop("folder", tmp_path / "data")
    return collect(read_sources(path), folder, how.pop("settings"), target=target, dtype="float32", **how)


def texts(folder: Path) -> dict[tuple[bytes, int], tuple[bool, int, tuple[int, ...]]]:
    """Every text by its prompt and sample; a text that is there twice is a failure."""
    found: dict[tuple[bytes, int], tuple[bool, int, tuple[int, ...]]] = {}
    for record in read_records(folder, read_manifest(folder)):
        key = record.digest, record.sample
        assert key not in found, "a text is there twice"
        found[key] = record.held_out, record.num_prompt_tokens, tuple(record.token_ids.tolist())
    return found


@pytest.mark.core
def test_each_prompt_is_written_on_once(target: str, tmp_path: Path) -> None:
    found = run(target, tmp_path)
    there = texts(tmp_path / "data")
    assert found.num_written == len(there) == len(PROMPTS)
    begun = sorted(list(tokens[:prompt]) for _, prompt, tokens in there.values())
    assert begun == sorted(PROMPTS)
    assert all(len(tokens) == prompt + 6 for _, prompt, tokens in there.values())
    assert 0 < found.manifest.num_held_out < len(PROMPTS)


def test_a_text_may_be_longer_than_any_prompt(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("".join(f"x{number} = {number}\n" for number in range(8_000)))
    settings = DataSettings(max_tokens=0, prompt_tokens=64, held_out=0.5)
    found = collect(read_sources(tmp_path / "long.txt"), tmp_path / "data", settings, limit=40)
    assert found.manifest.num_records == 40


def test_the_same_call_again_writes_nothing_and_more_prompts_are_added(target: str, tmp_path: Path) -> None:
    run(target, tmp_path, PROMPTS[:4])
    before = texts(tmp_path / "data")
    assert run(target, tmp_path, PROMPTS[:4]).num_written == 0
    assert run(target, tmp_path).num_written == 6
    after = texts(tmp_path / "data")
    assert before.items() <= after.items()
    run(target, tmp_path, folder=tmp_path / "at-once")
    assert after == texts(tmp_path / "at-once")  # which texts are written together changes nothing


class Killed(BaseException):
    """As sudden as a signal: nothing of ours catches it."""


@pytest.mark.parametrize("moment", ["before a file", "behind a file", "behind the manifest"])
def test_a_run_that_was_killed_goes_on(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    run(target, tmp_path, folder=tmp_path / "whole")
    write, save = collecting.write_shard, collecting.Manifest.save
    calls = {"files": 0, "manifests": 0}

    def write_shard(folder: Path, name: str, records: Sequence[Record]) -> Any:
        calls["files"] += 1
        if moment == "before a file" and calls["files"] == 2:
            raise Killed
        shard = write(folder, name, records)
        if moment == "behind a file" and calls["files"] == 2:
            raise Killed
        return shard

    def save_manifest(self: Any, folder: Path) -> None:
        save(self, folder)
        calls["manifests"] += 1
        if moment == "behind the manifest" and calls["manifests"] == 3:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(collecting, "write_shard", write_shard)
        patch.setattr(collecting.Manifest, "save", save_manifest)
        with pytest.raises(Killed):
            run(target, tmp_path)
    assert 0 < len(texts(tmp_path / "data")) < len(PROMPTS)
    run(target, tmp_path)
    assert texts(tmp_path / "data") == texts(tmp_path / "whole")


def test_samples_of_a_prompt_differ_and_stand_on_one_side(target: str, tmp_path: Path) -> None:
    run(target, tmp_path, settings=SETTINGS.replace(samples=3))
    there = texts(tmp_path / "data")
    assert len(there) == 3 * len(PROMPTS)
    for digest in {digest for digest, _ in there}:
        same = [there[digest, sample] for sample in range(3)]
        assert len({tokens for _, _, tokens in same}) > 1
        assert len({held_out for held_out, _, _ in same}) == 1


def test_prompts_alone_may_be_the_data(target: str, tmp_path: Path) -> None:
    run(target, tmp_path, settings=SETTINGS.replace(max_tokens=0))
    assert sorted(list(tokens) for _, _, tokens in texts(tmp_path / "data").values()) == sorted(PROMPTS)


@pytest.mark.core
@pytest.mark.parametrize("max_tokens", [0, 6])
def test_kept_rows_are_what_a_stock_model_computes(target: str, tmp_path: Path, max_tokens: int) -> None:
    settings = SETTINGS.replace(max_tokens=max_tokens, hidden_states=(LAYERS, 1), target_top_k=3)
    said: list[int] = []
    run(target, tmp_path, settings=settings, on_size=said.append)
    files = [load_file(file) for file in (tmp_path / "data").glob("shard-*.safetensors")]
    assert said == [sum(tensor.nbytes for file in files for tensor in file.values())]  # no text ended early
    names = [hidden_name(1), hidden_name(LAYERS), TOP_TOKENS, TOP_LOGITS]
    stock = FrozenTarget(target, "float32")
    records = read_records(tmp_path / "data", read_manifest(tmp_path / "data"), rows=names)
    assert any(len(record.token_ids) > 1 for record in records)
    for record in records:
        states, logits = stock.states(record.token_ids[None], [1, LAYERS])
        for layer in (1, LAYERS):
            torch.testing.assert_close(record.rows[hidden_name(layer)], states[layer][0, :-1], atol=1e-4, rtol=1e-4)
        kept = logits[0, :-1].gather(-1, record.rows[TOP_TOKENS].long())
        torch.testing.assert_close(record.rows[TOP_LOGITS], kept, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(kept, logits[0, :-1].topk(3).values, atol=1e-4, rtol=1e-4)


def test_a_prompt_that_is_too_long_is_left_out_and_named(target: str, tmp_path: Path) -> None:
    found = run(target, tmp_path, [*PROMPTS, [3] * 200])
    assert len(texts(tmp_path / "data")) == len(PROMPTS)
    assert [where for where, _ in found.refused] == ["p.jsonl:11"]
    with pytest.raises(InvalidParameterError, match=r"p\.jsonl:1.*refuses every prompt"):
        run(target, tmp_path, [[3] * 200], folder=tmp_path / "none")


def test_data_of_another_target_are_refused_by_their_witness(target: str, tmp_path: Path) -> None:
    run(target, tmp_path)
    other = tmp_path / "other"
    shutil.copytree(target, other)
    weights = load_file(other / "model.safetensors")
    weights["model.embed_tokens.weight"].neg_()
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    data = tmp_path / "data"
    FrozenTarget(target, "float32").check_fits(read_manifest(data), data)
    with pytest.raises(ContradictionError, match=r"its hidden states differ .* by 2\.00 of their length"):
        FrozenTarget(str(other), "float32").check_fits(read_manifest(data), data)
    (data / WITNESS).write_bytes(b"half")
    with pytest.raises(InvalidParameterError, match=r"witness.safetensors.*cannot be read"):
        FrozenTarget(target, "float32").check_fits(read_manifest(data), data)


@pytest.mark.parametrize("change", [{"temperature": 0.5}, {"max_tokens": 7}, {"seed": 1}])
def test_data_of_other_settings_are_not_mixed(target: str, tmp_path: Path, change: dict[str, Any]) -> None:
    run(target, tmp_path)
    with pytest.raises(ContradictionError, match=next(iter(change))):
        run(target, tmp_path, settings=SETTINGS.replace(**change))


@pytest.mark.parametrize(
    ("change", "field"),
    [({"temperature": -1.0}, "temperature"), ({"held_out": 1.0}, "held_out"), ({"hidden_states": "x"}, "hidden_states")],
)
def test_settings_out_of_range_are_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=field):
        DataSettings(**change)


def test_a_layer_that_the_target_lacks_is_refused(target: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="hidden_states=9"):
        run(target, tmp_path, settings=SETTINGS.replace(hidden_states=(9,)))


# -- files -------------------------------------------------------------------------------------------------------------


def test_more_likely_tokens_than_there_are_cannot_be_kept(target: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="target_top_k=5000"):
        run(target, tmp_path, settings=SETTINGS.replace(target_top_k=5000))
    assert not (tmp_path / "data").exists()


def test_a_file_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "first")

    def fail(unfinished: Path) -> None:
        unfinished.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match=r"No space left.*Free some space"):
        write_whole(path, fail)
    assert path.read_text() == "first"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_the_data_as_they_were(target: str, tmp_path: Path) -> None:
    """A real one: the process may write no file of more bytes than a shard takes."""
    run(target, tmp_path, PROMPTS[:3])
    before = texts(tmp_path / "data")
    script = (
        "import resource, sys; from pathlib import Path; from tests.train import test_data as t\n"
        "from outrider.errors import StorageError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (600, 600))\n"
        "try: t.run(sys.argv[1], Path(sys.argv[2]), t.PROMPTS, folder=Path(sys.argv[2]) / 'data')\n"
        "except StorageError as error: print('refused:', error)\n"
    )
    lines(tmp_path / "p.jsonl")
    done = subprocess.run([sys.executable, "-c", script, target, str(tmp_path)], capture_output=True, text=True)
    assert "refused:" in done.stdout, done.stderr
    assert "shard-00001" in done.stdout
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 600
    assert texts(tmp_path / "data") == before
    assert not list((tmp_path / "data").glob("*.unfinished"))
    run(target, tmp_path)
    assert len(texts(tmp_path / "data")) == len(PROMPTS)


@pytest.mark.parametrize("damage", ["gone", "cut", "manifest", "other"])
def test_damaged_data_are_refused(target: str, tmp_path: Path, damage: str) -> None:
    run(target, tmp_path)
    folder = tmp_path / "data"
    shard = folder / "shard-00001.safetensors"
    if damage == "gone":
        shard.unlink()
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-8])
    elif damage == "other":
        shard.write_bytes((folder / "shard-00003.safetensors").read_bytes())
    else:
        (folder / "manifest.json").write_text('{"version": 2}')
    with pytest.raises(InvalidParameterError, match="data="):
        load_data(folder, length=16)


def test_too_little_for_a_split_is_refused(target: str, tmp_path: Path) -> None:
    run(target, tmp_path, settings=SETTINGS.replace(held_out=1e-6))
    with pytest.raises(InvalidParameterError, match="0 of its 10 texts are left to measure with"):
        load_data(tmp_path / "data", length=16)
    with pytest.raises(InvalidParameterError, match=r"holds no manifest\.json"):
        load_data(tmp_path, length=16)


# -- batches -----------------------------------------------------------------------------------------------------------


def test_batches_are_functions_of_their_numbers(target: str, tmp_path: Path) -> None:
    run(target, tmp_path, [[i % 24, (7 * i) % 24, i // 24] for i in range(1, 60)])
    pieces = load_data(tmp_path / "data", length=16).train
    one, other = Batches(pieces, 4, seed=3), Batches(pieces, 4, seed=3)
    numbers = [0, 5, 40, 3, 40, 1]
    expected = {number: one[number].token_ids.tolist() for number in sorted(numbers)}
    assert [other[number].token_ids.tolist() for number in numbers] == [expected[number] for number in numbers]
    assert expected[0] != Batches(pieces, 4, seed=4)[0].token_ids.tolist()
    each = len(pieces) // 4
    epoch = [
        tuple(row[: int(n)].tolist()) for i in range(each) for row, n in zip(one[i].token_ids, one[i].lengths, strict=True)
    ]
    assert len(epoch) == len(set(epoch)) == each * 4


def test_long_texts_are_cut_and_padding_predicts_nothing(target: str, tmp_path: Path) -> None:
    run(target, tmp_path, [[1] * 9 + [i] for i in range(20)])
    data = load_data(tmp_path / "data", length=7)  # texts of 16 tokens: 7, 7 and 2
    assert sorted({len(piece.token_ids) for piece in data.train}) == [2, 7]
    assert {piece.num_prompt_tokens for piece in data.train} == {7, 3, 0}
    batch = Batches(data.train, len(data.train), seed=0)[0]
    assert int(batch.predicts().sum()) == batch.num_tokens == sum(len(piece.token_ids) - 1 for piece in data.train)
    assert int(batch.predicts(3).sum()) == sum(max(0, len(piece.token_ids) - 3) for piece in data.train)
    drafted = sum(max(0, len(p.token_ids) - 1 - p.num_prompt_tokens) for p in data.train)
    assert int(batch.drafts().sum()) == drafted
