"""llama.cpp through its own server, which the xllamacpp package runs in this process.

Every mode has a server, because the draft length is a setting of a server and not of a request. All servers of a peer map
the same files.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from outrider.errors import EngineAnswerError
from outrider.lab.peers.base import (
    Peer,
    PeerEngine,
    PeerMode,
    PeerModels,
    PeerRequest,
    PeerRun,
    build_with,
    gguf_file,
    missing_packages,
)

#: The length of the n-gram that must occur again. `ngram-simple` never tries a shorter one.
_NGRAM_SIZE = 2
_CONTEXT = 4096
#: Fields of every request: no filters of the probabilities, and nothing reused from the text before.
_REQUEST = {"cache_prompt": False, "ignore_eos": True, "return_tokens": True, "top_p": 1.0, "min_p": 0.0}


class LlamaCppPeer(Peer):
    """llama.cpp, with drafts of its draft model or of its simple n-gram search."""

    name = "llama.cpp"
    package = "xllamacpp"
    dtypes = ("float32", "bfloat16", "int8", "int4")

    @staticmethod
    def missing() -> str | None:
        """See Peer."""
        return missing_packages(("xllamacpp", "gguf"), "llama-cpp")

    @staticmethod
    def building(models: PeerModels) -> Callable[[], PeerEngine]:
        """See Peer."""
        return build_with(LlamaCppEngine, models)

    @property
    def precision(self) -> str:
        """See Peer."""
        weights = {"int8": "q8_0", "int4": "q4_0"}.get(self.models.dtype, self.models.dtype)
        if self.models.target.endswith(".gguf"):
            weights = "of the file"
        return f"weights {weights}, KV {_kv_type(self.models.dtype)}"


class LlamaCppEngine:
    """The servers of all modes."""

    def __init__(self, models: PeerModels) -> None:
        import xllamacpp

        self._native: Any = xllamacpp
        self._models = models
        self._target = gguf_file(models.folder, models.target, models.dtype)
        self._servers: dict[PeerMode, Any] = {}
        self._batch = 1

    def generate(self, request: PeerRequest) -> PeerRun:
        """See PeerEngine."""
        address = self.server(request.mode, request.batch).listening_address
        with ThreadPoolExecutor(request.batch) as threads:
            start = perf_counter()
            futures = [threads.submit(_timed, address, _body(request, number), start) for number in range(request.batch)]
            answers = [future.result() for future in futures]
        decoding = [answer["timings"]["predicted_ms"] / 1e3 for answer, _ in answers]
        # A slot's clock starts at the first token, which follows the prompt.
        first = tuple(end - seconds for (_, end), seconds in zip(answers, decoding, strict=True))
        last, texts = max(end for _, end in answers), tuple(tuple(answer["tokens"]) for answer, _ in answers)
        timings = [answer["timings"] for answer, _ in answers]
        return PeerRun(
            texts=texts,
            seconds=last,
            first_token_seconds=first,
            decode_tokens=sum(map(len, texts)) - 1,
            decode_seconds=last - min(first),
            num_draft_tokens=sum(told.get("draft_n", 0) for told in timings),
            num_accepted_tokens=sum(told.get("draft_n_accepted", 0) for told in timings),
        )

    def server(self, mode: PeerMode, batch: int) -> Any:
        """The server of a mode with a slot for each text. Servers for another number of texts are ended."""
        if batch != self._batch:
            self._servers.clear()
            self._batch = batch
        if mode not in self._servers:
            self._servers[mode] = self._native.Server(self._params(mode))
        return self._servers[mode]

    def _params(self, mode: PeerMode) -> Any:
        native, models = self._native, self._models
        params = native.CommonParams()
        params.model.path = self._target
        params.n_ctx, params.n_parallel, params.port = _CONTEXT * self._batch, self._batch, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = models.num_threads
        params.verbosity, params.fit_params, params.cache_ram_mib = 0, False, 0
        params.cache_type_k = params.cache_type_v = self._kv()
        if mode.kind == "draft_model":
            self._draft_with_model(params.speculative, mode.num_draft_tokens)
        elif mode.kind == "ngram":
            self._draft_with_ngrams(params.speculative, mode.num_draft_tokens)
        return params

    def _draft_with_model(self, speculative: Any, k: int) -> None:
        models, draft = self._models, speculative.draft
        assert models.draft is not None
        speculative.types = [self._native.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        draft.mparams.path = gguf_file(models.folder, models.draft, models.dtype)
        draft.n_min, draft.n_max, draft.p_min = 0, k, 0.0
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = models.num_threads
        draft.cache_type_k = draft.cache_type_v = self._kv()

    def _draft_with_ngrams(self, speculative: Any, k: int) -> None:
        speculative.types = [self._native.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        speculative.ngram_simple.size_n, speculative.ngram_simple.size_m = _NGRAM_SIZE, k
        speculative.ngram_simple.min_hits = 1

    def _kv(self) -> Any:
        return getattr(self._native.ggml_type, f"GGML_TYPE_{_kv_type(self._models.dtype).replace('loat', '').upper()}")


def _kv_type(dtype: str) -> str:
    """llama.cpp's own default, or float32 where float32 is compared."""
    return "float32" if dtype == "float32" else "float16"


def _body(request: PeerRequest, number: int) -> dict[str, Any]:
    """The question for one of the texts."""
    greedy = request.temperature == 0.0
    body: dict[str, Any] = {**_REQUEST, "prompt": list(request.prompts[number]), "n_predict": request.max_tokens}
    body |= {"temperature": request.temperature, "top_k": 1 if greedy else 0}
    return body if request.seed is None else {**body, "seed": request.seed}


def _timed(address: str, body: dict[str, Any], start: float) -> tuple[Any, float]:
    """The answer to a question, and the seconds since `start` at which it came."""
    answer = _send(f"{address}/completion", body)
    return answer, perf_counter() - start


def _send(url: str, body: dict[str, Any]) -> Any:
    """The answer of a server. There is no time limit, because the whole process is ended when it takes too long."""
    headers = {"Content-Type": "application/json"}
    try:
        with urlopen(Request(url, json.dumps(body).encode(), headers)) as answer:
            return json.load(answer)
    except HTTPError as error:
        said = error.read(500).decode("utf-8", "replace").strip()
        raise EngineAnswerError("llama.cpp", f"answers {error.code}: {said}", "See its log.") from error
