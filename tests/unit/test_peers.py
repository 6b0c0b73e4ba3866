"""Peers that fail, settings that are refused, and peers that are not installed."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from outrider.errors import EngineAnswerError, InvalidParameterError, InvalidPromptError, MissingExtraError
from outrider.lab.peers import openvino
from outrider.lab.peers.base import (
    TOKEN_SECONDS,
    Peer,
    PeerMode,
    PeerModels,
    PeerRequest,
    PeerRun,
    Worker,
    _deadline,
    converted_path,
    gguf_file,
)
from outrider.lab.peers.known import PEERS, open_peer

PLAIN = PeerMode("plain", "plain")
MODELS = PeerModels("target", None, "float32", 1, Path("unused"))


class Obedient:
    """An engine that does what the prompt says."""

    def __init__(self, models: PeerModels) -> None:
        if models.target == "missing":
            raise FileNotFoundError("no such checkpoint")
        self.asked = 0

    def generate(self, request: PeerRequest) -> PeerRun:
        self.asked += 1
        match request.prompts[0][0]:
            case 2:
                raise ArithmeticError("no such token")
            case 3:
                os._exit(3)
            case 4:
                time.sleep(60)
        lengths = [request.max_tokens - (prompt[0] == 5) for prompt in request.prompts]
        return PeerRun(tuple((self.asked,) * length for length in lengths), 1.0, (), sum(lengths), None, None, None)


class ObedientPeer(Peer):
    name = "obedient"
    package = "outrider"
    dtypes = ("float32",)
    precision = "none"
    engine = Obedient


@pytest.fixture
def peer(monkeypatch):
    monkeypatch.setattr("outrider.lab.peers.base.metadata.version", lambda package: "1")
    with ObedientPeer(MODELS) as found:
        yield found


def write(peer: Peer, first: int, max_tokens: int = 2, temperature: float = 0.0) -> tuple[int, ...]:
    run = peer.generate(PLAIN, [[first, 0]], max_tokens=max_tokens, temperature=temperature, seed=None)
    return run.texts[0]


# -- failures ----------------------------------------------------------------------------------------------------------


def test_a_mode_is_warmed_up_once(peer):
    assert write(peer, 1) == (2, 2)  # the first text was the warm-up
    assert write(peer, 1) == (3, 3)


def test_texts_of_a_batch_come_together_and_another_batch_is_warmed_up_anew(peer):
    def texts(count):
        return peer.generate(PLAIN, [[1, 0]] * count, max_tokens=2, temperature=0.0, seed=None).texts

    assert texts(3) == ((2, 2),) * 3
    assert texts(3) == ((3, 3),) * 3
    assert texts(2) == ((5, 5),) * 2  # a fourth answer was the warm-up
    with pytest.raises(EngineAnswerError, match="wrote 1 tokens instead of 2"):
        peer.generate(PLAIN, [[1], [5]], max_tokens=2, temperature=0.0, seed=None)


def test_a_peer_may_take_longer_for_more_tokens():
    few, many = (PeerRequest(PLAIN, ((1,) * length,) * 4, 10, 0.0, None) for length in (10, 1_000))
    assert _deadline(many) - _deadline(few) == pytest.approx(TOKEN_SECONDS * 4 * 990)


def test_what_an_engine_raises_names_the_peer_and_costs_one_text(peer):
    with pytest.raises(EngineAnswerError, match="obedient: plain raises ArithmeticError: no such token"):
        write(peer, 2)
    assert write(peer, 1) == (3, 3)  # the same process


def test_a_crash_names_the_peer_and_the_next_text_gets_a_new_process(peer):
    with pytest.raises(EngineAnswerError, match=r"obedient: its process died in plain \(exit code 3\)"):
        write(peer, 3)
    assert write(peer, 1) == (2, 2)  # warmed up anew


def test_a_hang_ends_at_the_deadline(peer, monkeypatch):
    write(peer, 1)
    monkeypatch.setattr("outrider.lab.peers.base.ANSWER_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(EngineAnswerError, match=r"obedient: no answer to plain within 0.4 s"):
        write(peer, 4)
    assert time.monotonic() - start < 30, "it would hang for a minute"
    assert not peer._worker.is_alive
    monkeypatch.undo()
    assert write(peer, 1) == (2, 2)


def test_a_process_that_died_between_two_texts_is_replaced(peer):
    write(peer, 1)
    peer._worker._process.kill()
    peer._worker._process.join()
    assert write(peer, 1) == (2, 2)


def test_an_interrupt_leaves_a_process_that_is_starting_alone(capfd):
    worker = Worker("obedient", partial(Obedient, PeerModels("here", None, "float32", 1, Path())))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    worker._start()
    signal.signal(signal.SIGINT, before)
    started = worker._process
    assert started is not None
    for _ in range(20):  # a terminal sends Ctrl-C to this process and to that one
        os.kill(started.pid, signal.SIGINT)
        time.sleep(0.01)
    assert worker.ask(PeerRequest(PLAIN, ((1,),), 1, 0.0, None), 60.0).texts
    assert worker._process is started
    worker.close()
    assert capfd.readouterr().err == ""
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_an_engine_that_cannot_be_built():
    worker = Worker("obedient", partial(Obedient, PeerModels("missing", None, "float32", 1, Path())))
    with pytest.raises(EngineAnswerError, match="FileNotFoundError: no such checkpoint"):
        worker.ask(PeerRequest(PLAIN, ((1,),), 1, 0.0, None), 30.0)
    worker.close()
    worker.close()
    assert not worker.is_alive


def test_a_text_of_another_length_is_no_figure(peer):
    with pytest.raises(EngineAnswerError, match="wrote 1 tokens instead of 2"):
        write(peer, 5)


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"mode": PeerMode("draft_model k=3", "draft_model", 3)}, "mode"),
    ],
)
def test_bad_requests_never_reach_the_process(peer, arguments, field):
    given = {"mode": PLAIN, "prompts": [[1]], "max_tokens": 1, "temperature": 0.0, "seed": None, **arguments}
    with pytest.raises(InvalidParameterError) as error:
        peer.generate(given.pop("mode"), given.pop("prompts"), **given)
    assert error.value.field == field
    assert not peer._worker.is_alive


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []]])
def test_a_prompt_has_a_token(peer, prompts):
    with pytest.raises(InvalidPromptError):
        peer.generate(PLAIN, prompts, max_tokens=1, temperature=0.0, seed=None)


def test_who_drafts_for_one_text_at_a_time_is_not_asked_for_more(tmp_path):
    with open_peer("transformers", PeerModels("target", "draft", "float32", 1, tmp_path)) as peer:
        assert [mode.name for mode in peer.modes(full=True, batch=2)] == ["plain"]
        with pytest.raises(InvalidParameterError, match="one text at a time"):
            peer.generate(PeerMode("ngram k=3", "ngram", 3), [[1], [2]], max_tokens=1, temperature=0.0, seed=None)
        assert not peer._worker.is_alive


def test_unknown_peers_and_unusable_weights_are_refused(tmp_path):
    with pytest.raises(InvalidParameterError, match=r"Known are transformers, llama.cpp, ik_llama.cpp, openvino"):
        open_peer("nobody", MODELS)
    with pytest.raises(InvalidParameterError, match="float32, bfloat16"):
        open_peer("transformers", PeerModels("target", None, "int8", 1, tmp_path))
    with pytest.raises(InvalidParameterError, match="num_threads"):
        open_peer("transformers", PeerModels("target", None, "float32", 0, tmp_path))


# -- what is offered ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "package"), [("llama.cpp", "xllamacpp"), ("ik_llama.cpp", "ik_llama_cpp"), ("openvino", "openvino_genai")]
)
def test_a_peer_that_is_not_installed_says_what_to_install(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    reason = PEERS[name].missing()
    assert reason is not None
    assert package in reason
    assert "pip install 'outrider[" in reason
    with pytest.raises(MissingExtraError, match=package):
        open_peer(name, MODELS)


def test_modes_without_a_draft_model_need_none(peer):
    assert [mode.name for mode in peer.modes(full=False)] == ["plain", "ngram k=3"]


def test_modes_in_full_hold_the_short_ones(tmp_path):
    with open_peer("transformers", PeerModels("target", "draft", "float32", 1, tmp_path)) as peer:
        short, full = peer.modes(full=False), peer.modes(full=True)
    assert set(short) < set(full)
    assert short[0] == PLAIN
    assert PeerMode("draft_model k=5", "draft_model", 5) in short


def test_converted_files_have_another_name_when_the_checkpoint_changes(tmp_path):
    source, kept = tmp_path / "model", tmp_path / "kept"
    source.mkdir()
    (source / "weights").write_text("1")
    first = converted_path(kept, str(source), "float32.gguf")
    assert first == converted_path(kept, str(source), "float32.gguf")
    assert first.name.startswith("model-")
    (source / "weights").write_text("12")
    assert converted_path(kept, str(source), "float32.gguf") != first


@pytest.mark.parametrize(
    ("dtype", "capabilities", "kv"),
    [
        ("bfloat16", ("BF16", "FP32", "INT8"), "f16"),
        ("bfloat16", ("FP32", "INT8"), "f32"),
        ("int8", ("FP32", "INT8"), "f32"),
        ("float32", ("BF16", "FP32"), "f32"),
    ],
)
def test_openvino_keeps_float32_where_the_processor_has_no_bfloat16(
    dtype: str, capabilities: tuple[str, ...], kv: str
) -> None:
    models = PeerModels("target", None, dtype, 2, Path("unused"))
    assert openvino._properties(models, capabilities)["KV_CACHE_PRECISION"] == kv


def test_a_file_of_llama_cpp_is_not_converted(tmp_path: Path) -> None:
    assert gguf_file(tmp_path / "kept", "model.gguf", "bfloat16") == "model.gguf"
    assert not (tmp_path / "kept").exists()
    models = PeerModels("model.gguf", "draft.gguf", "bfloat16", 1, tmp_path)
    if PEERS["llama.cpp"].missing() is None:
        with open_peer("llama.cpp", models) as peer:
            assert peer.precision == "weights of the file, KV float16"
