"""Method: the settings of a way to draft, and the factory of its proposer."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self
from weakref import WeakValueDictionary

from outrider.cache.added_layers import AddedLayers
from outrider.errors import OutriderError, ProposerError
from outrider.model.loading.loaded_model import LoadedModel
from outrider.model.runner import ModelRunner
from outrider.model.target import Target
from outrider.propose.base import Proposer, Requirements
from outrider.validation import Frozen

if TYPE_CHECKING:
    from outrider.propose.speculation import SpeculationConfig

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
        """Load a folder or hub id; `dtype` None takes the target's, and `quantization` None that of drafts.

        Raises:
            ModelError: It cannot be used.
            InvalidParameterError: No such folder.
        """
        ...


@dataclass(frozen=True)
class ProposerContext:
    """What a method may use to build its proposer.

    Attributes:
        target: Whose tokens are guessed: the target, or inside a stage the draft model.
        max_num_batched_tokens: Rows that a pass may hold.
        load_runner: Loads another model.
        loaded: Models that proposers have loaded and may share, by their settings, as long as one of them is alive.
        outermost: The target of all stages; None outside of stages.
    """

    target: Target
    max_num_batched_tokens: int
    load_runner: LoadRunner
    loaded: WeakValueDictionary[Hashable, ModelRunner] = field(default_factory=WeakValueDictionary, compare=False)
    outermost: Target | None = None

    @property
    def vocab_size(self) -> int:
        """Width of the probabilities that drafts are drawn from: that of the target, inside a stage too."""
        return (self.outermost or self.target).vocab_size

    def inside(self, runner: ModelRunner) -> ProposerContext:
        """The same for who drafts for a draft model."""
        return replace(self, target=Target(runner), outermost=self.outermost or self.target)

    def build(self, method: Method) -> Proposer:
        """The proposer of a method, for a nested method to build its members; it belongs to the one that asks.

        Raises:
            InputError: A setting is missing or does not fit the target.
            ModelError: Its model cannot be loaded or speaks other tokens.
            ProposerError: It cannot be built.
        """
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
        """What the engine chooses from, for settings that leave it the choice; None where the method itself drafts."""
        return None

    @property
    def nested(self) -> Mapping[str, SpeculationConfig]:
        """Whole settings of other methods inside these, by their place, such as "methods.1"; empty where there are none."""
        return {}

    def with_nested(self, nested: Mapping[str, SpeculationConfig]) -> Self:
        """The same settings with others inside them.

        Args:
            nested: As many as there are, in their order.

        Raises:
            InputError: They do not fit together.
        """
        return self

    @property
    def allows_tree(self) -> bool:
        """Whether drafts of these settings can follow a fixed shape."""
        return self.takes_tree

    def usual_length(self) -> int:
        """Length of a draft where nobody asks for one; for a method whose settings decide it to override."""
        return self.default_num_draft_tokens

    def least_length(self) -> int:
        """Rows that a caller must grant to a draft at least; for a method whose settings need more to override. In a step
        a draft may have fewer nonetheless."""
        return 1

    def added_token_bytes(self, target: LoadedModel) -> int:
        """Bytes that a token takes in the layers that the proposer adds to the target's (`Target.add_layers`); for a method
        with such layers to override. They count when the memory of an engine that begins with this method is sized."""
        return 0

    def build(self, context: ProposerContext) -> Proposer:
        """The proposer with these settings.

        Raises:
            InputError: A setting is missing or does not fit the target.
            ModelError: A model that it needs cannot be used.
        """
        raise NotImplementedError


def same_method(one: Method | None, other: Method | None) -> bool:
    """Whether two settings mean the same proposer. Values that cannot be compared are different ones."""
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
