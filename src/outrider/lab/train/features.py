"""Trains what reads the target's features and drafts token by token: heads of EAGLE, and layers that predict tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import pad

from outrider.errors import ContradictionError, InvalidParameterError, UnsupportedModelError
from outrider.files import write_tensors
from outrider.heads.features import (
    Eagle1Network,
    Eagle3Network,
    FeatureHeadConfig,
    FeatureHeadNetwork,
    PublishedNetwork,
)
from outrider.heads.formats.mtp import (
    MtpConfig,
    MtpTensors,
    carries_mtp,
    name_mtp,
    new_mtp_config,
    read_mtp,
    read_mtp_config,
)
from outrider.heads.formats.published import PublishedHead, read_head
from outrider.heads.formats.writing import write_head, written_as
from outrider.heads.lone import RotaryFactors, SeenContext, new_tensors
from outrider.heads.mtp import MtpLayer, load_mtp_layer
from outrider.heads.networks import TargetHead
from outrider.heads.runner import paired_layers
from outrider.lab.train.batches import Batch
from outrider.lab.train.losses import Depth, LossName, Said, shifted
from outrider.lab.train.settings import (
    DraftVocabulary,
    HeadLearning,
    HeadTrainee,
    Trainee,
    TrainSettings,
    frequent_tokens,
    known_tokens,
)
from outrider.lab.train.target import Features, FrozenTarget, head_layers, layers_to_read
from outrider.loading.sources import WHOLE
from outrider.records import Manifest

LOSS_NAMES = "Use forward_kl, reverse_kl, jsd, total_variation, cross_entropy or accepted_length."


class Design(NamedTuple):
    """A head that is to be trained."""

    method: str  # that will draft with it
    layers: tuple[int, ...]  # the target's layers whose hidden states it reads, by transformers' index, low to high
    tokens: Tensor | None  # [draft_vocab_size] the target's token for each of its own; None where they are the same
    # Runs the layers on whole texts, and returns logits [n, draft_vocab_size] by depth. Its arguments are embeddings
    # [num_texts, num_tokens, hidden_size]; the target's hidden states [num_texts, num_tokens, target_hidden_size], low to
    # high; by depth, whether a draft token is made from a row [num_texts, num_tokens]; and the target's output layer. Row 0
    # has no feature before it, and is never asked.
    module: nn.Module
    save: Callable[[Path], None]  # writes it to a folder with the weights that the module has then
    learnt: int  # draft tokens behind a row that it learns
    most: int | None  # draft tokens behind a row that it can make; None for any number
    rows: int | None  # rows of a text at which it learns in a batch; None for all
    facts: dict[str, Any]  # what the model card says of it besides
    embedding: nn.Embedding | None = None  # its own, which does not learn; None where the target lends its


def begin_output(network: PublishedNetwork, target: FrozenTarget, tokens: Tensor | None) -> None:
    """Let a head's own output layer begin as the target's, of the tokens that it drafts; None for all."""
    output = target.output_weight()
    assert network.lm_head is not None
    with torch.no_grad():
        network.lm_head.weight.copy_(output if tokens is None else output[tokens.to(output.device)])


class FeatureHeadSettings(HeadLearning):
    """Holds what a head learns; a subclass for each method says which head."""

    # How far its probabilities are from the target's.
    loss: Literal[LossName, "accepted_length"] = Field("forward_kl", description=LOSS_NAMES)
    # What the loss of a draft token counts, relative to the one before.
    decay: float = Field(0.8, gt=0.0, le=1.0, description="Use a number above 0, up to 1.")

    def trainee(self, target: FrozenTarget, manifest: Manifest, data: Path, settings: TrainSettings) -> Trainee:
        torch.manual_seed(settings.seed)
        return TrainedFeatureHead(target, manifest, self, self.design(target, manifest, data), settings)

    def design(self, target: FrozenTarget, manifest: Manifest, data: Path) -> Design:
        """The head as training begins."""
        raise NotImplementedError


class OwnLayerSettings(FeatureHeadSettings):
    """A head whose layers are of a kind of their own, in a published format."""

    method: str  # that will draft with it
    # A published head, or one that was trained before, with which training begins. It decides its own shape and tokens.
    init: str | None = Field(None, min_length=1, description="Use the folder or the GGUF file of a head, or None.")
    # Units of the feed-forward part of its layers; None takes as many as the target has.
    feed_forward: int | None = Field(None, ge=1, description="Use 1 or more, or None.")

    def design(self, target: FrozenTarget, manifest: Manifest, data: Path) -> Design:
        if self.init is None:
            drafted = self._chosen_tokens(manifest, data)
            head = self._new(target, manifest, data, drafted)
        else:
            head = self._begun(self.init, target)
            drafted = known_tokens(data, manifest, head.tokens)
        form = self._form(head)
        written_as(head, form)  # what no format can hold is refused before any work
        network = head.network
        begun = {} if self.init is None else {"begun with": Path(self.init).name}
        return Design(
            method=self.method,
            layers=head.config.layers_of(target.num_layers),
            tokens=head.tokens,
            save=partial(write_head, head=head, form=form),
            facts=self._facts(head.config) | drafted.facts(target) | begun,
            embedding=network.embed_tokens,
            **self._learning(head, target),
        )

    def _begun(self, folder: str, target: FrozenTarget) -> PublishedHead:
        """A head that was there before, in float32 and for training."""
        head = read_head(folder)
        if head.config.method != self.method:
            problem = f"it holds a head for method={head.config.method!r}"
            raise InvalidParameterError("init", folder, problem, f"Use `outrider train {head.config.method}` for it.")
        paired_layers(head, target)
        for name, theirs in self._shape(head.config, target).items():
            asked = getattr(self, name)
            if asked not in (theirs, type(self).model_fields[name].default):
                problem = f"the head in {folder} has {theirs!r}"
                raise ContradictionError(name, asked, problem, "Leave it out, or train a new head.")
        network = head.network.float().requires_grad_(True)
        if network.embed_tokens is not None:
            network.embed_tokens.requires_grad_(False)
        return head

    def _chosen_tokens(self, manifest: Manifest, data: Path) -> DraftVocabulary:
        """The tokens that a new head drafts."""
        return DraftVocabulary(None, 1.0)

    def _new(self, target: FrozenTarget, manifest: Manifest, data: Path, drafted: DraftVocabulary) -> PublishedHead:
        """A new head as training begins."""
        raise NotImplementedError

    def _shape(self, config: Any, target: FrozenTarget) -> dict[str, Any]:
        """The settings that a head which was there before has decided already, and their values."""
        return {"feed_forward": config.layer.intermediate_size}

    def _form(self, head: PublishedHead) -> str:
        """The family of formats in which the head is written."""
        return "speculators"

    def _facts(self, config: Any) -> dict[str, Any]:
        """What the model card says of the head's own shape."""
        return {}

    def _learning(self, head: PublishedHead, target: FrozenTarget) -> dict[str, Any]:
        """The fields of `Design` that say how the head learns: `module`, `learnt`, `most` and `rows`."""
        raise NotImplementedError


