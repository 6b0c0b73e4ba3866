"""Target: the handle through which proposers use the target's embeddings, layers, head and KV memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.cache.memory import AddedLayers, AddedShape, Recompute
from outrider.cache.state import KVView
from outrider.errors import ContradictionError, InvalidParameterError, ModelTooLargeError, UnsupportedModelError
from outrider.kernels.decoder import DecoderKernel
from outrider.loading import hf_modules
from outrider.loading.fit import available_bytes
from outrider.model.attention import PartialPass
from outrider.model.batch import Segment
from outrider.model.fused import FusedDecoder
from outrider.model.runner import ForwardOutput, ModelRunner, upcast_logits


@dataclass(frozen=True)
class TargetRows:
    """Rows of one sequence that some of the target's layers are to compute; made and checked by `Target.rows`."""

    kv: KVView  # the sequence's
    token_ids: tuple[int, ...]  # tokens to compute
    start: int  # position of the first
    parents: tuple[int, ...] | None  # which row each one follows; None for a chain
    logits_from: int  # first row whose logits are wanted

    def segment(self) -> Segment:
        """Returns the rows as a pass takes them, in the blocks that the sequence has now."""
        return Segment.of(self.kv, self.token_ids, self.start, self.parents, self.logits_from)


class Target:
    """A handle on the target. No module of the model leaves it: where our kernels run, the modules hold no weights.

    Attributes:
        name: Path or hub id.
        model_type: The kind of model, as its configuration says.
        tokenizer: Its tokenizer, if any.
        vocab_size: Width of its logits.
        hidden_size: Width of its hidden states.
        num_layers: Decoder layers.
        max_model_len: Longest sequence.
        eos_token_ids: Tokens that end a text.
        dtype: Of its weights.
        device: Where it lies.
        text_start: What every text begins with, where an encoder reads the prompt; None where texts begin with their
            prompts.
        rounds_rows: Whether what enters its linear layers is rounded to 8 bits.
    """

    def __init__(self, runner: ModelRunner) -> None:
        loaded = runner.loaded
        config = hf_modules.decoder_config(loaded.model.config)
        self._runner = runner
        self.name = loaded.name
        self.model_type = str(config.model_type)
        self.tokenizer: Any | None = loaded.tokenizer
        self.vocab_size = loaded.vocab_size
        self.hidden_size = int(config.hidden_size)
        self.num_layers = int(config.num_hidden_layers)
        self.max_model_len = loaded.max_model_len
        self.eos_token_ids = loaded.eos_token_ids
        self.dtype = loaded.dtype
        self.device = loaded.device
        self.text_start = loaded.text_start
        self.rounds_rows = loaded.rounds_rows

    @property
    def config(self) -> Any:
        """transformers' configuration of its decoder, to read."""
        return hf_modules.decoder_config(self._runner.loaded.model.config)

    @property
    def tokens_at_once(self) -> int | None:
        """Returns how many tokens, one behind another, have logits together or have none. None: `head` computes all."""
        return self._runner.backend.tokens_at_once()

    @property
    def fused(self) -> bool:
        """Tells whether our kernels compute its passes as a whole."""
        return self._runner.backend.name == FusedDecoder.name

    @property
    def kernel(self) -> DecoderKernel:
        """Returns what computes its passes, where it is `fused`. It lends heads its embeddings and its output layer."""
        backend = self._runner.backend
        assert isinstance(backend, FusedDecoder), "only where our kernels compute whole passes"
        return backend.kernel

    def folder(self) -> str:
        """The folder of its checkpoint, or its file; it may hold more than the model. Errors are those of `LoadedModel`."""
        return self._runner.loaded.folder()

    @torch.inference_mode()
    def embed(self, token_ids: Tensor | Sequence[int]) -> Tensor:
        """Rows of the embedding table, as the model's layers would be given them through `inputs_embeds`.

        Args:
            token_ids: [n]

        Returns:
            [n, hidden_size]
        """
        try:
            tokens = torch.as_tensor(token_ids, device=self.device)
        except (TypeError, ValueError) as error:
            problem = f"no list of token ids ({error})"
            raise InvalidParameterError("token_ids", token_ids, problem, "Give whole numbers.") from error
        if tokens.ndim != 1 or tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise InvalidParameterError("token_ids", token_ids, "no list of token ids", "Give whole numbers.")
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            worst = int(tokens.min()) if int(tokens.min()) < 0 else int(tokens.max())
            remedy = f"Use ids from 0 to {self.vocab_size - 1}."
            raise InvalidParameterError("token_ids", worst, "token id outside the vocabulary", remedy)
        tokens = tokens.long()
        return self._runner.backend.embed(self._runner.loaded, tokens)

    @torch.inference_mode()
    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm of hidden states [n, hidden_size] as a layer leaves them."""
        return self._runner.backend.norm(self._runner.loaded, self._checked(hidden))

    @torch.inference_mode()
    def head(self, hidden: Tensor, head_panels: np.ndarray | None = None) -> Tensor:
        """Logits [n, vocab_size] of hidden states [n, hidden_size] that have passed the final norm; float32 at least.

        Args:
            head_panels: int64 [n, 2], ascending ranges of groups of `tokens_at_once` tokens that have logits; those of all
                others are minus infinity. None computes all.
        """
        return upcast_logits(self._runner.backend.head(self._runner.loaded, self._checked(hidden), head_panels))

    @torch.inference_mode()
    def read(self, kv: KVView, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values [stop - start, num_kv_heads, dim] that a layer keeps of the tokens of a text from `start` up to
        `stop`."""
        self._check_layers("layer", (layer,), self.num_layers)
        if not 0 <= start <= stop <= kv.num_computed:
            problem = f"{kv.num_computed} tokens of the text are computed"
            raise ContradictionError("stop", stop, problem, f"Read up to {kv.num_computed}.")
        slots = torch.tensor(kv.slots(start, stop), dtype=torch.long, device=self.device)
        return self._runner.memory.pool.read(layer, slots)

    def rows(
        self,
        kv: KVView,
        token_ids: Sequence[int],
        start: int,
        parents: tuple[int, ...] | None = None,
        *,
        logits_from: int = 0,
    ) -> TargetRows:
        """Rows of one sequence for `run`, behind those that its KV holds already.

        Args:
            parents: Which row each one follows, -1 for what stands before `start`; None for a chain.
        """
        rows = TargetRows(kv, tuple(token_ids), start, None if parents is None else tuple(parents), logits_from)
        self._check_rows(rows)
        return rows

    def run(
        self,
        rows: Sequence[TargetRows],
        *,
        layers: Sequence[int] | None = None,
        resume_from: Tensor | None = None,
        aux_layers: Sequence[int] = (),
    ) -> ForwardOutput:
        """Compute rows through some of the layers, then the final norm and the head; KV goes to the target's own memory.

        What is written behind the text's tokens is written again by the target's own pass. Rows that were made in an
        earlier step are looked at again: the text may have grown over them.

        Args:
            layers: Which layers run, in ascending order; None runs all.
            resume_from: [num_rows, hidden_size] what the layers before the first of `layers` left (`ForwardOutput.hidden`
                of an earlier run); None begins with the embeddings.

        Returns:
            Logits of the wanted rows, and `hidden` as the last of `layers` left it.
        """
        self._check_whole(rows)
        chosen = tuple(range(self.num_layers)) if layers is None else tuple(layers)
        self._check_layers("layers", chosen, self.num_layers)
        self._check_layers("aux_layers", tuple(sorted(aux_layers)), self.num_layers + 1)
        for layer in aux_layers:
            if layer not in (*chosen, self.num_layers):
                raise InvalidParameterError("aux_layers", layer, "that layer does not run", f"Use some of {chosen}.")
        num_rows = sum(len(each.token_ids) for each in rows)
        hidden = None if resume_from is None else self._checked(resume_from, num_rows)
        return self._compute(rows, aux_layers, PartialPass(chosen, hidden))

    def add_layers(self, shape: AddedShape, recompute: Recompute, aux_layers: Sequence[int] = ()) -> AddedLayers:
        """Layers of a proposer's own, whose keys and values lie beside the target's in the same blocks, in its dtype.

        They live as long as somebody holds what is returned. A proposer names them in its `Requirements`, so that a text
        that it drafts for begins with no more of another one than these layers hold.

        Args:
            recompute: How the proofs compute it anew, from tokens and hidden states of the target.
        """
        for field, size in (("num_layers", shape.num_layers), ("num_heads", shape.num_heads), ("head_dim", shape.head_dim)):
            if type(size) is not int or size < 1:
                raise InvalidParameterError(field, size, "no size of added layers", "Use a whole number from 1 on.")
        if type(shape.feature_size) is not int or shape.feature_size < 0:
            remedy = "Use a whole number, or 0 for none."
            raise InvalidParameterError("feature_size", shape.feature_size, "no size of a feature", remedy)
        self._check_layers("aux_layers", tuple(aux_layers), self.num_layers + 1)
        memory, free = self._runner.memory, available_bytes(self.device)
        blocks = memory.blocks
        size = shape.nbytes(blocks.num_blocks, blocks.block_size, self.dtype)
        if free is not None and size > free:
            problem = f"{shape.num_layers} added layers need {size / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
            raise ModelTooLargeError(self.name, problem, "Use a smaller kv_cache_tokens.", 0, size, free)
        return memory.add_layers(shape, self.dtype, self.device, recompute, aux_layers)

    def try_layers(self, layers: Sequence[int]) -> None:
        """Run a token through some of the layers, in a memory of its own, so that a method is refused before any work where
        its every draft would fail."""
        try:
            self.run_apart([0], layers=layers)
        except InvalidParameterError:
            raise
        except Exception as error:  # whatever the model's own code raises
            problem = f"it cannot run layers {list(layers)} alone ({error})"
            raise UnsupportedModelError(self.name, problem, "Use another method.") from error

    def run_apart(
        self, token_ids: Sequence[int], *, layers: Sequence[int] | None = None, aux_layers: Sequence[int] = ()
    ) -> ForwardOutput:
        """Compute a text in a memory of its own, which no sequence has a part in.

        Args:
            layers: As for `run`; None for a whole pass, which leaves no `hidden`.
        """
        if layers is not None:
            self._check_layers("layers", tuple(layers), self.num_layers)
        self._check_layers("aux_layers", tuple(aux_layers), self.num_layers + 1)
        apart = self._runner.with_own_memory(len(token_ids))
        segment = Segment.of(apart.memory.room_for(len(token_ids)), token_ids, 0)
        return apart.forward([segment], aux_layers, None if layers is None else PartialPass(tuple(layers)))

    def _compute(self, rows: Sequence[TargetRows], aux_layers: Sequence[int], part: PartialPass) -> ForwardOutput:
        """Run checked rows. What the first layers compute from the embeddings is written down for the target's own pass."""
        segments, begun = [each.segment() for each in rows], self._runner.partial_rows
        before = [begun.take(each.kv) for each in rows]  # whatever is written now, and even if the pass raises half-way
        out = self._runner.forward(segments, aux_layers, part)
        depth = len(part.layers)
        is_first_part = part.hidden is None and part.layers == tuple(range(depth)) and 0 < depth < self.num_layers
        if is_first_part and out.hidden is not None:
            for each, segment, known, (first, end) in zip(rows, segments, before, out.row_spans, strict=True):
                begun.add(each.kv, segment, depth, out.hidden[first:end], known)
        return out

    def _check_whole(self, rows: Sequence[TargetRows]) -> None:
        if not isinstance(rows, list | tuple) or not rows or not all(isinstance(each, TargetRows) for each in rows):
            raise InvalidParameterError("rows", rows, "no list of rows", "Give a list of what Target.rows returns.")
        for each in rows:
            self._check_rows(each)
        if len({id(each.kv) for each in rows}) < len(rows):
            raise InvalidParameterError("rows", rows, "two of one sequence", "Give one for each sequence.")

    def _check_rows(self, rows: TargetRows) -> None:
        kv, tokens = rows.kv, rows.token_ids
        if not isinstance(kv, KVView) or not kv.belongs_to(self._runner.memory):
            raise InvalidParameterError("kv", kv, "not the target's KV of a sequence", "Use ProposerSequence.kv.")
        for token in tokens:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                problem, remedy = "no token of the target", f"Use whole numbers from 0 to {self.vocab_size - 1}."
                raise InvalidParameterError("token_ids", token, problem, remedy)
        if not tokens or type(rows.logits_from) is not int or not 0 <= rows.logits_from <= len(tokens):
            problem = f"there are {len(tokens)} rows"
            raise InvalidParameterError(
                "logits_from", rows.logits_from, problem, f"Use 0 to {len(tokens)}, and a row at least."
            )
        self._check_parents(rows)
        if type(rows.start) is not int or rows.start < kv.num_computed:
            problem = f"the KV of {kv.num_computed} tokens is part of the text and may not be written"
            raise ContradictionError("start", rows.start, problem, f"Start at {kv.num_computed} or later.")
        self._check_room(rows)

    def _check_parents(self, rows: TargetRows) -> None:
        parents = rows.parents
        if parents is None:
            return
        fits = len(parents) == len(rows.token_ids)
        if not fits or any(type(p) is not int or not -1 <= p < row for row, p in enumerate(parents)):
            problem = f"not an earlier row, or -1, for each of {len(rows.token_ids)} rows"
            raise InvalidParameterError("parents", parents, problem, "Give the row that each one follows.")

    def _check_room(self, rows: TargetRows) -> None:
        segment, limit = rows.segment(), self._runner.loaded.long_rope_after
        if segment.context_len > rows.kv.capacity:
            problem = (
                f"{len(rows.token_ids)} rows behind {rows.start} tokens, and the sequence has blocks for {rows.kv.capacity}"
            )
            raise ContradictionError("token_ids", list(rows.token_ids), problem, "Stay within the budget of the request.")
        if limit is not None and segment.text_len > limit and not segment.long_rope:
            problem = f"behind {limit} tokens the target uses other rotary factors for the whole text"
            raise ContradictionError(
                "token_ids", list(rows.token_ids), problem, "Stay within the max_depth of the request."
            )

    def _check_layers(self, field: str, layers: tuple[int, ...], count: int) -> None:
        for layer in layers:
            if not 0 <= layer < count:
                problem = f"the target has {self.num_layers} layers"
                raise InvalidParameterError(field, layer, problem, f"Use 0 to {count - 1}.")
        if list(layers) != sorted(set(layers)):
            raise InvalidParameterError(field, list(layers), "not in ascending order", "Sort them, each once.")

    def _checked(self, hidden: Tensor, num_rows: int | None = None) -> Tensor:
        if not isinstance(hidden, Tensor):
            raise InvalidParameterError("hidden", type(hidden).__name__, "no tensor", f"Use [n, {self.hidden_size}].")
        fits = hidden.ndim == 2 and hidden.shape[1] == self.hidden_size
        if not fits or (num_rows is not None and len(hidden) != num_rows):
            rows = "n" if num_rows is None else num_rows
            raise InvalidParameterError(
                "hidden", list(hidden.shape), "hidden states of another shape", f"Use [{rows}, {self.hidden_size}]."
            )
        return hidden.to(self.device)
