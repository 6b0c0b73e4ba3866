"""The real engine as a judge: it writes held-out prompts with what is trained, and counts what its verifier accepts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.config import ActivationsName, DTypeName
from outrider.llm import LLM
from outrider.params import SamplingParams
from outrider.propose.speculation import SpeculationConfig
from outrider.stats import RequestStats
from outrider.train.batches import Piece


class Judge:
    """Runs the engine on held-out prompts.

    The chance that the token rule accepts, which is measured on texts, is exact for a single token and cheap. It does not
    see how drafts of several tokens are verified, what the engine's own kernels compute, or whether what was written loads
    at all. This does.

    Args:
        target: Folder or hub id.
        dtype: Of its weights, as LLM takes it.
        activations: What enters products with rounded weights, as LLM takes it.
        pieces: Held-out texts, whose prompts are written on.
        num_prompts: How many of them.
        params: How the texts are written.
        num_draft_tokens: Draft tokens in a step.
    """

    def __init__(
        self,
        target: str,
        dtype: DTypeName,
        activations: ActivationsName | None,
        pieces: Sequence[Piece],
        num_prompts: int,
        params: SamplingParams,
        num_draft_tokens: int,
    ) -> None:
        self._llm = LLM(target, speculation="none", dtype=dtype, activations=activations)
        begun = [piece for piece in pieces if piece.num_prompt_tokens > 0]
        self._prompts = [piece.token_ids[: piece.num_prompt_tokens].tolist() for piece in begun[:num_prompts]]
        self._params = params
        self._num_draft_tokens = num_draft_tokens

    def judge(self, settings: dict[str, Any]) -> RequestStats:
        """What the engine counts where the method of these settings drafts.

        Raises:
            OutriderError: The method cannot be built, or no prompt could be written.
        """
        config = SpeculationConfig.of({**settings, "num_draft_tokens": self._num_draft_tokens})
        found = RequestStats()
        outputs = self._llm.generate(self._prompts, self._params, speculation=config)
        for output in outputs:
            if output.error is None:
                found.add(output.stats)
        if not found.num_target_passes:
            assert outputs[0].error is not None
            raise outputs[0].error
        return found

    def close(self) -> None:
        """Free the engine."""
        self._llm.close()


def by_position(stats: RequestStats) -> tuple[float, ...]:
    """The share of draft tokens that stood at each position, of those whose earlier tokens stood."""
    pairs = zip(stats.accepted_per_position, stats.tried_per_position, strict=False)
    return tuple(stood / tried for stood, tried in pairs if tried)
