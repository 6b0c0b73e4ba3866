"""SpeculationConfig: who drafts for a request, how far, and how the draft is verified."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_serializer, model_validator

from outrider.errors import ContradictionError, InvalidParameterError
from outrider.propose import registry
from outrider.propose.method import Method
from outrider.propose.trees.tree import MAX_ROWS
from outrider.validation import Frozen, unknown_setting
from outrider.verify.verifier import RuleName

#: The children of each node by depth, or the name of a kind of tree that adapts. Empty for chains.
TreeShape = tuple[Annotated[int, Field(ge=1, le=64)], ...] | Literal["best_first", "sequoia"]
#: Rows of a tree that adapts where nobody says how many.
_ADAPTIVE_ROWS = 12

#: Names of earlier forms and of other engines, and how to say the same here.
FORMERLY = {
    "proposer": "Use method={value!r}.",
    "draft_model": "Use method=DraftModel(model={value!r}), or LLM(..., draft_model={value!r}).",
    "draft_dtype": "Use method=DraftModel(model=..., dtype={value!r}).",
    "ngram_max": "Use method=Ngram(max_match={value!r}).",
    "ngram_min": "Use method=Ngram(min_match={value!r}).",
    "suffix_min_match": "Use method=Suffix(min_match={value!r}).",
    "suffix_factor": "Use method=Suffix(factor={value!r}).",
    "suffix_tree": "Use method=Suffix(branches={value!r}).",
    "suffix_shared": "Use method=Suffix(shared={value!r}).",
    "suffix_cache_mib": "Use method=Suffix(cache_mib={value!r}).",
    "options": "Use method=... with the settings of that method's own class.",
    "num_speculative_tokens": "Use num_draft_tokens={value!r}.",
}


def _as_method(value: object) -> Method | None:
    """A method from its settings, or from its name for the defaults; None for "none" and "off"."""
    if value is None or isinstance(value, Method):
        return value
    if isinstance(value, str):
        return None if value in ("none", "off") else registry.find(value)()
    remedy = 'Use a name like "suffix", or settings like DraftModel(model="...").'
    raise InvalidParameterError("method", value, "neither a method's name nor its settings", remedy)


def _as_widths(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class SpeculationConfig(Frozen):
    """How to speculate. Every setting gives the same output distribution.

    Attributes:
        method: Who drafts: a method's settings, or its name for the defaults; None decodes plainly.
        num_draft_tokens: Most rows that a draft may have in a step. Unless given: the size of `tree`, or what suits the
            method.
        tree: Shape of drafts, children of each node by depth: (3, 2) has 3 nodes and 6 below them. Empty for chains.
            "best_first" puts every row where it is likeliest to stand and stops where a row no longer pays; "sequoia" takes
            the best fixed shape for the acceptance so far. Both learn while they draft.
        rule: How sampled drafts are verified. "auto" takes block verification (Sun et al. 2024), traversal on trees (Weng
            et al. 2025), or coupling for seeded requests; "block" is the same without a seed; "token" is Leviathan et al.
            2023, and recursive rejection on trees (Jeon et al. 2024); "walk" ignores how the draft was drawn; "coupled"
            shares the target's noise, and a text that was once drafted for so is walked to its end. Drafts that
            were not drawn are always verified by the walk.
        draft_sampling: "sampled" draws drafts from the draft's probabilities, "greedy" takes the most likely token.
    """

    method: Annotated[Method | None, BeforeValidator(_as_method)] = None
    num_draft_tokens: int = Field(
        5, ge=1, le=MAX_ROWS, description=f"Use 1 to {MAX_ROWS}; method='none' turns drafting off."
    )
    tree: Annotated[TreeShape, BeforeValidator(_as_widths)] = Field(
        (),
        description=f'Use children by depth, like (3, 2, 1), up to {MAX_ROWS} nodes; "best_first" or "sequoia".',
    )
    rule: RuleName = Field("auto", description="Use auto, walk, token, block or coupled.")
    draft_sampling: Literal["sampled", "greedy"] = Field("sampled", description="Use sampled or greedy.")

    def __init__(self, **values: Any) -> None:
        for name in sorted(values.keys() & FORMERLY.keys()):
            remedy = FORMERLY[name].format(value=values[name])
            raise InvalidParameterError(name, values[name], "SpeculationConfig has no such setting", remedy)
        super().__init__(**values)

    @classmethod
    def of(cls, value: object) -> SpeculationConfig:
        """The settings from any form a caller may use: themselves, a method or its name, or one flat mapping.

        Args:
            value: SpeculationConfig(method=DraftModel(model="m"), num_draft_tokens=5) and {"method": "draft_model",
                "model": "m", "num_draft_tokens": 5} say the same.

        Raises:
            InvalidParameterError: An unknown method or setting, or a value out of range.
            ContradictionError: Settings that cannot hold together.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls(**cls._parted(dict(value)))
        if value is None or isinstance(value, str | Method):
            return cls(method=value)
        remedy = "Use SpeculationConfig(...), a mapping like {'method': 'suffix'}, or a method's name."
        raise InvalidParameterError("speculation", value, "not settings for speculation", remedy)

    @classmethod
    def _parted(cls, values: dict[str, Any]) -> dict[str, Any]:
        """A flat mapping with the method's own settings put into the method."""
        for name in values:
            if not isinstance(name, str):
                raise InvalidParameterError("speculation", name, "not the name of a setting", "Use strings as names.")
        own = {name: value for name, value in values.items() if name in cls.model_fields}
        rest = {name: value for name, value in values.items() if name not in own}
        method = own.get("method")
        kind = registry.find(method) if isinstance(method, str) and method not in ("none", "off") else None
        known = kind.model_fields.keys() if kind is not None else frozenset()
        for name, value in rest.items():
            if name not in known and name not in FORMERLY:
                owner = "SpeculationConfig" if kind is None else f"SpeculationConfig with method={kind.name!r}"
                raise unknown_setting(owner, name, value, {*cls.model_fields, *known})
        if kind is not None:
            own["method"] = kind(**{name: rest.pop(name) for name in known & rest.keys()})
        return own | rest

    def as_mapping(self) -> dict[str, Any]:
        """The same as one flat mapping of plain values; `of` reads it back. Defaults of the method are left out."""
        own: dict[str, Any] = {"num_draft_tokens": self.num_draft_tokens, "tree": self.tree, "rule": self.rule}
        if not isinstance(self.tree, str):
            own["tree"] = list(self.tree)
        own["draft_sampling"] = self.draft_sampling
        if self.method is None:
            return {"method": "none", **own}
        return {"method": self.method.name, **self.method.model_dump(mode="json", exclude_defaults=True), **own}

    @model_serializer(mode="plain")
    def _as_nested(self) -> dict[str, Any]:
        return self.as_mapping()

    @model_validator(mode="before")
    @classmethod
    def _fitting_length(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Where no length is given: as many as the tree has, or what suits the method."""
        values = {**values, "method": _as_method(values.get("method"))}
        tree = values.get("tree")
        if isinstance(tree, tuple | list) and tree and all(isinstance(width, int) and width >= 1 for width in tree):
            size = tree_size(tree[: MAX_ROWS + 1])
            if size > MAX_ROWS:
                remedy = f"Use fewer children or levels, up to {MAX_ROWS} nodes."
                raise InvalidParameterError("tree", tree, f"it has {size} nodes or more", remedy)
            return {"num_draft_tokens": size, **values}
        if "num_draft_tokens" in values:
            return values
        if isinstance(tree, str):
            return {"num_draft_tokens": _ADAPTIVE_ROWS, **values}
        method = values["method"]
        return values if method is None else {**values, "num_draft_tokens": method.usual_length()}

    @model_validator(mode="after")
    def _shape_fits(self) -> SpeculationConfig:
        if self.tree and self.method is None:
            remedy = 'Name one, as in method="draft_model".'
            raise ContradictionError("tree", self.tree, "no method is named that could draft it", remedy)
        if self.tree and self.method is not None and not self.method.allows_tree:
            problem = f"method={self.method.name!r} takes no tree"
            raise ContradictionError("tree", self.tree, problem, self.method.instead_of_tree)
        if isinstance(self.tree, str) and self.method is not None and not self.method.grows_from_probabilities:
            problem = f"method={self.method.name!r} has no probabilities by which a tree could adapt"
            raise ContradictionError("tree", self.tree, problem, "Leave it out, or give the children by depth.")
        least = 1 if self.method is None else self.method.least_length()
        if self.num_draft_tokens < least:
            problem = f"method={self.name!r} needs {least} rows with its settings"
            remedy = f"Use {least} or more, or change the settings of the method."
            raise ContradictionError("num_draft_tokens", self.num_draft_tokens, problem, remedy)
        return self

    @property
    def enabled(self) -> bool:
        """Whether anybody drafts."""
        return self.method is not None

    @property
    def engine_chooses(self) -> bool:
        """Whether the engine chooses who drafts, step by step."""
        return self.method is not None and self.method.candidates is not None

    @property
    def candidates(self) -> tuple[SpeculationConfig, ...]:
        """What the engine chooses from; these settings alone where it has no choice."""
        chosen = None if self.method is None else self.method.candidates
        return (self,) if chosen is None else chosen

    @property
    def name(self) -> str:
        """The method's, "none" where nobody drafts."""
        return "none" if self.method is None else self.method.name


def tree_size(widths: Sequence[int]) -> int:
    """Nodes of a shape, all levels together."""
    size, level = 0, 1
    for width in widths:
        level *= width
        size += level
    return size


PLAIN = SpeculationConfig()


def _as_members(values: object) -> object:
    if isinstance(values, str | Mapping | Frozen) or not isinstance(values, Iterable):
        return values
    return tuple(SpeculationConfig.of(value) for value in values)


#: A member of a nested method: whole settings of its own, in any form that `SpeculationConfig.of` takes; and several.
Member = Annotated[SpeculationConfig, BeforeValidator(SpeculationConfig.of)]
Members = Annotated[tuple[SpeculationConfig, ...], BeforeValidator(_as_members)]
