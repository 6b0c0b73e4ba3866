"""Draw docs/images/generate.svg: a real run of the embedded pair, coloured by token origin.

python docs/images/make_generate.py
"""

from __future__ import annotations

import io
from pathlib import Path
from time import perf_counter

from rich.console import Console
from rich.text import Text

from outrider import LLM, SamplingParams
from outrider.cli.render import closing_line, coloured, ending, legend

PROMPT = "class Reader:\n    def __init__(self, path):\n"


def main() -> None:
    console = Console(record=True, width=104, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    llm = LLM(dtype="float32")
    console.print(
        Text('$ outrider generate --dtype float32 --seed 4 -t 0.8 --max-tokens 120 -p "class Reader: ..."', style="bold")
    )
    console.print(legend())
    text = Text().append(PROMPT, "dim")
    params = SamplingParams(seed=4, temperature=0.8, max_tokens=120)
    start, last = perf_counter(), None
    for piece in llm.stream(PROMPT, params):
        text.append_text(coloured(piece.spans))
        last = piece.output or last
    assert last is not None
    console.print(text)
    seconds = perf_counter() - start
    console.print(Text(closing_line(len(last.token_ids), seconds, last.stats, ending(last, params)), style="dim"))
    console.save_svg(str(Path(__file__).with_name("generate.svg")), title="outrider generate")


if __name__ == "__main__":
    main()
