"""What rules would cost that change the distribution: copies of two such rules under the prover, on the default pair.

The package has no such rule. The numbers are those of docs/explanation/losslessness.md, which is compared with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.config import default_model
from outrider.engine import verification
from outrider.lab.prove.engine import EngineProof
from outrider.lab.prove.settings import DRAFT, Setting
from outrider.verify import verifier
from outrider.verify.logits import target_probs
from outrider.verify.rules import token_acceptance
from outrider.verify.verifier import DraftCandidate, Verdict, Verifier

#: Numbers of the page, which the engine's own proofs do not need.
pytestmark = pytest.mark.by_change(
    *("src/outrider/verify/", "src/outrider/lab/prove/", "src/outrider/assets/", "docs/explanation/losslessness.md"),
    "tests/statistical/test_lossy_rules.py",
)
PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "losslessness.md").read_text("utf-8")
PROMPTS = ("def main(", "import os\nimport", "class Reader:\n    def", "for i in range(")
#: Medusa's thresholds, as its authors set them.
EPSILON, DELTA = 0.09, 0.3
FEW = {"top_k": 3, "max_tokens": 3, "ignore_eos": True}
DRAWN = {"method": "draft_model", "model": DRAFT, "num_draft_tokens": 2, "rule": "token"}
LIKELIEST = {"method": "draft_model", "model": DRAFT, "num_draft_tokens": 2, "draft_sampling": "greedy"}


class Typical(Verifier):
    """Typical acceptance (Cai et al. 2024): a draft token stands where the target holds it likely enough, measured by the
    entropy of its probabilities. Behind what stands the target draws."""

    def verify(
        self, candidates: Sequence[DraftCandidate], logits: Tensor, best: Sequence[int] | None = None
    ) -> list[Verdict]:
        return [self._verdict(candidate, logits) for candidate in candidates]

    def _verdict(self, candidate: DraftCandidate, logits: Tensor) -> Verdict:
        rows = target_probs(logits[slice(*candidate.rows)], [candidate.sampling] * (len(candidate.draft) + 1))
        count = 0
        for token, p in zip(candidate.draft.token_ids, rows, strict=False):
            entropy = -(p * p.clamp(min=1e-300).log()).sum()
            if not p[token] > min(EPSILON, DELTA * float((-entropy).exp())):
                break
            count += 1
        key = candidate.keys.next(count, owed=False)
        token = int(self.noise.categorical(rows[count : count + 1], [key])[0])
        return Verdict(tuple(range(count)), token, verifier._origin(candidate.draft, count - 1))


def lenient(patch: pytest.MonkeyPatch, leniency: float) -> None:
    """Leviathan et al. 2023, appendix: the draft's probabilities count for a share of themselves."""

    def acceptance(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
        return (token_acceptance(p, leniency * q, x)).clamp(max=1.0)

    def owed(p: Tensor, q: Tensor, weight: Tensor) -> Tensor:
        rest = (weight[:, None] * p - leniency * q).clamp(min=0.0)
        return rest / rest.sum(-1, keepdim=True)

    patch.setattr(verifier, "token_acceptance", acceptance)
    patch.setattr(verifier, "residual", owed)


@pytest.fixture(scope="module")
def proofs() -> Iterator[list[EngineProof]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    pair = default_model("target"), default_model("draft")
    tokenizer: Any = EngineProof(*pair).llm.tokenizer
    yield [EngineProof(*pair, prompt=tuple(tokenizer.encode(prompt))) for prompt in PROMPTS]
    torch.set_num_threads(threads)


def distances(proofs: Sequence[EngineProof], speculation: dict[str, Any]) -> list[float]:
    return [proof.prove(Setting("lossy", speculation, FEW)).measured for proof in proofs]


def row_of(rule: str) -> list[float]:
    """The numbers of a row of the page's table: their mean, the least and the largest."""
    (row,) = re.findall(rf"^\| {re.escape(rule)} \| ([\d.]+) \| ([\d.]+) to ([\d.]+) \|$", PAGE, re.MULTILINE)
    return [float(number) for number in row]


def same(found: Sequence[float], rule: str) -> None:
    want = row_of(rule)
    assert [round(value, 3) for value in (sum(found) / len(found), min(found), max(found))] == want


@pytest.mark.parametrize("speculation", [DRAWN, DRAWN | {"rule": "block"}, LIKELIEST], ids=["token", "block", "walk"])
def test_our_rules_cost_nothing(proofs: list[EngineProof], speculation: dict[str, Any]) -> None:
    found = distances(proofs, speculation)
    assert max(found) < 1e-12
    same(found, "block verification, token rule, walk")


def test_typical_acceptance(proofs: list[EngineProof], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "Verifier", Typical)
    same(distances(proofs, LIKELIEST), "typical acceptance, ε = 0.09, δ = 0.3")


@pytest.mark.parametrize("leniency", [0.8, 0.5, 0.3])
def test_leniency(proofs: list[EngineProof], monkeypatch: pytest.MonkeyPatch, leniency: float) -> None:
    lenient(monkeypatch, leniency)
    same(distances(proofs, DRAWN), f"lenience {leniency}")
