"""The continuous batching of OpenVINO GenAI: alone, with a draft model, or with prompt lookup.

Its own GGUF reader makes its models from files that we write, since the exporter of optimum-intel needs an older
transformers than this project. The reader knows neither float32 nor bfloat16. So weights are stored as float16, which
changes a bfloat16 weight by at most 3e-8, and `precision` says in which type the plugin computes.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from time import perf_counter
from typing import Any

from outrider.lab.peers.base import Peer, PeerModels, PeerRequest, PeerRun, converted_path

#: The longest n-gram that prompt lookup matches. It falls back to shorter ones.
_NGRAM_MAX = 3
_STORED_AS = {"float32": "float16", "bfloat16": "float16", "int8": "int8", "int4": "int4"}


class OpenVinoEngine:
    """A pipeline for each kind of mode. The draft length is a setting of the request."""

    def __init__(self, models: PeerModels) -> None:
        self._models = models
        self._pipelines: dict[str, Any] = {}

    def generate(self, request: PeerRequest) -> PeerRun:
        kind = request.mode.kind
        if kind not in self._pipelines:
            self._pipelines[kind] = self._pipeline(kind)
        texts: list[list[int]] = [[] for _ in request.prompts]
        times: list[list[float]] = [[] for _ in request.prompts]
        pipeline, prompts, settings = self._pipelines[kind], _tensors(request), _generation(request)
        start = perf_counter()
        handles = [pipeline.add_request(number, prompt, settings) for number, prompt in enumerate(prompts)]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = perf_counter() - start
            for handle, text, came in zip(handles, texts, times, strict=True):
                while handle.can_read():
                    text += next(iter(handle.read().values())).generated_ids
                    came.append(now)
        return _run(texts, times, kind)

    def _pipeline(self, kind: str) -> Any:
        import openvino_genai

        models = self._models
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # no text reuses what another one computed
        properties = _properties(models, _capabilities())
        if kind == "draft_model":
            assert models.draft is not None
            properties |= {"draft_model": openvino_genai.draft_model(self._converted(models.draft), "CPU", **properties)}
        elif kind == "ngram":
            properties |= {"prompt_lookup": True}
        target = self._converted(models.target)
        return openvino_genai.ContinuousBatchingPipeline(target, scheduler, "CPU", properties)

    def _converted(self, checkpoint: str) -> str:
        dtype = _STORED_AS[self._models.dtype]
        folder = converted_path(self._models.folder, checkpoint, f"{dtype}-openvino")
        if not (folder / "complete").exists():
            _convert(checkpoint, dtype, folder)
            (folder / "complete").touch()
        return str(folder)


class OpenVinoPeer(Peer):
    """OpenVINO GenAI on the CPU."""

    name = "openvino"
    package = "openvino-genai"
    dtypes = ("float32", "bfloat16", "int8", "int4")
    engine = OpenVinoEngine
    needs, extra = ("openvino", "openvino_genai", "openvino_tokenizers", "gguf"), "openvino"

    @property
    def precision(self) -> str:
        if self.models.dtype == "float32":
            return "weights float16 in the file, float32 in memory, KV float32"
        if self.models.dtype in ("int8", "int4"):
            bits = self.models.dtype.removeprefix("int")
            return f"weights {bits} bits in groups of 32, KV float16, or float32 on processors without bfloat16"
        return "weights float16 in the file; bfloat16 and KV float16 where the processor has bfloat16, otherwise float32"


def _convert(checkpoint: str, dtype: str, folder: Path) -> None:
    """Write the model and a tokenizer. The pipeline needs a tokenizer, although it is given token ids only."""
    import openvino
    import openvino_genai
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    from outrider.lab.convert.gguf import write_gguf

    folder.mkdir(parents=True, exist_ok=True)
    parts = convert_tokenizer(AutoTokenizer.from_pretrained(checkpoint), with_detokenizer=True)
    for part, name in zip(parts, ("openvino_tokenizer.xml", "openvino_detokenizer.xml"), strict=True):
        openvino.save_model(part, folder / name)
    source = folder / "model.gguf"
    write_gguf(checkpoint, source, dtype)
    tokenizer = openvino_genai.Tokenizer(folder)
    openvino_genai.LLMPipeline(source, tokenizer, "CPU", enable_save_ov_model=True)  # writes it beside its source
    source.unlink()


def _capabilities() -> list[str]:
    """The types that the plugin computes in on this processor."""
    import openvino

    return list(openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"))


def _properties(models: PeerModels, capabilities: Collection[str]) -> dict[str, Any]:
    """The settings of the plugin. Where the processor has no bfloat16, it computes in float32, and its attention refuses
    keys and values of another type ("expect kvcache type f32")."""
    wide = models.dtype == "float32" or "BF16" not in capabilities
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


def _tensors(request: PeerRequest) -> list[Any]:
    """The prompts, [1, length] each."""
    import numpy as np
    import openvino

    return [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in request.prompts]


def _run(texts: list[list[int]], times: list[list[float]], kind: str) -> PeerRun:
    """The run of texts whose outputs came at these times. Every output of a text is a pass of the target. OpenVINO does not
    tell the draft tokens of requests that it batches."""
    num_tokens, num_passes = sum(map(len, texts)), sum(map(len, times))
    last, first = max(came[-1] for came in times), min(came[0] for came in times)
    return PeerRun(
        texts=tuple(map(tuple, texts)),
        seconds=last,
        first_token_seconds=tuple(came[0] for came in times),
        decode_tokens=num_tokens
        - sum(came[0] == first for came in times),  # one token of each text comes in its first pass
        decode_seconds=last - first,
        num_draft_tokens=0 if kind == "plain" else None,
        num_accepted_tokens=num_tokens - num_passes,
    )
