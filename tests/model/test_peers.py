"""Every peer writes our greedy text, in every mode, and its figures add up."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams
from outrider.bench.peers.base import PeerModels
from outrider.bench.peers.registry import PEERS, open_peer
from outrider.llm import default_model

NUM_TOKENS = 32
TEXT = 'def add(a, b):\n    """Return the sum of a and b."""\n'


@pytest.fixture(scope="module")
def reference():
    """The prompt as tokens, and our text behind it, for the embedded pair in float32."""
    llm = LLM(default_model("target"), dtype="float32")
    prompt = llm.tokenizer.encode(TEXT)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return prompt, tuple(llm.generate([prompt], params)[0].token_ids)


@pytest.mark.parametrize("name", PEERS)
def test_every_mode_writes_our_greedy_text(name, reference, tmp_path):
    if (reason := PEERS[name].missing()) is not None:
        pytest.skip(reason)
    prompt, expected = reference
    models = PeerModels(default_model("target"), default_model("draft"), "float32", 1, tmp_path)
    with open_peer(name, models) as peer:
        for mode in peer.modes(full=False):
            run = peer.generate(mode, prompt, max_tokens=NUM_TOKENS, temperature=0.0, seed=None)
            assert run.token_ids == expected, mode
            assert run.seconds == pytest.approx(run.time_to_first_token + run.decode_seconds, abs=1e-6)
            if run.num_draft_tokens is not None:
                assert 0 <= run.num_accepted_tokens <= run.num_draft_tokens
                assert (run.num_draft_tokens > 0) == (mode.kind != "plain")


@pytest.mark.parametrize("name", PEERS)
def test_sampled_texts_follow_the_seed_without_speculation(name, reference, tmp_path):
    if (reason := PEERS[name].missing()) is not None:
        pytest.skip(reason)
    prompt, greedy = reference
    with open_peer(name, PeerModels(default_model("draft"), None, "float32", 1, tmp_path)) as peer:
        plain = peer.modes(full=False)[0]
        texts = [
            peer.generate(plain, prompt, max_tokens=NUM_TOKENS, temperature=1.0, seed=seed).token_ids for seed in (1, 1, 2)
        ]
    assert texts[0] == texts[1] != texts[2]
    assert greedy not in texts