class TrainedFeatureHead(HeadTrainee):
    """A head in training."""

    def __init__(
        self,
        target: FrozenTarget,
        manifest: Manifest,
        learning: FeatureHeadSettings,
        design: Design,
        settings: TrainSettings,
    ) -> None:
        self._target, self._design = target, design
        self.loss_name, self.decay, self.method = learning.loss, learning.decay, design.method
        self._features = Features(target, manifest, settings.teacher, design.layers)
        self.rows = self._features.rows
        self._temperature = manifest.settings.temperature
        self._tokens = None if design.tokens is None else design.tokens.to(target.device)
        self.module = design.module.to(target.device).train()
        self.draft_vocab_size = None if design.tokens is None else len(design.tokens)
        wanted = settings.num_draft_tokens
        self._measured = wanted if design.most is None else min(wanted, design.most)
        self.reach = max(design.learnt, self._measured) + 1  # row 0 drafts nothing

    def save(self, folder: Path) -> None:
        self._design.save(folder)

    def facts(self) -> dict[str, Any]:
        return {
            "kind": f"{self._design.method} head",
            "parameters": sum(each.numel() for each in self.module.parameters() if each.requires_grad),
            "hidden states of the target that it reads": ", ".join(map(str, self._design.layers)),
            **self._design.facts,
            "draft tokens that it learns behind a token": self._design.learnt,
            "loss": self.loss_name,
        }

    def drafted(self, module: nn.Module, batch: Batch, *, learn: bool) -> tuple[list[Depth], Said]:
        """As many draft tokens as it learns or as are measured. Where a head learns at some rows only, these are drawn."""
        rows_of, depth = (batch.predicts, self._design.learnt) if learn else (batch.drafts, self._measured)
        states, logits = self._features.read(batch)
        own = self._design.embedding
        embeddings = (self._target.embed if own is None else own)(batch.token_ids).float()
        chosen = rows_of(1) & (torch.arange(batch.token_ids.shape[1], device=embeddings.device) > 0)
        if learn and self._design.rows is not None:
            chosen = _any_rows(chosen, self._design.rows)
        wanted = [rows_of(ahead) & chosen for ahead in range(1, depth + 1)]
        hidden = [states[layer].float() for layer in self._design.layers]
        drafted = self._through(module, batch, embeddings, hidden, wanted)
        depths = [Depth(own, rows, ahead) for ahead, (own, rows) in enumerate(zip(drafted, wanted, strict=True), 1)]
        return depths, Said(batch, logits, self._temperature, self._tokens)

    def _through(self, module: nn.Module, batch: Batch, embeddings: Tensor, hidden: list[Tensor], wanted: Any) -> Any:
        """Logits [n, draft_vocab_size] by depth; see `Design`."""
        return module(embeddings, hidden, wanted, self._target.head)


