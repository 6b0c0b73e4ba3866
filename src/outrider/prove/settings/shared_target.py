"""Proven requests whose drafts come from some of the target's own layers."""

from __future__ import annotations

from outrider.prove.settings.methods import (
    DEEPER,
    EXIT,
    EXIT_ONE,
    LOOKUP,
    ONE,
    SKIP,
    SKIP_ONE,
    drafted,
    exit_tree,
    skip_tree,
)
from outrider.prove.settings.setting import Setting

#: Layers of the target of `SHARED_TARGET_SETTINGS`.
SHARED_TARGET_LAYERS = 3

#: Methods that draft with some of the target's own layers; the target of these proofs has several.
SHARED_TARGET_SETTINGS = (
    Setting("early exit, block", EXIT | {"rule": "block"}),
    Setting("early exit, token", EXIT | {"rule": "token"}),
    Setting("early exit, seeded", EXIT, {"seed": 5}),
    Setting("early exit, most likely tokens", EXIT | {"draft_sampling": "greedy"}),
    Setting("early exit, two samples", EXIT_ONE, {"n": 2, "max_tokens": 2}),
    Setting("early exit, tree, traversal", exit_tree("block")),
    Setting("early exit, tree, recursive rejection", exit_tree("token")),
    Setting("early exit, tree, seeded", exit_tree("auto"), {"seed": 6}),
    Setting("early exit in turns with the draft model", turns=((EXIT,), (drafted("block"),))),
    Setting("early exit behind a lookup", turns=((LOOKUP | {"num_draft_tokens": 1}, EXIT),)),
    Setting("early exit, then the draft model behind it", turns=((EXIT_ONE, drafted("block", num_draft_tokens=1)),)),
    Setting("early exit, then a deeper one behind it", turns=((EXIT_ONE, DEEPER | {"num_draft_tokens": 1}),)),
    Setting("early exit, then a tree behind it", turns=((EXIT_ONE, skip_tree("block") | {"num_draft_tokens": 2}),)),
    *(
        Setting(f"merge of {name}, {rule}", {"method": "merge", "methods": members, "rule": rule})
        for name, members in (
            ("early exit and the draft model", (EXIT_ONE, ONE)),
            ("a tree and a chain of unlike laws", (exit_tree("auto") | {"tree": (2,)}, SKIP_ONE)),
        )
        for rule in ("block", "token")
    ),
    Setting("layer skip behind early exit", turns=((EXIT_ONE, SKIP_ONE),)),
    Setting("early exit behind layer skip", turns=((SKIP_ONE, EXIT_ONE),)),
    Setting("layer skip, block", SKIP | {"rule": "block"}),
    Setting("layer skip, token", SKIP | {"rule": "token"}),
    Setting("layer skip, without the first layer", SKIP | {"skip": (0,)}),
    Setting("layer skip, seeded", SKIP, {"seed": 7}),
    Setting("layer skip, tree, traversal", skip_tree("block")),
    Setting("layer skip, tree, recursive rejection", skip_tree("token")),
    Setting("layer skip in turns with early exit", turns=((SKIP_ONE,), (EXIT,), (exit_tree("block"),))),
)
