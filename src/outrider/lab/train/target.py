"""The target as a teacher: what it says, and the features and layers that heads read of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.config import ActivationsName, DTypeName, ModelConfig, default_model
from outrider.errors import ContradictionError, InvalidParameterError
from outrider.heads.lone import layer_config
from outrider.kernels.weights import QuantisedLinear
from outrider.lab.train.batches import Batch
from outrider.loading.fit import leaves_room
from outrider.loading.loaded_model import LoadedModel
from outrider.loading.loader import convert, load_model
from outrider.loading.sources import check_sources
from outrider.model.hf import final_norm, noting_layers, only_head
from outrider.records import TOP_LOGITS, TOP_TOKENS, Manifest, check_witness, hidden_name


class FrozenTarget:
    """A stock model that is not trained; without a name, the embedded one. The engine's own weights are packed, so it is
    loaded once more for this."""

    def __init__(
        self,
        name: str | None,
        dtype: DTypeName = "auto",
        device: str | None = None,
        activations: ActivationsName | None = None,
        *,
        widened: bool = False,
    ) -> None:
        """`widened` computes in float32 what is loaded in fewer bits, if the memory holds it."""
        self.name = default_model("target") if name is None else name
        check_sources(target=self.name)
        loaded = load_model(ModelConfig(model=self.name, dtype=dtype, device=device, activations=activations))
        self.model, self.tokenizer, self._loaded = loaded.model, loaded.tokenizer, loaded
        self._some: tuple[Tensor, nn.Linear] | None = None  # tokens, and an output layer that computes these alone
        self.dtype = loaded.dtype  # of its weights in the engine
        if widened and _may_widen(loaded):
            convert(self.model, torch.float32)
        self.vocab_size, self.device = loaded.vocab_size, loaded.device
        config = self.model.config.get_text_config(decoder=True)
        self.model_type = str(config.model_type)
        self.hidden_size, self.num_layers = int(config.hidden_size), int(config.num_hidden_layers)
        with noting_layers(self.model), torch.no_grad():  # so that its head can run without its layers
            self.model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=self.device), use_cache=False)

    def folder(self) -> str | None:
        """The folder of its checkpoint; None where it comes from a file of another kind. Raises ModelLoadError."""
        return None if self._loaded.source is None else self._loaded.folder()

    @torch.no_grad()
    def logits(self, token_ids: Tensor) -> Tensor:
        """[num_texts, num_tokens, vocab_size] of texts [num_texts, num_tokens]; row i speaks of token i + 1."""
        logits: Tensor = self.model(input_ids=token_ids, use_cache=False).logits
        return logits

    @torch.no_grad()
    def states(self, token_ids: Tensor, layers: Sequence[int]) -> tuple[dict[int, Tensor], Tensor]:
        """Hidden states [num_texts, num_tokens, hidden_size] by transformers' index of the layer, and the logits. Index i
        is the input of layer i, and the number of layers is what the final norm leaves."""
        out = self.model(input_ids=token_ids, use_cache=False, output_hidden_states=True)
        return {layer: out.hidden_states[layer] for layer in layers}, out.logits

    def head(self, hidden: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Logits [num_rows, vocab_size] of what the final norm left, [num_rows, hidden_size]; gradients go through. Given
        tokens [n], the logits [num_rows, n] of these alone."""
        rows = hidden.to(self.model.dtype)
        placeholders = torch.zeros((1, len(rows)), dtype=torch.long, device=self.device)  # stand in for the rows
        with only_head(self.model, rows), self._outputs(tokens):
            logits: Tensor = self.model(input_ids=placeholders, use_cache=False).logits[0]
        return logits

    @contextmanager
    def _outputs(self, tokens: Tensor | None) -> Iterator[None]:
        """Let the output layer compute some tokens alone; None for all."""
        whole = self.model.get_output_embeddings()
        if tokens is not None:
            if self._some is None or self._some[0] is not tokens:
                self._some = (tokens, _of_tokens(whole, tokens))
            self.model.set_output_embeddings(self._some[1])
        try:
            yield
        finally:
            self.model.set_output_embeddings(whole)

    @torch.no_grad()
    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows [..., hidden_size] of the embedding table, as the layers would be given them, of tokens [...]."""
        rows: Tensor = self.model.get_input_embeddings()(token_ids.to(self.device))
        return rows

    def output_weight(self) -> Tensor:
        """[vocab_size, hidden_size] in float32: the weight of the output layer, as it is computed with."""
        layer = self.model.get_output_embeddings()
        stored = getattr(layer, "quantised_weight", None)
        weight: Tensor = layer.weight if stored is None else stored.format.dequantise(stored, torch.float32)
        return weight.detach().float()

    @torch.no_grad()
    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm of hidden states [num_rows, hidden_size]."""
        return final_norm(self.model, hidden.to(self.model.dtype))

    def check_fits(self, manifest: Manifest, data: Path) -> None:
        """Raise ContradictionError where the data in a folder are in other tokens, hold hidden states of another width, or
        were written by another target."""
        theirs = manifest.target
        if theirs.vocab_size != self.vocab_size:
            problem = f"its {self.vocab_size} tokens are not the {theirs.vocab_size} of {theirs.name}, which wrote the data"
            raise ContradictionError("target", self.name, problem, "Use the target that wrote the data.")
        if manifest.settings.hidden_states and theirs.hidden_size != self.hidden_size:
            problem = f"its hidden states have width {self.hidden_size}, and those of the data {theirs.hidden_size}"
            raise ContradictionError("target", self.name, problem, "Use the target that wrote the data.")
        check_witness(data, self.name, self._last_states)

    def _last_states(self, token_ids: Tensor) -> Tensor:
        """Returns what the final norm leaves [num_tokens, hidden_size] of tokens [num_tokens]."""
        return self.states(token_ids[None].to(self.device), (self.num_layers,))[0][self.num_layers][0]


