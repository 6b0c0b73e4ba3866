"""Methods by name: the built-in ones, those that installed packages bring, and those of this process."""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from outrider.errors import InvalidParameterError, ProposerError
from outrider.propose.method import Method

ENTRY_POINT_GROUP = "outrider.methods"

#: Where the settings of the built-in methods are, so that only what is used is imported.
_BUILT_IN = {
    "auto": "outrider.propose.auto:Auto",
    "blockwise": "outrider.propose.methods.blockwise:Blockwise",
    "cross_vocabulary": "outrider.propose.methods.cross_vocabulary:CrossVocabulary",
    "draft_model": "outrider.propose.methods.draft_model:DraftModel",
    "eagle1": "outrider.propose.methods.eagle1:Eagle1",
    "eagle3": "outrider.propose.methods.eagle3:Eagle3",
    "dflash": "outrider.propose.methods.dflash:DFlash",
    "early_exit": "outrider.propose.methods.early_exit:EarlyExit",
    "exit": "outrider.propose.methods.exit_head:ExitHead",
    "layer_skip": "outrider.propose.methods.layer_skip:LayerSkip",
    "lookahead": "outrider.propose.methods.lookahead:Lookahead",
    "medusa": "outrider.propose.methods.medusa:Medusa",
    "merge": "outrider.propose.compositions:Merge",
    "mtp": "outrider.propose.methods.mtp:Mtp",
    "ngram": "outrider.propose.methods.ngram:Ngram",
    "peagle": "outrider.propose.methods.peagle:PEagle",
    "prediction": "outrider.propose.methods.prediction:Prediction",
    "staged": "outrider.propose.methods.staged:Staged",
    "suffix": "outrider.propose.methods.suffix:Suffix",
    "then": "outrider.propose.compositions:Then",
    "token_recycling": "outrider.propose.methods.token_recycling:TokenRecycling",
}
_registered: dict[str, type[Method]] = {}
_NO_METHOD = "Give a subclass of outrider.propose.method.Method with a name of its own."


def register(method: type[Method]) -> type[Method]:
    """Make a method known by its name in this process; serves as a decorator.

    Raises:
        InvalidParameterError: It is no method, or has a name that nobody could ask for.
    """
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
    """The settings class of a method.

    Raises:
        InvalidParameterError: No such method; the error names the nearest ones.
        ProposerError: A package that brings it cannot be imported, or brings something else.
    """
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

    Raises:
        InvalidParameterError: No such module or class, or no method.
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
    """Whether it is a settings class that can be asked for: the base class has no name."""
    return isinstance(found, type) and issubclass(found, Method) and isinstance(getattr(found, "name", None), str)


def _imported(address: str) -> Any:
    module, _, attribute = address.partition(":")
    return getattr(import_module(module), attribute)


def _checked(name: str, found: Any) -> type[Method]:
    if not _is_method(found):
        raise ProposerError(f"method {name!r}: {found!r} is no subclass of outrider.propose.method.Method")
    kind: type[Method] = found
    return kind
