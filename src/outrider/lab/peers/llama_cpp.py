"""llama.cpp through its own server, which the xllamacpp package runs in this process.

Every mode has a server, because the draft length is a setting of a server and not of a request. All servers of a peer map
the same files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from outrider.errors import EngineAnswerError, MissingExtraError
from outrider.lab.peers.base import (
    GGUF_NAMES,
    OtherEngine,
    Peer,
    PeerMode,
    PeerModels,
    PeerRequest,
    PeerRun,
    converted_path,
    gguf_file,
)

if TYPE_CHECKING:
    from outrider.lab.peers.server import CompletionsClient
    from outrider.lab.prove.running import Proof

#: The length of the n-gram that must occur again. `ngram-simple` never tries a shorter one.
_NGRAM_SIZE = 2
_CONTEXT = 4096
#: Draft tokens of prediction layers or of a head in a step.
_LENGTHS = (1, 2, 3)
#: Fields of every request: no filters of the probabilities, and nothing reused from the text before.
_REQUEST = {"cache_prompt": False, "ignore_eos": True, "return_tokens": True, "top_p": 1.0, "min_p": 0.0}


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
        models, k = self._models, mode.num_draft_tokens
        draft = None
        if mode.kind == "draft_model" and models.draft is not None:
            draft = gguf_file(models.folder, models.draft, models.dtype)
        elif mode.kind == "eagle3" and models.head is not None:
            draft = _head_file(models.folder, models.head, models.target)
        ways = {
            "draft_model": Speculation("", "DRAFT_SIMPLE", {"n_max": k, "p_min": 0.0}),
            "mtp": Speculation("", "DRAFT_MTP", {"n_max": k, "p_min": 0.0}),
            "eagle3": Speculation("", "DRAFT_EAGLE3", {"n_max": k, "p_min": 0.0}),
            "ngram": Speculation("", "NGRAM_SIMPLE", ngram={"size_n": _NGRAM_SIZE, "size_m": k, "min_hits": 1}),
        }
        params = _server_params(
            self._native,
            (self._target, draft),
            ways.get(mode.kind),
            slots=self._batch,
            context=_CONTEXT,
            num_threads=models.num_threads,
            kv=_kv_type(models.dtype),
        )
        params.cache_ram_mib = 0
        return params


class LlamaCppPeer(Peer):
    """llama.cpp, with drafts of a draft model, of a head, of the prediction layers of its file, or of its simple n-gram
    search."""

    name = "llama.cpp"
    package = "xllamacpp"
    dtypes = ("float32", "bfloat16", "int8", "int4")
    engine = LlamaCppEngine
    needs, extra = ("xllamacpp", "gguf"), "llama-cpp"

    @property
    def precision(self) -> str:
        weights = GGUF_NAMES.get(self.models.dtype, self.models.dtype)
        if self.models.target.endswith(".gguf"):
            weights = "of the file"
        return f"weights {weights}, KV {_kv_type(self.models.dtype)}"

    def modes(self, *, full: bool, batch: int = 1) -> Sequence[PeerMode]:
        more = {"mtp": _predicts(self.models.target), "eagle3": self.models.head is not None}
        modes = [PeerMode(f"{kind} k={k}", kind, k) for kind, is_there in more.items() if is_there for k in _LENGTHS]
        return [*super().modes(full=full, batch=batch), *modes]

    @staticmethod
    def proving(folder: Path) -> AbstractContextManager[OtherEngine]:
        return open_llama_cpp(folder)


def _predicts(target: str) -> bool:
    """Whether it is a file that carries prediction layers."""
    if not target.endswith(".gguf"):
        return False
    from outrider.loading.gguf.architecture import PREDICTED
    from outrider.loading.gguf.header import read_gguf

    metadata = read_gguf(target).metadata
    return bool(metadata.get(f"{metadata.get('general.architecture')}.{PREDICTED}"))


def _head_file(folder: Path, head: str, target: str) -> str:
    """A head as a GGUF file with the vocabulary of the target's file. It is written if it is missing."""
    if head.lower().endswith(".gguf"):
        return head
    from outrider.lab.convert.gguf import write_gguf_head
    from outrider.lab.convert.gguf_vocabulary import placeholders

    path = converted_path(folder, head, "head.gguf")
    if not path.exists():
        write_gguf_head(head, path, target, None if target.lower().endswith(".gguf") else placeholders())
    return str(path)


def _kv_type(dtype: str) -> str:
    """llama.cpp's own default, or float32 where float32 is compared."""
    return "float32" if dtype == "float32" else "float16"


@dataclass(frozen=True)
class Speculation:
    """One way in which a server may speculate."""

    name: str  # the parameters under the names of llama.cpp
    kind: str  # the member of `common_speculative_type`, without its prefix
    draft: Mapping[str, Any] | None = None  # fields of the draft model's parameters. None where no model drafts.
    ngram: Mapping[str, Any] = field(default_factory=dict)  # fields of the n-gram parameters


