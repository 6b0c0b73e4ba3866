"""Bugs that begin at some place of a path: each kind in the variants "from depth d on"."""

from __future__ import annotations

from collections.abc import Callable

from tests.mutation.mutants import Mutant

#: The third place first, since `make test` plants the first variant of each kind alone.
DEPTHS = (3, 1, 2, 4, 5, 6)


def _from_depth(
    name: str, pitfall: int, path: str, old: str, new: Callable[[int], str], killer: str, depths: tuple[int, ...] = DEPTHS
) -> list[Mutant]:
    """The variants of one bug; `new` takes the depth from which it acts."""
    return [Mutant(f"{name}, from depth {d} on", pitfall, path, old, new(d), killer) for d in depths]


_DRAFT = "        if not self.nodes:\n            return EMPTY\n"

DEEP_MUTANTS = (
    *_from_depth(
        "a doubted token is dropped from the draft",
        2,
        "propose/trees/growth.py",
        _DRAFT,
        lambda d: (
            f"        while self.nodes and self.nodes[-1].depth >= {d} and (\n"
            "            self.confidence(len(self.nodes) - 1).token < self.min_confidence\n"
            "        ):\n"
            f"            self.nodes.pop()\n{_DRAFT}"
        ),
        "deep_low_confidence",
    ),
    *_from_depth(
        "a chain drops its last token where the place behind it is not worth its row",
        2,
        "propose/trees/adaptive.py",
        "        return {last: 1} if pays or (last < 0 and self._is_time_to_try()) else {}\n",
        lambda d: (
            f"        if not pays and growth.node(last).depth >= {d}:\n"
            "            growth.nodes.pop()\n"
            "        return {last: 1} if pays or (last < 0 and self._is_time_to_try()) else {}\n"
        ),
        "deep_judged",
        (3, 2, 4, 5),  # a chain seldom ends elsewhere
    ),
    *_from_depth(
        "bad words lose the oldest committed tokens",
        11,
        "verify/processing.py",
        "        before = (*self._token_ids[max(0, len(self._token_ids) - self._lengths[-1]) :], *path)\n",
        lambda d: (
            f"        kept = self._lengths[-1] if len(path) < {d} else 2\n"
            "        before = (*self._token_ids[max(0, len(self._token_ids) - kept) :], *path)\n"
        ),
        "deep_bad_words",
    ),
    *_from_depth(
        "penalties count the last two tokens of a path alone",
        11,
        "verify/processing.py",
        "            for token in path:\n                output[row, token] += 1\n",
        lambda d: (
            f"            for token in path if len(path) < {d} else path[-2:]:\n                output[row, token] += 1\n"
        ),
        "deep_penalties",
        (3, 4, 5, 6),  # shorter paths are counted whole
    ),
    *_from_depth(
        "the bonus row is taken one too early after longer chains",
        8,
        "verify/verifier.py",
        "p[i, k] for i, k in enumerate(lengths)",
        lambda d: f"p[i, k - (k == length > {d})] for i, k in enumerate(lengths)",
        "deep_chains",
    ),
    *_from_depth(
        "a best-first tree leaves out an unlikely last row",
        2,
        "propose/trees/growth.py",
        _DRAFT,
        lambda d: (
            "        if self.request.builder.learns and self.nodes and (\n"
            f"            self.nodes[-1].depth >= {d} and self.confidence(len(self.nodes) - 1).token < 0.5\n"
            "        ):\n"
            f"            self.nodes.pop()\n{_DRAFT}"
        ),
        "deep_best_first",
    ),
    *_from_depth(
        "a residual of the token rule under the block rule",
        4,
        "verify/verifier.py",
        "for each in (p, q, weights)",
        lambda d: f"for each in (p, q, torch.where(torch.arange(length + 1) >= {d}, 1.0, weights))",
        "deep_residuals",
        (3, 1, 2, 4, 5),  # the drafts have six places
    ),
    *_from_depth(
        "a token counts as accepted behind one that was refused",
        7,
        "verify/verifier.py",
        "        return coins.index(False) if False in coins else len(coins)\n",
        lambda d: (
            f"        first = [*coins[:{d}], False].index(False)\n"
            f"        return first + (first == {d}) * sum(coins[{d}:])\n"
        ),
        "deep_tokens",
    ),
    *_from_depth(
        "a draft token stands where the target draws another one",
        6,
        "verify/verifier.py",
        "                child = draft.child(node, token)\n",
        lambda d: (
            "                child = draft.child(node, token)\n"
            f"                if child is None and len(paths[i]) >= {d} - 1 and draft.children(node):\n"
            "                    child = draft.children(node)[0]\n"
        ),
        "deep_walks",
    ),
    *_from_depth(
        "a refusal leaves what the target owes as it was",
        4,
        "verify/rules.py",
        "            wanted, owed = _residual(wanted, proposal, wanted.new_ones(())), True\n",
        lambda d: (
            f"            if len(path) + 1 < {d}:\n"
            "                wanted = _residual(wanted, proposal, wanted.new_ones(()))\n"
            "            owed = True\n"
        ),
        "deep_recursion",
    ),
    *_from_depth(
        "what a parent owes is forgotten where a leaf was refused",
        4,
        "verify/rules.py",
        "        wanted[parent] = _residual(wanted[parent], proposal, weight[parent])\n",
        lambda d: (
            f"        if len(tree.path_to(node)) < {d}:\n"
            "            wanted[parent] = _residual(wanted[parent], proposal, weight[parent])\n"
        ),
        "deep_traversal",
    ),
)
