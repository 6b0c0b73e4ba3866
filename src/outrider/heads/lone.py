"""A decoder layer that stands alone, as heads have one, computed by the code of a model's own type."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.errors import ModelLoadError
from outrider.kernels.library import KernelLibrary
from outrider.kernels.weights import ExpertStack
from outrider.loading import hf_modules
from outrider.loading.exclusive import attempt, exclusive_transformers
from outrider.loading.sources import WHOLE
from outrider.model import hf
from outrider.model.attention import Scores, attend
from outrider.model.context import SeenPart

# --- A decoder layer that stands alone, as heads have one: what transformers knows of it, and what its rows see.


class SeenContext(NamedTuple):
    """The keys and values that some rows of a layer look at."""

    rows: slice  # which rows
    keys: Tensor  # [num_slots, num_kv_heads, dim]
    values: Tensor
    mask: Tensor | None  # [num_rows, num_slots] additive; None where every row sees everything


#: Keeps the keys and values of all rows of a layer, [n, num_kv_heads, dim] each, and says what these rows see, in their
#: order.
Look = Callable[[Tensor, Tensor], Sequence[SeenContext]]


def attend_alone(queries: Tensor, seen: Sequence[SeenContext], scores: Scores) -> Tensor:
    """The values that rows find [n, num_heads, value_dim], of their queries [n, num_heads, head_dim]."""
    parts = [(each, SeenPart(slice(0, len(each.keys)), causal=False, mask=each.mask)) for each in seen]
    return torch.cat(
        [attend(queries[each.rows].transpose(0, 1), each.keys, each.values, part, scores) for each, part in parts]
    )


def layer_config(kind: str, fields: Mapping[str, Any]) -> Any:
    """The configuration of a model with such layers; what the fields leave out has transformers' defaults. It raises
    whatever transformers raises for a field that it cannot use."""
    return AutoConfig.for_model(kind, **fields)


def knows_activation(name: object) -> bool:
    """Tells if there is an activation of this name."""
    return isinstance(name, str) and name in ACT2FN


def activation(name: str) -> nn.Module:
    """The activation of a name."""
    found: nn.Module = ACT2FN[name]
    return found


class RotaryFactors:
    """Cosines and sines of a layer by position."""

    def __init__(self, config: Any, device: torch.device) -> None:
        self._module = LlamaRotaryEmbedding(config).to(device)
        self._device = device

    def at(self, positions: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[n, head_dim] each."""
        like = torch.empty(0, dtype=dtype, device=self._device)
        cosines, sines = self._module(like, torch.tensor([list(positions)], device=self._device))
        return cosines[0], sines[0]


def model_class(model_type: str) -> str | None:
    """The class of causal language models of a type; None for a type that transformers does not know."""
    found: str | None = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    return found


def is_model_class(name: str) -> bool:
    """Tells if transformers has a causal language model of this class."""
    return name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


# --- LoneDecoder: one decoder layer with the norm behind it, computed by the code of a model's own type.


_DOWNLOAD = "Download or save the checkpoint again."
#: The tensors that a model must have and a lone layer does not use, each with one row.
_UNUSED = ("model.embed_tokens.weight", "lm_head.weight")


class LoneDecoder(nn.Module):
    """A decoder layer behind which a norm comes, of a causal language model of one layer, which is taken over. Its rows see
    what they are told."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        hf_modules.set_attention(model, hf.register_attention("outrider_alone", _attention))
        if model.dtype == torch.float64:
            hf_modules.use_plain_experts(model)
        self.stack = model.base_model

    @property
    def norm(self) -> nn.Module:
        """The norm behind the layer."""
        norm: nn.Module = self.stack.norm
        return norm

    def forward(self, states: Tensor, positions: Sequence[int], look: Look) -> Tensor:
        """Returns the rows [n, hidden_size] that the layer leaves at positions, behind the norm, of states [n,
        hidden_size]. `look` is given their keys and values."""
        with _looking(look):
            places = torch.tensor([list(positions)], device=states.device)
            left: Tensor = self.stack(inputs_embeds=states[None], position_ids=places, use_cache=False).last_hidden_state[0]
        return left

    def keys_and_values(self, states: Tensor, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Keys and values that the layer keeps of rows, [n, num_kv_heads, dim] each. What comes behind them is not
        computed."""

        def stop(keys: Tensor, values: Tensor) -> list[SeenContext]:
            raise _EnoughError(keys, values)

        try:
            self.forward(states, positions, stop)
        except _EnoughError as found:
            return found.kept
        raise AssertionError("the layer does not attend")

    def tensors(self) -> dict[str, Tensor]:
        """The weights by the names that `load_lone_decoder` takes, as a checkpoint of the type has them."""
        return _saved(self.stack)

    def expert_stacks(self) -> list[ExpertStack]:
        """The weights of a mixture of experts, where it has one."""
        return hf_modules.expert_stacks(self.stack)

    def use_packed_experts(self, library: KernelLibrary) -> None:
        """Let our kernels compute a mixture of experts, where it has a form that they know."""
        hf_modules.use_packed_experts(self.stack, library)


