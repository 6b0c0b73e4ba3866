"""Proven requests whose draft model has another vocabulary than the target."""

from __future__ import annotations

from outrider.prove.settings.methods import CROSSED, LOOKUP
from outrider.prove.settings.setting import Setting

#: Drafts from a model of another vocabulary. They need the pair of CROSSED_PIECES.
CROSSED_SETTINGS = (
    Setting("other vocabulary", CROSSED),
    Setting("other vocabulary, token rule", CROSSED | {"rule": "token"}, {"temperature": 1.4, "top_k": 2}),
    Setting("other vocabulary, seeded", CROSSED, {"seed": 5}),
    Setting("other vocabulary, most likely tokens", CROSSED | {"draft_sampling": "greedy"}),
    Setting("other vocabulary, tree", CROSSED | {"tree": (2, 1), "num_draft_tokens": 4}),
    Setting("other vocabulary, penalties", CROSSED, {"repetition_penalty": 1.7, "frequency_penalty": -0.6}),
    Setting("other vocabulary, only tokens outside it", CROSSED, {"allowed_token_ids": (1,)}),
    Setting("other vocabulary, two samples", CROSSED | {"num_draft_tokens": 1}, {"n": 2, "max_tokens": 2}),
    Setting("other vocabulary, behind a lookup", turns=((LOOKUP | {"num_draft_tokens": 1}, CROSSED),)),
    Setting("other vocabulary, by text", CROSSED | {"match": "text"}),
    Setting("other vocabulary, by text, behind a lookup", turns=((LOOKUP, CROSSED | {"match": "text"}),)),
)
