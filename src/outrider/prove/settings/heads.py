"""Proven requests whose drafts come from heads on the target's hidden states."""

from __future__ import annotations

from typing import Any

from outrider.prove.settings.methods import (
    BLOCKWISE,
    DFLASH,
    DFLASH_ONE,
    EAGLE1,
    EAGLE3,
    EAGLE3_ONE,
    EXIT,
    EXIT_HEAD,
    EXIT_ONE,
    LAYERED,
    LAYERED_HEADS,
    LAYERED_ONE,
    LOOKUP,
    MEDUSA,
    MEDUSA_ONE,
    MTP,
    MTP_ONE,
    ONE,
    PEAGLE,
    PEAGLE_ONE,
    drafted,
    staged,
)
from outrider.prove.settings.setting import Setting

#: The row that heads read was computed for an earlier text here, so a text begins with a token that is decoded plainly.
_FOUR, _PAIR = {"max_tokens": 4}, {"n": 2, "max_tokens": 3, "top_k": 2}
_OF_TWO, _PAIR_OF_TWO = {"top_k": 2}, {"n": 2, "max_tokens": 2, "top_k": 2}


def _staged(drafter: dict[str, Any]) -> dict[str, Any]:
    """A stage whose draft model is unlike the target, with heads or layers of that draft model."""
    own = {"model": LAYERED_HEADS} if "model" in drafter else {}
    return staged({**drafter, **own}, model=LAYERED)


