"""`outrider launch`: what programs are told of a server, and that a server that it starts ends with the program."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.request import urlopen

import pytest
import typer

from outrider.cli import launch as module
from outrider.cli.launch import launch
from outrider.errors import ContradictionError, EngineAnswerError, InvalidParameterError

#: A program that writes down what it was told, asks its server whether it is there, and ends with 3.
_PROGRAM = f"""#!{sys.executable}
import json, os, sys
from pathlib import Path
from urllib.request import Request, urlopen
url = os.environ.get("ANTHROPIC_BASE_URL")
headers = {{"Authorization": "Bearer " + os.environ.get("ANTHROPIC_AUTH_TOKEN", "")}}
models = json.load(urlopen(Request(url + "/v1/models", headers=headers))) if url else None
told = {{"env": dict(os.environ), "arguments": sys.argv[1:], "models": models}}
Path(os.environ["TOLD"]).write_text(json.dumps(told))
sys.exit(3)
"""
#: In place of `outrider serve`: it says what it was asked for as its model.
_SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
END = ["nanobind: leaked 1 types!", ' - leaked type "a"', " - ... skipped remainder", "See https://nanobind.rtfd.io", ""]
BOX = ["╭─ Error ───╮", "│ No such   │", "│ option: x │", "╰───────────╯"]
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": " ".join(sys.argv[1:]), "max_model_len": 256}]}).encode())
if sys.argv[1] == "broken":
    print("outrider: no such model.\\nName another.", *END, sep="\\n", file=sys.stderr)
if sys.argv[1] == "unknown":
    print("Usage: outrider", *BOX, *END, sep="\\n", file=sys.stderr)
if sys.argv[1] in ("broken", "unknown"):
    sys.exit(2)
server = HTTPServer(("127.0.0.1", 0), Handler)
print(json.dumps({"event": "listening", "url": f"http://127.0.0.1:{server.server_port}"}), file=sys.stderr, flush=True)
server.serve_forever()
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the programs write; all of them are installed."""
    for name in ("claude", "codex", "opencode", "aider"):
        (tmp_path / name).write_text(_PROGRAM, "utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TOLD", str(tmp_path / "told.json"))
    return tmp_path / "told.json"


class _Models(BaseHTTPRequestHandler):
    answer: ClassVar[Any] = {"data": [{"id": "coder", "max_model_len": 4096}]}

    def do_GET(self) -> None:
        self.send_response(200 if self.headers["Authorization"] == "Bearer key" else 401)
        self.end_headers()
        self.wfile.write(json.dumps(self.answer).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Models) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def started(told: Path, program: str, **given: Any) -> dict[str, Any]:
    """What a program was told; it ends with its own exit code."""
    with pytest.raises(typer.Exit) as end:
        launch(program, **{"arguments": ["-x", "y"], "url": "", "model": None, "serve": None, "api_key": "key", **given})
    assert end.value.exit_code == 3
    found: dict[str, Any] = json.loads(told.read_text("utf-8"))
    return found


def test_claude_is_told_by_variables(told: Path, url: str) -> None:
    found = started(told, "claude", url=f"{url}/v1/")
    assert found["env"]["ANTHROPIC_BASE_URL"] == url
    assert found["env"]["ANTHROPIC_AUTH_TOKEN"] == "key"
    assert found["env"]["ANTHROPIC_MODEL"] == found["env"]["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "coder"
    assert found["arguments"] == ["-x", "y"]
    assert "ANTHROPIC_MODEL" not in os.environ


def test_codex_is_told_by_settings_in_toml(told: Path, url: str) -> None:
    found = started(told, "codex", url=url)
    *given, flag, model, one, other = found["arguments"]
    assert (flag, model, one, other) == ("-m", "coder", "-x", "y")
    assert set(given[::2]) == {"-c"}
    read = tomllib.loads("\n".join(given[1::2]))
    provider = {"name": "Outrider", "base_url": f"{url}/v1", "wire_api": "responses", "env_key": "OUTRIDER_API_KEY"}
    assert read["model_providers"]["outrider"] == provider
    assert (read["model_provider"], read["model_context_window"]) == ("outrider", 4096)
    assert found["env"]["OUTRIDER_API_KEY"] == "key"


def test_opencode_is_told_by_a_configuration(told: Path, url: str) -> None:
    read = json.loads(started(told, "opencode", url=url)["env"]["OPENCODE_CONFIG_CONTENT"])
    provider = read["provider"]["outrider"]
    assert read["model"] == "outrider/coder"
    assert provider["options"] == {"baseURL": f"{url}/v1", "apiKey": "key"}
    assert provider["models"]["coder"]["limit"]["context"] == 4096


def test_aider_is_told_by_variables_and_its_model(told: Path, url: str) -> None:
    found = started(told, "aider", url=url)
    assert found["env"]["OPENAI_API_BASE"] == f"{url}/v1"
    assert found["arguments"] == ["--model", "openai/coder", "-x", "y"]


def test_a_server_that_was_started_ends_with_the_program(
    told: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_SERVE", (sys.executable, "-c", _SERVER))
    file = tmp_path / "coder-q4.gguf"
    file.touch()
    found = started(told, "claude", model=str(file), serve="--method suffix")
    assert found["models"]["data"][0]["id"] == f"{file} --port 0 --served-model-name coder-q4 --method suffix"
    with pytest.raises(OSError, match="refused"):
        urlopen(f"{found['env']['ANTHROPIC_BASE_URL']}/v1/models")
    assert "--method suffix" in capfd.readouterr().err
    for name, said in (("broken", "no such model. Name another."), ("unknown", "No such option: x")):
        with pytest.raises(EngineAnswerError, match=re.escape(f"({said})")):
            started(told, "claude", model=name)


def test_what_cannot_be_started_is_told(told: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidParameterError, match="claude, codex, opencode, aider"):
        started(told, "vim")
    with pytest.raises(ContradictionError, match="--model"):
        started(told, "claude", serve="--method suffix")
    with pytest.raises(InvalidParameterError, match="No closing quotation"):
        started(told, "claude", model="x", serve="--method 'a")
    with pytest.raises(EngineAnswerError, match=r"no server answers.*--model"):
        started(told, "claude", url="http://127.0.0.1:1")
    with pytest.raises(EngineAnswerError, match="--api-key"):
        started(told, "claude", url=url, api_key="other")
    monkeypatch.setattr(_Models, "answer", {"models": []})
    with pytest.raises(EngineAnswerError, match="/v1/models"):
        started(told, "claude", url=url)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InvalidParameterError, match="pip install aider-chat"):
        started(told, "aider")