def _any_rows(rows: Tensor, most: int) -> Tensor:
    """So many of the rows of each text, drawn without preference: [num_texts, num_tokens]."""
    drawn = torch.rand(rows.shape, device=rows.device).masked_fill(~rows, -1.0)
    count = min(most, rows.shape[1])
    return rows & (drawn >= drawn.topk(count, 1).values[:, -1:])


# --- EAGLE heads (Li et al. 2024, 2025) that are to be trained.


#: Least layers of a target for the layers that EAGLE-3 reads to be three different ones.
_USUAL_FROM = 7


class Eagle1Settings(OwnLayerSettings):
    """A head of EAGLE, which EAGLE-2 drafts trees with. It continues what the target's final norm leaves. The target's
    output layer, which does not learn, reads what it leaves."""

    method: Literal["eagle1", "eagle3"] = "eagle1"
    # Draft tokens behind each token of a text that it learns.
    unroll: int = Field(4, ge=1, le=16, description="Use 1 to 16.")

    def _new(self, target: FrozenTarget, manifest: Manifest, data: Path, drafted: DraftVocabulary) -> PublishedHead:
        config = _config(self.method, target, self.feed_forward, target.vocab_size, None)
        return PublishedHead("", config, Eagle1Network(config, own_embedding=False, bias=True), None)

    def _form(self, head: PublishedHead) -> str:
        return "safeailab"

    def _learning(self, head: PublishedHead, target: FrozenTarget) -> dict[str, Any]:
        network = head.network
        assert isinstance(network, FeatureHeadNetwork)
        return {"module": UnrolledHead(network), "learnt": self.unroll, "most": None, "rows": None}


class Eagle3Settings(Eagle1Settings):
    """A head of EAGLE-3."""

    method: Literal["eagle1", "eagle3"] = "eagle3"
    # The target's layers whose inputs it reads, in ascending order; None takes 2, n // 2 and n - 3 of n.
    layers: tuple[int, ...] | None = Field(None, description="Use ascending layer numbers, or None.")
    # Most tokens that it drafts: the most frequent ones of the data.
    draft_vocab: int = Field(32000, ge=2, description="Use 2 or more.")

    def _chosen_tokens(self, manifest: Manifest, data: Path) -> DraftVocabulary:
        return frequent_tokens(data, manifest, self.draft_vocab)

    def _new(self, target: FrozenTarget, manifest: Manifest, data: Path, drafted: DraftVocabulary) -> PublishedHead:
        layers = layers_to_read(target, self.layers, _usual_layers(target.num_layers))
        config = _config(self.method, target, self.feed_forward, drafted.size(target), layers)
        network = Eagle3Network(config, own_embedding=False, own_output=True)
        begin_output(network, target, drafted.tokens)
        return PublishedHead("", config, network, drafted.tokens)

    def _shape(self, config: Any, target: FrozenTarget) -> dict[str, Any]:
        read = {"layers": config.layers_of(target.num_layers), "draft_vocab": config.draft_vocab_size}
        return super()._shape(config, target) | read

    def _form(self, head: PublishedHead) -> str:
        return "speculators"