#: Methods that draft with heads on the target's hidden states. They need the pair with several layers.
HEADS_SETTINGS = (
    Setting("Medusa, block", MEDUSA | {"rule": "block"}, _FOUR),
    Setting("Medusa, token", MEDUSA | {"rule": "token"}, _FOUR),
    Setting("Medusa, walk", MEDUSA | {"rule": "walk"}, _FOUR),
    Setting("Medusa, seeded", MEDUSA, {"seed": 5, **_FOUR}),
    Setting("Medusa, most likely tokens", MEDUSA | {"draft_sampling": "greedy"}, _FOUR),
    Setting("Medusa, two samples", MEDUSA_ONE, _PAIR),
    Setting("Medusa, temperature and filters", MEDUSA, {"top_k": 2, "top_p": 0.9, "temperature": 1.3, **_FOUR}),
    Setting("Medusa, penalties", MEDUSA, {"frequency_penalty": -0.6, "repetition_penalty": 1.7, **_FOUR}),
    Setting("Medusa, stop tokens", MEDUSA, {"stop_token_ids": (2,), **_FOUR}),
    Setting("Medusa, low confidence", MEDUSA | {"min_confidence": 0.4}, _FOUR),
    Setting("Medusa, tree, traversal", MEDUSA | {"tree": (2, 1), "rule": "block"}, _FOUR),
    Setting("Medusa, tree, recursive rejection", MEDUSA | {"tree": (2, 1), "rule": "token"}, _FOUR),
    Setting("Medusa, tree, seeded", MEDUSA | {"tree": (2, 1)}, {"seed": 6, **_FOUR}),
    Setting("Medusa, best-first tree", MEDUSA | {"tree": "best_first", "num_draft_tokens": 4}, _FOUR),
    Setting("Medusa, Sequoia's tree", MEDUSA | {"tree": "sequoia", "num_draft_tokens": 3}, _FOUR),
    Setting("Medusa in turns with others", turns=((MEDUSA,), (), (LOOKUP,), (drafted("block"),)), params=_FOUR),
    Setting("Medusa behind a lookup", turns=((LOOKUP | {"num_draft_tokens": 1}, MEDUSA),), params=_FOUR),
    Setting("Medusa behind the draft model", turns=((ONE, MEDUSA_ONE),), params=_FOUR),
    Setting("the draft model behind Medusa", turns=((MEDUSA_ONE, ONE),), params=_FOUR),
    Setting("Medusa behind early exit", turns=((EXIT_ONE, MEDUSA_ONE),), params=_FOUR),
    Setting("blockwise, block", BLOCKWISE | {"rule": "block"}, _FOUR),
    Setting("blockwise, token", BLOCKWISE | {"rule": "token"}, _FOUR),
    Setting("blockwise, seeded", BLOCKWISE, {"seed": 7, **_FOUR}),
    Setting("blockwise, two samples", BLOCKWISE | {"num_draft_tokens": 1}, _PAIR),
    Setting("blockwise, tree", BLOCKWISE | {"tree": (2, 1)}, _FOUR),
    Setting("exit, block", EXIT_HEAD | {"rule": "block"}),
    Setting("exit, token", EXIT_HEAD | {"rule": "token"}),
    Setting("exit, seeded", EXIT_HEAD, {"seed": 5}),
    Setting("exit, two samples", EXIT_HEAD | {"num_draft_tokens": 1}, {"n": 2, "max_tokens": 2}),
    Setting("exit, tree, traversal", EXIT_HEAD | {"tree": (2, 1), "rule": "block"}),
    Setting("exit, tree, recursive rejection", EXIT_HEAD | {"tree": (2, 1), "rule": "token"}),
    Setting("exit behind Medusa", turns=((MEDUSA_ONE, EXIT_HEAD | {"num_draft_tokens": 1}),), params=_FOUR),
    Setting("exit in turns with early exit", turns=((EXIT_HEAD,), (EXIT,)), params=_FOUR),
    Setting("EAGLE-3, block", EAGLE3 | {"rule": "block"}),
    Setting("EAGLE-3, token", EAGLE3 | {"rule": "token"}),
    Setting("EAGLE-3, walk", EAGLE3 | {"rule": "walk"}),
    Setting("EAGLE-3, seeded", EAGLE3, {"seed": 5}),
    Setting("EAGLE-3, most likely tokens", EAGLE3 | {"draft_sampling": "greedy"}),
    Setting("EAGLE-3, two samples", EAGLE3_ONE, {"n": 2, "max_tokens": 2}),
    Setting("EAGLE-3, temperature and filters", EAGLE3, {"top_k": 2, "top_p": 0.9, "temperature": 1.3}),
    Setting("EAGLE-3, penalties", EAGLE3, {"frequency_penalty": -0.6, "repetition_penalty": 1.7}),
    Setting("EAGLE-3, tokens that it never drafts", EAGLE3, {"allowed_token_ids": (1, 2)}),
    Setting("EAGLE-3, low confidence", EAGLE3 | {"min_confidence": 0.5}),
    Setting("EAGLE-3, tree, traversal", EAGLE3 | {"tree": (2, 1), "rule": "block"}),
    Setting("EAGLE-3, tree, recursive rejection", EAGLE3 | {"tree": (2, 1), "rule": "token"}),
    Setting("EAGLE-3, tree, seeded", EAGLE3 | {"tree": (2, 1)}, {"seed": 6}),
    Setting("EAGLE-3, best-first tree", EAGLE3 | {"tree": "best_first", "num_draft_tokens": 4}),
    Setting("EAGLE-3, Sequoia's tree", EAGLE3 | {"tree": "sequoia", "num_draft_tokens": 3}),
    Setting("EAGLE-3 in turns with others", EAGLE3, turns=((EAGLE3,), (), (LOOKUP,), (drafted("block"),)), params=_FOUR),
    Setting("EAGLE-3 behind a lookup", EAGLE3, turns=((LOOKUP | {"num_draft_tokens": 1}, EAGLE3),)),
    Setting("EAGLE-3 behind the draft model", EAGLE3_ONE, turns=((ONE, EAGLE3_ONE),)),
    Setting("the draft model behind EAGLE-3", EAGLE3_ONE, turns=((EAGLE3_ONE, ONE),)),
    Setting("EAGLE-3 behind Medusa", EAGLE3_ONE, turns=((MEDUSA_ONE, EAGLE3_ONE),), params=_FOUR),
    Setting("EAGLE-3, then the draft model", {"method": "then", "methods": (EAGLE3_ONE, ONE)}),
    *(
        Setting(f"staged, {name}", _staged(drafter), {"top_k": 2, **params})
        for name, drafter, params in (
            ("Medusa's heads of the draft model", MEDUSA, _FOUR),
            ("a tree of the draft model's heads, seeded", BLOCKWISE | {"tree": (2, 1)}, {"seed": 6, **_FOUR}),
            ("the first layer of the draft model", EXIT, {}),
            ("the draft model's head for an exit", EXIT_HEAD | {"rule": "token"}, {}),
            ("EAGLE-3 of the draft model", EAGLE3, {}),
            ("a tree of EAGLE of the draft model", EAGLE1 | {"tree": (2, 1)}, {}),
            ("layers of the draft model's checkpoint", MTP, {}),
            ("a block of the draft model's head, seeded", DFLASH, {"seed": 6}),
            ("P-EAGLE of the draft model", PEAGLE, {}),
        )
    ),
    Setting(
        "EAGLE-3 of the draft model and that model itself",
        {"method": "merge", "methods": (_staged(EAGLE3 | {"num_draft_tokens": 1}), LAYERED_ONE)},
        {"top_k": 2},
    ),
    *(
        Setting(f"merge of {name}, {rule}", {"method": "merge", "methods": members, "rule": rule})
        for name, members in (
            ("EAGLE-3 and the draft model", (EAGLE3_ONE, ONE)),
            ("a tree of EAGLE-3 and EAGLE", (EAGLE3_ONE | {"tree": (2,)}, EAGLE1 | {"num_draft_tokens": 1})),
        )
        for rule in ("block", "token")
    ),
    Setting("the engine chooses, EAGLE-3", {"method": "auto", "methods": (EAGLE3,)}, {"max_tokens": 5}),
    Setting("EAGLE, block", EAGLE1 | {"rule": "block"}),
    Setting("EAGLE, token", EAGLE1 | {"rule": "token"}),
    Setting("EAGLE, seeded", EAGLE1, {"seed": 5}),
    Setting("EAGLE, two samples", EAGLE1 | {"num_draft_tokens": 1}, {"n": 2, "max_tokens": 2}),
    Setting("EAGLE, tree, traversal", EAGLE1 | {"tree": (2, 1), "rule": "block"}),
    Setting("EAGLE-2: the likeliest tokens first", EAGLE1 | {"tree": "best_first", "num_draft_tokens": 4}),
    Setting(
        "the engine chooses, EAGLE", {"method": "auto", "methods": (EAGLE1 | {"num_draft_tokens": 1},)}, _FOUR | _OF_TWO
    ),
    Setting("EAGLE-3 behind EAGLE", {"method": "then", "methods": (EAGLE1 | {"num_draft_tokens": 1}, EAGLE3_ONE)}),
    Setting("MTP, block", MTP | {"rule": "block"}),
    Setting("MTP, seeded", MTP, {"seed": 5}),
    Setting("MTP, most likely tokens", MTP | {"draft_sampling": "greedy"}),
    Setting("MTP, two samples", MTP_ONE, _PAIR_OF_TWO),
    Setting("MTP, tree, traversal", MTP | {"tree": (2, 1), "rule": "block"}),
    Setting("MTP, tree, recursive rejection", MTP | {"tree": (2, 1), "rule": "token"}),
    Setting("MTP, best-first tree", MTP | {"tree": "best_first", "num_draft_tokens": 4}, _OF_TWO),
    Setting("MTP, Sequoia's tree", MTP | {"tree": "sequoia", "num_draft_tokens": 3}, _OF_TWO),
    Setting("MTP behind a lookup", MTP, turns=((LOOKUP | {"num_draft_tokens": 1}, MTP),)),
    Setting("merge of MTP and the draft model", {"method": "merge", "methods": (MTP_ONE, ONE), "rule": "block"}, _OF_TWO),
    Setting("the engine chooses, MTP", {"method": "auto", "methods": (MTP_ONE,)}, {"max_tokens": 4, "top_k": 2}),
    Setting("DFlash, block", DFLASH | {"rule": "block"}),
    Setting("DFlash, token", DFLASH | {"rule": "token"}),
    Setting("DFlash, seeded", DFLASH, {"seed": 5}),
    Setting("DFlash, two samples", DFLASH_ONE, {"n": 2, "max_tokens": 2}),
    Setting("DFlash, penalties", DFLASH, {"frequency_penalty": -0.6, "repetition_penalty": 1.7}),
    Setting("DFlash, tree, traversal", DFLASH | {"tree": (2, 1), "rule": "block"}),
    Setting("DFlash, tree, recursive rejection", DFLASH | {"tree": (2, 1), "rule": "token"}),
    Setting("DFlash, best-first tree", DFLASH | {"tree": "best_first", "num_draft_tokens": 4}),
    Setting("DFlash, Sequoia's tree", DFLASH | {"tree": "sequoia", "num_draft_tokens": 3}),
    Setting("the engine chooses, DFlash", {"method": "auto", "methods": (DFLASH_ONE,)}, _FOUR | _OF_TWO),
    Setting("DFlash behind a lookup", DFLASH_ONE, turns=((LOOKUP | {"num_draft_tokens": 1}, DFLASH_ONE),), params=_FOUR),
    Setting("merge of DFlash and EAGLE-3", {"method": "merge", "methods": (DFLASH_ONE | {"tree": (2,)}, EAGLE3_ONE)}),
    Setting("P-EAGLE, block", PEAGLE | {"rule": "block"}),
    Setting("P-EAGLE, token", PEAGLE | {"rule": "token"}),
    Setting("P-EAGLE, seeded", PEAGLE, {"seed": 5}),
    Setting("P-EAGLE, two samples", PEAGLE_ONE, {"n": 2, "max_tokens": 2}),
    Setting("P-EAGLE, tree, traversal", PEAGLE | {"tree": (2, 1), "rule": "block"}),
    Setting("P-EAGLE, best-first tree", PEAGLE | {"tree": "best_first", "num_draft_tokens": 4}),
    Setting("P-EAGLE, Sequoia's tree", PEAGLE | {"tree": "sequoia", "num_draft_tokens": 3}),
    Setting("P-EAGLE behind a lookup", PEAGLE_ONE, turns=((LOOKUP | {"num_draft_tokens": 1}, PEAGLE_ONE),), params=_FOUR),
    Setting("merge of P-EAGLE and the draft model", {"method": "merge", "methods": (PEAGLE_ONE, ONE)}, _OF_TWO),
    Setting("the engine chooses, P-EAGLE", {"method": "auto", "methods": (PEAGLE_ONE,)}, {"max_tokens": 4, "top_k": 2}),
)
