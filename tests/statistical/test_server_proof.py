"""The proofs on servers over HTTP: one server is lossless, and each of the others has a planted fault."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import log
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

from outrider import LLM, DraftModel, SamplingParams, SpeculationConfig
from outrider.cli.app import app
from outrider.errors import EngineAnswerError, InvalidParameterError, MissingExtraError
from outrider.lab.peers.known import ServerOptions, open_engine
from outrider.lab.peers.llama_cpp import open_llama_cpp
from outrider.lab.peers.server import Answer, CompletionsClient, ReferenceModel, Reported, ServerProof, detectable, judge
from outrider.lab.prove.running import run_proofs
from outrider.lab.prove.tiny import save_tiny_llama
from outrider.verify import verifier

pytestmark = pytest.mark.by_change("src/outrider/lab/prove/", "src/outrider/cli/", "tests/statistical/test_server_proof.py")
LETTERS = "abcdef"
PROMPT = (0, 1, 2, 3, 4)
NUM_TEXTS, LENGTH = 1000, 3


class Served:
    """A server of `/v1/completions` around an LLM with a draft model.

    Args:
        llm: What writes.
        weights: What the reported probabilities come from.
        texts: Unseeded texts behind PROMPT, written in stock, which is what makes these tests quick.
        style: "legacy", "entries", or anything else for no probabilities.
        certain: Report probability 1 for every other token that was chosen.
    """

    def __init__(self, llm, weights, texts=(), style="legacy", certain=False):
        self.llm, self.weights, self.style, self.certain = llm, weights, style, certain
        self.lock = threading.Lock()
        self.texts = list(texts)
        self.requests = Counter()

    def complete(self, body):
        prompt = tuple(body["prompt"]) if isinstance(body["prompt"], list) else self.weights.encode(body["prompt"])
        plain = body.get("speculation") == "none"
        params = {"max_tokens": body["max_tokens"], "temperature": body["temperature"], "seed": body.get("seed")}
        with self.lock:
            self.requests["plain" if plain else "drafted"] += 1
            ids = self._write(prompt, params, plain)
            return self._answer(prompt, ids)

    def _write(self, prompt, params, plain):
        if params["temperature"] and params["seed"] is None:
            assert prompt == PROMPT
            assert not plain
            return self.texts.pop()
        more = {"speculation": SpeculationConfig(method="none")} if plain else {}
        return self.llm.generate(prompt, SamplingParams(**params), **more)[0].token_ids

    def _answer(self, prompt, ids):
        rows = [self.weights.row(prompt + tuple(ids[:i])) for i in range(len(ids))]
        if self.certain:
            rows = [{**row, t: 1.0} if t % 2 else row for t, row in zip(ids, rows, strict=True)]
        tops = [sorted(row.items(), key=lambda entry: -entry[1])[:5] for row in rows]
        words = [LETTERS[t] for t in ids]
        chosen = [log(row[t]) for t, row in zip(ids, rows, strict=True)]
        choice = {"text": "".join(words), "token_ids": list(ids), "finish_reason": "length"}
        if self.style == "legacy":
            named = [{LETTERS[t]: log(p) for t, p in top} for top in tops]
            choice["logprobs"] = {"tokens": words, "token_logprobs": chosen, "top_logprobs": named}
        elif self.style == "entries":
            del choice["token_ids"]
            choice["logprobs"] = {
                "content": [
                    {
                        "id": t,
                        "token": w,
                        "logprob": c,
                        "top_logprobs": [{"id": x, "token": LETTERS[x], "logprob": log(p)} for x, p in top],
                    }
                    for t, w, c, top in zip(ids, words, chosen, tops, strict=True)
                ]
            }
        return {"choices": [choice]}


@contextmanager
def serving(served):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._send(200, {"data": [{"id": "tiny"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if body["model"] != "tiny":
                self._send(404, {"error": "no such model"})
            else:
                self._send(200, served.complete(body))

        def _send(self, code, content):
            data = json.dumps(content).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *ignored):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("served")
    target = save_tiny_llama(folder / "target", 1, vocab_size=len(LETTERS))
    draft = save_tiny_llama(folder / "draft", 2, vocab_size=len(LETTERS))
    speculation = SpeculationConfig(method=DraftModel(model=draft), num_draft_tokens=2)
    yield LLM(target, dtype="float64", device="cpu", speculation=speculation, max_num_seqs=64), target
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def weights(pair):
    return ReferenceModel(pair[1])


@pytest.fixture(scope="module")
def honest(pair):
    return texts_of(pair[0])


@pytest.fixture(scope="module")
def biased(pair):
    """A server that draws the recovered token from the draft's probabilities instead of the residual."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifier, "residual", lambda p, q, weight: torch.where(q.sum(-1, keepdim=True) > 0, q, p))
        return texts_of(pair[0])


