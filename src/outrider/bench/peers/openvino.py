"""The pipeline of OpenVINO GenAI: alone, with a draft model, or with prompt lookup.

Its own GGUF reader makes its models from files that we write, since the exporter of optimum-intel needs an older
transformers than this project. The reader knows neither float32 nor bfloat16. So weights are stored as float16, which
changes a bfloat16 weight by at most 3e-8, and `precision` says in which type the plugin computes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from outrider.bench.peers.base import (
    Peer,
    PeerEngine,
    PeerModels,
    PeerRequest,
    PeerRun,
    build_with,
    missing_packages,
)
from outrider.bench.peers.converted import converted_path
from outrider.convert.gguf import write_gguf

#: The longest n-gram that prompt lookup matches. It falls back to shorter ones.
_NGRAM_MAX = 3
_STORED_AS = {"float32": "float16", "bfloat16": "float16", "int8": "int8"}


class OpenVinoPeer(Peer):
    """OpenVINO GenAI on the CPU."""

    name = "openvino"
    package = "openvino-genai"
    dtypes = ("float32", "bfloat16", "int8")

    @staticmethod
    def missing() -> str | None:
        """See Peer."""
        return missing_packages(("openvino", "openvino_genai", "openvino_tokenizers", "gguf"), "openvino")

    @staticmethod
    def building(models: PeerModels) -> Callable[[], PeerEngine]:
        """See Peer."""
        return build_with(OpenVinoEngine, models)

    @property
    def precision(self) -> str:
        """See Peer."""
        if self.models.dtype == "float32":
            return "weights float16 in the file, float32 in memory, KV float32"
        if self.models.dtype == "int8":
            return "weights 8 bits in groups of 32, KV float16"
        return "weights float16 in the file; bfloat16 where the processor has it, otherwise float32; KV float16"


class OpenVinoEngine:
    """A pipeline for each kind of mode. The draft length is a setting of the request.

    Args:
        models: What they load.
    """

    def __init__(self, models: PeerModels) -> None:
        self._models = models
        self._pipelines: dict[str, Any] = {}

    def generate(self, request: PeerRequest) -> PeerRun:
        """See PeerEngine."""
        import numpy as np
        import openvino

        kind = request.mode.kind
        if kind not in self._pipelines:
            self._pipelines[kind] = self._pipeline(kind)
        prompt = openvino.Tensor(np.array([request.prompt_ids], dtype=np.int64))
        clock = _clock()
        start = perf_counter()
        result = self._pipelines[kind].generate(prompt, _generation(request), clock)
        end = perf_counter()
        drafted, accepted = _draft_counts(result, kind)
        return PeerRun(tuple(result.tokens[0]), end - start, clock.first - start, end - clock.first, drafted, accepted)

    def _pipeline(self, kind: str) -> Any:
        import openvino_genai

        models = self._models
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # no text reuses what another one computed
        more: dict[str, Any] = {}
        if kind == "draft_model":
            assert models.draft is not None
            more["draft_model"] = openvino_genai.draft_model(self._converted(models.draft), "CPU", **_properties(models))
        elif kind == "ngram":
            more["prompt_lookup"] = True
        target = self._converted(models.target)
        return openvino_genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, **_properties(models), **more)

    def _converted(self, checkpoint: str) -> str:
        dtype = _STORED_AS[self._models.dtype]
        folder = converted_path(self._models.folder, checkpoint, f"{dtype}-openvino")
        if not (folder / "complete").exists():
            _convert(checkpoint, dtype, folder)
            (folder / "complete").touch()
        return str(folder)


def _convert(checkpoint: str, dtype: str, folder: Path) -> None:
    """Write the model and a tokenizer. The pipeline needs a tokenizer, although it is given token ids only."""
    import openvino
    import openvino_genai
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    parts = convert_tokenizer(AutoTokenizer.from_pretrained(checkpoint), with_detokenizer=True)
    for part, name in zip(parts, ("openvino_tokenizer.xml", "openvino_detokenizer.xml"), strict=True):
        openvino.save_model(part, folder / name)
    source = folder / "model.gguf"
    write_gguf(checkpoint, source, dtype)
    tokenizer = openvino_genai.Tokenizer(folder)
    openvino_genai.LLMPipeline(source, tokenizer, "CPU", enable_save_ov_model=True)  # writes it beside its source
    source.unlink()


def _properties(models: PeerModels) -> dict[str, Any]:
    wide = models.dtype == "float32"
    return {
        "INFERENCE_NUM_THREADS": models.num_threads,
        "INFERENCE_PRECISION_HINT": "bf16" if models.dtype == "bfloat16" else "f32",
        "KV_CACHE_PRECISION": "f32" if wide else "f16",
    }


def _generation(request: PeerRequest) -> Any:
    import openvino_genai

    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos = request.max_tokens, True
    config.eos_token_id = 0  # it must be some token, and none ends a text
    config.do_sample = request.temperature > 0.0
    if config.do_sample:
        config.temperature, config.top_p = request.temperature, 1.0
    if request.seed is not None:
        config.rng_seed = request.seed
    if request.mode.kind != "plain":
        config.num_assistant_tokens = request.mode.num_draft_tokens
    if request.mode.kind == "ngram":
        config.max_ngram_size = _NGRAM_MAX
    return config


def _draft_counts(result: Any, kind: str) -> tuple[int | None, int | None]:
    """The numbers of draft tokens and accepted ones. OpenVINO does not count those of prompt lookup."""
    if kind == "plain":
        return 0, 0
    counted = result.extended_perf_metrics if kind == "draft_model" else None
    return (None, None) if counted is None else (counted.get_num_draft_tokens(), counted.get_num_accepted_tokens())


def _clock() -> Any:
    """A streamer that keeps the time of the first output. Its base class exists only where the package is installed."""
    import openvino_genai

    class Clock(openvino_genai.StreamerBase):  # type: ignore[misc]
        first = 0.0

        def write(self, token: Any) -> Any:
            self.first = self.first or perf_counter()
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    return Clock()