def _may_widen(loaded: LoadedModel) -> bool:
    """Tells whether a model has fewer bits than float32, and memory has room for it in float32."""
    numbers = sum(weight.numel() for weight in loaded.model.parameters() if any(weight.stride()))
    return loaded.dtype.itemsize < 4 and leaves_room(4 * numbers, loaded.device)


def _of_tokens(layer: nn.Linear, tokens: Tensor) -> nn.Linear:
    """An output layer that computes some tokens as the whole one does."""
    found = type(layer)(layer.in_features, len(tokens), bias=layer.bias is not None, device="meta")
    found.weight = nn.Parameter(layer.weight[tokens], requires_grad=False)
    if layer.bias is not None:
        found.bias = nn.Parameter(layer.bias[tokens], requires_grad=False)
    if isinstance(layer, QuantisedLinear) and isinstance(found, QuantisedLinear):
        found.quantised_weight = layer.quantised_weight.each(lambda tensor: tensor[tokens])
    return found


class Teacher:
    """Holds what the target says of a batch: computed, or as it was kept with the data. The source "forward" runs the
    target on every batch; "hidden_states" takes the final ones from the data and runs the head alone; "top_k" takes its
    most likely tokens from the data, and holds all others for impossible. `rows` names what the data must hold."""

    def __init__(self, target: FrozenTarget, manifest: Manifest, source: str) -> None:
        self._target = target
        self._source = source
        self._last = hidden_name(target.num_layers)
        asked = manifest.settings
        there = {
            "forward": True,
            "hidden_states": target.num_layers in asked.hidden_states,
            "top_k": asked.target_top_k > 0,
        }
        if not there[source]:
            flag = f"--hidden-states {target.num_layers}" if source == "hidden_states" else "--target-top-k 64"
            remedy = f'Use "forward", or make the data with {flag}.'
            raise InvalidParameterError("teacher", source, "the data do not hold it", remedy)
        self.rows = {"forward": (), "hidden_states": (self._last,), "top_k": (TOP_TOKENS, TOP_LOGITS)}[source]

    def logits(self, batch: Batch, rows: Tensor) -> Tensor:
        """The target's logits [n, vocab_size] of the chosen rows, where `rows` [num_texts, num_tokens] says which."""
        if self._source == "forward":
            return self._target.logits(batch.token_ids)[rows]
        chosen = rows[:, :-1]
        if self._source == "hidden_states":
            return self._target.head(batch.rows[self._last][chosen])
        tokens, values = batch.rows[TOP_TOKENS][chosen], batch.rows[TOP_LOGITS][chosen]
        logits = values.new_full((len(values), self._target.vocab_size), -torch.inf)
        return logits.scatter_(1, tokens.long(), values)