def _server_params(
    native: Any,
    files: tuple[str, str | None],
    speculation: Speculation | None,
    *,
    slots: int,
    context: int,
    num_threads: int,
    kv: str,
) -> Any:
    """The parameters of a server that writes so many texts at a time; the files are those of the target and of a draft."""
    params, kv = native.CommonParams(), getattr(native.ggml_type, f"GGML_TYPE_{kv.replace('loat', '').upper()}")
    params.model.path = files[0]
    params.n_ctx, params.n_parallel, params.port = context * slots, slots, 0
    params.verbosity, params.fit_params = 0, False
    models = [params]
    if speculation is not None:
        kinds, own = native.common_speculative_type, params.speculative
        own.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{speculation.kind}")]
        for key, value in speculation.ngram.items():
            setattr(own.ngram_simple, key, value)
        if speculation.draft is not None:
            own.draft.n_min = 0
            if files[1] is not None:  # prediction layers are in the file of the target
                own.draft.mparams.path = files[1]
            for key, value in speculation.draft.items():
                setattr(own.draft, key, value)
            models.append(own.draft)
    for each in models:
        each.cpuparams.n_threads = each.cpuparams_batch.n_threads = num_threads
        each.cache_type_k = each.cache_type_v = kv
    return params


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


# --- Proofs on llama.cpp, through servers in this process, on tiny models that are made for them.
#
# Its random draws cannot be forked from here. So its texts are sampled, and the proofs report their power. The reference
# is the same checkpoint in transformers. Both compute in float32, and keep their KV in float32, and agree to about 1e-6.


_VOCAB_SIZE = 16
#: This token ends a text. It may be drawn like any other.
_EOS_TOKEN_ID = 2
#: All prompts repeat themselves, so that n-grams find something.
PROMPTS = ((1, 4, 5, 6, 4, 5), (1, 7, 8, 7, 8, 7, 8), (1, 9, 3, 9, 3, 5, 9, 3), (1, 12, 12, 12, 12))
SPECULATIONS = (
    Speculation("draft-simple, n_max=3", "DRAFT_SIMPLE", {"n_max": 3, "p_min": 0.0}),
    Speculation("draft-simple, n_max=3, p_min=0.3", "DRAFT_SIMPLE", {"n_max": 3, "p_min": 0.3}),
    Speculation("draft-simple, n_max=3, probabilistic", "DRAFT_SIMPLE", {"n_max": 3, "p_min": 0.0, "probabilistic": True}),
    Speculation("ngram-simple, size_n=1, size_m=3", "NGRAM_SIMPLE", ngram={"size_n": 1, "size_m": 3, "min_hits": 1}),
)


class LlamaCpp:
    """A server for each way to speculate, and one that does not speculate."""

    def __init__(self, folder: Path) -> None:
        self._native = _native()
        from outrider.lab.convert.gguf import write_gguf
        from outrider.lab.convert.gguf_vocabulary import placeholders
        from outrider.lab.prove.tiny import save_tiny_llama

        self.title = f"llama.cpp, xllamacpp {self._native.__version__}, float32"
        self.servers: list[Any] = []
        self._target, draft = (
            save_tiny_llama(folder / name, seed, vocab_size=_VOCAB_SIZE) for name, seed in (("target", 1), ("draft", 2))
        )
        words = placeholders(_EOS_TOKEN_ID)
        files = [write_gguf(each, Path(f"{each}.gguf"), vocabulary=words) for each in (self._target, draft)]
        self._files = (files[0], files[1])

    def proofs(self, *, quick: bool) -> Sequence[Proof]:
        """See OtherEngine."""
        from outrider.lab.peers.server import ReferenceModel, ServerProof

        plain, weights = self._client(None), ReferenceModel(self._target)
        how: dict[str, Any] = {"prompts": PROMPTS, "num_texts": 4_000 if quick else 10_000}
        found: list[Proof] = []
        for speculation in SPECULATIONS[: 1 if quick else None]:
            server = ServerProof(self._client(speculation), plain, weights, **how)
            found += [(f"{speculation.name}: {claim}", prove) for claim, prove in server.proofs(quick=quick)]
        return found

    def _client(self, speculation: Speculation | None) -> CompletionsClient:
        from outrider.lab.peers.server import CompletionsClient

        native = self._native
        params = _server_params(native, self._files, speculation, slots=8, context=128, num_threads=1, kv="float32")
        params.warmup, params.flash_attn_type = False, native.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.servers.append(native.Server(params))
        return CompletionsClient(self.servers[-1].listening_address, "tiny", {"top_k": 0, "min_p": 0.0})


@contextmanager
def open_llama_cpp(folder: Path) -> Iterator[LlamaCpp]:
    """llama.cpp with models in `folder`. Its servers stop when the block ends."""
    engine = LlamaCpp(folder)
    try:
        yield engine
    finally:
        engine.servers.clear()


def _native() -> Any:
    try:
        import gguf  # noqa: F401
        import xllamacpp
    except ImportError as error:
        remedy = "Run: pip install 'outrider[llama-cpp]'"
        raise MissingExtraError("llama.cpp", f"{error.name} is not installed", remedy) from error
    return xllamacpp
