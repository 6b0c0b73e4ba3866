"""Assistants of Gemma 4: small decoders that read a target's own keys and values, and keep none of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import HeadMismatchError, ModelLoadError
from outrider.heads.checkpoint import use_kernels
from outrider.heads.formats.folder import (
    CONFIG,
    SLIDING,
    HeadTensor,
    check_num_layers,
    check_positive,
    read_config,
    read_flag,
    read_tensors,
    refused,
)
from outrider.heads.formats.gguf import is_gguf_assistant, read_gguf_assistant, read_gguf_assistant_tensors
from outrider.heads.lone import SeenContext, attend_alone, layer_config
from outrider.loading import hf_modules
from outrider.loading.exclusive import attempt, exclusive_transformers
from outrider.loading.gguf.header import is_gguf
from outrider.loading.hf_modules import ASSISTANTS
from outrider.model import hf
from outrider.model.attention import Scores
from outrider.model.runner import upcast_logits
from outrider.model.target import Target

# --- The description of an assistant: a configuration around one of Gemma 4's text models, all of whose layers share.


_OTHER = "Use the assistant that was published with this target."
_DOWNLOAD = "Download the assistant again."


@dataclass(frozen=True)
class AssistantConfig:
    """An assistant, as its folder describes it."""

    folder: str
    layers: Any  # transformers' configuration of its decoder layers
    target_hidden_size: int
    vocab_size: int
    num_clusters: int  # into which its vocabulary is divided; 0 where all tokens are scored
    num_scored: int  # clusters whose tokens are scored at one place


def is_assistant(folder: str) -> bool:
    """Tells if a folder or a GGUF file holds an assistant."""
    if is_gguf(folder):
        return is_gguf_assistant(folder)
    return (Path(folder) / CONFIG).is_file() and read_config(folder).get("model_type") in list(ASSISTANTS)


def read_assistant_config(folder: str) -> AssistantConfig:
    """The description in a folder or a GGUF file."""
    mapping = read_gguf_assistant(folder) if is_gguf(folder) else read_config(folder)
    kind = mapping.get("model_type")
    if kind not in list(ASSISTANTS):  # it may be anything that JSON holds
        problem, remedy = "it is no assistant of Gemma 4", f"Use a folder whose model_type is {' or '.join(ASSISTANTS)}."
        raise refused(folder, "model_type", kind, problem, remedy)
    inner = mapping.get("text_config")
    if not isinstance(inner, Mapping):
        raise refused(folder, "text_config", inner, "it describes no layers", _DOWNLOAD)
    layers = _layers(folder, ASSISTANTS[kind], dict(inner))
    sizes = {"backbone_hidden_size": mapping.get("backbone_hidden_size"), "vocab_size": layers.vocab_size}
    clusters = (0, 0)
    if read_flag(folder, mapping, "use_ordered_embeddings"):
        clusters = mapping.get("num_centroids", 2048), mapping.get("centroid_intermediate_top_k", 32)
        sizes |= {"num_centroids": clusters[0], "centroid_intermediate_top_k": clusters[1]}
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise refused(folder, name, size, "no size", "Use a whole number from 1 on.")
    if clusters[0] and (layers.vocab_size % clusters[0] or clusters[1] > clusters[0]):
        problem = f"{layers.vocab_size} tokens are not divided so, or fewer clusters are there than are scored"
        raise refused(folder, "num_centroids", clusters[0], problem, _DOWNLOAD)
    return AssistantConfig(folder, layers, sizes["backbone_hidden_size"], layers.vocab_size, *clusters)


def _layers(folder: str, kind: str, fields: dict[str, Any]) -> Any:
    """The configuration of its decoder layers, each of which reads keys and values of another model."""
    fields.pop("model_type", None)
    layers = attempt(folder, f"{CONFIG} describes no layers of {kind}", layer_config, kind, fields)
    layers.num_kv_shared_layers = layers.num_hidden_layers
    for name in ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp"):
        if getattr(layers, name, None):
            raise refused(folder, name, getattr(layers, name), "assistants have no such part", _OTHER)
    if SLIDING in layers.layer_types and not layers.sliding_window >= 1:
        raise refused(folder, "sliding_window", layers.sliding_window, "no window", "Use a whole number from 1 on.")
    check_positive(folder, {"rms_norm_eps": layers.rms_norm_eps})
    return layers


# --- Its decoder: transformers' own code, which is told what its rows see.


class _AllShare:
    """A configuration in which no layer keeps keys and values of its own. transformers 5.23 raises for it."""

    @property
    def kv_sharing_modes(self) -> list[str]:
        return ["reuse"] * self.num_hidden_layers  # type: ignore[attr-defined]


class Clusters(nn.Module):
    """Scores the tokens of the likeliest clusters of a vocabulary; the others are not drafted."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        self._num_scored = config.num_scored
        self.centroids = nn.Linear(config.layers.hidden_size, config.num_clusters, bias=False)
        self.token_ordering = nn.Buffer(torch.empty(config.vocab_size, dtype=torch.long))

    def scored(self, states: Tensor, weight: Tensor) -> Tensor:
        """Logits [n, vocab_size] of states [n, hidden_size], given the output layer [vocab_size, hidden_size]."""
        best = self.centroids(states).topk(self._num_scored, -1).indices
        tokens = self.token_ordering.view(self.centroids.out_features, -1)[best].flatten(1)
        scores = (weight[tokens].to(states.dtype) @ states[:, :, None])[..., 0]
        unscored = states.new_full((len(states), len(weight)), torch.finfo(states.dtype).min)
        return unscored.scatter(-1, tokens, scores)


