"""ik_llama.cpp, a fork of llama.cpp for CPUs, through the C functions that the ik-llama-cpp-python package binds.

The package binds no drafting, so there is plain decoding alone. Tokens are drawn here, from the logits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np

from outrider.errors import EngineAnswerError
from outrider.lab.peers.base import GGUF_NAMES, Peer, PeerMode, PeerModels, PeerRequest, PeerRun, gguf_file

#: Tokens of a text at most, and rows of a pass.
_CONTEXT, _ROWS = 4096, 512
#: What the library calls with what it logs.
_Listener = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class IkLlamaEngine:
    """The target in memory, and a context for the number of texts that was last asked for."""

    def __init__(self, models: PeerModels) -> None:
        from ik_llama_cpp import _ctypes_api

        self._native: Any = _ctypes_api
        self._models = models
        self._silence = _Listener(lambda level, text, data: None)  # it lives as long as the library may call it
        _ctypes_api._lib.llama_log_set(self._silence, None)
        self._native.llama_backend_init()
        params = self._native.llama_model_default_params()
        params.repack_tensors = True
        path = gguf_file(models.folder, models.target, models.dtype)
        self._model = self._native.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise EngineAnswerError("ik_llama.cpp", f"it does not load {path}", "See its log.")
        self._vocab_size = self._native.llama_vocab_n_tokens(self._native.llama_model_get_vocab(self._model))
        self._context: Any = None
        self._batch = 0

    def generate(self, request: PeerRequest) -> PeerRun:
        """The prompts are read one after another, and then all texts decode in one batch."""
        context, draws = self._context_for(request.batch), np.random.default_rng(request.seed)
        start = perf_counter()
        rows, first = [], []
        for number, prompt in enumerate(request.prompts):
            for at in range(0, len(prompt), _ROWS):
                part = prompt[at : at + _ROWS]
                self._decode(context, [(token, at + i, number) for i, token in enumerate(part)], [len(part) - 1])
            rows.append(_chosen(self._logits(context, (len(prompt) - 1) % _ROWS), request.temperature, draws))
            first.append(perf_counter() - start)
        texts = [[token] for token in rows]
        while len(texts[0]) < request.max_tokens:
            places = enumerate(zip(texts, request.prompts, strict=True))
            step = [(text[-1], len(prompt) + len(text) - 1, number) for number, (text, prompt) in places]
            self._decode(context, step, range(len(step)))
            for number, text in enumerate(texts):
                text.append(_chosen(self._logits(context, number), request.temperature, draws))
        seconds, count = perf_counter() - start, sum(map(len, texts))
        return PeerRun(tuple(map(tuple, texts)), seconds, tuple(first), count - 1, seconds - first[0], 0, 0)

    def _context_for(self, batch: int) -> Any:
        """An empty context for so many texts."""
        if batch != self._batch:
            if self._context is not None:
                self._native.llama_free(self._context)
            params = self._native.llama_context_default_params()
            params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = _CONTEXT * batch, _ROWS, _ROWS, batch
            params.n_threads = params.n_threads_batch = self._models.num_threads
            params.flash_attn = False  # it fails an assertion without VNNI
            self._context, self._batch = self._native.llama_init_from_model(self._model, params), batch
        self._native.llama_kv_cache_clear(self._context)
        return self._context

    def _decode(self, context: Any, rows: Sequence[tuple[int, int, int]], wanted: Sequence[int]) -> None:
        """One pass over (token, position, text) rows, with the logits of those that are wanted."""
        batch = self._native.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (token, position, number) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, i in wanted
            batch.seq_id[i][0] = number
        failed = self._native.llama_decode(context, batch)
        self._native.llama_batch_free(batch)
        if failed:
            raise EngineAnswerError("ik_llama.cpp", f"a pass answers {failed}", "See its log.")

    def _logits(self, context: Any, row: int) -> np.ndarray:
        """[vocab_size] of a row of the last pass."""
        found = self._native.llama_get_logits_ith(context, ctypes.c_int32(row))
        return np.ctypeslib.as_array(found, (self._vocab_size,))


class IkLlamaPeer(Peer):
    """ik_llama.cpp, with weights that it has put into its own order of rows."""

    name = "ik_llama.cpp"
    package = "ik-llama-cpp-python"
    dtypes = ("float32", "bfloat16", "int8", "int4")
    engine = IkLlamaEngine
    needs, extra = ("ik_llama_cpp", "gguf"), "ik-llama-cpp"
    drafts_in_batches = False

    @property
    def precision(self) -> str:
        weights = GGUF_NAMES.get(self.models.dtype, self.models.dtype)
        return f"weights {weights}, KV float16; its package is compiled for AVX2, and drafts nothing"

    def modes(self, *, full: bool, batch: int = 1) -> Sequence[PeerMode]:
        return [PeerMode("plain", "plain")]


def _chosen(logits: np.ndarray, temperature: float, draws: np.random.Generator) -> int:
    """The likeliest token, or one that is drawn by a Gumbel race."""
    return int(np.argmax(logits if temperature == 0.0 else logits / temperature + draws.gumbel(size=logits.shape)))