def lone_config(config: Any, *, experts: bool, layer_type: str | None) -> Any:
    """The configuration of a model of one layer, of the same type. Where layers of the type may have a mixture of experts,
    or several kinds of attention, it says which this one has."""
    lone = deepcopy(config)
    lone.__dict__.pop("quantization_config", None)
    values: dict[str, Any] = {
        "num_hidden_layers": 1,
        "vocab_size": 1,
        "tie_word_embeddings": False,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
    }
    known = {
        "layer_types": [layer_type],
        "mlp_layer_types": ["sparse" if experts else "dense"],
        "first_k_dense_replace": 0 if experts else 1,
        "mlp_only_layers": [] if experts else [0],
        "decoder_sparse_step": 1,
    }
    values |= {name: value for name, value in known.items() if getattr(lone, name, None) is not None}
    for name, value in values.items():
        setattr(lone, name, value)
    return lone


def kept_widths(config: Any) -> tuple[int, int, int]:
    """Returns how many heads the layer of a `lone_config` keeps of a token, and the widths of their keys and values, as its
    own code says."""
    with torch.device("meta"):
        decoder = LoneDecoder(empty_lone(str(config.model_type), config))
        keys, values = decoder.keys_and_values(torch.empty(1, config.hidden_size, dtype=decoder.stack.dtype), [0])
    return keys.shape[1], keys.shape[2], values.shape[2]


def load_lone_decoder(
    name: str,
    config: Any,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: torch.device,
    fill: Callable[[nn.Module], None] = lambda model: None,
) -> LoneDecoder:
    """Loads a layer of a `lone_config` with its weights, by the names that a checkpoint of the type has for them behind
    "model.": "layers.0.*" and "norm.weight". A ModelLoadError names the tensor that is missing or does not fit.

    `fill` gives the model what `tensors` have no numbers for."""
    state = {f"model.{key}": tensor for key, tensor in tensors.items()}
    state |= {key: torch.zeros(1, config.hidden_size) for key in _UNUSED}
    load, how = type(empty_lone(name, config)).from_pretrained, {"config": config, "state_dict": state, "dtype": dtype}
    problem = "its layers that predict several tokens cannot be read"
    with exclusive_transformers():
        model, info = attempt(name, problem, load, None, output_loading_info=True, ignore_mismatched_sizes=True, **how)
    faults = {"mismatched_keys": "of another shape", "missing_keys": "missing", "unexpected_keys": "of no known use"}
    for kind, fault in faults.items():
        found = sorted(str(each[0] if isinstance(each, tuple) else each) for each in info.get(kind) or ())
        if found:
            raise ModelLoadError(name, f"{problem}: {found[0].removeprefix('model.')} is {fault}", _DOWNLOAD)
    model = model.eval().requires_grad_(False).to(device)
    fill(model)
    return LoneDecoder(model)


def empty_lone(name: str, config: Any) -> Any:
    """A model of one layer without weights, of a configuration from `lone_config`; the errors are those of
    `load_lone_decoder`."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return attempt(name, "a layer of it cannot be built", AutoModelForCausalLM.from_config, config)


def new_tensors(name: str, config: Any) -> dict[str, Tensor]:
    """Weights with which training begins, by the names that `load_lone_decoder` takes."""
    from transformers import AutoModelForCausalLM

    model = attempt(name, "a layer of it cannot be built", AutoModelForCausalLM.from_config, config)
    return _saved(model)


def _saved(model: Any) -> dict[str, Tensor]:
    """Returns the tensors that transformers writes of a model of one layer, by the names behind "model."; what is not used
    is left out."""
    from safetensors.torch import load_file

    with TemporaryDirectory() as folder, exclusive_transformers():
        model.save_pretrained(folder)
        found = {name.removeprefix("model."): tensor for name, tensor in load_file(Path(folder) / WHOLE).items()}
    for name in _UNUSED:
        found.pop(name.removeprefix("model."), None)
    return found


class _EnoughError(Exception):
    """Ends a pass at the keys and values of its layer."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.kept = keys, values


_look: ContextVar[Look | None] = ContextVar("outrider_look", default=None)


@contextmanager
def _looking(look: Look) -> Iterator[None]:
    token = _look.set(look)
    try:
        yield
    finally:
        _look.reset(token)


def _attention(
    module: Any,
    query: Tensor,  # [1, num_heads, num_rows, head_dim], rotary embedding applied
    key: Tensor,  # [1, num_kv_heads, num_rows, head_dim]
    value: Tensor,  # [1, num_kv_heads, num_rows, value_dim]
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention that transformers calls in the layer."""
    look = _look.get()
    assert look is not None, "attention called outside a pass of a lone decoder"
    seen = look(key[0].transpose(0, 1), value[0].transpose(0, 1))
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    return attend_alone(query[0].transpose(0, 1), seen, scores)[None], None
