"""Proofs on llama.cpp, through its own server in this process, on tiny models that are made for them.

Its random draws cannot be forked from here. So its texts are sampled, and the proofs report their power. The reference is
the same checkpoint in transformers. Both compute in float32, and keep their KV in float32, and agree to about 1e-6.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.errors import MissingExtraError
from outrider.lab.convert.gguf import write_gguf
from outrider.lab.convert.gguf_vocabulary import placeholders
from outrider.lab.peers.server import CompletionsClient, ReferenceModel, ServerProof
from outrider.lab.prove.running import Proof
from outrider.lab.prove.tiny import save_tiny_llama

_VOCAB_SIZE = 16
#: This token ends a text. It may be drawn like any other.
_EOS_TOKEN_ID = 2
#: All prompts repeat themselves, so that n-grams find something.
PROMPTS = ((1, 4, 5, 6, 4, 5), (1, 7, 8, 7, 8, 7, 8), (1, 9, 3, 9, 3, 5, 9, 3), (1, 12, 12, 12, 12))


@dataclass(frozen=True)
class Speculation:
    """One way in which the server may speculate."""

    name: str  # the parameters under the names of llama.cpp
    kind: str  # the member of `common_speculative_type`, without its prefix
    draft: Mapping[str, Any] | None = None  # fields of the draft model's parameters. None where no model drafts.
    ngram: Mapping[str, Any] = field(default_factory=dict)  # fields of the n-gram parameters


SPECULATIONS = (
    Speculation("draft-simple, n_max=3", "DRAFT_SIMPLE", {"n_max": 3, "p_min": 0.0}),
    Speculation("draft-simple, n_max=3, p_min=0.3", "DRAFT_SIMPLE", {"n_max": 3, "p_min": 0.3}),
    Speculation("draft-simple, n_max=3, probabilistic", "DRAFT_SIMPLE", {"n_max": 3, "p_min": 0.0, "probabilistic": True}),
    Speculation("ngram-simple, size_n=1, size_m=3", "NGRAM_SIMPLE", ngram={"size_n": 1, "size_m": 3, "min_hits": 1}),
)


class LlamaCpp:
    """A server for each way to speculate, and one that does not speculate."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._native = _native()
        self._stack = stack
        self.title = f"llama.cpp, xllamacpp {self._native.__version__}, float32"
        target = save_tiny_llama(folder / "target", 1, vocab_size=_VOCAB_SIZE)
        draft = save_tiny_llama(folder / "draft", 2, vocab_size=_VOCAB_SIZE)
        self._files = [self._converted(checkpoint) for checkpoint in (target, draft)]
        self._weights = ReferenceModel(target)

    @staticmethod
    def _converted(checkpoint: str) -> str:
        return write_gguf(checkpoint, Path(f"{checkpoint}.gguf"), vocabulary=placeholders(_EOS_TOKEN_ID))

    def proofs(self, *, quick: bool) -> Sequence[Proof]:
        """See OtherEngine."""
        plain = self._client(None)
        found: list[Proof] = []
        for speculation in SPECULATIONS[: 1 if quick else None]:
            server = ServerProof(
                self._client(speculation),
                plain,
                self._weights,
                prompts=PROMPTS,
                num_texts=4_000 if quick else 10_000,
            )
            found += [(f"{speculation.name}: {claim}", prove) for claim, prove in server.proofs(quick=quick)]
        return found

    def _client(self, speculation: Speculation | None) -> CompletionsClient:
        server = self._stack.enter_context(self._serving(speculation))
        return CompletionsClient(server, "tiny", {"top_k": 0, "min_p": 0.0})

    @contextmanager
    def _serving(self, speculation: Speculation | None) -> Iterator[str]:
        params = self._params()
        if speculation is not None:
            self._speculate(params, speculation)
        server = self._native.Server(params)
        yield server.listening_address
        del server  # which stops it

    def _params(self) -> Any:
        native = self._native
        params = native.CommonParams()
        params.model.path = self._files[0]
        params.n_ctx, params.n_parallel, params.port = 1024, 8, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.verbosity, params.warmup, params.fit_params = 0, False, False
        params.flash_attn_type = native.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cache_type_k = params.cache_type_v = native.ggml_type.GGML_TYPE_F32
        return params

    def _speculate(self, params: Any, speculation: Speculation) -> None:
        native = self._native
        kinds = native.common_speculative_type
        params.speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{speculation.kind}")]
        for key, value in speculation.ngram.items():
            setattr(params.speculative.ngram_simple, key, value)
        if speculation.draft is None:
            return
        draft = params.speculative.draft
        draft.mparams.path = self._files[1]
        draft.n_min, draft.cpuparams.n_threads = 0, 1
        draft.cache_type_k = draft.cache_type_v = native.ggml_type.GGML_TYPE_F32
        for key, value in speculation.draft.items():
            setattr(draft, key, value)


@contextmanager
def open_llama_cpp(folder: Path) -> Iterator[LlamaCpp]:
    """llama.cpp with models in `folder`. Its servers stop when the block ends."""
    with ExitStack() as stack:
        yield LlamaCpp(folder, stack)


def _native() -> Any:
    try:
        import gguf  # noqa: F401
        import xllamacpp
    except ImportError as error:
        remedy = "Run: pip install 'outrider[llama-cpp]'"
        raise MissingExtraError("llama.cpp", f"{error.name} is not installed", remedy) from error
    return xllamacpp