class AssistantNetwork(nn.Module):
    """The modules of an assistant, by the names that it is published with."""

    def __init__(self, config: AssistantConfig) -> None:
        super().__init__()
        width = config.layers.hidden_size
        self.model = _decoder(config)
        self.pre_projection = nn.Linear(2 * config.target_hidden_size, width, bias=False)
        self.post_projection = nn.Linear(width, config.target_hidden_size, bias=False)
        self.masked_embedding = Clusters(config) if config.num_clusters else None
        # Rows of it are looked up where there are clusters, and so it is none of the matrices that our kernels pack.
        self.lm_head: nn.Module
        if config.num_clusters:
            self.lm_head = nn.Embedding(config.vocab_size, width)
        else:
            self.lm_head = nn.Linear(width, config.vocab_size, bias=False)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [n, vocab_size] of what the decoder left [n, hidden_size]."""
        if isinstance(self.lm_head, nn.Embedding) and self.masked_embedding is not None:
            return self.masked_embedding.scored(states, self.lm_head.weight)
        found: Tensor = self.lm_head(states)
        return found


def _decoder(config: AssistantConfig) -> Any:
    """A decoder without embeddings, whose attention is told what its rows see."""
    from transformers import AutoModel

    layers, vocab_size = config.layers, config.layers.vocab_size
    kind: Any = AutoModel._model_mapping[type(layers)]
    layers.__class__ = type(type(layers).__name__, (_AllShare, type(layers)), {})
    layers.vocab_size, layers.pad_token_id = 1, None
    with exclusive_transformers():
        decoder = attempt(config.folder, "its layers cannot be built", kind, layers)
    layers.vocab_size = vocab_size
    hf_modules.set_attention(decoder, hf.register_attention("outrider_assistant", _attention))
    decoder.embed_tokens = None
    return decoder


#: By type of layer, what the rows of a pass see.
Seen = Mapping[str, Sequence[SeenContext]]
_seen: ContextVar[Seen | None] = ContextVar("outrider_assistant_seen", default=None)


@contextmanager
def _seeing(seen: Seen) -> Iterator[None]:
    token = _seen.set(seen)
    try:
        yield
    finally:
        _seen.reset(token)


def _attention(
    module: Any,
    query: Tensor,  # [num_rows, num_heads, 1, head_dim], rotary embedding applied
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention that transformers calls in a layer, whose own keys and values are none."""
    seen = _seen.get()
    assert seen is not None, "attention called outside a pass of an assistant"
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling)
    return attend_alone(query[:, :, 0], seen[module.layer_type], scores)[:, None], None