# --- What heads read of the target, and what the target says: computed, or as it was kept with the data.


#: Logits [..., n] of some of the rows [num_texts * num_tokens] of a batch, and of tokens [n], or of all tokens for None.
LogitsOf = Callable[[slice, Tensor | None], Tensor]


class Features:
    """Hidden states and logits of the target; `rows` names what the data must hold."""

    def __init__(self, target: FrozenTarget, manifest: Manifest, source: str, layers: Sequence[int]) -> None:
        self._target = target
        self._layers = sorted(set(layers))
        self._kept = source != "forward"
        needed = sorted({*layers, target.num_layers})
        there = set(manifest.settings.hidden_states)
        if self._kept and (source != "hidden_states" or not there.issuperset(needed)):
            problem = f"heads learn from the hidden states of layers {needed}, and the data hold {sorted(there)}"
            raise ContradictionError("teacher", source, problem, "Use teacher='forward', or make other data.")
        self.rows = tuple(hidden_name(layer) for layer in needed) if self._kept else ()

    def read(self, batch: Batch) -> tuple[dict[int, Tensor], LogitsOf]:
        """Hidden states [num_texts, num_tokens, hidden_size] by layer, and what the target says. What was kept has no row
        for the last token; there the one before stands in, which nobody may read."""
        if not self._kept:
            states, logits = self._target.states(batch.token_ids, self._layers)
            all_rows = logits.flatten(0, 1)
            return states, lambda rows, some: all_rows[rows] if some is None else all_rows[rows].index_select(-1, some)
        states = {layer: _with_last(batch.rows[hidden_name(layer)]) for layer in self._layers}
        last = _with_last(batch.rows[hidden_name(self._target.num_layers)])

        @torch.no_grad()
        def logits_of(rows: slice, tokens: Tensor | None) -> Tensor:
            return self._target.head(last.flatten(0, 1)[rows], tokens)

        return states, logits_of


def _with_last(kept: Tensor) -> Tensor:
    return torch.cat([kept, kept[:, -1:]], 1)


# --- The layers of heads in the target's sizes, and the layers of the target that they read.


def layers_to_read(target: FrozenTarget, asked: Sequence[int] | None, usual: Sequence[int]) -> tuple[int, ...]:
    """The layers of the target whose inputs a head reads: those that are asked for, or else the usual ones."""
    layers, count = tuple(usual if asked is None else asked), target.num_layers
    if list(layers) != sorted(set(layers)) or not layers or not 0 <= layers[0] <= layers[-1] < count:
        problem = f"not some of the inputs of the target's layers 0 to {count - 1}, in ascending order"
        raise InvalidParameterError("layers", layers, problem, f"Use a form like {','.join(map(str, usual))}.")
    return layers


def head_layers(kind: str, target: FrozenTarget, feed_forward: int | None, count: int = 1) -> Any:
    """transformers' configuration of so many layers of a kind in the target's sizes, with its feed-forward units unless
    others are given."""
    theirs = target.model.config.get_text_config(decoder=True)
    heads = int(theirs.num_attention_heads)
    rotary = getattr(theirs, "rope_parameters", None) or {}
    return layer_config(
        kind,
        {
            "hidden_size": target.hidden_size,
            "intermediate_size": feed_forward or int(getattr(theirs, "intermediate_size", 0) or 4 * target.hidden_size),
            "num_attention_heads": heads,
            "num_key_value_heads": int(getattr(theirs, "num_key_value_heads", None) or heads),
            "head_dim": int(getattr(theirs, "head_dim", None) or target.hidden_size // heads),
            "num_hidden_layers": count,
            "vocab_size": target.vocab_size,
            "rms_norm_eps": float(getattr(theirs, "rms_norm_eps", None) or 1e-5),
            "hidden_act": "silu",
            "max_position_embeddings": int(getattr(theirs, "max_position_embeddings", None) or 2048),
            "rope_theta": float(rotary.get("rope_theta", 10000.0)),
        },
    )