def texts_of(llm):
    outputs = llm.generate([PROMPT] * NUM_TEXTS, SamplingParams(max_tokens=LENGTH))
    return [output.token_ids for output in outputs]


def proof_of(url, **more):
    client = CompletionsClient(url, body=more.pop("body", {}))
    plain = CompletionsClient(url, body={"speculation": "none"})
    return ServerProof(client, plain, prompts=[PROMPT, (1, 1, 2), (5, 0)], num_texts=NUM_TEXTS, length=LENGTH, **more)


@pytest.mark.parametrize("style", ["legacy", "entries"])
def test_a_lossless_server_passes(pair, weights, honest, style):
    served = Served(pair[0], weights, honest, style)
    with serving(served) as url:
        checks = {name: prove() for name, prove in proof_of(url).proofs(quick=True)}
    assert all(finding.passed for finding in checks.values()), checks
    assert served.requests["plain"]
    assert served.requests["drafted"] > NUM_TEXTS
    assert checks["seeded text is the plain one"].measured == 0  # ours promises it
    assert "would be noticed" in checks[f"distribution of the texts behind {PROMPT}"].detail


def test_a_biased_server_fails_by_its_own_report(pair, weights, biased):
    with serving(Served(pair[0], weights, biased)) as url:
        assert not proof_of(url).prove_distribution(PROMPT, NUM_TEXTS).passed


def test_reports_that_contradict_each_other_are_refused(pair, weights, honest):
    with serving(Served(pair[0], weights, honest, certain=True)) as url:
        proof = proof_of(url)
        with pytest.raises(EngineAnswerError, match="contradict"):
            proof.prove_distribution(PROMPT, NUM_TEXTS)
        assert not proof.prove_reported([PROMPT], NUM_TEXTS).passed


def test_weights_decide_whatever_the_server_reports(pair, weights, honest, biased):
    for texts, passed in ((honest, True), (biased, False)):
        with serving(Served(pair[0], weights, texts, certain=True)) as url:
            proof = proof_of(url, weights=weights)
            assert proof.prove_distribution(PROMPT, NUM_TEXTS).passed is passed
            assert proof.prove_reported([PROMPT], NUM_TEXTS).informs


def test_a_greedy_text_that_is_not_the_plain_one_is_found(pair, weights):
    served = Served(pair[0], weights)
    real = served._write
    served._write = lambda prompt, params, plain: (
        [1] * 3 if not plain and not params["temperature"] else real(prompt, params, plain)
    )
    with serving(served) as url:
        checks = dict(proof_of(url).proofs(quick=True))
        assert not checks["greedy text is the plain one"]().passed
        assert not checks["greedy tokens are the likeliest"]().passed
        assert checks["greedy text repeats"]().passed


