"""The record that the Learn page shows before anything is measured: `python web/record.py URL "two cores" > recorded.json`.

URL is a server of the embedded pair, started with `--allow merge`. Texts are short, and traces hold what is drawn.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

PROMPT = "class Reader:\n    def __init__(self, path):\n"
TWICE = "names = ['alpha', 'beta']\nfor name in names:\n    print(name)\n\nnames = ['gamma', 'delta']\nfor"
DROPPED = ("position", "num_scratch_rows", "schedule", "laws", "reason", "draft_probs")


def write(url: str, speculation: Any, prompt: str = PROMPT, max_tokens: int = 14) -> dict[str, Any]:
    """One text, in the shape of the pages."""
    asked = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 1, "ignore_eos": True, "trace": True}
    body = json.dumps({**asked, "speculation": speculation}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        found = json.load(answer)
    (choice,) = found["choices"]
    trace = choice["trace"]
    names = {"tokenIds": "token_ids", "origins": "origins", "texts": "texts", "rounds": "rounds"}
    text = {"text": choice["text"], "finishReason": choice["finish_reason"], "speculation": {}}
    return {**text, **{name: trace[theirs] for name, theirs in names.items()}}


def short(value: Any) -> Any:
    """The same with three digits a number, and four likely tokens a row."""
    if isinstance(value, float):
        return float(f"{value:.3g}")
    if isinstance(value, list):
        return [short(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {name: short(each) for name, each in value.items() if name not in DROPPED}
    if "token_ids" in value and "rows" in value:
        found |= {"laws": value["laws"], "reason": "", "draft_probs": short(value["draft_probs"])}
        end = value["accepted"][-1] if value["accepted"] else -1
        needed = {*value["token_ids"], value["token_id"]}
        for row in found["rows"]:
            most = 5 if row["node"] == end else 0
            row["likely"] = [each for place, each in enumerate(row["likely"]) if place < most or each["token_id"] in needed]
    return found


def passes(url: str) -> list[tuple[int, list[float]]]:
    """Times of passes, by the tokens that they look at."""
    found: dict[int, list[float]] = {}
    for speculation in ("off", *({"method": "draft_model", "num_draft_tokens": length} for length in (1, 3, 7))):
        for each in write(url, speculation, max_tokens=40)["rounds"][1:]:
            found.setdefault(len(each["token_ids"]) + 1, []).append(each["seconds"]["forward"])
    return sorted((rows, short(seconds[:16])) for rows, seconds in found.items() if len(seconds) >= 6)


def main(url: str, machine: str) -> None:
    """Print the file."""
    with urllib.request.urlopen(f"{url}/pages/facts") as answer:
        facts = json.load(answer)
    write(url, {"method": "draft_model"})
    merge = {"method": "merge"}
    merged = max((write(url, merge, TWICE) for _ in range(12)), key=variety)
    run = max((write(url, {"method": "draft_model", "num_draft_tokens": 4}) for _ in range(12)), key=variety)
    found = {
        "machine": f"{machine} with the embedded pair ({facts['dtype']})",
        "weight_bytes": facts["weight_bytes"],
        "passes": passes(url),
        "run": short(run),
        "merged": short(merged),
    }
    sys.stdout.write(json.dumps(found, separators=(",", ":")) + "\n")


def variety(text: dict[str, Any]) -> int:
    """How much there is to see: kinds of tokens, and methods that guessed in one round."""
    most = max(len({draw["member"] for draw in each["draws"]}) for each in text["rounds"])
    return 10 * most + 3 * len(set(text["origins"])) - len(text["rounds"])


if __name__ == "__main__":
    main(*sys.argv[1:])
