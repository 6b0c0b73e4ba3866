"""Frozen, composed configurations, validated once."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from outrider.errors import ContradictionError, InvalidParameterError
from outrider.validation import Frozen

DTypeName = Literal["auto", "float64", "float32", "bfloat16", "float16"]
AttentionName = Literal["auto", "fused", "paged", "gather"]
QuantizationName = Literal["int8"]
RuleName = Literal["auto", "walk", "token", "block", "coupled"]


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _no_quantization(value: object) -> object:
    if value in get_args(QuantizationName):
        raise InvalidParameterError(
            "dtype",
            value,
            "a way to round weights, not a dtype to compute in",
            f"Use quantization={value!r}, on the command line --quantization {value}.",
        )
    return value


class ModelConfig(Frozen):
    """Which checkpoint to load and how.

    Attributes:
        model: Local folder or hub id, as transformers takes it; for a model that is loaded already, what to call it.
        dtype: Weights and activations; "auto" takes the checkpoint's own.
        device: A torch device; None takes CUDA where there is one, else the CPU.
        revision: Hub revision.
        trust_remote_code: Whether transformers may run code that the checkpoint brings.
        attention_backend: "fused" (our kernels: Llama-like decoders on CPUs), "paged" (most models), "gather" (portable)
            or "auto", which probes at load.
        max_model_len: Longest sequence, prompt and output together; None takes the checkpoint's context.
        quantization: "int8" rounds the linear layers' weights at load (weight-only, a scale a row); None leaves them. The
            model that is decoded losslessly is then the rounded one.
        batch_invariant: Whether a token's bits must not depend on batch, chunk or draft.
    """

    model: str = Field(min_length=1, description="Use a local folder or a hub id.")
    dtype: Annotated[DTypeName, BeforeValidator(_no_quantization)] = Field(
        "auto", description="Use auto, float64, float32, bfloat16 or float16."
    )
    device: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    attention_backend: AttentionName = Field("auto", description="Use auto, fused, paged or gather.")
    max_model_len: int | None = Field(None, ge=2, description="Use 2 tokens or more, or None.")
    quantization: QuantizationName | None = Field(None, description="Use int8 or None.")
    batch_invariant: bool = False

    @model_validator(mode="after")
    def _backend_can_be_invariant(self) -> ModelConfig:
        if self.batch_invariant and self.attention_backend not in ("auto", "fused"):
            raise ContradictionError(
                "attention_backend",
                self.attention_backend,
                "its bits depend on the batch, and batch_invariant=True asks that none do",
                "Use auto or fused, or leave one of them out.",
            )
        return self


class CacheConfig(Frozen):
    """How much key-value memory there is and how it is cut.

    Attributes:
        block_size: Tokens a block.
        num_tokens: Capacity in tokens, rounded down to blocks; None sizes it from free memory and the scheduler's limits.
        prefix_caching: Whether finished blocks are kept for later requests that start with the same tokens.
    """

    block_size: int = Field(16, ge=1, le=1024, description="Use 1 to 1024 tokens.")
    num_tokens: int | None = Field(None, ge=1, description="Use 1 token or more, or None.")
    prefix_caching: bool = True


class SchedulerConfig(Frozen):
    """How much work one step may hold.

    Attributes:
        max_num_seqs: Sequences that run at a time.
        max_num_batched_tokens: Rows in one target pass: prefill chunks, last tokens and draft tokens together.
    """

    max_num_seqs: int = Field(32, ge=1, description="Use 1 or more.")
    max_num_batched_tokens: int = Field(1024, ge=1, description="Use 1 or more.")

    @model_validator(mode="after")
    def _every_sequence_gets_a_row(self) -> SchedulerConfig:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ContradictionError(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"below max_num_seqs={self.max_num_seqs}, so a running sequence could find no row",
                "Raise it or lower max_num_seqs.",
            )
        return self


class SpeculationConfig(Frozen):
    """Who guesses, how far, and how the guess is checked. Every setting gives the same output law.

    Attributes:
        proposer: A registered name: "draft_model", "ngram", "suffix", "none", or one from an installed plug-in.
        draft_model: Local folder or hub id; for proposer="draft_model".
        draft_dtype: The draft model's dtype; None takes the target's.
        num_draft_tokens: Most draft tokens a step. Unless given: 5, the size of `tree`, or 16 for proposer="suffix".
        tree: Shape of drafts for proposers that draft trees, children of each node by depth: (3, 2) has 3 nodes and 6 below
            them. Empty for chains.
        rule: How sampled drafts are verified. "auto" takes block verification (Sun et al. 2024), traversal on trees (Weng
            et al. 2025), or coupling for seeded requests; "block" is the same without a seed; "token" is Leviathan et al.
            2023, and recursive rejection on trees (Jeon et al. 2024); "walk" ignores the draft's law; "coupled" shares the
            target's noise. Drafts without a law are always verified by the walk.
        draft_sampling: "sampled" draws drafts from the draft's law, "greedy" takes its most likely token.
        ngram_max: Longest suffix that the ngram proposer looks up.
        ngram_min: Shortest one.
        suffix_min_match: Shortest match that the suffix proposer drafts from.
        suffix_factor: Most tokens it drafts for each token of the match.
        suffix_tree: Whether it drafts branches where texts went on in several ways.
        suffix_shared: Whether it also learns from finished requests of the same namespace.
        suffix_cache_mib: Memory for these, all namespaces together.
        options: Settings for plug-in proposers.
    """

    proposer: str = Field("none", min_length=1, description="Use a registered proposer's name.")
    draft_model: str | None = Field(None, min_length=1, description="Use a local folder or a hub id.")
    draft_dtype: DTypeName | None = None
    num_draft_tokens: int = Field(5, ge=1, le=512, description="Use 1 to 512; proposer='none' turns drafting off.")
    tree: Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], BeforeValidator(_as_tuple)] = Field(
        (), description="Use the number of children by depth, like (3, 2, 1); up to 512 nodes."
    )
    rule: RuleName = Field("auto", description="Use auto, walk, token, block or coupled.")
    draft_sampling: Literal["sampled", "greedy"] = Field("sampled", description="Use sampled or greedy.")
    ngram_max: int = Field(5, ge=1, description="Use 1 or more, at least ngram_min.")
    ngram_min: int = Field(2, ge=1, description="Use 1 or more, at most ngram_max.")
    suffix_min_match: int = Field(2, ge=1, description="Use 1 or more.")
    suffix_factor: float = Field(2.0, gt=0.0, le=64.0, description="Use a value above 0, up to 64.")
    suffix_tree: bool = False
    suffix_shared: bool = False
    suffix_cache_mib: int = Field(64, ge=1, description="Use 1 or more.")
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _fitting_budget(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Where no length is given: as many as the tree has, or room for a lookup proposer's long matches."""
        tree = values.get("tree")
        if values.get("proposer") == "suffix" and "num_draft_tokens" not in values:
            return {**values, "num_draft_tokens": 16}
        if not tree or "num_draft_tokens" in values or not all(isinstance(width, int) for width in tree):
            return values
        size, level = 0, 1
        for width in tree:
            level *= width
            size += level
        return {**values, "num_draft_tokens": size}

    @model_validator(mode="after")
    def _settings_agree(self) -> SpeculationConfig:
        if self.draft_model is not None and self.proposer in ("ngram", "suffix", "none"):
            raise ContradictionError(
                "draft_model",
                self.draft_model,
                f"proposer={self.proposer!r} loads no model",
                "Use proposer='draft_model'.",
            )
        if self.tree and self.proposer in ("ngram", "suffix"):
            remedy = "Use another proposer." if self.proposer == "ngram" else "Use suffix_tree=True."
            raise ContradictionError("tree", self.tree, f"proposer={self.proposer!r} takes no fixed shape", remedy)
        if self.ngram_min > self.ngram_max:
            raise ContradictionError(
                "ngram_min", self.ngram_min, f"more than ngram_max={self.ngram_max}", "Lower it or raise ngram_max."
            )
        return self

    @property
    def enabled(self) -> bool:
        return self.proposer != "none"


PLAIN = SpeculationConfig(proposer="none")
