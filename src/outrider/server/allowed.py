"""Which methods may a request name? Those that the server was started with, by name: a request must not load a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import ContradictionError, InvalidParameterError
from outrider.propose.prediction import Prediction
from outrider.propose.speculation import PLAIN, SpeculationConfig

#: What a request may change. A method's own settings would make another proposer, with memory of its own.
CHANGEABLE = ("num_draft_tokens", "tree", "rule", "draft_sampling")


class AllowedMethods:
    """The methods of a server.

    Args:
        usual: Who drafts where a request does not say.
        others: What requests may ask for beside it, one for each name.

    Raises:
        ContradictionError: Two of them have one name.
    """

    def __init__(self, usual: SpeculationConfig, others: Sequence[SpeculationConfig] = ()) -> None:
        self.usual = usual
        self._by_name = {config.name: config for config in (usual,) if config.enabled}
        for config in others:
            if config.name in self._by_name:
                problem = "another method of this name is there already"
                raise ContradictionError("allow", config.name, problem, "Give each method once.")
            self._by_name[config.name] = config
        self._by_name.setdefault(Prediction.name, SpeculationConfig(method=Prediction()))

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
        name = settings.pop("method", Prediction.name if predicted else self.usual.name)
        if predicted and name != Prediction.name:
            problem = "the text that the request predicts is drafted by the method prediction"
            raise ContradictionError("speculation", name, problem, "Leave one of them out.")
        for setting, value in settings.items():
            if setting not in CHANGEABLE:
                remedy = f"A request may change {', '.join(CHANGEABLE)}."
                raise InvalidParameterError(f"speculation.{setting}", value, "not a setting of a request", remedy)
        return self._named(name).replace(**settings) if settings else self._named(name)

    def _named(self, name: object) -> SpeculationConfig:
        if name in ("off", "none"):
            return PLAIN
        if not isinstance(name, str) or name not in self._by_name:
            remedy = f"This server was started with: {', '.join(self.names)}."
            raise InvalidParameterError("speculation", name, "no method of this server", remedy)
        return self._by_name[name]
