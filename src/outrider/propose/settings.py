"""Settings of speculation: who drafts for a request, how far, how the draft is verified; and the methods by their names."""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self
from weakref import WeakValueDictionary

from pydantic import BeforeValidator, Field, model_serializer, model_validator

from outrider.cache.memory import AddedLayers
from outrider.config import Elsewhere, Frozen, unknown_setting
from outrider.errors import ContradictionError, InvalidParameterError, OutriderError, ProposerError
from outrider.loading.loaded_model import LoadedModel
from outrider.model.runner import ModelRunner
from outrider.model.target import Target
from outrider.propose.base import Proposer, Requirements
from outrider.propose.tree import MAX_ROWS
from outrider.verify.verifier import RuleName

# --- Method: the settings of a way to draft, and the factory of its proposer.


#: Names that the settings around a method use; one mapping holds both, so no method may have settings of these names.
RESERVED = frozenset({"method", "num_draft_tokens", "tree", "rule", "draft_sampling"})


class LoadRunner(Protocol):
    """Loads another model with KV memory of its own."""

    def __call__(
        self,
        model: str,
        *,
        dtype: str | None = None,
        quantization: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> ModelRunner:
        """Load a folder or hub id; `dtype` None takes the target's, and `quantization` None that of drafts."""
        ...


@dataclass(frozen=True)
class ProposerContext:
    """Holds what a method may use to build its proposer."""

    target: Target  # whose tokens are guessed: the target, or inside a stage the draft model
    max_num_batched_tokens: int  # rows that a pass may hold
    load_runner: LoadRunner  # loads another model
    # Models that proposers have loaded and may share, by their settings, as long as one of them is alive.
    loaded: WeakValueDictionary[Hashable, ModelRunner] = field(default_factory=WeakValueDictionary, compare=False)
    outermost: Target | None = None  # the target of all stages; None outside of stages

    @property
    def vocab_size(self) -> int:
        """Width of the probabilities that drafts are drawn from: that of the target, inside a stage too."""
        return (self.outermost or self.target).vocab_size

    def inside(self, runner: ModelRunner) -> ProposerContext:
        """Returns the same for who drafts for a draft model."""
        return replace(self, target=Target(runner), outermost=self.outermost or self.target)

    def build(self, method: Method) -> Proposer:
        """The proposer of a method, for a nested method to build its members; it belongs to the one that asks."""
        try:
            proposer = method.build(self)
        except OutriderError:
            raise
        except Exception as error:
            raise ProposerError(f"method {method.name!r} cannot build its proposer: {error!r}") from error
        if not isinstance(proposer, Proposer):
            raise ProposerError(f"method {method.name!r} built {type(proposer).__name__}, which is no Proposer")
        _check_requirements(method, proposer.requires, self.target)
        return proposer


class Method(Frozen):
    """Settings of one way to draft; a subclass adds its own and says how to build its proposer.

    Two requests share a proposer exactly when these settings are equal.
    """

    #: What callers write: SpeculationConfig(method="...").
    name: ClassVar[str]
    #: Length of a draft where nobody asks for one, unless the settings say more (see `usual_length`).
    default_num_draft_tokens: ClassVar[int] = 5
    #: Whether drafts can follow a fixed shape (SpeculationConfig.tree), and what to do instead where they cannot.
    takes_tree: ClassVar[bool] = True
    instead_of_tree: ClassVar[str] = "Leave it out."
    #: Whether its drafts grow from probabilities, as the request's parameters leave them. By these trees can adapt.
    grows_from_probabilities: ClassVar[bool] = True
    #: Whether drafts may have more rows than their longest path without such a shape. Where they may not, no more rows are
    #: granted than a path may be long.
    branches_freely: ClassVar[bool] = False
    #: Whether all tokens of a draft are guessed in one pass of its own, so that a long draft takes as long as a short one.
    drafts_in_one_pass: ClassVar[bool] = False
    #: Whether it ends drafts by itself, before the length that it is asked for, so that not every row is used.
    ends_drafts: ClassVar[bool] = False
    #: What is probably wrong where hardly any of its draft tokens stand, for the log; empty where nothing can be wrong.
    if_nothing_stands: ClassVar[str] = ""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        taken = sorted(RESERVED & cls.model_fields.keys())
        if taken:
            raise ProposerError(f"method {cls.__name__}: {taken[0]!r} is a setting of SpeculationConfig; use another name")
        if not isinstance(getattr(cls, "name", None), str):
            raise ProposerError(f"method {cls.__name__}: it has no name; write name: ClassVar[str] = '...'")

    @property
    def candidates(self) -> tuple[SpeculationConfig, ...] | None:
        """Returns what the engine chooses from, for settings that leave it the choice; None where the method itself
        drafts."""
        return None

    @property
    def nested(self) -> Mapping[str, SpeculationConfig]:
        """Whole settings of other methods inside these, by their place, such as "methods.1"; empty where there are none."""
        return {}

    def with_nested(self, nested: Mapping[str, SpeculationConfig]) -> Self:
        """Returns the same settings with others inside them."""
        return self

    @property
    def allows_tree(self) -> bool:
        """Tells whether drafts of these settings can follow a fixed shape."""
        return self.takes_tree

    def usual_length(self) -> int:
        """Length of a draft where nobody asks for one; for a method whose settings decide it to override."""
        return self.default_num_draft_tokens

    def least_length(self) -> int:
        """Rows that a caller must grant to a draft at least; for a method whose settings need more to override. In a step
        a draft may have fewer nonetheless."""
        return 1

    def check_source(self, field: str) -> None:
        """Refuse a model or a head that is not there, before anything is loaded; for a method that reads one to override.

        Args:
            field: What the error calls the setting that names it.

        Raises:
            InputError: Nothing can be loaded from there.
        """

    def added_token_bytes(self, target: LoadedModel) -> int:
        """Bytes that a token takes in the layers that the proposer adds to the target's (`Target.add_layers`); for a method
        with such layers to override. They count when the memory of an engine that begins with this method is sized."""
        return 0

    def build(self, context: ProposerContext) -> Proposer:
        """The proposer with these settings."""
        raise NotImplementedError


def same_method(one: Method | None, other: Method | None) -> bool:
    """Tells whether two settings mean the same proposer. Values that cannot be compared are different ones."""
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:
        return False


def _check_requirements(method: Method, requires: object, target: Target) -> None:
    """Raise ProposerError for what the target cannot show: when the proposer is built, and not in a step of others."""
    if requires is None:
        return
    if not isinstance(requires, Requirements):
        raise ProposerError(
            f"method {method.name!r}: requires is {type(requires).__name__} instead of Requirements or None"
        )
    layers, top_k, added = requires.aux_layers, requires.target_top_k, requires.added_layers
    if added is not None and not isinstance(added, AddedLayers):
        raise ProposerError(f"method {method.name!r}: added_layers={added!r} is not what Target.add_layers returns")
    if not isinstance(layers, tuple) or any(type(layer) is not int for layer in layers):
        raise ProposerError(f"method {method.name!r}: aux_layers={layers!r} is no tuple of layer numbers")
    if any(not 0 <= layer <= target.num_layers for layer in layers):
        raise ProposerError(
            f"method {method.name!r}: aux_layers={layers!r}, and the target has layers 0 to {target.num_layers}"
        )
    if type(top_k) is not int or not 0 <= top_k <= target.vocab_size:
        raise ProposerError(f"method {method.name!r}: target_top_k={top_k!r} is not between 0 and {target.vocab_size}")


# --- SpeculationConfig: who drafts for a request, how far, and how the draft is verified.


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
#: Kinds of drafting by the names of llama.cpp, and the methods that are most like them.
LLAMA_CPP_TYPES = {
    "none": "none",
    "draft-simple": "draft_model",
    "draft-mtp": "mtp",
    "draft-eagle3": "eagle3",
    "draft-dflash": "dflash",
    "ngram-simple": "ngram",
    **dict.fromkeys(("ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache"), "suffix"),
}


def _as_method(value: object) -> Method | None:
    """A method from its settings, or from its name for the defaults; None for "none" and "off"."""
    if value is None or isinstance(value, Method):
        return value
    if isinstance(value, str):
        return None if value in ("none", "off") else find(value)()
    remedy = 'Use a name like "suffix", or settings like DraftModel(model="...").'
    raise InvalidParameterError("method", value, "neither a method's name nor its settings", remedy)


def _as_widths(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class SpeculationConfig(Frozen):
    """Says how to speculate. Every setting gives the same output distribution.

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
            shares the target's noise; once a text had such a draft, all its later drafts are verified by the walk.
            Drafts that were not drawn always are.
        draft_sampling: "sampled" draws drafts from the draft's probabilities, "greedy" takes the most likely token.
    """

    method: Annotated[Method | None, BeforeValidator(_as_method), Elsewhere(options=("--spec-type",))] = None
    num_draft_tokens: Annotated[int, Elsewhere(options=("--spec-draft-n-max", "--draft-max", "--draft-n", "--draft"))] = (
        Field(5, ge=1, le=MAX_ROWS, description=f"Use 1 to {MAX_ROWS}; method='none' turns drafting off.")
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
        kind = find(method) if isinstance(method, str) and method not in ("none", "off") else None
        known = kind.model_fields.keys() if kind is not None else frozenset()
        for name, value in rest.items():
            if name not in known and name not in FORMERLY:
                owner = "SpeculationConfig" if kind is None else f"SpeculationConfig with method={kind.name!r}"
                raise unknown_setting(owner, name, value, {*cls.model_fields, *known})
        if kind is not None:
            own["method"] = kind(**{name: rest.pop(name) for name in known & rest.keys()})
        return own | rest

    def as_mapping(self) -> dict[str, Any]:
        """Returns the same as one flat mapping of plain values; `of` reads it back. Defaults of the method are left out."""
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
        """Fills `num_draft_tokens`: the size of the tree, or the method's default."""
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
        """Tells whether anybody drafts."""
        return self.method is not None

    @property
    def engine_chooses(self) -> bool:
        """Tells whether the engine chooses who drafts, step by step."""
        return self.method is not None and self.method.candidates is not None

    @property
    def candidates(self) -> tuple[SpeculationConfig, ...]:
        """Returns what the engine chooses from; these settings alone where it has no choice."""
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


# --- Methods by name: the built-in ones, those that installed packages bring, and those of this process.


ENTRY_POINT_GROUP = "outrider.methods"

#: Where the settings of the built-in methods are, so that only what is used is imported.
_BUILT_IN = {
    "auto": "outrider.propose.compositions:Auto",
    "blockwise": "outrider.propose.row_heads:Blockwise",
    "cross_vocabulary": "outrider.propose.cross_vocabulary:CrossVocabulary",
    "draft_model": "outrider.propose.draft_model:DraftModel",
    "eagle1": "outrider.propose.eagle:Eagle1",
    "eagle3": "outrider.propose.eagle:Eagle3",
    "dflash": "outrider.propose.parallel:DFlash",
    "dspark": "outrider.propose.parallel:DSpark",
    "early_exit": "outrider.propose.own_layers:EarlyExit",
    "exit": "outrider.propose.own_layers:ExitHead",
    "gemma4_assistant": "outrider.propose.assistant:Gemma4Assistant",
    "layer_skip": "outrider.propose.own_layers:LayerSkip",
    "lookahead": "outrider.propose.lookahead:Lookahead",
    "medusa": "outrider.propose.row_heads:Medusa",
    "merge": "outrider.propose.compositions:Merge",
    "mtp": "outrider.propose.eagle:Mtp",
    "ngram": "outrider.propose.ngram:Ngram",
    "peagle": "outrider.propose.parallel:PEagle",
    "prediction": "outrider.propose.ngram:Prediction",
    "staged": "outrider.propose.staged:Staged",
    "suffix": "outrider.propose.suffix:Suffix",
    "then": "outrider.propose.compositions:Then",
    "token_recycling": "outrider.propose.recycling:TokenRecycling",
}
_registered: dict[str, type[Method]] = {}
_NO_METHOD = "Give a subclass of outrider.propose.settings.Method with a name of its own."


def register(method: type[Method]) -> type[Method]:
    """Make a method known by its name in this process; serves as a decorator."""
    if not _is_method(method):
        raise InvalidParameterError("method", method, "it is no method", _NO_METHOD)
    if method.name in ("none", "off"):
        problem = f"{method.name!r} stands for plain decoding"
        raise InvalidParameterError("name", method.name, problem, "Give the method another name.")
    _registered[method.name] = method
    return method


def names() -> list[str]:
    """Every method that can be asked for, but for those whose names begin with an underscore: they are for proofs."""
    found = {*_BUILT_IN, *_registered, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))}
    return sorted(name for name in found if not name.startswith("_"))


def find(name: str) -> type[Method]:
    """The settings class of a method."""
    if name in _registered:
        return _registered[name]
    if name in _BUILT_IN:
        return _checked(name, _imported(_BUILT_IN[name]))
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            found = point.load()
        except Exception as error:
            raise ProposerError(f"method {name!r} cannot be loaded from {point.value}: {error}") from error
        return _checked(name, found)
    near = "".join(f"Did you mean {guess}? " for guess in get_close_matches(name, names(), n=1))
    raise InvalidParameterError("method", name, "no such method", f"{near}Known: {', '.join(('none', *names()))}.")


def load(address: str) -> type[Method]:
    """Import a method that is given as "module:Class" and make it known by its name; runs that module's code.

    Modules of the current folder are found too, as they are where Python runs a file of that folder.
    """
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = _imported(address)
    except (Exception, SystemExit) as error:  # whatever the module's own code raises
        remedy = "Use module:Class, where Python finds the module."
        raise InvalidParameterError("method", address, f"it cannot be imported ({error})", remedy) from error
    if not _is_method(found):
        raise InvalidParameterError("method", address, "it is no method", _NO_METHOD)
    kind: type[Method] = found
    return register(kind)


def _is_method(found: Any) -> bool:
    """Tells whether it is a settings class that can be asked for: the base class has no name."""
    return isinstance(found, type) and issubclass(found, Method) and isinstance(getattr(found, "name", None), str)


def _imported(address: str) -> Any:
    module, _, attribute = address.partition(":")
    return getattr(import_module(module), attribute)


def _checked(name: str, found: Any) -> type[Method]:
    if not _is_method(found):
        raise ProposerError(f"method {name!r}: {found!r} is no subclass of outrider.propose.settings.Method")
    kind: type[Method] = found
    return kind