# --- An assistant beside its target.


@dataclass(frozen=True)
class AssistantRows:
    """Rows of one text. All of them stand where its last token stands, whatever was drafted before them."""

    tokens: Sequence[int]  # the token that each of them reads
    states: Tensor  # [n, target_hidden_size] and the state that was left before it
    position: int
    seen: Mapping[str, tuple[Tensor, Tensor]]  # by type of layer, keys and values of the text: [num_slots, num_heads, dim]


class Assistant:
    """An assistant of a target, which lends embeddings, keys and values."""

    def __init__(self, config: AssistantConfig, network: AssistantNetwork, target: Target) -> None:
        self._config, self._network, self._target = config, network, target
        self._sources = _sources(config, target)
        self._dtype = use_kernels(network, target)

    @torch.inference_mode()
    def look(self, kv: Any, stop: int) -> dict[str, tuple[Tensor, Tensor]]:
        """By type of layer, the keys and values of the first `stop` tokens of a text that its rows see."""
        found = {}
        for kind, layer in self._sources.items():
            window = self._config.layers.sliding_window if kind == "sliding_attention" else None
            first = 0 if window is None else max(stop - window - 1, 0)  # the window reaches that far in transformers' masks
            keys, values = self._target.read(kv, layer, first, stop)
            found[kind] = keys.to(self._dtype), values.to(self._dtype)
        return found

    @torch.inference_mode()
    def compute(self, texts: Sequence[AssistantRows]) -> tuple[Tensor, Tensor]:
        """Logits [n, vocab_size] behind the rows of all texts in turn, and the states [n, target_hidden_size] that they
        leave."""
        tokens = [token for text in texts for token in text.tokens]
        read = torch.cat([self._target.embed(tokens), torch.cat([text.states for text in texts])], -1).to(self._dtype)
        places = torch.tensor([[text.position] for text in texts for _ in text.tokens], device=read.device)
        kinds = self._sources
        with _seeing({kind: _contexts(texts, kind) for kind in kinds}):
            left = self._network.model(
                inputs_embeds=self._network.pre_projection(read)[:, None],  # for transformers, each row is a text
                position_ids=places,
                attention_mask=dict.fromkeys(kinds),
                shared_kv_states=dict.fromkeys(kinds, (None, None)),
                use_cache=False,
            ).last_hidden_state[:, 0]
        states = self._network.post_projection(left).to(self._target.dtype)
        return upcast_logits(self._network.logits(left)), states


def _contexts(texts: Sequence[AssistantRows], kind: str) -> list[SeenContext]:
    found, first = [], 0
    for text in texts:
        rows = slice(first, first + len(text.tokens))
        found.append(SeenContext(rows, *text.seen[kind], None))
        first = rows.stop
    return found


def _sources(config: AssistantConfig, target: Target) -> dict[str, int]:
    """By type of its layers, the layer of the target whose keys and values they read: the last one that keeps its own."""
    kinds = list(getattr(target.config, "layer_types", None) or ())
    own = len(kinds) - int(getattr(target.config, "num_kv_shared_layers", 0) or 0)
    found = {kind: own - 1 - kinds[:own][::-1].index(kind) for kind in set(kinds[:own])}
    for kind in set(config.layers.layer_types):
        if kind not in found:
            problem = f"its layers of {kind} read keys and values of such a layer, and {target.name!r} has none"
            raise HeadMismatchError(config.folder, problem, _OTHER, "layer_types", kind, sorted(found))
    return {kind: found[kind] for kind in sorted(set(config.layers.layer_types))}


def open_assistant(folder: str, target: Target) -> Assistant:
    """The assistant in a folder or a GGUF file beside its target; HeadMismatchError where it was made for another one."""
    config = read_assistant_config(folder)
    check_target(config, target.name, target.config, target.vocab_size)
    tensors = read_gguf_assistant_tensors(folder) if is_gguf(folder) else read_tensors(folder)
    check_num_layers(folder, config.layers, tensors)
    network = AssistantNetwork(config)
    _load(config, network, tensors)
    return Assistant(config, network.eval().requires_grad_(False).to(target.device, target.dtype), target)


