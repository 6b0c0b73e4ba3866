"""The methods that a request may name: those that the server offers by name, since a request must not load a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import ContradictionError, InputError, InvalidParameterError
from outrider.propose.methods.prediction import Prediction
from outrider.propose.speculation import PLAIN, SpeculationConfig
from outrider.propose.trees.tree import MAX_ROWS
from outrider.validation import nearest

#: What a request may change. A method's own settings would make another proposer, with memory of its own.
CHANGEABLE = ("num_draft_tokens", "tree", "rule", "draft_sampling")
#: What would be right, where SpeculationConfig says it in Python.
_IN_JSON = {
    "num_draft_tokens": f'Use 1 to {MAX_ROWS}; "speculation": "off" turns drafting off.',
    "tree": f'Use children by depth, like [3, 2, 1], up to {MAX_ROWS} nodes, "best_first" or "sequoia", '
    "with a method that drafts trees.",
}


class AllowedMethods:
    """The methods of a server.

    Args:
        usual: Who drafts where a request does not say.
        others: What requests may ask for beside it, one for each name.

    Raises:
        ContradictionError: Two of them have one name.
    """

    def __init__(self, usual: SpeculationConfig, others: Sequence[SpeculationConfig] = ()) -> None:
        self.usual, self._others = usual, tuple(others)
        self._by_name = {config.name: config for config in (usual,) if config.enabled}
        for config in others:
            if config.name in self._by_name:
                problem = "another method of this name is there already"
                raise ContradictionError("allow", config.name, problem, "Give each method once.")
            self._by_name[config.name] = config
        if usual.engine_chooses:  # what the engine may choose, a request may choose, too
            for member in usual.candidates:
                self._by_name.setdefault(member.name, member)
        self._by_name.setdefault(Prediction.name, SpeculationConfig(method=Prediction()))

    def with_usual(self, usual: SpeculationConfig) -> AllowedMethods:
        """The same with other settings for requests that do not say. Raises ContradictionError as above."""
        return AllowedMethods(usual, self._others)

    @property
    def names(self) -> tuple[str, ...]:
        """What a request may name."""
        return ("off", *sorted(self._by_name))

    def of(self, asked: str | Mapping[str, Any] | None, *, predicted: bool) -> SpeculationConfig:
        """The settings that a request asks for.

        Args:
            asked: Its field `speculation`: None, "off", a method's name, or a mapping.
            predicted: Whether it brings a prediction; then the method `prediction` drafts.

        Raises:
            InputError: The method is none of the server's, or a setting may not be changed.
        """
        settings = {"method": asked} if isinstance(asked, str) else dict(asked or {})
        field = "speculation" if isinstance(asked, str) else "speculation.method"
        name = settings.pop("method", Prediction.name if predicted else self.usual.name)
        if predicted and name != Prediction.name:
            problem = "the text that the request predicts is drafted by the method prediction"
            raise ContradictionError("speculation", name, problem, "Leave one of them out.")
        for setting, value in settings.items():
            if setting not in CHANGEABLE:
                remedy = f"{nearest(setting, ('method', *CHANGEABLE))}A request may change {', '.join(CHANGEABLE)}."
                raise InvalidParameterError(f"speculation.{setting}", value, "not a setting of a request", remedy)
        config = self._named(name, field)
        return _changed(config, settings) if settings else config

    def _named(self, name: object, field: str) -> SpeculationConfig:
        if name in ("off", "none"):
            return PLAIN
        if not isinstance(name, str) or name not in self._by_name:
            remedy = f"Requests to this server may name: {', '.join(self.names)}."
            raise InvalidParameterError(field, name, "no method of this server", remedy)
        return self._by_name[name]


def _changed(config: SpeculationConfig, settings: Mapping[str, Any]) -> SpeculationConfig:
    """The settings with some of a request's own, whose errors have the names and the forms of a request."""
    try:
        return config.replace(**settings)
    except InputError as error:
        value = settings.get(error.field, error.value)
        remedy = _IN_JSON.get(error.field, error.remedy)
        raise type(error)(f"speculation.{error.field}", value, error.problem, remedy) from None
