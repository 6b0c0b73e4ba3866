"""FusedRunner: runs the layer of a head that drafts token by token in one pass of our kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.cache.memory import AddedLayers
from outrider.cache.pool import LayerReach
from outrider.cache.state import KVView
from outrider.heads.checkpoint import use_kernels
from outrider.heads.features import Eagle1Network, Eagle3Network, FeatureHeadNetwork
from outrider.heads.formats.published import PublishedHead
from outrider.heads.rows import DraftRows, TextRows, Work, pass_rows
from outrider.heads.runner import HeadRunner, NetworkT, features_before
from outrider.kernels.decoder import DecoderKernel, DecoderShape, Entry, PassRows, rows_without_context
from outrider.kernels.library import KernelLibrary, kernel_library
from outrider.model.families import Family
from outrider.model.layer_builder import activation_of, decoder_layer, decoder_shape, norm_of
from outrider.model.matrices import Matrices, whole
from outrider.model.runner import upcast_logits
from outrider.model.target import Target

#: The layers of the two methods: one has no norm before attention, the other has one for embeddings and one for features.
_EAGLE1, _EAGLE3 = Family(attention_norm=None), Family(attention_norm="hidden_norm")
#: The modules that do not stay as they are.
_PACKED = ("layer", "lm_head", "embed_tokens")
_FIRST_POSITIONS = 4096
#: Hidden states behind the norm of the output layer, as transformers counts those of one layer.
_NORMED = 1


class FusedRunner(HeadRunner[NetworkT]):
    """A head of one layer over keys and values in blocks. Those of a draft lie in blocks of its own, behind those of the
    text, so that no level of it copies what is kept of the text. Where it has no embeddings or output layer of its own, the
    target's kernels lend theirs. The arguments are those of `HeadRunner`."""

    kernel: DecoderKernel
    _num_positions = 0

    @property
    def passes_normed(self) -> bool:
        """Whether the next token reads what the layer leaves behind the kernels' final norm, and not what comes before
        it."""
        raise NotImplementedError

    def _pack(self) -> torch.dtype:
        """Take the layer and the output layer over to the kernels, and what comes before them as for every head."""
        library = kernel_library()
        assert library is not None
        self.kernel = self._take(library)
        use_kernels(nn.ModuleList(self._others()), self._target)
        return self.kernel.real

    def _take(self, library: KernelLibrary) -> DecoderKernel:
        """The kernel of the layer, with its weights."""
        raise NotImplementedError

    def _others(self) -> Iterable[nn.Module]:
        """What features go through first, which stays as it is."""
        return ()

    def _tables(self, num_positions: int) -> list[list[tuple[Tensor, Tensor]]]:
        """Rotary tables as the kernels take them, for so many positions at least."""
        raise NotImplementedError

    def join(self) -> AddedLayers:
        self.shape = replace(self.shape, draft_blocks=True)
        added = super().join()
        self.kernel.use_memory(added.memory)
        return added

    @torch.inference_mode()
    def recompute(self, token_ids: Sequence[int], hidden: Mapping[int, Tensor]) -> list[tuple[Tensor, Tensor]]:
        count = len(token_ids)
        size = count, self.shape.num_heads, self.shape.head_dim
        memory = torch.empty(size, dtype=self._target.dtype), torch.empty(size, dtype=self._target.dtype)
        before = torch.zeros(1, self.shape.feature_size, dtype=self._target.dtype)
        with self.kernel.other_memory([memory]):
            self._read(list(token_ids), [range(count)], before, hidden, list(range(count)))
        return [memory]

    @torch.inference_mode()
    def _read(
        self, tokens: list[int], spans: Sequence[range], before: Tensor, hidden: Mapping[int, Tensor], keep: Any
    ) -> Tensor:
        features = self.fuse(hidden)
        rows = rows_without_context(tokens, [place for span in spans for place in span], keep)
        self._use_positions(rows)
        self.kernel.keep(rows, 0, features_before(before, features, spans))
        return features

    def _keeping(self, added: AddedLayers, texts: Sequence[TextRows]) -> Any:
        return [slot for text in texts for slot in added.writable_slots(text.kv, text.start, len(text.span))]

    def begin(self, added: AddedLayers, kv: KVView, feature: Tensor, room: int, free: Iterator[int]) -> DraftRows | None:
        draft = DraftRows.of(added.num_filled(kv), feature, room)
        return draft if draft.lies_in_blocks(kv, added, free) else None

    @torch.inference_mode()
    def compute(self, work: Sequence[Work], *, wanted: bool) -> Tensor:
        parts = [(draft, draft.take(tokens, parents)) for draft, tokens, parents in work]
        computed = [(draft, row) for draft, taken in parts for row in taken]
        rows = pass_rows(parts, wanted=wanted)
        self._use_positions(rows)
        read = torch.stack([draft.features[draft.parents[row]].to(self.dtype) for draft, row in computed])
        wanted_states = (_NORMED,) if self.passes_normed else ()
        logits, aux, left = self.kernel.forward_part(rows, wanted_states, (0,), read, head_panels=self.head_panels())
        for (draft, row), feature in zip(computed, aux.get(_NORMED, left), strict=True):
            draft.features[row] = feature
        return upcast_logits(logits)

    def _use_positions(self, rows: PassRows) -> None:
        """Rotary tables grow by doubling, since most texts are far shorter than what a model allows."""
        needed = max(rows.positions) + 1
        if needed > self._num_positions:
            self._num_positions = max(_FIRST_POSITIONS, 2 * needed)
            self.kernel.use_rotary(self._tables(self._num_positions))


