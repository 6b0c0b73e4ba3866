"""Every peer writes our greedy text, in every mode, and its figures add up."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams
from outrider.config import default_model
from outrider.lab.convert.gguf import write_gguf
from outrider.lab.convert.gguf_vocabulary import placeholders
from outrider.lab.peers.base import PeerModels
from outrider.lab.peers.known import PEERS, open_peer
from tests.model.test_gguf_mtp import PROMPT, QWEN, made

pytestmark = pytest.mark.by_change("src/outrider/lab/peers/", "tests/model/test_peers.py")
NUM_TOKENS = 32
TEXT = 'def add(a, b):\n    """Return the sum of a and b."""\n'
ENDED = 'if __name__ == "__main__":\n    main()\n'


@pytest.fixture(scope="module")
def llm():
    return LLM(default_model("target"), dtype="float32")


def ours(llm, text):
    """A prompt as tokens, and our text behind it."""
    prompt = llm.tokenizer.encode(text)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return prompt, tuple(llm.generate([prompt], params)[0].token_ids)


@pytest.fixture(scope="module")
def reference(llm):
    return ours(llm, TEXT)


@pytest.fixture(scope="module")
def ended(llm):
    prompt, text = ours(llm, ENDED)
    assert llm.tokenizer.eos_token_id in text[:4]
    return prompt, text


#: transformers is always there; the others come with the extra `peers`.
NAMES = [pytest.param(name, marks=() if name == "transformers" else pytest.mark.slow) for name in PEERS]


@pytest.fixture(scope="module", params=NAMES)
def peer(request, tmp_path_factory):
    if (reason := PEERS[request.param].missing()) is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("converted")
    models = PeerModels(default_model("target"), default_model("draft"), "float32", 1, folder)
    with open_peer(request.param, models) as found:
        yield found


def test_every_mode_writes_our_greedy_text(peer, reference):
    prompt, expected = reference
    for mode in peer.modes(full=False):
        run = peer.generate(mode, [prompt], max_tokens=NUM_TOKENS, temperature=0.0, seed=None)
        assert run.texts == (expected,), mode
        assert run.seconds == pytest.approx(run.first_token_seconds[0] + run.decode_seconds, abs=1e-6)
        assert run.decode_tokens == NUM_TOKENS - 1
        assert (run.num_accepted_tokens > 0) <= (mode.kind != "plain")
        if run.num_draft_tokens is not None:
            assert 0 <= run.num_accepted_tokens <= run.num_draft_tokens
            assert (run.num_draft_tokens > 0) == (mode.kind != "plain")


def test_sampled_texts_follow_the_seed(peer, reference):
    prompt, greedy = reference
    plain = peer.modes(full=False)[0]
    texts = [
        peer.generate(plain, [prompt], max_tokens=NUM_TOKENS, temperature=1.0, seed=seed).texts[0] for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert greedy not in texts


def test_no_token_ends_a_text(peer, ended):
    """The token that ends texts is neither obeyed nor forbidden."""
    prompt, expected = ended
    for mode in peer.modes(full=False):
        run = peer.generate(mode, [prompt], max_tokens=NUM_TOKENS, temperature=0.0, seed=None)
        assert run.texts == (expected,), mode


def test_texts_of_a_batch_are_those_that_are_written_alone(peer, llm):
    """Prompts of several lengths at a time: nothing of one text reaches another, and padding reaches none."""
    prompts, expected = zip(*(ours(llm, text) for text in (TEXT, ENDED, TEXT + ENDED)), strict=True)
    modes = peer.modes(full=False, batch=len(prompts))
    assert modes[0].kind == "plain"
    assert (len(modes) > 1) is peer.drafts_in_batches
    for mode in modes:
        run = peer.generate(mode, prompts, max_tokens=NUM_TOKENS, temperature=0.0, seed=None)
        assert run.texts == expected, mode
        assert len(run.first_token_seconds) == len(prompts)
        assert all(0 < first <= run.seconds for first in run.first_token_seconds)
        assert run.seconds == pytest.approx(min(run.first_token_seconds) + run.decode_seconds, abs=1e-6)
        assert len(prompts) * (NUM_TOKENS - 1) <= run.decode_tokens < len(prompts) * NUM_TOKENS
        assert 0 <= run.num_accepted_tokens < len(prompts) * NUM_TOKENS


@pytest.mark.slow
def test_llama_cpp_also_drafts_with_the_layers_that_a_file_carries(tmp_path):
    if (reason := PEERS["llama.cpp"].missing()) is not None:
        pytest.skip(reason)
    path = write_gguf(made(QWEN, tmp_path / "source"), tmp_path / "m.gguf", vocabulary=placeholders(), parts="all")
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = LLM(path, dtype="float32", speculation="none").generate([PROMPT], params)[0].token_ids
    with open_peer("llama.cpp", PeerModels(path, None, "float32", 1, tmp_path)) as peer:
        modes = [mode for mode in peer.modes(full=False) if mode.kind == "mtp"]
        assert [mode.num_draft_tokens for mode in modes] == [1, 2, 3]
        run = peer.generate(modes[1], [PROMPT], max_tokens=NUM_TOKENS, temperature=0.0, seed=None)
    assert run.texts == (expected,)
    assert 0 <= run.num_accepted_tokens < run.num_draft_tokens
