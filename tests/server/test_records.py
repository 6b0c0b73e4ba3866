"""Texts of tenants that allow it are kept: theirs alone, within a budget, until they delete them."""

from __future__ import annotations

import asyncio
import errno
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outrider import files
from outrider.cli.app import app
from outrider.errors import ContradictionError, InvalidParameterError, StorageError
from outrider.heads.checkpoint import Witness
from outrider.params import CompletionOutput, SamplingParams
from outrider.propose.settings import PLAIN
from outrider.records import DataSettings, Record, TargetFacts, read_manifest, read_records, write_shard
from outrider.results import RequestStats
from outrider.server.metrics import ServerMetrics
from outrider.server.recorder import NamespaceRecords, Origin, Recorder, RecordFolder
from outrider.server.requests import Job, Prompt
from outrider.server.schemas import CompletionRequest
from tests.server.running import CLIENT, TEMPLATE, Server, running

KEYS = "ann: first record_mib=1\nbob: second\nEve: third record_mib=1\n"
ANN, BOB, EVE = ({"authorization": f"Bearer {key}"} for key in ("first", "second", "third"))
ORIGIN = Origin(
    TargetFacts(name="t", vocab_size=9, hidden_size=2, num_layers=1),
    Witness(torch.arange(3), torch.ones(3, 2)),
    DataSettings(held_out=0.1),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_folder(tmp_path_factory.mktemp("records"))


def new_folder(parent: Path) -> Path:
    """Where a server records, beside its keys and its template."""
    (parent / "keys").write_text(KEYS, "utf-8")
    (parent / "template").write_text(TEMPLATE, "utf-8")
    return parent / "traffic"


@pytest.fixture(scope="module")
def _shared(folder: Path) -> Iterator[Server]:
    with recording(folder) as server:
        yield server


@pytest.fixture
def server(_shared: Server) -> Server:
    """The server of most tests, which keeps nothing yet."""
    for key in (ANN, EVE):
        CLIENT.delete(f"{_shared.url}/records", headers=key)
    return _shared


def recording(folder: Path) -> Any:
    given = ("--api-key-file", str(folder.parent / "keys"), "--chat-template", str(folder.parent / "template"))
    return running(*given, "--record", str(folder), "--method", "suffix")


def complete(server: Server, headers: dict[str, str], **more: Any) -> list[list[int]]:
    """The tokens of the texts, prompts first."""
    body = {"prompt": "def parse(", "max_tokens": 6, "return_token_ids": True, **more}
    response = server.post("/v1/completions", body, headers=headers)
    assert response.status_code == 200, response.text
    return [choice["prompt_token_ids"] + choice["token_ids"] for choice in response.json()["choices"]]


def kept(folder: Path) -> list[list[int]]:
    return [record.token_ids.tolist() for record in read_records(folder, read_manifest(folder))]


def test_texts_of_keys_that_allow_it_are_kept_each_tenant_by_itself(server: Server, folder: Path) -> None:
    before = server.metric("outrider:recorded_texts_total", 'tenant="ann"')
    anns = complete(server, ANN, n=2)
    eves = complete(server, EVE, prompt=["import os", "x = "])
    complete(server, BOB)
    complete(server, ANN, store=False)
    complete(server, ANN, max_tokens=0, echo=True, logprobs=0)
    said = server.get("/records", headers=ANN).json()
    size = sum(file.stat().st_size for file in (folder / "ann").glob("shard-*"))
    tokens = sum(map(len, anns))
    assert said == {"namespace": "ann", "texts": 2, "tokens": tokens, "bytes": size, "budget_bytes": 2**20}
    assert server.get("/records", headers=EVE).json()["texts"] == 2
    assert server.get("/records", headers=BOB).json()["texts"] == 0
    assert (kept(folder / "ann"), kept(folder / "%45ve")) == (anns, eves)
    assert {path.name for path in folder.iterdir()} == {".lock", "ann", "%45ve"}
    assert read_manifest(folder / "ann").settings.temperature == 1.0
    assert server.get("/records").status_code == 401
    assert server.metric("outrider:recorded_texts_total", 'tenant="ann"') == before + 2


def test_streams_and_chats_are_kept_when_they_are_whole(server: Server, folder: Path) -> None:
    before = server.get("/records", headers=EVE).json()["texts"]
    messages = [{"role": "user", "content": "x = 1"}, {"role": "assistant", "content": "y"}]
    for more in ([], [*messages[1:], {"role": "user", "content": "z"}]):
        body = {"messages": [messages[0], *more], "max_tokens": 3, "stream": True}
        assert server.post("/v1/chat/completions", body, headers=EVE).status_code == 200
    assert server.get("/records", headers=EVE).json()["texts"] == before + 2
    *_, first, second = read_records(folder / "%45ve", read_manifest(folder / "%45ve"))
    assert (first.digest != second.digest, first.held_out) == (True, second.held_out)


def test_a_second_server_is_refused(server: Server, folder: Path) -> None:
    with pytest.raises(InvalidParameterError, match=r"record=.*another server writes to it\. Give each server"):
        RecordFolder(folder)


def test_a_tenant_deletes_what_is_kept_of_it_and_of_nobody_else(server: Server, folder: Path) -> None:
    complete(server, ANN)
    complete(server, EVE)
    there, others = (server.get("/records", headers=key).json()["texts"] for key in (ANN, EVE))
    assert CLIENT.delete(f"{server.url}/records", headers=ANN).json() == {"namespace": "ann", "deleted_texts": there}
    assert server.get("/records", headers=ANN).json()["texts"] == 0
    assert list((folder / "ann").glob("shard-*")) == []
    assert server.get("/records", headers=EVE).json()["texts"] == others > 0
    assert complete(server, ANN) == kept_when_told(server, folder / "ann")


def kept_when_told(server: Server, folder: Path) -> list[list[int]]:
    server.get("/records", headers=ANN)
    return kept(folder)


def test_what_was_kept_outlives_a_server_that_is_killed_and_a_key_that_forbids_more(tmp_path: Path) -> None:
    folder = new_folder(tmp_path)
    with recording(folder) as server:
        complete(server, ANN)
        complete(server, EVE)
        for key in (ANN, EVE):
            server.get("/records", headers=key)  # all texts are written now
        anns, eves = kept(folder / "ann"), kept(folder / "%45ve")
        server.process.kill()
        server.process.wait(60)
    (folder.parent / "keys").write_text(KEYS.replace("first record_mib=1", "first"), "utf-8")
    with recording(folder) as other:
        complete(other, ANN)
        new = complete(other, EVE)
        assert other.get("/records", headers=ANN).json()["budget_bytes"] == 0
        other.process.send_signal(signal.SIGTERM)
        other.process.wait(60)
    assert (kept(folder / "ann"), kept(folder / "%45ve")) == (anns, [*eves, *new])


# -- without a server --------------------------------------------------------------------------------------------------


def texts(count: int, length: int = 40, first: int = 0) -> list[Record]:
    return [
        Record(place.to_bytes(16, "big"), 0, False, 4, torch.full((length,), place))
        for place in range(first, first + count)
    ]


def numbers(folder: Path) -> list[int]:
    return [int(record.token_ids[0]) for record in read_records(folder, read_manifest(folder))]


def test_without_a_key_that_allows_it_no_server_starts(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("ann: first\n", "utf-8")
    for more, said in ((("--api-key-file", str(tmp_path / "keys")), "no key allows it"), (("--replicas", "2"), "several")):
        found = CliRunner().invoke(app, ["serve", "--port", "0", "--record", str(tmp_path / "traffic"), *more])
        assert isinstance(found.exception, ContradictionError)
        assert said in str(found.exception)
    assert not (tmp_path / "traffic").exists()


def test_a_text_that_was_cancelled_is_not_kept(tmp_path: Path) -> None:
    """Another one of the same request is. Draft heads must not learn from half a text where texts end."""
    asked = CompletionRequest(prompt=[1, 2], n=2)
    job = Job(asked, (Prompt((1, 2)),), SamplingParams(n=2), PLAIN, "ann")
    whole = CompletionOutput(0, "", (5,), (), "length", None, RequestStats())
    half = replace(whole, index=1, token_ids=(6,), finish_reason="cancelled")

    async def keep() -> None:
        recorder = Recorder(RecordFolder(tmp_path), {"ann": 2**20}, ORIGIN, ServerMetrics("t"))
        recorder.keep(job, {0: whole, 1: half})
        await recorder.close()

    asyncio.run(keep())
    assert kept(tmp_path / "ann") == [[1, 2, 5]]


def test_the_oldest_go_when_the_budget_is_spent(tmp_path: Path) -> None:
    found = NamespaceRecords(tmp_path, ORIGIN, 2**15)
    for first in range(0, 240, 10):
        found.add(texts(10, first=first))
        assert found.num_bytes == sum(file.stat().st_size for file in tmp_path.glob("shard-*")) <= 2**15
    there = numbers(tmp_path)
    assert there == list(range(240 - len(there), 240))
    assert len(there) > 100
    assert len(read_manifest(tmp_path).shards) < 12
    smaller = NamespaceRecords(tmp_path, ORIGIN, 2**14)
    assert smaller.num_bytes <= 2**14
    assert numbers(tmp_path)[-1] == 239


def test_a_break_leaves_what_was_there(tmp_path: Path) -> None:
    NamespaceRecords(tmp_path, ORIGIN, 2**20).add(texts(3))
    write_shard(tmp_path, "shard-00000001.safetensors", texts(9))  # and then no manifest that names it
    (tmp_path / "shard-00000002.safetensors.unfinished").write_bytes(b"half")
    found = NamespaceRecords(tmp_path, ORIGIN, 2**20)
    assert numbers(tmp_path) == [0, 1, 2]
    assert len(list(tmp_path.glob("shard-*"))) == 1
    found.add(texts(1, first=3))
    assert numbers(tmp_path) == [0, 1, 2, 3]
    assert len(list(tmp_path.glob("shard-*"))) == 1


def test_a_disk_that_takes_nothing_loses_the_new_texts_alone(tmp_path: Path) -> None:
    found = NamespaceRecords(tmp_path, ORIGIN, 2**20)
    found.add(texts(3))
    in_the_way = tmp_path / "shard-00000001.safetensors.unfinished"
    in_the_way.mkdir()
    with pytest.raises(StorageError, match=r"shard-00000001.safetensors: it cannot be written"):
        found.add(texts(2, first=3))
    in_the_way.rmdir()
    found.add(texts(1, first=5))
    assert numbers(tmp_path) == [0, 1, 2, 5]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A disk on which no byte is free as long as the list holds something. Names can still be changed there."""
    is_full: list[bool] = []
    write = files._put

    def put(path: Path, content: bytes) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(files, "_put", put)
    return is_full


def test_a_full_disk_keeps_what_it_has_and_gives_it_up_when_asked(tmp_path: Path, full: list[bool]) -> None:
    folder = tmp_path / "ann"
    found = NamespaceRecords(folder, ORIGIN, 2**20)
    found.add(texts(3))
    size = found.num_bytes
    full.append(True)
    with pytest.raises(StorageError):
        found.add(texts(2, first=3))
    assert (found.num_texts, found.num_bytes, numbers(folder)) == (3, size, [0, 1, 2])
    assert found.delete() == 3
    assert (found.num_texts, found.num_bytes, list(tmp_path.rglob("shard-*"))) == (0, 0, [])
    full.clear()
    found.add(texts(2, first=7))
    assert numbers(folder) == [7, 8]
    NamespaceRecords(folder, ORIGIN, 2**20)
    other = Origin(ORIGIN.facts, Witness(ORIGIN.witness.token_ids, -ORIGIN.witness.features), ORIGIN.settings)
    with pytest.raises(ContradictionError):  # the folder is bound to its target again
        NamespaceRecords(folder, other, 2**20)


def test_what_is_told_is_what_is_there_when_nothing_can_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "ann"
    found = NamespaceRecords(folder, ORIGIN, 2**20)
    found.add(texts(3))

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(StorageError):
        found.delete()
    assert (found.num_texts, numbers(folder)) == (3, [0, 1, 2])


def test_a_start_on_a_full_disk_reads_what_is_there(tmp_path: Path, full: list[bool]) -> None:
    NamespaceRecords(tmp_path / "ann", ORIGIN, 2**15).add(texts(60, length=80))
    full.append(True)
    found = NamespaceRecords(tmp_path / "ann", ORIGIN, 2**14)
    assert found.num_texts == 60, "too many, and nothing can be written that says otherwise"
    assert NamespaceRecords(tmp_path / "eve", ORIGIN, 2**15).num_texts == 0
    full.clear()
    found.add(texts(1, first=60))
    assert found.num_bytes <= 2**14
    assert numbers(tmp_path / "ann")[-1] == 60


@pytest.mark.parametrize("length", [40, 900, 5000])
def test_the_budget_holds_while_files_are_replaced(tmp_path: Path, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever lies there at any time, half-written files included, is an eighth more at most."""
    most, budget, write = 0, 2**15, files._put

    def put(path: Path, content: bytes) -> None:
        nonlocal most
        write(path, content)
        most = max(most, sum(file.stat().st_size for file in tmp_path.glob("shard-*")))

    monkeypatch.setattr(files, "_put", put)
    found = NamespaceRecords(tmp_path, ORIGIN, budget)
    for first in range(0, 300, 30):
        assert found.add(texts(30, length, first)) == 0
    assert budget // 2 < most <= budget * 9 // 8
    assert numbers(tmp_path)[-1] == 299
    assert found.num_bytes <= budget


def test_a_text_larger_than_the_budget_costs_no_other(tmp_path: Path) -> None:
    found = NamespaceRecords(tmp_path, ORIGIN, 2**15)
    assert found.add([*texts(3), *texts(1, 9000, 3), *texts(1, 40, 4)]) == 1
    assert numbers(tmp_path) == [0, 1, 2, 4]
    assert found.add(texts(1, 9000)) == 1
    assert numbers(tmp_path) == [0, 1, 2, 4]


def test_several_files_of_one_batch_all_stay(tmp_path: Path) -> None:
    found = NamespaceRecords(tmp_path, ORIGIN, 2**16)
    for first in range(0, 40, 20):
        found.add(texts(20, 300, first))
    assert numbers(tmp_path) == list(range(40))


def test_a_folder_that_others_may_read_is_closed_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "traffic"
    folder.mkdir()
    folder.chmod(0o755)
    RecordFolder(folder).close()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(InvalidParameterError, match=r"other users may read it .mode 770.*Give a folder of your own"):
        RecordFolder(folder)


def test_records_of_another_target_are_refused(tmp_path: Path) -> None:
    NamespaceRecords(tmp_path, ORIGIN, 2**20).add(texts(1))
    other = Origin(ORIGIN.facts, Witness(ORIGIN.witness.token_ids, -ORIGIN.witness.features), ORIGIN.settings)
    with pytest.raises(ContradictionError, match=r"target='t': its hidden states differ .* by 2\.00 of their length"):
        NamespaceRecords(tmp_path, other, 2**20)
    (tmp_path / "shard-00000000.safetensors").unlink()
    with pytest.raises(InvalidParameterError, match=r"record=.*shard-00000000.safetensors.*cannot be read"):
        NamespaceRecords(tmp_path, ORIGIN, 2**20)


def test_names_of_folders_are_safe_and_differ(tmp_path: Path) -> None:
    folder = RecordFolder(tmp_path)
    names = ["web", "Web", "../web", "..", "a/b", "é", "a b", "%41"]
    found = [folder.of(name) for name in names]
    assert len({path.name.lower() for path in found}) == len(names)
    assert {path.parent for path in found} == {tmp_path}
    assert not {".", ".."} & {path.name for path in found}
    with pytest.raises(InvalidParameterError, match="too long"):
        folder.of("x" * 300)
    folder.close()
    RecordFolder(tmp_path).close()
