"""Probabilities, draws and verification for GPUs, run by Triton's interpreter, equal those of the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from outrider.draft import Draft, Law
from outrider.kernels.triton import sampling
from outrider.params import SamplingParams
from outrider.verify import noise
from outrider.verify.logits import target_probs
from outrider.verify.rules import owed_mass, residual
from outrider.verify.verifier import CandidateKeys, DraftCandidate, Rule, Verdict, Verifier
from tests.unit.interpreted import DEVICE

#: Every way to cut a distribution, some together, and a greedy row.
PARAMS = (
    {"temperature": 0.0},
    {"temperature": 0.3, "top_k": 3},
    {"temperature": 1.7, "top_p": 0.9, "min_p": 0.05},
    {"top_k": 20, "top_p": 0.4},
    {"min_p": 0.3},
    {"top_p": 0.01},
    {"top_p": 0.51},  # on equal entries
    {"top_k": 2},  # on equal entries
)


@pytest.fixture(autouse=True)
def stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of `outrider.verify` comes from stock operators, so that it is computed in another way."""
    monkeypatch.setenv("OUTRIDER_KERNELS", "off")


def logits_of(size: int, dtype: torch.dtype) -> torch.Tensor:
    logits = torch.randn(len(PARAMS), size, dtype=dtype) * 3
    logits[:, 1::7] = float("-inf")
    logits[-2:] = torch.tensor([0.0, -0.0, -1.0, 0.0], dtype=dtype).repeat(size // 4 + 1)[:size]
    logits[0, 5:] = logits[0].max()  # a greedy row takes the first of equals
    return logits


@pytest.mark.parametrize(("size", "dtype"), [(61, torch.float64), (sampling._PROBABILITY_ENTRIES + 9, torch.float32)])
def test_probabilities_are_the_stock_ones(size: int, dtype: torch.dtype) -> None:
    logits, rows = logits_of(size, dtype), [SamplingParams(**params) for params in PARAMS]
    want = target_probs(logits, rows)
    got = sampling.target_probs(
        logits.to(DEVICE),
        [0.0 if row.greedy else row.temperature for row in rows],
        *([getattr(row, name) for row in rows] for name in ("top_k", "top_p", "min_p")),
    ).cpu()
    assert torch.equal(got > 0, want > 0)
    rounding = 1e-12 if dtype is torch.float64 else 2e-6 if DEVICE.type == "cpu" else 2e-5  # GPUs approximate powers
    assert torch.allclose(got, want, rtol=rounding, atol=0)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_number_of_rows_compiles_the_kernel_anew(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles a kernel for pointers that are multiples of 16 bytes, and once more for others."""
    real, launches = sampling._target_probs, []

    class Launched:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
            return lambda *args, **sizes: (launches.append(args), real[grid](*args, **sizes))

    monkeypatch.setattr(sampling, "_target_probs", Launched())
    sampling.target_probs(torch.randn(count, 9, device=DEVICE), *([value] * count for value in (1.0, 3, 0.9, 0.0)))
    cuts = launches[0][2:6]
    assert [cut.storage_offset() * cut.element_size() % 16 for cut in cuts] == [0] * 4


def test_draws_have_the_noise_of_the_stock_ones() -> None:
    probs = (torch.randn(40, sampling._DRAW_ENTRIES + 7, dtype=torch.float64) * 4).softmax(-1)
    probs[:, ::3] = 0
    probs[:20, sampling._DRAW_ENTRIES - 1 :] *= 50
    probs[3, 8:] = 0
    bits = torch.from_numpy(noise.mix_fields(torch.arange(200).view(40, 5).numpy().astype("uint64")))
    there = probs.to(DEVICE), bits.to(DEVICE)
    assert torch.equal(sampling.race(*there).cpu(), noise.gumbel_max(probs, bits))
    assert torch.equal(sampling.invert(*there).cpu(), noise.invert_cdf(probs, bits))


def test_debts_are_the_stock_ones() -> None:
    p, q = (
        (torch.randn(2, 3, sampling._DRAW_ENTRIES + 7, dtype=torch.float64) * 3).softmax(-1).to(DEVICE) for _ in range(2)
    )
    weight = torch.rand(2, 3, dtype=torch.float64).to(DEVICE)
    q[1, 2], weight[1, 2] = p[1, 2], 1.0  # nothing is owed
    assert torch.allclose(sampling.owed_mass(p, q, weight), owed_mass(p, q, weight), rtol=1e-12, atol=1e-15)
    want = torch.stack([residual(p[:, i], q[:, i], weight[:, i]) for i in range(3)], 1)
    assert torch.allclose(sampling.owed_probs(p, q, weight), want, rtol=1e-12, atol=1e-15)
    tiny = torch.full((1, 1, 10), 0.1, dtype=torch.float64, device=DEVICE)
    tiny[..., 3] = 5e-310
    assert torch.equal(
        sampling.owed_probs(tiny, tiny * (tiny > 1e-9), torch.ones(1, 1, dtype=torch.float64, device=DEVICE)).cpu(),
        torch.eye(10, dtype=torch.float64)[None, 3:4],
    )


def verdicts(seed: int) -> list[Verdict]:
    """Of chains and a tree under every rule, with the keys of one engine."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(16, 11, dtype=torch.float64, generator=generator)
    probs = (torch.randn(3, 11, dtype=torch.float64, generator=generator) * 0.5).softmax(-1)
    probs[1] = probs[0]  # siblings of one law
    tokens = [int(token) for token in probs.multinomial(1, generator=generator)[:, 0]]
    tokens[1] = (tokens[0] + 1) % 11
    logits, probs = logits.to(DEVICE), probs.to(DEVICE)
    chain, tree = Draft.chain(tokens, Law.SAMPLED, probs), Draft(tuple(tokens), (-1, -1, 0), (Law.SAMPLED,) * 3, probs)
    kinds = ((chain, Rule.TOKEN), (chain, Rule.BLOCK), (tree, Rule.RECURSIVE), (tree, Rule.TRAVERSAL))
    sampling = SamplingParams(temperature=0.9)
    candidates = [
        DraftCandidate(draft, (4 * i, 4 * i + 4), sampling, CandidateKeys(i, seed, 0, 1, 20), rule)
        for i, (draft, rule) in enumerate(kinds)
    ]
    walked = DraftCandidate(Draft.chain(tokens, Law.COUPLED), (0, 4), sampling, CandidateKeys(9, seed, 0, 1, 20), Rule.WALK)
    return Verifier(noise.KeyedNoise()).verify([*candidates, walked], logits)


def test_chains_and_trees_are_verified_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    want = verdicts(0) + verdicts(1)
    assert len({len(verdict.path) for verdict in want}) > 2
    monkeypatch.setenv("OUTRIDER_KERNELS", "triton")
    got = verdicts(0) + verdicts(1)
    for here, there in zip(got, want, strict=True):
        assert (here.path, here.token_id, here.origin) == (there.path, there.token_id, there.origin)
        assert here.chances == pytest.approx(there.chances)
