"""`generate` of transformers: alone, with an assistant, or with prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

from outrider.lab.peers.base import OtherEngine, Peer, PeerModels, PeerRequest, PeerRun

#: The longest n-gram that prompt lookup matches. It falls back to shorter ones.
_NGRAM_MAX = 3
#: The token that fills up shorter prompts. It is masked, so any token would do.
_PADDING = 0


class TransformersEngine:
    """Target and draft model in memory."""

    def __init__(self, models: PeerModels) -> None:
        import torch
        from transformers.utils import logging

        torch.set_num_threads(models.num_threads)
        logging.disable_progress_bar()
        logging.set_verbosity_error()  # generate() warns of the arguments that it passes to itself
        self._models = models
        self._target = _load(models.target, models.dtype)
        self._draft: Any = None

    def generate(self, request: PeerRequest) -> PeerRun:
        import torch

        arguments = self._speculation(request)  # this may load the draft model, which is not timed
        clock, passes = _Clock(), _Passes()
        ids, mask = _padded(request.prompts)
        if request.seed is not None:
            torch.manual_seed(request.seed)
        with torch.inference_mode(), passes.watching(self._target):
            start = perf_counter()
            found = self._target.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=request.max_tokens,
                pad_token_id=_PADDING,
                streamer=clock,
                **_sampling(request.temperature),
                **arguments,
            )
            end = perf_counter()
        texts = tuple(map(tuple, found[:, ids.shape[1] :].tolist()))
        assert clock.first is not None
        drafted, accepted = passes.counts(ids.shape[1], len(texts[0]))
        later = sum(map(len, texts)) - request.batch  # the first output is assumed to be one token of each text
        first = (clock.first - start,) * request.batch
        return PeerRun(texts, end - start, first, later, end - clock.first, drafted, accepted)

    def _speculation(self, request: PeerRequest) -> dict[str, Any]:
        k = request.mode.num_draft_tokens
        if request.mode.kind == "draft_model":
            if self._draft is None:
                assert self._models.draft is not None
                self._draft = _load(self._models.draft, self._models.dtype)
            settled = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
            self._draft.generation_config.update(num_assistant_tokens=k, **settled)
            return {"assistant_model": self._draft}
        if request.mode.kind == "ngram":
            return {"prompt_lookup_num_tokens": k, "max_matching_ngram_size": _NGRAM_MAX}
        return {}


class TransformersPeer(Peer):
    """The installed transformers in eager mode, with its default attention."""

    name = "transformers"
    package = "transformers"
    dtypes = ("float32", "bfloat16")
    engine = TransformersEngine
    drafts_in_batches = False

    @property
    def precision(self) -> str:
        return f"weights and KV {self.models.dtype}"

    @staticmethod
    def proving(folder: Path) -> AbstractContextManager[OtherEngine]:
        from outrider.lab.peers.assisted import AssistedGeneration

        return nullcontext(AssistedGeneration(folder))


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[Any, Any]:
    """Token ids and attention mask, [batch, longest prompt] each. Shorter prompts are padded on the left."""
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[_PADDING] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def _load(checkpoint: str, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
    model.generation_config = GenerationConfig()  # so no token ends a text, and the checkpoint's own filters are off
    return model


def _sampling(temperature: float) -> dict[str, Any]:
    if temperature == 0.0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


class _Clock:
    """A streamer that keeps the time of the first output."""

    def __init__(self) -> None:
        self.first: float | None = None
        self._saw_prompt = False

    def put(self, value: Any) -> None:
        """Called with the prompt, and then with each piece of output."""
        if self._saw_prompt and self.first is None:
            self.first = perf_counter()
        self._saw_prompt = True

    def end(self) -> None:
        """Called at the end."""


class _Passes:
    """Counts the rows of the target's forward passes, because `generate` reports nothing about its drafts."""

    def __init__(self) -> None:
        self._rows: list[int] = []

    def watching(self, model: Any) -> Any:
        """A context manager. It counts until its block ends."""
        return model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, _model: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        self._rows.append(int(kwargs["input_ids"].shape[1]))

    def counts(self, num_prompt_tokens: int, num_tokens: int) -> tuple[int, int]:
        """The numbers of draft tokens and accepted ones. A pass has one committed row, or the prompt, and then a draft."""
        committed = num_prompt_tokens + len(self._rows) - 1
        return sum(self._rows) - committed, num_tokens - len(self._rows)