class FusedEagle(FusedRunner[FeatureHeadNetwork]):
    """A published EAGLE head."""

    @property
    def passes_normed(self) -> bool:
        return self.network.config.norm_output

    def _take(self, library: KernelLibrary) -> DecoderKernel:
        return _kernel(self.network, self._target, library)

    def _others(self) -> Iterable[nn.Module]:
        if isinstance(self.network, Eagle1Network):
            return ()
        return (module for name, module in self.network.named_children() if name not in _PACKED)

    def _tables(self, num_positions: int) -> list[list[tuple[Tensor, Tensor]]]:
        cosines, sines = self._where(range(num_positions))
        half = cosines.shape[-1] // 2  # every number stands for a pair
        return [[(cosines[:, :half], sines[:, :half])]]


def open_head(head: PublishedHead, target: Target) -> HeadRunner[FeatureHeadNetwork]:
    """A head that drafts token by token, in our kernels if these compute the target's passes and know the head."""
    fused = kernel_library() is not None and target.fused and _is_known(head)
    return (FusedEagle if fused else HeadRunner).of(head, target)


def _is_known(head: PublishedHead) -> bool:
    """Tells if our kernels have the activation of its layer."""
    try:
        activation_of(head.config.layer, _EAGLE3)
    except ValueError:
        return False
    return True


def _kernel(network: FeatureHeadNetwork, target: Target, library: KernelLibrary) -> DecoderKernel:
    config, matrices, lender = network.config, Matrices(library), target.kernel
    family = _EAGLE3 if isinstance(network, Eagle3Network) else _EAGLE1
    layer = replace(decoder_layer(network.layer, LayerReach(), 0, config.layer, family, matrices), unseen=1)
    final_norm = entry = None
    if isinstance(network, Eagle1Network):
        entry = Entry(matrices.take(whole(network.fc)), None, None)
    if isinstance(network, Eagle3Network):
        beside = norm_of(network.layer.input_layernorm, family)
        layer = replace(layer, beside_norm=beside, normed_residual=config.norm_before_residual)
        final_norm = norm_of(network.norm, family)
    own, shape = network.embed_tokens, decoder_shape(config.layer, family, None, [layer])
    head = None if network.lm_head is None else matrices.take(whole(network.lm_head))
    matrices.empty()
    return DecoderKernel(
        library,
        lent(shape, lender, embedding=own is None, head=head is None),
        [layer],
        embedding=lender.embedding if own is None else own.weight.data,
        positions=None,
        final_norm=final_norm,
        head=lender.head if head is None else head,
        kv_dtype=target.dtype,
        entry=entry,
    )


def lent(shape: DecoderShape, lender: DecoderKernel, *, embedding: bool = True, head: bool = True) -> DecoderShape:
    """The shape of a decoder with factors of the embeddings and the logits that another one lends."""
    if embedding:
        shape = replace(shape, embedding_scale=lender.shape.embedding_scale, input_scale=1.0)
    if head:
        shape = replace(shape, logit_scale=lender.shape.logit_scale, logit_cap=lender.shape.logit_cap)
    return shape
