"""A folder in which what the documentation says can be run: the embedded pair, under the names that pages use."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from outrider import LLM
from outrider.building import Profile
from outrider.config import default_model
from tests.docs.blocks import ROOT
from tests.model.gguf_files import Written
from tests.server.running import TEMPLATE, Server, running

PROMPTS = ["def parse(line):\n", "class Reader:\n", "import os\n", "for name in names:\n"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files and models as the pages name them."""
    folder = tmp_path_factory.mktemp("docs")
    for name, source in {"MODEL": default_model("target"), "DRAFT": default_model("draft")}.items():
        shutil.copytree(source, folder / name)
    for name, source in {"path-or-hub-id": "MODEL", "smaller-model-of-the-family": "DRAFT"}.items():
        (folder / name).symlink_to(source)
    rows = [{"prompt": prompt, "answer": "    return None\n" * 4, "max_tokens": 24} for prompt in PROMPTS]
    for name in ("prompts", "mine", "mail", "served"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (folder / "prompt.txt").write_text(PROMPTS[0], "utf-8")
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    (folder / "schema.json").write_text(json.dumps(schema), "utf-8")
    (folder / "template.jinja").write_text(TEMPLATE, "utf-8")
    (folder / "keys.txt").write_text("web:   sk-3f9a max_concurrent=8 tokens_per_minute=60000 record_mib=64\n", "utf-8")
    proposer = re.search(r"```python\n(.*?)```", (ROOT / "docs/how-to/write_a_proposer.md").read_text("utf-8"), re.DOTALL)
    assert proposer is not None
    (folder / "my_file.py").write_text(proposer[1] + "\n\nMyMethod = Bigram\n", "utf-8")
    for name in ("src", "recipes", "constraints.txt"):
        (folder / name).symlink_to(ROOT / name)
    script = folder / "bin" / "outrider"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m outrider "$@"\n', "utf-8")
    script.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A link that leads nowhere, or a page that no other names, would end the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="session")
def gguf_files(folder: Path) -> None:
    """The embedded pair as files of llama.cpp."""
    found = json.loads((folder / "MODEL" / "tokenizer.json").read_text("utf-8"))["model"]

    def vocabulary(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(sorted(found["vocab"], key=found["vocab"].__getitem__))
        writer.add_token_types([1] * len(found["vocab"]))
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in found["merges"]])
        writer.add_eos_token_id(0)

    for file, model in {"model.gguf": "MODEL", "draft.gguf": "DRAFT"}.items():
        Written(str(folder / model), folder / file, ("BF16",), vocabulary)


@pytest.fixture(scope="session")
def profile(folder: Path) -> None:
    """What `outrider tune` would recommend for the embedded pair."""
    with LLM(str(folder / "MODEL"), speculation="none", kv_cache_tokens=1024) as llm:
        found = Profile(identity=llm.identity, speculation={"method": "suffix"}, concurrency=1, gain=1.4, measured=True)
    (folder / "tuning").mkdir()
    (folder / "tuning" / "profile.json").write_text(found.model_dump_json(), "utf-8")


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Server]:
    """The server that clients of the pages ask."""
    template = str(folder / "template.jinja")
    with running("--chat-template", template, "--allow", "draft_model", "--served-model-name", "my-model") as server:
        yield server


@pytest.fixture(scope="session")
def server_with_keys(folder: Path) -> Iterator[Server]:
    """The same with the keys of the pages."""
    with running("--api-key-file", str(folder / "keys.txt"), "--record", str(folder / "kept")) as server:
        yield server


class Files(SimpleHTTPRequestHandler):
    """Answers from a folder, and says nothing."""

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    """Of a server that knows nothing but files."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(site))) as files:
        thread = Thread(target=files.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{files.server_port}"
        files.shutdown()
        thread.join()