@pytest.mark.parametrize(
    ("probs", "passed"), [([0.5, 0.3, 0.2], True), ([0.42, 0.38, 0.2], False)], ids=["the same", "shifted"]
)
def test_cells(probs, passed):
    texts = torch.multinomial(torch.tensor([0.5, 0.3, 0.2]).expand(6000, -1), 1, generator=torch.Generator().manual_seed(1))
    judgement = judge([(t,) for t in texts.flatten().tolist()], lambda start: dict(enumerate(probs)), 1)
    assert (judgement.p_value > 1e-6) is passed
    assert judgement.num_cells == 3


def test_unreported_and_ended_texts_have_their_cells():
    """Where only some tokens are reported, or texts ended, the rest has a cell of its own."""
    texts = [("a", "b")] * 300 + [("a", "c")] * 100 + [("a",)] * 100 + [("x", "y")] * 500
    known = {(): {"a": 0.5}, ("a",): {"b": 0.6, "c": 0.2, "</s>": 0.2}}
    judgement = judge(texts, known.get, 2)
    assert judgement.num_cells == 4
    assert judgement.p_value > 0.99


def test_stated_power_is_kept():
    """A shift of the reported size is noticed in all of twenty trials. Smaller shifts need not be noticed."""
    generator = torch.Generator().manual_seed(3)
    least = detectable(2, 2000)
    shifted = torch.tensor([0.5 + least, 0.5 - least])
    for _ in range(20):
        texts = torch.multinomial(shifted.expand(2000, -1), 1, generator=generator).flatten().tolist()
        assert judge([(t,) for t in texts], lambda start: {0: 0.5, 1: 0.5}, 1).p_value < 1e-6
    assert detectable(50, 2000) > least > detectable(2, 20000)


def test_a_server_that_is_not_there():
    with pytest.raises(EngineAnswerError, match="does not answer"):
        CompletionsClient("http://127.0.0.1:9").name()


def test_a_server_that_is_not_there_fails_once():
    result = CliRunner().invoke(app, ["prove", "--engine", "http://127.0.0.1:9", "--model", "m"])
    assert isinstance(result.exception, EngineAnswerError)


def test_an_unknown_model_is_the_servers_word(pair, weights):
    with serving(Served(pair[0], weights)) as url, pytest.raises(EngineAnswerError, match="404"):
        CompletionsClient(url, "other").complete(["x"], max_tokens=1)


def test_answers_without_probabilities_are_refused(pair, weights):
    with serving(Served(pair[0], weights, style="none")) as url, pytest.raises(EngineAnswerError, match="probabilities"):
        CompletionsClient(url, "tiny").complete([[0, 1]], max_tokens=1, temperature=0.0)


def test_reports_are_averaged():
    assert Reported([]).probs(()) is None
    assert Reported([]).contradiction == 0.0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--engine", "nobody"),
        ("--engine", "transformers", "--weights", "x"),
        ("--weights", "x"),
        ("--engine", "transformers", "MODEL"),
        ("--engine", "http://127.0.0.1:9", "--model", "m", "--plain", "[]"),
    ],
)
def test_wrong_usage(arguments):
    result = CliRunner().invoke(app, ["prove", *arguments])
    assert isinstance(result.exception, InvalidParameterError | ValueError)


def test_every_token_certain_is_no_distribution():
    """A server may report 1 for every accepted token, and the same at every request."""
    answers = [Answer(t, (t,), None, ({t: 1.0},)) for t in ("a", "b", "a")]
    assert Reported(answers).contradiction == 1.0


@pytest.mark.parametrize("name", ["gguf", "xllamacpp"])
def test_llama_cpp_names_the_package_that_is_missing(monkeypatch, name):
    monkeypatch.setitem(sys.modules, "gguf", ModuleType("gguf"))
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=name), open_engine("llama.cpp", ServerOptions()):
        pass


@pytest.mark.slow  # with the extra `peers`
def test_llama_cpp(tmp_path):
    pytest.importorskip("xllamacpp")
    pytest.importorskip("gguf")
    with open_llama_cpp(tmp_path) as engine:
        report = run_proofs(engine.proofs(quick=True))
    assert report.passed, report
    assert any(not check.finding.informs for check in report.checks)
