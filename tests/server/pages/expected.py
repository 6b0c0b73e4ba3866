"""What the playground must say of an answer of the server, from its trace alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: What the note of a token says, by its origin.
REASONS = {"accepted": "It stands", "recovered": " fell.", "bonus": "one token more", "plain": "wrote it alone"}

#: The words of the pages for methods, by their names.
WORDS = dict(re.findall(r'^  (\w+): "(.*)",$', (Path(__file__).parents[3] / "web/src/names.ts").read_text("utf-8"), re.M))

#: Student's t at 97.5%, by degrees of freedom.
STUDENT = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447}


def speed(rounds: list[dict[str, Any]]) -> float:
    """Tokens a second behind the first token."""
    tokens = sum(len(found["accepted"]) + (found["token_id"] is not None) for found in rounds[1:])
    return tokens / (rounds[-1]["at"] - rounds[0]["at"])


def notes_of(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What the notes of a round's tokens must say, from its trace alone."""
    rows = {row["node"]: {each["token_id"]: each for each in row["likely"]} for row in found["rows"]}
    end = -1
    for node in found["accepted"]:
        likely = rows[found["parents"][node]][found["token_ids"][node]]
        assert likely["target"] == found["target_probs"][node]
        coins = [coin for coin in found["coins"] if coin["node"] == node]
        decisive = [coin for coin in coins if coin["stands"]] or coins[-1:]
        yield note(found["round"], likely, node, coin=decisive[0]["probability"] if decisive else None)
        end = node
    if found["token_id"] is not None:
        fallen = [found["texts"][node] for node, parent in enumerate(found["parents"]) if parent == end]
        names = [text.strip() for text in fallen if text.strip().isalnum()]
        yield note(found["round"], rows[end][found["token_id"]], None, fallen=names, is_repair=bool(fallen))


def note(
    number: int,
    likely: dict[str, Any],
    node: int | None,
    *,
    coin: float | None = None,
    fallen: list[str] | None = None,
    is_repair: bool = False,
) -> dict[str, Any]:
    facts = [each for each in (likely["target"], likely["draft"], coin) if each is not None]
    return {"round": number, "facts": facts, "node": node, "fallen": fallen or [], "is_repair": is_repair}


def residuals(found: dict[str, Any]) -> list[float]:
    """What a token was drawn from behind the last token that stood, where something was refused there."""
    row = found["rows"][found["accepted"][-1] + 1 if found["accepted"] else 0]
    return [each["residual"] for each in row["likely"][:9] if found["token_ids"] and each["residual"] is not None]


def boxes(found: dict[str, Any], stage: int) -> list[str]:
    """The kinds of boxes of the drawn tree: the root, the draft, and what the target wrote."""
    nodes = range(len(found["token_ids"]))
    if stage < 2:
        draft = ["guess" for _ in nodes]
    else:
        draft = ["accepted" if node in found["accepted"] else "fallen" for node in nodes]
    end = found["accepted"][-1] if found["accepted"] else -1
    kind = "plain" if not draft else "recovered" if end in found["parents"] else "bonus"
    return ["root", *draft, *([kind] if stage == 3 and found["token_id"] is not None else [])]


def pairs_of(found: list[dict[str, Any]]) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Rounds of the plain text and of the other, turn by turn."""
    for one, other in zip(found[::2], found[1::2], strict=True):
        pair = (one, other) if one["asked"]["speculation"] == "off" else (other, one)
        yield pair[0]["trace"]["rounds"], pair[1]["trace"]["rounds"]


def words_of(found: dict[str, Any]) -> str:
    """What the guesses of a round came from, in words; nobody where there are none."""
    words = [WORDS[name] for name in dict.fromkeys(part["method"] for part in found["drafted_by"])]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words) or "nobody"
