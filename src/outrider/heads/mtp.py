"""MtpHead: runs the layers for the prediction of several tokens that a target's own checkpoint carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from outrider.cache.memory import AddedShape
from outrider.errors import ModelLoadError
from outrider.heads.checkpoint import use_kernels
from outrider.heads.eagle import FeatureHead
from outrider.heads.formats.mtp import MtpConfig, MtpTensors, read_mtp, read_mtp_config
from outrider.heads.lone import LoneDecoder, Look, empty_lone, kept_widths, load_lone_decoder
from outrider.kernels.library import kernel_library
from outrider.kernels.weights import keep_quantised, round_rows
from outrider.loading.gguf.header import is_gguf
from outrider.loading.gguf.prediction import PredictionLayers
from outrider.model.target import Target


class MtpLayer(nn.Module):
    """One layer: a decoder layer of the target's type reads [embedding, feature], each behind a norm of its own.

    Args:
        tensors: As its file has it, in the dtype and on the device of the decoder layer.
        decoder: The decoder layer.
    """

    def __init__(self, tensors: MtpTensors, decoder: LoneDecoder) -> None:
        super().__init__()
        self.embedding_norm = _norm_of(decoder, tensors.embedding_norm)
        self.hidden_norm = _norm_of(decoder, tensors.hidden_norm)
        with torch.device("meta"):
            self.fc = nn.Linear(tensors.fc.shape[1], tensors.fc.shape[0], bias=False)
        self.fc.weight = nn.Parameter(tensors.fc, requires_grad=False)
        self.decoder = decoder

    def enter(self, embeddings: Tensor, features: Tensor) -> Tensor:
        """What the decoder layer reads [n, hidden_size], of embeddings and features of the same shape."""
        read: Tensor = self.fc(torch.cat([self.embedding_norm(embeddings), self.hidden_norm(features)], -1))
        return read


class MtpHead(FeatureHead):
    """The layers of a target.

    Args:
        target: The target.
        folder: A folder or GGUF file that holds them; None for the target's own.

    Raises:
        InvalidParameterError: There is no such folder.
        UnsupportedModelError: The checkpoint carries no such layers, or has no folder.
        ModelLoadError: They cannot be read.
    """

    def __init__(self, target: Target, folder: str | None = None) -> None:
        super().__init__(target)
        folder = target.folder() if folder is None else folder
        config = read_mtp_config(folder, target.config)
        self.shape = mtp_shape(config)
        self.window = config.window
        self.aux_layers = (target.num_layers,)
        place = (target.dtype, target.device)
        if is_gguf(folder):
            file = PredictionLayers(folder, target.config)
            layers = [load_file_layer(folder, config, file, number, *place) for number in range(config.num_layers)]
            if target.rounds_rows:
                for layer in layers:
                    round_rows(layer, layer.decoder.expert_stacks())
        else:
            layers = [load_mtp_layer(folder, config, tensors, *place) for tensors in read_mtp(folder, target.config)]
        self._layers = nn.ModuleList(layers)
        library = kernel_library()
        if library is not None:
            for layer in layers:
                layer.decoder.use_packed_experts(library)
        self.dtype = use_kernels(self._layers, target)

    @torch.inference_mode()
    def fuse(self, hidden: Mapping[int, Tensor]) -> Tensor:
        (layer,) = self.aux_layers
        return hidden[layer].to(self._target.dtype)

    @torch.inference_mode()
    def keys_and_values(
        self, layer: int, token_ids: Sequence[int], features: Tensor, positions: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        read = self._enter(layer, token_ids, features)
        keys, values = self._decoder(layer).keys_and_values(read, positions)
        return keys.to(self._target.dtype), values.to(self._target.dtype)

    @torch.inference_mode()
    def run(self, layer: int, token_ids: Sequence[int], features: Tensor, positions: Sequence[int], look: Look) -> Tensor:
        left: Tensor = self._decoder(layer)(self._enter(layer, token_ids, features), positions, look)
        return left

    def next_feature(self, left: Tensor) -> Tensor:
        return left

    @torch.inference_mode()
    def logits(self, left: Tensor) -> Tensor:
        return self._target.head(left)

    def _enter(self, layer: int, token_ids: Sequence[int], features: Tensor) -> Tensor:
        return self._layer(layer).enter(self._embed(token_ids), features.to(self.dtype))

    def _decoder(self, layer: int) -> LoneDecoder:
        return self._layer(layer).decoder

    def _layer(self, layer: int) -> MtpLayer:
        found = self._layers[layer]
        assert isinstance(found, MtpLayer)
        return found


def mtp_shape(config: MtpConfig) -> AddedShape:
    """What such layers keep of a text."""
    kept = kept_widths(config.layer)
    features = config.num_layers * int(config.layer.hidden_size)
    return AddedShape(config.num_layers, kept.num_heads, kept.key_dim, features, kept.value_dim)


def load_mtp_layer(
    folder: str, config: MtpConfig, tensors: MtpTensors, dtype: torch.dtype, device: torch.device
) -> MtpLayer:
    """A layer with its weights.

    Args:
        folder: Where they come from, to name.
        config: Of the layer.
        tensors: Its weights.
        dtype: In which it has them.
        device: Where they lie.

    Raises:
        ModelLoadError: A tensor is missing, of another shape, or belongs to no part of the layer.
    """
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
    """A layer of a GGUF file, whose matrices stay in their blocks.

    Args:
        path: The file, to name.
        config: Of the layer.
        file: Its layers.
        place: Its number among them.
        dtype: Of what is not in blocks.
        device: Where it lies.

    Raises:
        ModelLoadError: A tensor is missing, of another shape, or holds NaN or infinity.
        UnsupportedModelError: It has a tensor that is not known of its architecture.
    """
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
