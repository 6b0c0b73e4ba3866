"""lm-evaluation-harness: the same texts and the same score with speculation and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from tests.server.running import TEMPLATE, Server, running

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval not installed; run: pip install 'outrider[harness]'"),
]

PROMPTS = ["def parse(line):\n", "class Reader:\n", "import os\n", "for name in names:\n", "with open(path) as", "try:\n"]
TASK = """
task: lines
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
num_fewshot: 0
generation_kwargs:
  until: ["\\n\\n"]
  max_gen_toks: 24
  temperature: 0
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task of six prompts. The answers to two of them are what the offline API writes, and the others are wrong."""
    folder = tmp_path_factory.mktemp("harness")
    (folder / "template.jinja").write_text(TEMPLATE, "utf-8")
    (folder / "lines.yaml").write_text(TASK.format(data=folder / "lines.jsonl"), "utf-8")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with running("--chat-template", str(folder / "template.jinja")) as server:
        yield server


@pytest.fixture(scope="module")
def texts(folder: Path) -> dict[str, list[str]]:
    """What the offline API writes, by route."""
    params = SamplingParams(temperature=0, max_tokens=24, stop="\n\n")
    with LLM(kv_cache_tokens=4096) as llm:
        assert llm.tokenizer is not None
        llm.tokenizer.chat_template = TEMPLATE
        chats: Any = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        found = {
            "completions": [output.text for output in llm.generate(PROMPTS, params)],
            "chat/completions": [output.text for output in llm.chat(chats, params)],
        }
    return found


def evaluate(server: Server, folder: Path, route: str, speculation: str) -> tuple[float, list[str]]:
    """The score, and the text of every prompt, as the harness has them."""
    model = "local-chat-completions" if route.startswith("chat") else "local-completions"
    out = folder / f"{model}-{speculation}"
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--model", model, "--tasks", "lines", "--include_path", str(folder)),
        "--model_args",
        f"base_url={server.url}/v1/{route},model=outrider-embedded,tokenizer_backend=None,num_concurrent=3,max_retries=1",
        *("--gen_kwargs", f"speculation={speculation}", "--output_path", str(out), "--log_samples"),
        *(["--apply_chat_template"] if route.startswith("chat") else []),
    ]
    alone = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env={**os.environ, **alone}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = out.rglob("results_*.json")
    (samples,) = out.rglob("samples_*.jsonl")
    lines = [json.loads(line) for line in samples.read_text("utf-8").splitlines()]
    lines.sort(key=lambda line: line["doc_id"])
    score = json.loads(results.read_text("utf-8"))["results"]["lines"]["exact_match,none"]
    return score, [line["resps"][0][0] for line in lines]


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_the_harness_sees_no_difference(server: Server, folder: Path, texts: dict[str, list[str]], route: str) -> None:
    answers = [text if place < 2 else "something else" for place, text in enumerate(texts[route])]
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(PROMPTS, answers, strict=True)]
    (folder / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    for speculation in ("draft_model", "off"):
        assert evaluate(server, folder, route, speculation) == (pytest.approx(2 / 6), texts[route]), speculation
    accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total", 'method="draft_model"')
    assert accepted > 0
