"""Structures are tried in processes that the system ends: what explodes there costs a second, and nobody else anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from outrider.config import default_model
from outrider.errors import ClosedError, TrialError
from outrider.structured import trials
from outrider.structured.structures import StructureVocabulary, Written
from outrider.structured.trials import TOO_MUCH_WORK, Trials

pytest.importorskip("llguidance")

#: It takes minutes, and more memory every second.
_NUMBERS = [{"type": "integer", "multipleOf": 99_991 - i} for i in range(100)]
ENDLESS = Written("schema", json.dumps({"type": "array", "prefixItems": _NUMBERS, "minItems": 100}))
FINE = Written("regex", "[ab]{3}")


@pytest.fixture(scope="module")
def vocabulary() -> Callable[[], StructureVocabulary]:
    tokenizer = AutoTokenizer.from_pretrained(default_model("target"))
    found = StructureVocabulary.of(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    return lambda: found


@pytest.fixture
def tried() -> Iterator[Trials]:
    found = Trials()
    yield found
    found.close()


#: Seconds after which the clock would end a trial that the system should have ended, also on a busy machine.
PATIENT = 120.0


def _pids(tried: Trials) -> set[int]:
    return {trier._process.pid for trier in tried._all}


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


def _until(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


def test_nothing_is_started_before_it_is_needed(tried: Trials, vocabulary: Callable[[], StructureVocabulary]) -> None:
    assert not tried._all
    assert tried.verdict(FINE, vocabulary) is None
    assert tried.verdict(Written("regex", "[cd]{3}"), vocabulary) is None
    assert len(tried._all) == 1


def test_one_that_was_prepared_is_used_and_replaced_where_it_has_ended(
    tried: Trials, vocabulary: Callable[[], StructureVocabulary]
) -> None:
    tried.prepare(vocabulary())
    prepared = _pids(tried)
    assert tried.verdict(FINE, vocabulary) is None
    assert _pids(tried) == prepared
    (pid,) = prepared
    tried.prepare(vocabulary())
    for each in _pids(tried):
        os.kill(each, 9)
    assert _until(lambda: not any(map(_runs, _pids(tried))))
    assert tried.verdict(Written("regex", "[cd]{3}"), vocabulary) is None
    assert pid not in _pids(tried)


def test_what_never_ends_is_ended_by_the_system_and_the_process_is_replaced(
    tried: Trials, vocabulary: Callable[[], StructureVocabulary], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_PATIENCE", PATIENT)
    assert tried.verdict(FINE, vocabulary) is None
    (first,) = _pids(tried)
    begun = time.monotonic()
    assert tried.verdict(ENDLESS, vocabulary) == TOO_MUCH_WORK
    assert time.monotonic() - begun < PATIENT / 2
    assert not tried._all
    assert not _runs(first)
    assert tried.verdict(Written("regex", "[ef]"), vocabulary) is None
    assert _pids(tried) != {first}


def test_a_trial_has_a_limit_of_memory(
    tried: Trials, vocabulary: Callable[[], StructureVocabulary], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "SECONDS", 60.0)
    monkeypatch.setattr(trials, "NUM_BYTES", 2**24)
    monkeypatch.setattr(trials, "_PATIENCE", PATIENT)
    begun = time.monotonic()
    assert tried.verdict(ENDLESS, vocabulary) == TOO_MUCH_WORK
    assert time.monotonic() - begun < PATIENT / 2


def test_where_the_system_cannot_limit_it_the_clock_does(
    tried: Trials, vocabulary: Callable[[], StructureVocabulary], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tried.verdict(FINE, vocabulary) is None
    monkeypatch.setattr(trials, "SECONDS", 0.0)  # no limit
    monkeypatch.setattr(trials, "_PATIENCE", 1.0)
    assert tried.verdict(ENDLESS, vocabulary) == TOO_MUCH_WORK
    assert len(tried._verdicts) == 1  # it may have been this machine


def test_a_structure_is_tried_once(
    tried: Trials, vocabulary: Callable[[], StructureVocabulary], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_NUM_VERDICTS", 2)
    bad = Written("regex", "((")
    refusal = tried.verdict(bad, vocabulary)
    assert refusal
    assert tried.verdict(Written("lark", "(("), vocabulary) != refusal  # the same text in another language
    monkeypatch.setattr(trials._Trier, "reason", lambda *_: pytest.fail("it was tried again"))
    assert tried.verdict(bad, vocabulary) == refusal
    monkeypatch.undo()
    monkeypatch.setattr(trials, "_NUM_VERDICTS", 2)
    for text in "abcdef":
        assert tried.verdict(Written("regex", text), vocabulary) is None
    assert len(tried._verdicts) == 2


def test_one_that_was_killed_while_it_rested_is_replaced(
    tried: Trials, vocabulary: Callable[[], StructureVocabulary]
) -> None:
    assert tried.verdict(FINE, vocabulary) is None
    (pid,) = _pids(tried)
    os.kill(pid, 9)
    assert _until(lambda: not _runs(pid))
    assert tried.verdict(Written("regex", "[gh]"), vocabulary) is None


def test_closing_breaks_off_the_trial_under_way(
    tried: Trials, vocabulary: Callable[[], StructureVocabulary], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "SECONDS", 60.0)
    monkeypatch.setattr(trials, "NUM_BYTES", 2**40)
    found: list[BaseException] = []

    def ask() -> None:
        try:
            tried.verdict(ENDLESS, vocabulary)
        except ClosedError as error:
            found.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert _until(lambda: bool(_pids(tried)))
    pids = _pids(tried)
    time.sleep(0.5)
    tried.close()
    asking.join(60)
    assert not asking.is_alive()
    assert found
    assert not any(_runs(pid) for pid in pids)
    with pytest.raises(ClosedError):
        tried.verdict(Written("regex", "[ij]"), vocabulary)


def test_without_a_process_nothing_is_followed(
    tried: Trials, vocabulary: Callable[[], StructureVocabulary], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "_PROGRAM", "raise SystemExit(3)")
    with pytest.raises(TrialError, match="before it was ready, with 3"):
        tried.verdict(FINE, vocabulary)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(TrialError, match="cannot be started"):
        tried.verdict(FINE, vocabulary)
    assert not tried._all


_ORPHAN = """
import sys, threading, time
from transformers import AutoTokenizer
from outrider.config import default_model
from outrider.structured.structures import StructureVocabulary, Written
from outrider.structured.trials import Trials
tokenizer = AutoTokenizer.from_pretrained(default_model("target"))
tried, found = Trials(), StructureVocabulary.of(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
assert tried.verdict(Written("regex", "a"), lambda: found) is None
print(*(trier._process.pid for trier in tried._all), flush=True)
if sys.argv[1]:
    tried.verdict(Written("schema", sys.argv[1]), lambda: found)
time.sleep(600)
"""


@pytest.mark.by_change("src/outrider/structured/")
@pytest.mark.skipif(not Path("/proc").exists(), reason="needs /proc")
@pytest.mark.parametrize("at_work", [False, True])
def test_it_ends_with_whoever_started_it(at_work: bool) -> None:
    command = [sys.executable, "-c", _ORPHAN, ENDLESS.text if at_work else ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert _runs(pid)
        time.sleep(0.2)
        parent.kill()
    assert _until(lambda: not _runs(pid))
