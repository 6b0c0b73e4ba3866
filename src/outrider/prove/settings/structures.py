"""Proven requests whose output has a structure, with the tokens that it forces."""

from __future__ import annotations

from typing import Any

from outrider.params import StructuredOutputs
from outrider.prove.settings.methods import LOOKUP, ONE, drafted
from outrider.prove.settings.parameters import DRAFTED_BY, stuck_behind
from outrider.prove.settings.setting import Setting

_LANGUAGE = ('""', '"a"', '"aa"')
_RULE = " | ".join('"' + text.replace('"', '\\"') + '"' for text in _LANGUAGE)

#: The same structure, in every form in which a caller may ask for it.
STRUCTURES: dict[str, StructuredOutputs] = {
    "choice": StructuredOutputs(choice=_LANGUAGE),
    "regex": StructuredOutputs(regex='""|"a"|"aa"'),
    "json_schema": StructuredOutputs(json_schema={"enum": ["", "a", "aa"]}),
    "lark": StructuredOutputs(grammar=f"start: {_RULE}"),
    "gbnf": StructuredOutputs(grammar=f"root ::= {_RULE}"),
}

#: A structure that forces the first four tokens, leaves a choice, and forces the end.
_FORCING = ('"aa"a', '"aa""')
_FORCED: dict[str, Any] = {"structured_outputs": StructuredOutputs(choice=_FORCING), "max_tokens": 7}

#: Who drafts behind what is forced, with the parameters that each needs.
_BEHIND_FORCED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nobody": ({"method": "none"}, {}),
    "nobody, seeded": ({"method": "none"}, {"seed": 8}),
    "nobody, two samples": ({"method": "none"}, {"n": 2}),
    "block": (drafted("block"), {}),
    "token": (drafted("token"), {"temperature": 1.4}),
    "tree": (drafted("block", tree=(2, 1)), {}),
    "coupled": (drafted("auto"), {"seed": 8}),
    "lookup": (LOOKUP, {}),
    "merge": ({"method": "merge", "methods": [LOOKUP, ONE]}, {}),
    "the engine's choice": ({"method": "auto", "methods": [LOOKUP, ONE]}, {}),
    "a text that ends among them": (ONE, {"max_tokens": 3}),
    "a stop string among them": (ONE, {"stop": ("aa",)}),
}

#: Ends of texts that need a tokenizer.
_STUCK_ENDS = {"a stop string": {"stop": ('"',), **stuck_behind(0)}, "an end of text": stuck_behind(2)}

STRUCTURE_SETTINGS = (
    *(
        Setting(f"{name}, block", drafted("block"), {"structured_outputs": structure, "max_tokens": 5}, language=_LANGUAGE)
        for name, structure in STRUCTURES.items()
    ),
    *(
        Setting(
            f"regex, {way}",
            speculation,
            {"structured_outputs": STRUCTURES["regex"], **extra, "max_tokens": 5, "frequency_penalty": 0.5},
            language=_LANGUAGE,
        )
        for way, (speculation, extra) in DRAFTED_BY.items()
        if way != "block"
    ),
    Setting(
        "regex, nobody drafts", params={"structured_outputs": STRUCTURES["regex"], "max_tokens": 5}, language=_LANGUAGE
    ),
    *(
        Setting(f"forced tokens, then {way}", speculation, {**_FORCED, **extra}, language=_FORCING)
        for way, (speculation, extra) in _BEHIND_FORCED.items()
    ),
    *(
        Setting(f"nothing may follow {end}, {way}", DRAFTED_BY[way][0], {**asked, **DRAFTED_BY[way][1]})
        for end, asked in _STUCK_ENDS.items()
        for way in ("block", "tree", "coupled", "lookup")
    ),
)
