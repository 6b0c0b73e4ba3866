"""Runs the layers for the prediction of several tokens that a target's own checkpoint carries."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from outrider.cache.memory import AddedShape
from outrider.errors import ModelLoadError
from outrider.heads.features import BesideNetwork
from outrider.heads.formats.mtp import MtpConfig, MtpTensors, read_mtp, read_mtp_config
from outrider.heads.fused_head import FusedRunner, lent
from outrider.heads.lone import LoneDecoder, empty_lone, kept_widths, load_lone_decoder
from outrider.heads.runner import HeadRunner
from outrider.kernels.decoder import DecoderKernel, Entry
from outrider.kernels.library import KernelLibrary, kernel_library
from outrider.kernels.weights import keep_quantised, round_rows
from outrider.loading import hf_modules
from outrider.loading.gguf.header import is_gguf
from outrider.loading.gguf.prediction import PredictionLayers
from outrider.model.fused import RotaryTables
from outrider.model.layer_builder import decoder_layer, decoder_shape, described, norm_of
from outrider.model.matrices import Matrices, whole
from outrider.model.target import Target


class MtpLayer(nn.Module):
    """One layer: a decoder layer of the target's type reads [embedding, feature], each behind a norm of its own. The
    tensors are in the dtype and on the device of the decoder layer."""

    def __init__(self, tensors: MtpTensors, decoder: LoneDecoder) -> None:
        super().__init__()
        self.embedding_norm = _norm_of(decoder, tensors.embedding_norm)
        self.hidden_norm = _norm_of(decoder, tensors.hidden_norm)
        with torch.device("meta"):
            self.fc = nn.Linear(tensors.fc.shape[1], tensors.fc.shape[0], bias=False)
        self.fc.weight = nn.Parameter(tensors.fc, requires_grad=False)
        self.decoder = decoder

    @property
    def stack(self) -> Sequence[LoneDecoder]:
        """The decoder layer, which makes its own rotary positions."""
        return [self.decoder]

    def enter(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """Rows [n, hidden_size] that the decoder layer reads, of embeddings and features of the same shape."""
        read: Tensor = self.fc(torch.cat([self.embedding_norm(embeddings), self.hidden_norm(features)], -1))
        return read


class MtpNetwork(BesideNetwork):
    """The layers of a target, each of which is a level."""

    def __init__(self, layers: Sequence[MtpLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    @property
    def levels(self) -> Sequence[MtpLayer]:
        return [layer for layer in self.layers if isinstance(layer, MtpLayer)]


class FusedMtp(FusedRunner[MtpNetwork]):
    """One layer in a pass of our kernels, where these know the target's type."""

    passes_normed = True

    def _take(self, library: KernelLibrary) -> DecoderKernel:
        stack, matrices = self._layer.decoder.stack, Matrices(library)
        config, family = described(stack)
        self._rotary_tables = RotaryTables(stack, family)
        (spec,), (layer,) = hf_modules.layer_specs(config), hf_modules.decoder_layers(stack)
        number = self._rotary_tables.number(spec.type_name)
        packed = replace(decoder_layer(layer, spec.reach, number, config, family, matrices), unseen=1)
        norms = (norm_of(each, family) for each in (self._layer.embedding_norm, self._layer.hidden_norm))
        entry, lender = Entry(matrices.take(whole(self._layer.fc)), *norms), self._target.kernel
        matrices.empty()
        return DecoderKernel(
            library,
            lent(decoder_shape(config, family, None, [packed]), lender),
            [packed],
            embedding=lender.embedding,
            positions=None,
            final_norm=norm_of(stack.norm, family),
            head=lender.head,
            kv_dtype=self._target.dtype,
            entry=entry,
        )

    @property
    def _layer(self) -> MtpLayer:
        (layer,) = self.network.levels
        return layer

    def _tables(self, num_positions: int) -> list[list[tuple[Tensor, Tensor]]]:
        return self._rotary_tables.build(num_positions)


def _is_fused(layers: Sequence[MtpLayer], config: MtpConfig, target: Target) -> bool:
    """Whether our kernels compute such a layer as they compute the target's."""
    if not target.fused or len(layers) > 1 or config.window is not None:
        return False
    try:
        _, family = described(layers[0].decoder.stack)
    except ValueError:
        return False
    return family.positions is None and family.source is None


def open_mtp(target: Target, folder: str | None = None) -> HeadRunner[MtpNetwork]:
    """The layers of a target beside it, from a folder or a GGUF file that holds them; None for the target's own."""
    folder = target.folder() if folder is None else folder
    config, place = read_mtp_config(folder, target.config), (target.dtype, target.device)
    if is_gguf(folder):
        file = PredictionLayers(folder, target.config)
        layers = [load_file_layer(folder, config, file, number, *place) for number in range(config.num_layers)]
    else:
        layers = [load_mtp_layer(folder, config, tensors, *place) for tensors in read_mtp(folder, target.config)]
    if target.rounds_rows:  # of blocks alone
        for layer in layers:
            round_rows(layer, layer.decoder.expert_stacks())
    network, aux_layers, shape = MtpNetwork(layers), (target.num_layers,), mtp_shape(config)
    if _is_fused(layers, config, target):
        return FusedMtp(network, target, aux_layers, shape)
    library = kernel_library()
    if library is not None:
        for layer in layers:
            layer.decoder.use_packed_experts(library)
    return HeadRunner(network, target, aux_layers, shape, window=config.window)


def mtp_shape(config: MtpConfig) -> AddedShape:
    """Shape of what such layers keep of a text."""
    num_heads, key_dim, value_dim = kept_widths(config.layer)
    features = config.num_layers * int(config.layer.hidden_size)
    return AddedShape(config.num_layers, num_heads, key_dim, features, value_dim)


def load_mtp_layer(
    folder: str, config: MtpConfig, tensors: MtpTensors, dtype: torch.dtype, device: torch.device
) -> MtpLayer:
    """A layer with its weights from a folder, in this dtype and on this device."""
    hidden = int(config.layer.hidden_size)
    shapes = {"fc": [hidden, 2 * hidden], "embedding_norm": [hidden], "hidden_norm": [hidden]}
    for name, shape in shapes.items():
        found = list(getattr(tensors, name).shape)
        if found != shape:
            problem = f"its layers that predict several tokens have {name} of shape {found}, and {shape} is needed"
            raise ModelLoadError(folder, problem, "Download or save the checkpoint again.")
    own = {name: getattr(tensors, name).to(device, dtype) for name in shapes}
    decoder = load_lone_decoder(folder, config.layer, tensors.decoder, dtype, device)
    return MtpLayer(tensors._replace(**own), decoder)


def load_file_layer(
    path: str, config: MtpConfig, file: PredictionLayers, place: int, dtype: torch.dtype, device: torch.device
) -> MtpLayer:
    """A layer of a GGUF file, whose matrices stay in their blocks."""
    read = file.read(place, config.layer, empty_lone(path, config.layer), dtype)
    decoder = load_lone_decoder(path, config.layer, read.decoder, dtype, device, read.fill)
    fc, embedding, hidden = (each.to(device, dtype) for each in (read.fc, read.embedding_norm, read.hidden_norm))
    layer = MtpLayer(MtpTensors(fc, embedding, hidden, read.decoder), decoder)
    if read.stored is not None:
        keep_quantised(layer.fc, read.stored)
    return layer


def _norm_of(decoder: LoneDecoder, weight: Tensor) -> nn.Module:
    """A norm as the decoder's type has them, with another weight: some types add 1 to it."""
    norm = deepcopy(decoder.norm)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm
