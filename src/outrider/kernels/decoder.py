"""A whole forward pass of a decoder in one call of the compiled kernels.

Small models spend most of their time between operators, since a pass dispatches some hundred of them. Here a pass is one
parallel region over packed weights (native/decoder.inc), and attention reads the KV memory through the block table. What a
decoder is made of is described here, and the kernels follow the description. Activations are float64 for float64 weights,
and float32 for all others. Where the processor has products of bf16, they are rounded as they enter such a product. Rows
are independent of each other: the bits of a token depend neither on the batch, nor on the chunk, nor on the draft that it
is computed in.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from outrider.kernels.experts import PackedExperts
from outrider.kernels.layout import (
    ACTIVATIONS,
    ATTENTION_LISTS,
    LAYER_MATRICES,
    LAYER_NORMS,
    PASS_LISTS,
    DecoderStruct,
    FeedForward,
    FormatCode,
    LayerStruct,
    LinearStruct,
    NormKind,
    NormStruct,
    PassStruct,
    RotaryStruct,
)
from outrider.kernels.library import KernelLibrary
from outrider.kernels.mixers import Mixer, MixerRows, MixerWeights, mixer_structs
from outrider.kernels.packed import PackedWeights

_I64, _POINTER = ctypes.c_int64, ctypes.c_void_p


@dataclass(frozen=True)
class Norm:
    """A norm."""

    kind: NormKind  # what it does
    epsilon: float  # what is added to the mean square
    weight: Tensor  # its factors, one for each number. Norms of heads have factors for every head.
    bias: Tensor | None = None  # what is added, in the shape of `weight`, or None


@dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder, and what holds for all of its layers."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str  # the activation of the feed-forward, a key of ACTIVATIONS
    parallel: bool = False  # whether the feed-forward stands beside attention, so that both read the input of the layer
    # Whether rotary embeddings turn pairs of neighbours, and not of numbers that lie half a head apart.
    interleaved: bool = False
    embedding_scale: float = 1.0  # the factor of the rows of the embedding table
    input_scale: float = 1.0  # another factor, of what the first layer reads
    logit_scale: float = 1.0  # the factor of logits
    logit_cap: float = 0.0  # the bound that logits come near to, by a hyperbolic tangent. 0 is none.


@dataclass(frozen=True)
class DecoderLayer:
    """The weights of one layer. Norms are not packed, and matrices are.

    Attributes:
        mlp_norm, mlp_post_norm: The norms before and after the feed-forward, or None. Without the first one, a feed-forward
            beside attention reads what attention reads.
    """

    attention_norm: Norm | None  # the norms before and after attention, or None
    attention_post_norm: Norm | None  # the norms before and after attention, or None
    mlp_norm: Norm | None
    mlp_post_norm: Norm | None
    query_norm: Norm | None  # the norms of the heads, or None
    key_norm: Norm | None  # the norms of the heads, or None
    whole_norms: bool  # whether these take all heads together, and not each alone
    # The query, key and value projections, stacked, and behind them gates of heads that have some. In a layer with a
    # running state, the projection into it, in the order of `Mixer`.
    qkv: PackedWeights
    out: PackedWeights  # the projection from the heads to the hidden state
    # The projection into the feed-forward to which the activation is applied, or None where there is only `up`.
    gate: PackedWeights | None
    up: PackedWeights | None  # the projection that is multiplied with it, or that the activation is applied to
    down: PackedWeights | None  # the projection from the feed-forward to the hidden state
    # The experts that the feed-forward is made of, or None. With the last three, these stand beside the experts.
    experts: PackedExperts | None
    rotary: int | None  # which rotary tables it uses, or None where positions do not enter
    scale: float  # the factor of attention scores
    softcap: float  # a score s of attention becomes softcap * tanh(s / softcap). 0 leaves scores as they are.
    residual_scale: float  # the factor of what attention and the feed-forward add to the hidden state
    window: int  # how far rows look back. 0 means that they see everything.
    chunk: int  # how far rows look back. 0 means that they see everything.
    # [num_heads], for each query head a score that all rows see and that has no value. None where there are none.
    sinks: Tensor | None = None
    unseen: int = 0  # how many tokens at the beginning of a text no later row sees
    beside_norm: Norm | None = None  # the norm of the embedding that attention reads before the hidden state, or None
    normed_residual: bool = False  # whether attention then adds to what `attention_norm` leaves, and not to what that reads
    mixer: Mixer | None = None  # what the layer has instead of attention where it keeps a running state, or None
    gated_heads: bool = False  # whether what heads attend to is multiplied by the sigmoids of gates
    # [hidden_size] what a feed-forward beside experts is scaled by: the sigmoid of the product with a row.
    beside_gate: Tensor | None = None
    # [num_heads, num_distances] what is added to scores by the distance of a key; the last one holds for all greater
    # distances. None where there are none.
    biases: Tensor | None = None
    source_norm: Norm | None = None  # the norm before attention to a source, or None
    # The projection to the queries of such attention, whose keys and values lie in the KV memory, or None.
    source_query: PackedWeights | None = None
    source_out: PackedWeights | None = None  # the projection from its heads to the hidden state, or None

    @property
    def feed_forward(self) -> FeedForward:
        """Returns what its feed-forward is made of."""
        if self.experts is not None:
            return FeedForward.EXPERTS
        return FeedForward.PLAIN if self.gate is None else FeedForward.GATED

    @property
    def nbytes(self) -> int:
        """The bytes of weights that one row reads."""
        matrices = (getattr(self, name) for name in (*LAYER_MATRICES, "experts"))
        return sum(weights.nbytes for weights in matrices if weights is not None)


@dataclass(frozen=True)
class Entry:
    """What rows go through before the first layer: a product of [embedding, row that the pass brings]."""

    weights: PackedWeights  # [hidden_size, 2 * hidden_size]
    embedding_norm: Norm | None  # the norm of the embedding before it, or None
    row_norm: Norm | None  # the norm of the row before it, or None


@dataclass(frozen=True)
class PassRows:
    """The rows of one pass. They are plain lists, since most passes have few rows."""

    tokens: list[int]  # [num_rows]
    positions: list[int]  # [num_rows]
    slots: list[int]  # [num_rows]
    long_rows: list[int]  # [num_rows], whether a row takes the second pair of rotary tables
    first: list[int]  # [num_segments + 1], the first row of each sequence
    start: list[int]  # [num_segments], the number of tokens before the rows of each sequence
    tables: list[int]  # the block tables, one after another
    table_at: list[int]  # [num_segments], where each block table begins
    ancestry_at: list[int]  # [num_segments], where the matrix of each tree begins in `ancestry`. -1 for a chain.
    logit_rows: list[int]  # [num_logits], the rows whose logits are wanted
    ancestry: np.ndarray  # uint8, for each tree a matrix that says which row sees which, one after another
    block_size: int  # the number of tokens in a block
    # [num_rows], the row before each one, counted within its sequence, -1 for the text before the pass. Layers with a
    # running state read them, and without such layers there may be none.
    parents: Sequence[int] = ()
    # [num_segments + 1], how many rows of trees earlier passes have computed before each segment's. They lie in the slots
    # before its own rows, `start` is where its tree begins, and the tree's matrix holds them, too. Empty where there are
    # none.
    known: Sequence[int] = ()
    # The positions of all rows, in each segment those of the known rows first. Empty where there are none.
    tree_positions: Sequence[int] = ()
    # The same rows as they see the sources of their texts: `start` says how many tokens a source has, and the position of
    # every row is that of the last one. None where there are no sources.
    sources: PassRows | None = None


class DecoderKernel:
    """A decoder's weights, and its forward pass.

    Args:
        embedding: [vocab_size, hidden_size], perhaps packed; the head's packed weights where these are tied to it, and
            those of another decoder where it lends its own. None for layers that are given rows, and read no tokens.
        positions: [num_positions, hidden_size] learned embeddings of positions, or None.
        final_norm: The norm behind the last layer, or None.
        head: The weights from the hidden state to the logits; None for layers without logits of their own.
        entry: What embeddings and the rows that a pass brings go through, or None.
    """

    def __init__(
        self,
        library: KernelLibrary,
        shape: DecoderShape,
        layers: Sequence[DecoderLayer],
        embedding: Tensor | PackedWeights | None,
        positions: Tensor | None,
        final_norm: Norm | None,
        head: PackedWeights | None,
        kv_dtype: torch.dtype,
        entry: Entry | None = None,
    ) -> None:
        self._library = library
        self.real = layers[0].qkv.real
        self.shape, self.head, self.embedding, self._entry = shape, head, embedding, entry
        self._packed = list(layers)
        self._mixers: list[MixerWeights] = []
        self._memory: list[tuple[Tensor, Tensor] | None] = [None] * len(layers)
        self._vectors: list[Tensor] = []  # the structures point into these tensors too, so they must stay alive
        table = embedding if isinstance(embedding, Tensor) else None
        packed = embedding if isinstance(embedding, PackedWeights) else None
        used = [layer.rotary for layer in layers if layer.rotary is not None]
        self._rotary = (RotaryStruct * (1 + max(used, default=0)))()
        self._tables: list[Tensor] = []
        self._layers = (LayerStruct * len(layers))(*(self._layer(layer) for layer in layers))
        self._decoder = DecoderStruct(
            num_layers=len(layers),
            hidden=shape.hidden_size,
            intermediate=shape.intermediate_size,
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            kv_bf16=kv_dtype == torch.bfloat16,
            interleaved=shape.interleaved,
            activation=ACTIVATIONS[shape.activation],
            parallel=shape.parallel,
            embed_bf16=table is not None and table.dtype == torch.bfloat16,
            embed_scale=shape.embedding_scale * shape.input_scale,
            logit_scale=shape.logit_scale,
            logit_cap=shape.logit_cap,
            layers=ctypes.addressof(self._layers),
            embedding=None if table is None else table.data_ptr(),
            packed_embedding=None if packed is None else ctypes.addressof(packed.struct),
            position_table=self._vector(positions),
            head=LinearStruct() if head is None else head.struct,
            final_norm=self._norm(final_norm),
        )
        if entry is not None:
            self._decoder.entry = entry.weights.struct
            self._decoder.entry_norms[:] = self._norm(entry.embedding_norm), self._norm(entry.row_norm)
        readable = packed is None or not packed.format.quantised or packed.format.code is FormatCode.BLOCKS
        assert readable, "weights that were rounded here have no embeddings to read"
        self._scratch = torch.empty(0, dtype=self.real)
        self._decode = library.function("decode", self.real)
        self._scratch_size = library.function("scratch_size", self.real, _I64)

    @property
    def kernels(self) -> str:
        """The instruction set for which its weights are packed."""
        return self._packed[0].qkv.kernels

    @property
    def tokens_at_once(self) -> int | None:
        """Returns how many tokens, one behind another, have logits together or have none. None where all must have some."""
        return None if self.head is None or self.head.tail is not None else self._library.panel(self.real)

    @property
    def nbytes(self) -> int:
        """The bytes of weights that a pass of one row reads."""
        return sum(each.nbytes for each in (self.head, *self._packed) if each is not None)

    def use_rotary(self, tables: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> None:
        """Take rotary tables.

        Args:
            tables: For each number that layers name, cosines and sines [num_positions, rotary_dim / 2], and a second pair
                where long texts have other ones.
        """
        taken: list[Tensor] = []
        for struct, pairs in zip(self._rotary, tables, strict=True):
            near, far = pairs[0], pairs[-1]
            kept = [t.to(self.real).contiguous() for t in (*near, *far)]
            pointers = [t.data_ptr() for t in kept]
            struct.cosines[:], struct.sines[:] = pointers[0::2], pointers[1::2]
            self._decoder.rotary_dim = 2 * kept[0].shape[-1]
            taken += kept
        self._tables = taken

    @property
    def mixers(self) -> list[Mixer | None]:
        """By layer, what it has where it keeps a running state."""
        return [layer.mixer for layer in self._packed]

    def use_memory(self, pools: Sequence[tuple[Tensor, Tensor] | None]) -> None:
        """Use the keys and values [num_slots, num_kv_heads, head_dim] of every layer that attends as KV memory."""
        self._memory = list(pools)
        for layer, pool in zip(self._layers, pools, strict=True):
            if pool is not None:
                layer.keys, layer.values = (each.data_ptr() for each in pool)

    @contextmanager
    def other_memory(self, pools: Sequence[tuple[Tensor, Tensor] | None]) -> Iterator[None]:
        """Use another KV memory for a while."""
        before = self._memory
        self.use_memory(pools)
        try:
            yield
        finally:
            self.use_memory(before)

    def forward(
        self,
        rows: PassRows,
        aux_layers: Sequence[int] = (),
        mixed: Sequence[MixerRows | None] = (),
        head_panels: np.ndarray | None = None,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Compute the rows, and write their KV to the memory in use.

        Args:
            mixed: By layer, what rows read and leave where it keeps a running state; empty without such layers.
            head_panels: int64 [n, 2], ascending ranges of groups of `tokens_at_once` tokens that have logits; those of all
                others are minus infinity. None computes all.

        Returns:
            Logits [num_logits, vocab_size], and the wanted hidden states [num_rows, hidden_size] by their index in
            transformers.
        """
        count = len(self._layers) + 1
        for layer in aux_layers:
            if not -count <= layer < count:
                raise IndexError(f"hidden states {layer} of {count}")
        aux = {layer % count: self._states_like(len(rows.tokens)) for layer in aux_layers}
        states = [aux.get(i) for i in range(count)] if aux else []
        logits = self._pass(self._decoder, rows, states, mixed=mixed, head_panels=head_panels)
        return logits, {layer: aux[layer % count] for layer in aux_layers}

    def forward_part(
        self,
        rows: PassRows,
        aux_layers: Sequence[int],
        layers: Sequence[int],
        hidden: Tensor | None,
        mixed: Sequence[MixerRows | None] = (),
        head_panels: np.ndarray | None = None,
    ) -> tuple[Tensor, dict[int, Tensor], Tensor]:
        """Compute the rows through some of the layers, and then through the final norm and the head.

        Args:
            hidden: [num_rows, hidden_size] the input of the first of them, or of the entry. None begins with the
                embeddings.
            head_panels: As for `forward`.

        Returns:
            Logits [num_logits, vocab_size], hidden states by index, and the output of the last layer
            [num_rows, hidden_size].
        """
        decoder, _chosen = self._part(layers)
        num_rows, last = len(rows.tokens), len(self._layers)
        places = {layer: place for place, layer in enumerate((*layers, last))}
        aux = {layer: self._states_like(num_rows) for layer in aux_layers if layer in places}
        states = [aux.get(layer) for layer in (*layers, last)] if aux else []
        left = self._states_like(num_rows)
        logits = self._pass(decoder, rows, states, hidden, left, mixed, head_panels=head_panels)
        return logits, aux, left

    def keep(self, rows: PassRows, layer: int, hidden: Tensor) -> None:
        """Write the keys and values of rows to the memory in use, and compute nothing else.

        Args:
            hidden: [num_rows, hidden_size] the input of the layer, or of the entry.
        """
        decoder, _chosen = self._part([layer])
        self._pass(decoder, rows, [], hidden, keeps_only=True)

    def _part(self, layers: Sequence[int]) -> tuple[DecoderStruct, ctypes.Array[LayerStruct]]:
        """A decoder of some of the layers, over the same memory, and the list of them that it points to."""
        decoder = DecoderStruct.from_buffer_copy(self._decoder)
        chosen = (LayerStruct * len(layers))(*(self._layers[i] for i in layers))
        decoder.layers, decoder.num_layers = ctypes.addressof(chosen), len(layers)
        return decoder, chosen

    def embed(self, token_ids: Tensor) -> Tensor:
        """The rows [n, hidden_size] of the embedding table, without what positions add to them."""
        decoder = DecoderStruct.from_buffer_copy(self._decoder)
        decoder.num_layers, decoder.embed_scale, decoder.position_table = 0, self.shape.embedding_scale, None
        rows = rows_without_context(token_ids.tolist())
        found = self._states_like(len(token_ids))
        self._pass(decoder, rows, [], None, found)
        return found

    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm of hidden states [n, hidden_size]."""
        rows, last = rows_without_context([0] * len(hidden)), len(self._layers)
        return self.forward_part(rows, (last,), (), hidden)[1][last]

    def logits(self, hidden: Tensor, head_panels: np.ndarray | None = None) -> Tensor:
        """The logits [n, vocab_size] of normed hidden states [n, hidden_size], scaled and capped. `head_panels` are as for
        `forward`."""
        decoder = DecoderStruct.from_buffer_copy(self._decoder)
        decoder.num_layers, decoder.final_norm = 0, NormStruct(NormKind.NONE)
        rows = replace(rows_without_context([0] * len(hidden)), logit_rows=list(range(len(hidden))))
        return self._pass(decoder, rows, [], hidden, head_panels=head_panels)

    def _states_like(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows, self.shape.hidden_size, dtype=self.real)

    def _pass(
        self,
        decoder: DecoderStruct,
        rows: PassRows,
        states: Sequence[Tensor | None],
        hidden: Tensor | None = None,
        left: Tensor | None = None,
        mixed: Sequence[MixerRows | None] = (),
        *,
        keeps_only: bool = False,
        head_panels: np.ndarray | None = None,
    ) -> Tensor:
        """Call the kernels once. Returns logits [num_logits, vocab_size].

        Args:
            mixed: What rows read and leave in each layer.
        """
        num_rows, num_logits = len(rows.tokens), len(rows.logit_rows)
        beyond = None if rows.sources is None else _SourceTables(rows.sources)
        assert self.head is not None or not num_logits, "these layers have no logits of their own"
        width, vocab_size = (0, 0) if self.head is None else (self.head.width, self.head.out_features)
        out = torch.empty(num_logits, width, dtype=self.real)
        if head_panels is not None:
            out.fill_(-torch.inf)
        lists = [getattr(rows, name) for name in PASS_LISTS]
        numbers = np.array(list(chain.from_iterable(lists)), np.int64)  # one array holds all lists
        begins = accumulate((len(values) for values in lists[:-1]), initial=0)
        base = numbers.ctypes.data
        addresses = (base + 8 * begin for begin in begins)
        pointers = (_POINTER * len(states))(*(None if s is None else s.data_ptr() for s in states)) if states else None
        given = None if hidden is None else hidden.to(self.real).contiguous()
        parents, running = np.array(rows.parents, np.int64), mixer_structs(mixed)
        known, places = np.array(rows.known, np.int64), np.array(rows.tree_positions, np.int64)
        call = PassStruct(
            num_rows,
            len(rows.start),
            num_logits,
            rows.block_size,
            *addresses,
            rows.ancestry.ctypes.data,
            parents.ctypes.data if mixed else None,
            ctypes.addressof(running) if mixed else None,
            known.ctypes.data if rows.known else None,
            places.ctypes.data if rows.known else None,
            keeps_only,
            False,
            None if beyond is None else ctypes.addressof(beyond.struct),
            None if head_panels is None else head_panels.ctypes.data,
            0 if head_panels is None else len(head_panels),
            out.data_ptr(),
            None if pointers is None else ctypes.addressof(pointers),
            None if given is None else given.data_ptr(),
            None if left is None else left.data_ptr(),
        )
        threads = _I64(self._library.num_threads)
        passed = ctypes.byref(call)
        needed = self._scratch_size(ctypes.byref(decoder), passed, threads)
        if needed > len(self._scratch):
            self._scratch = torch.empty(needed, dtype=self.real)
        call.scratch = self._scratch.data_ptr()
        self._decode(ctypes.byref(decoder), passed, threads)
        return out[:, :vocab_size]

    def _layer(self, layer: DecoderLayer) -> LayerStruct:
        matrices = {name: getattr(layer, name) for name in LAYER_MATRICES}
        rotary = None if layer.rotary is None else ctypes.addressof(self._rotary[layer.rotary])
        mixer = None
        if layer.mixer is not None:
            self._mixers.append(MixerWeights(layer.mixer, self.real))
            mixer = ctypes.addressof(self._mixers[-1].struct)
        return LayerStruct(
            **{name: self._norm(getattr(layer, name)) for name in LAYER_NORMS},
            **{name: LinearStruct() if weights is None else weights.struct for name, weights in matrices.items()},
            experts=None if layer.experts is None else ctypes.addressof(layer.experts.struct),
            mixer=mixer,
            beside_gate=self._vector(layer.beside_gate),
            rotary=rotary,
            sinks=self._vector(layer.sinks),
            biases=self._vector(layer.biases),
            distances=0 if layer.biases is None else layer.biases.shape[1],
            window=layer.window,
            chunk=layer.chunk,
            unseen=layer.unseen,
            normed_residual=layer.normed_residual,
            gated_heads=layer.gated_heads,
            whole_norms=layer.whole_norms,
            feed_forward=layer.feed_forward,
            scale=layer.scale,
            softcap=layer.softcap,
            residual_scale=layer.residual_scale,
        )

    def _norm(self, norm: Norm | None) -> NormStruct:
        if norm is None:
            return NormStruct(NormKind.NONE)
        return NormStruct(norm.kind, norm.epsilon, self._vector(norm.weight), self._vector(norm.bias))

    def _vector(self, values: Tensor | None) -> int | None:
        if values is None:
            return None
        self._vectors.append(values.detach().to(self.real).contiguous())
        return self._vectors[-1].data_ptr()


class _SourceTables:
    """Rows as they see sources, for the kernels."""

    def __init__(self, rows: PassRows) -> None:
        lists = [getattr(rows, name) for name in ATTENTION_LISTS]
        self._numbers = np.array(list(chain.from_iterable(lists)), np.int64)  # the structure points into it
        begins = accumulate((len(values) for values in lists[:-1]), initial=0)
        addresses = {name: self._numbers.ctypes.data + 8 * at for name, at in zip(ATTENTION_LISTS, begins, strict=True)}
        segments, size = len(rows.start), rows.block_size
        self.struct = PassStruct(rows=len(rows.positions), segments=segments, block_size=size, of_sources=True, **addresses)


def rows_without_context(tokens: list[int], positions: list[int] | None = None, slots: list[int] | None = None) -> PassRows:
    """The rows of a pass that reads no KV memory; positions and slots are 0 where none are given."""
    count = len(tokens)
    nothing = [0] * count
    return PassRows(
        tokens=tokens,
        positions=nothing if positions is None else positions,
        slots=nothing if slots is None else slots,
        long_rows=nothing,
        first=[0, count],
        start=[0],
        tables=[0],
        table_at=[0],
        ancestry_at=[-1],
        logit_rows=[],
        ancestry=np.empty(0, np.uint8),
        block_size=1,
    )