def _config(
    method: str, target: FrozenTarget, feed_forward: int | None, size: int, layers: tuple[int, ...] | None
) -> FeatureHeadConfig:
    return FeatureHeadConfig(
        method=method,
        layer=head_layers("llama", target, feed_forward),
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=size,
        aux_layers=layers,
        verifier=target.name,
        architectures=tuple(target.model.config.architectures or ()),
    )


def _usual_layers(count: int) -> tuple[int, ...]:
    """EAGLE-3's layers of so many; a target with fewer layers shows what enters its second, middle and last one."""
    if count >= _USUAL_FROM:
        return (2, count // 2, count - 3)
    return tuple(sorted({min(1, count - 1), count // 2, count - 1}))


# --- UnrolledHead: a head that drafts several tokens behind every token of a text at once, as it will in the engine.
#
# EAGLE-3 (Li et al. 2025) calls this the training-time test, and HASS (Zhang et al. 2025) trains heads of EAGLE so. The
# row of token i reads the token beside the target's feature of token i - 1, and drafts token i + 1. The next draft
# token is made from token i + 1 beside what the head itself left in row i, and so on. Token i + 1 is that of the text
# here, with which a draft goes on as long as it stands. A row sees the first rows of its text up to token i, and its
# own later rows.


class UnrolledHead(nn.Module):
    """A head in training."""

    def __init__(self, network: FeatureHeadNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(
        self, embeddings: Tensor, hidden: list[Tensor], wanted: Sequence[Tensor], target_head: TargetHead
    ) -> list[Tensor]:
        """Logits [n, draft_vocab_size] of the draft tokens of each depth.

        Args:
            embeddings: [num_texts, num_tokens, hidden_size] of the texts.
            hidden: [num_texts, num_tokens, target_hidden_size] of the target, low to high.
            wanted: By depth: [num_texts, num_tokens] whether a draft token is made from this row. Row 0 has no feature
                before it, and makes none.
        """
        length = embeddings.shape[1]
        positions = range(length + len(wanted))
        tables = RotaryFactors(self.network.config.layer, embeddings.device).at(positions, torch.float32)
        fused = self.network.fuse(hidden)
        features = torch.cat([torch.zeros_like(fused[:, :1]), fused[:, :-1]], 1)
        kept: list[tuple[Tensor, Tensor]] = []
        logits = []
        for depth, rows in enumerate(wanted):
            here = (tables[0][depth : depth + length], tables[1][depth : depth + length])
            left = self._through(shifted(embeddings, depth), features, here, kept)
            logits.append(self.network.logits(left[rows], target_head))
            features = self.network.next_feature(left)
        return logits

    def _through(
        self, embeddings: Tensor, features: Tensor, tables: tuple[Tensor, Tensor], kept: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Returns what the layer leaves [num_texts, num_tokens, hidden_size]. What it keeps of the rows is added to
        `kept`."""
        layer = self.network.layer
        read = self.network.enter(embeddings, features)
        queries = layer.self_attn.queries(read.rows, tables)
        keys, values = layer.self_attn.keys_and_values(read.rows, tables)
        shared_by = queries.shape[2] // keys.shape[2]
        kept.append((keys.repeat_interleave(shared_by, 2), values.repeat_interleave(shared_by, 2)))
        found = _attended(queries, kept)
        return layer.leave(read.residual.flatten(0, 1), found.flatten(0, 1)).reshape(read.residual.shape)


def _attended(queries: Tensor, kept: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns what rows find [num_texts, num_tokens, num_heads, head_dim] among the first rows of their text up to their
    own, and among their own later rows.

    Args:
        queries: [num_texts, num_tokens, num_heads, head_dim]
        kept: By depth, the keys and values of the rows, of this shape each.
    """
    (first, of_first), *later = kept
    queries = queries * queries.shape[-1] ** -0.5  # which are fewer numbers than the scores
    places = torch.arange(queries.shape[1], device=queries.device)
    seen = (places <= places[:, None]) & (places > 0) | (places == places[:, None])  # row 0 sees itself, to be a number
    of_text = torch.einsum("bihd,bjhd->bhij", queries, first)
    own = [(queries * keys).sum(-1).transpose(1, 2)[..., None] for keys, _ in later]
    scores = torch.cat([of_text, *own], -1)
    shares = scores.masked_fill_(~pad(seen, (0, len(later)), value=True), float("-inf")).softmax(-1)
    found = torch.einsum("bhij,bjhd->bihd", shares[..., : len(places)], of_first)
    for depth, (_, values) in enumerate(later):
        found = found + shares[..., len(places) + depth].transpose(1, 2)[..., None] * values
    return found


# --- Layers that predict several tokens (Gloeckle et al. 2024; DeepSeek-V3) are trained as these heads are.


#: Standard deviation of the weights with which a new layer meets the embedding.
_SPREAD = 0.02


class MtpSettings(FeatureHeadSettings):
    """Layers that predict several tokens."""

    method: Literal["mtp"] = "mtp"
    # Folder with the layers that training begins with. None takes those of the target's checkpoint, and one new layer where
    # it has none.
    init: str | None = Field(None, min_length=1, description="Use a local folder, or None.")
    # Draft tokens behind each token of a text that they learn.
    unroll: int = Field(4, ge=1, le=16, description="Use 1 to 16.")

    def design(self, target: FrozenTarget, manifest: Manifest, data: Path) -> Design:
        whole = target.model.config.get_text_config(decoder=True)
        folder = self._begins_with(target, whole)
        if folder is None:
            config, tensors = _new(target, whole)
        else:
            config, tensors = read_mtp_config(folder, whole), read_mtp(folder, whole)
        layers = [load_mtp_layer(folder or target.name, config, each, torch.float32, target.device) for each in tensors]
        _let_learn(layers, shared=config.shared)
        facts = {"layers": len(layers), "begun with": "a new layer" if folder is None else "layers that were there"}
        return Design(
            method=self.method,
            layers=(target.num_layers,),
            tokens=None,
            module=UnrolledMtp(layers, config.window),
            save=partial(_save, layers=layers, config=whole, folder=folder),
            learnt=self.unroll,
            most=None,
            rows=None,
            facts=facts,
        )

    def _begins_with(self, target: FrozenTarget, config: Any) -> str | None:
        """The folder with the layers that training begins with; None for a new one."""
        if self.init is not None:
            return self.init
        own = target.folder()
        return own if own is not None and carries_mtp(own, config) else None


def _new(target: FrozenTarget, whole: Any) -> tuple[MtpConfig, list[MtpTensors]]:
    """A new layer of the target's type. It begins with what the target's final norm leaves, to which little of the token's
    embedding is added, and ends with a copy of that norm."""
    norm = getattr(target.model.base_model, "norm", None)
    weight = getattr(norm, "weight", None)
    if not isinstance(norm, nn.Module) or not isinstance(weight, Tensor):
        problem = f"decoder layers of {whole.model_type} do not end with a norm that a layer of its own could have"
        raise UnsupportedModelError(target.name, problem, "Train eagle3 or eagle1 for it.")
    config = new_mtp_config(whole)
    decoder = {name: weight.float() for name, weight in new_tensors(target.name, config.layer).items()}
    plain, size = decoder["norm.weight"], int(whole.hidden_size)
    fc = torch.cat([_SPREAD * torch.randn(size, size), torch.eye(size)], 1)
    own = {"norm.weight": weight.detach().float().cpu().clone()}  # a copy, since the target does not learn
    return config, [MtpTensors(fc, plain.clone(), plain.clone(), {**decoder, **own})]


def _let_learn(layers: Sequence[MtpLayer], *, shared: bool) -> None:
    """Let all weights learn; where layers share what is beside their decoder layers, they go on to share it."""
    first = layers[0]
    for layer in layers:
        layer.requires_grad_(True)
        layer.decoder.stack.get_input_embeddings().requires_grad_(False)  # which nothing reads
        if shared:
            layer.fc, layer.embedding_norm, layer.hidden_norm = first.fc, first.embedding_norm, first.hidden_norm
            layer.decoder.stack.norm = first.decoder.stack.norm


def _save(path: Path, layers: Sequence[MtpLayer], config: Any, folder: str | None) -> None:
    """Write the layers as one file, by the names that they had in `folder`. Raises StorageError."""
    tensors = [_tensors(layer) for layer in layers]
    write_tensors(path / WHOLE, name_mtp(tensors, config, folder), {"format": "pt"})


def _tensors(layer: MtpLayer) -> MtpTensors:
    own: dict[str, Tensor] = {"fc": layer.fc.weight}
    own |= {name: getattr(layer, name).weight for name in ("embedding_norm", "hidden_norm")}
    return MtpTensors(**own, decoder=layer.decoder.tensors())


# --- UnrolledMtp: layers for the prediction of several tokens that draft behind every token of a text at once.
#
# Layer d of them, from 0, drafts token i + d + 1 behind token i, and the last layer goes on alone, as it will in the
# engine. The row of token i reads, in the first layer, the token beside what the target's final norm left of token i -
# 1; in layer d it reads token i + d beside what layer d - 1 left in this row. A row sees the first rows of its text up
# to its own, and its own later rows in the same layer. Tokens that were drafted are those of the text, as in
# `UnrolledHead`.


class UnrolledMtp(nn.Module):
    """Such layers in training. Their rows look so many tokens back as the window has; None for all."""

    def __init__(self, layers: Sequence[MtpLayer], window: int | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._window = window

    def forward(
        self, embeddings: Tensor, hidden: list[Tensor], wanted: Sequence[Tensor], target_head: TargetHead
    ) -> list[Tensor]:
        """Logits [n, vocab_size] of the draft tokens of each depth; see `Design`."""
        (states,) = hidden
        features = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
        logits = []
        kept: list[tuple[Tensor, Tensor]] = []
        for depth, rows in enumerate(wanted):
            if depth < len(self.layers):
                layer, kept = self.layers[depth], []
            assert isinstance(layer, MtpLayer)
            features = self._through(layer, shifted(embeddings, depth), features, depth, kept)
            logits.append(target_head(features[rows]))
        return logits

    def _through(
        self, layer: MtpLayer, embeddings: Tensor, features: Tensor, depth: int, kept: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Returns what a layer leaves [num_texts, num_tokens, hidden_size], behind its norm. What it keeps of the rows is
        added to `kept`."""
        texts, length = embeddings.shape[:2]
        rows = layer.enter(embeddings, features).flatten(0, 1).float()
        positions = [depth + place for place in range(length)] * texts
        left: Tensor = layer.decoder(rows, positions, partial(self._look, texts, kept))
        return left.reshape(embeddings.shape)

    def _look(self, texts: int, kept: list[tuple[Tensor, Tensor]], keys: Tensor, values: Tensor) -> list[SeenContext]:
        """Returns what the rows of each text see in a layer, of keys and values [num_texts * num_tokens, num_kv_heads,
        dim]."""
        kept.append((keys, values))
        length = len(keys) // texts
        mask = self._mask(length, len(kept), keys)
        spans = [slice(text * length, (text + 1) * length) for text in range(texts)]
        return [SeenContext(span, *_joined(kept, span), mask) for span in spans]

    def _mask(self, length: int, depths: int, like: Tensor) -> Tensor:
        """[length, depths * length] additive: a row sees the first rows up to its own, and its own later rows. Row 0, which
        nobody may look at, sees itself, to be a number."""
        places = torch.arange(length, device=like.device)
        own = places == places[:, None]
        first = (places <= places[:, None]) & (places > 0) | own
        seen = torch.cat([first, *[own] * (depths - 1)], 1)
        if self._window is not None:
            positions = torch.cat([places + depth for depth in range(depths)])
            seen &= places[:, None] + depths - 1 - positions < self._window
        return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))


def _joined(kept: Sequence[tuple[Tensor, Tensor]], rows: slice) -> tuple[Tensor, Tensor]:
    """The keys and values of some rows of all depths, one depth behind the other."""
    return torch.cat([keys[rows] for keys, _ in kept]), torch.cat([values[rows] for _, values in kept])