def check_target(config: AssistantConfig, name: str, decoder: Any, vocab_size: int) -> None:
    """Raise HeadMismatchError where an assistant was made for another target than that of this name, whose decoder has this
    configuration. GGUF files do not tell unified models from the others."""
    for field, value, found in (
        ("hidden_size", config.target_hidden_size, decoder.hidden_size),
        ("vocab_size", config.vocab_size, vocab_size),
    ):
        if value != found:
            problem = f"it was made for a target with {field}={value}, and {name!r} has {found}"
            raise HeadMismatchError(config.folder, problem, _OTHER, field, value, found)
    own, kind = str(config.layers.model_type), str(decoder.model_type)
    if not kind.startswith("gemma4"):
        problem = f"it reads keys and values of a Gemma 4, and {name!r} is a {kind}"
        raise HeadMismatchError(config.folder, problem, _OTHER, "model_type", own, kind)
    widths, theirs = _key_widths(config.layers), _key_widths(decoder)
    for layer_type in widths.keys() & theirs.keys():
        value, found = widths[layer_type], theirs[layer_type]
        if value != found:
            problem = f"its layers of {layer_type} read keys that are {value} wide, and those of {name!r} are {found} wide"
            raise HeadMismatchError(config.folder, problem, _OTHER, "head_dim", value, found)
    if own != kind and not is_gguf(config.folder) and not is_gguf(name):
        problem = f"it was made for a target of {own}, and {name!r} is a {kind}"
        raise HeadMismatchError(config.folder, problem, _OTHER, "model_type", own, kind)


def _key_widths(layers: Any) -> dict[str, int]:
    """Numbers that a head of keys has, by type of layer."""
    return {kind: heads.width for kind, heads in zip(layers.layer_types, hf_modules.key_heads(layers), strict=True)}


def _load(config: AssistantConfig, network: AssistantNetwork, tensors: Mapping[str, HeadTensor]) -> None:
    """Give the modules their weights. A ModelLoadError names a tensor that is missing, of another shape, or of no use."""
    found = {name: each for name, each in tensors.items() if not _is_unused(name)}
    table = found.pop("model.embed_tokens.weight", None)
    if table is not None:
        found.setdefault("lm_head.weight", table)
    wanted = network.state_dict()
    for name, weight in wanted.items():
        if name not in found:
            raise ModelLoadError(config.folder, f"it has no tensor {name}", _DOWNLOAD)
        if found[name].tensor.is_floating_point() != weight.is_floating_point():
            needed = "real" if weight.is_floating_point() else "whole"
            problem = f"{name} in {found[name].file} holds {found[name].tensor.dtype}, and {needed} numbers are needed"
            raise ModelLoadError(config.folder, problem, _DOWNLOAD)
        if found[name].tensor.shape != weight.shape:
            shapes = f"{list(found[name].tensor.shape)}, and {CONFIG} asks for {list(weight.shape)}"
            raise ModelLoadError(config.folder, f"{name} in {found[name].file} has shape {shapes}", _DOWNLOAD)
    for name in found.keys() - wanted.keys():
        raise ModelLoadError(config.folder, f"{name} in {found[name].file} belongs to no part of an assistant", _OTHER)
    whole = {name: each.tensor if each.tensor.is_floating_point() else each.tensor.long() for name, each in found.items()}
    network.load_state_dict(whole, assign=True)
    ordering = network.masked_embedding
    if ordering is not None and sorted(ordering.token_ordering.tolist()) != list(range(config.vocab_size)):
        problem = "masked_embedding.token_ordering names a token twice or none at all"
        raise ModelLoadError(config.folder, problem, _DOWNLOAD)


def _is_unused(name: str) -> bool:
    """Tells if a tensor is of a part that layers without keys and values of their own do not have."""
    return any(f".self_attn.{part}." in name for part in ("k_proj", "v_proj", "k_norm", "v_norm"))
