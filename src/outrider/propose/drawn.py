"""Drawn: what was drawn for one request, so that every draw comes to its test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.draft import EMPTY, Draft, Law

#: Tokens behind the committed text, from the first one on; the empty path is the end of the text.
Path = tuple[int, ...]


class Drawn:
    """The tokens that were drawn for one request in one turn, each with its place and the probabilities it was drawn from.

    *A draw, once made, can only be tested or carried*: if it depended on a drawn token, or on what was drawn behind it,
    whether it is tested, the text would have another distribution. So every draw is noted here before a proposer sees the
    token. A proposer that raises behind a draw, leaves a drawn token out, or names other probabilities, has a fault, and
    its draft is what was drawn. Coupled guesses are not kept, since they decide nothing; they are only counted.
    """

    def __init__(self) -> None:
        self._rows: dict[Path, Tensor] = {}
        self._tokens: dict[Path, list[int]] = {}
        self._order: list[tuple[Path, int]] = []
        self._count = Counter[int]()

    def next_branch(self, position: int) -> int:
        """The number that tells this draw from the others for the same position."""
        self._count[position] += 1
        return self._count[position] - 1

    def taken(self, path: Path) -> Sequence[int]:
        """Tokens that were drawn behind a path, in their order."""
        return self._tokens.get(path, ())

    def note(self, path: Path, row: Tensor, token: int) -> None:
        """A token was drawn behind a path.

        Args:
            path: Tokens between the committed text and this one.
            row: [vocab_size] probabilities, those of the first token that was drawn there. Further ones are drawn from what
                is left of them without the tokens before.
            token: The token.
        """
        self._rows.setdefault(path, row)
        self._tokens.setdefault(path, []).append(token)
        self._order.append((path, token))

    def draft(self, base: Path) -> Draft:
        """All that was drawn, as a draft behind `base`. Tokens on the way to a draw that nobody drew are guesses."""
        nodes: dict[Path, int] = {}
        tokens, parents, laws, rows = list[int](), list[int](), list[Law](), list[Tensor]()

        def add(path: Path, token: int, law: Law, row: Tensor) -> None:
            nodes[(*path, token)] = len(tokens)
            tokens.append(token)
            parents.append(nodes.get(path, -1))
            laws.append(law)
            rows.append(row)

        for path, token in self._order:
            row = self._rows[path]
            for end in range(len(base), len(path)):
                if path[: end + 1] not in nodes:
                    add(path[:end], path[end], Law.OPAQUE, torch.zeros_like(row))
            add(path, token, Law.SAMPLED, row)
        return Draft(tuple(tokens), tuple(parents), tuple(laws), torch.stack(rows)) if tokens else EMPTY

    def problem(self, draft: Draft, base: Path) -> str | None:
        """What a draft behind `base` says of its draws that is not so; None where it holds all of them and no others."""
        paths, told = draft.paths, dict[Path, list[int]]()
        for draw, (node, law) in enumerate(zip(draft.nodes, draft.laws, strict=True)):
            if law is not Law.SAMPLED:
                continue
            token, parent = draft.token_ids[node], draft.parents[node]
            path = base if parent < 0 else (*base, *paths[parent])
            told.setdefault(path, []).append(token)
            row = self._rows.get(path)
            if row is None or token not in self._tokens[path]:
                return f"node {node}: token {token} was not drawn through the noise that the proposer was given"
            assert draft.draft_probs is not None
            if not torch.equal(draft.draft_probs[draw].to(row), row):
                return f"node {node}: token {token} was drawn from other probabilities"
        for path, tokens in self._tokens.items():
            if told.get(path) != tokens:
                return f"of the tokens {tokens} that were drawn behind {list(path)}, it holds {told.get(path, [])}"
        return None
