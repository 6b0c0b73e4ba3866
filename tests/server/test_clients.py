"""Programs that people have, as clients of a real server: LiteLLM, llm, GuideLLM, and what aider and Open WebUI send."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.config import default_model
from tests.server.running import TEMPLATE, Server, running

NAME = "outrider-embedded"
PROMPT = "def f(x):"
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "move", "description": "Moves.", "parameters": POINT}}]


def needs(package: str) -> pytest.MarkDecorator:
    reason = f"{package} not installed; run: pip install 'outrider[clients]'"
    return pytest.mark.skipif(find_spec(package) is None, reason=reason)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    template = tmp_path_factory.mktemp("server") / "template.jinja"
    template.write_text(TEMPLATE, "utf-8")
    with running("--method", "draft_model", "--chat-template", str(template)) as server:
        yield server


@pytest.fixture(scope="module")
def template() -> str:
    return TEMPLATE


@pytest.fixture(scope="module")
def text(llm: LLM) -> str:
    """What the offline API writes behind the prompt."""
    return llm.chat([{"role": "user", "content": PROMPT}], SamplingParams(temperature=0, max_tokens=24))[0].text


# -- LiteLLM -----------------------------------------------------------------------------------------------------------

#: Calls LiteLLM with arguments from standard input, one list of them a line, and prints what it makes of the answers. A
#: message "-" stands for the last answer's message, as an agent puts it back.
_LITELLM = """
import json, sys
import litellm

last = None
for line in sys.stdin:
    asked = json.loads(line)
    asked["messages"] = [last.model_dump() if message == "-" else message for message in asked["messages"]]
    answer = litellm.completion(**asked)
    if asked.get("stream"):
        chunks = list(answer)
        choices = [chunk.choices[0] for chunk in chunks]
        usage = getattr(chunks[-1], "usage", None)
        ends = [choice.finish_reason for choice in choices if choice.finish_reason]
        found = {"text": "".join(choice.delta.content or "" for choice in choices), "end": ends[0], "calls": []}
    else:
        (choice,), usage = answer.choices, answer.usage
        last = choice.message
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in last.tool_calls or ()]
        found = {"text": last.content, "end": choice.finish_reason, "calls": calls}
    print(json.dumps({**found, "usage": usage and usage.model_dump()}))
"""


@pytest.fixture(scope="module")
def litellm(server: Server) -> Callable[..., list[Any]]:
    """Asks through LiteLLM, in a process of its own, since it changes the warnings and logs where it is loaded."""

    def ask(*calls: dict[str, Any]) -> list[Any]:
        common = {"model": f"openai/{NAME}", "api_base": f"{server.url}/v1", "api_key": "any", "num_retries": 0}
        lines = "".join(json.dumps({**common, **call}) + "\n" for call in calls)
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        done = subprocess.run(
            [sys.executable, "-c", _LITELLM], input=lines, capture_output=True, text=True, env=environment, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    return ask


@pytest.mark.slow
@needs("litellm")
def test_litellm_and_with_it_aider(litellm: Callable[..., list[Any]], text: str) -> None:
    """Whole, streamed, with a call that goes back into the conversation, and with the arguments that aider gives it."""
    user = {"role": "user", "content": PROMPT}
    asked: Any = {"messages": [user], "temperature": 0, "max_tokens": 24}
    tools = {"tools": TOOLS, "max_tokens": 200, "seed": 1}
    named = {"tool_choice": {"type": "function", "function": {"name": "move"}}}
    reply = {"role": "tool", "tool_call_id": "call_1", "name": "move", "content": "done"}
    aider = {"temperature": 0, "timeout": 600, "max_tokens": 24}
    history = [{"role": "system", "content": "import os"}, user, {"role": "assistant", "content": "Ok."}, user]
    whole, streamed, called, back, edit, commit = litellm(
        asked,
        {**asked, "stream": True, "stream_options": {"include_usage": True}},
        {"messages": [user], **tools, **named},
        {"messages": [user, "-", reply], **tools},
        {"messages": history, "stream": True, **aider},
        {"messages": history[:2], "stream": False, **aider},
    )
    assert (whole["text"], whole["end"], whole["usage"]["completion_tokens"]) == (text, "length", 24)
    assert (streamed["text"], streamed["end"], streamed["usage"]["completion_tokens"]) == (text, "length", 24)
    ((name, arguments),) = called["calls"]
    assert (name, arguments.keys(), called["end"]) == ("move", {"x"}, "tool_calls")
    assert back["end"] in ("stop", "length")
    assert edit["text"]
    assert commit["text"]


# -- llm ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs("llm")
def test_the_command_llm(server: Server, text: str, tmp_path: Path) -> None:
    """With the models that its file extra-openai-models.yaml names, as its documentation shows it."""
    common = {"model_name": NAME, "api_base": f"{server.url}/v1"}
    models = [
        {"model_id": "chat", "supports_schema": True, "supports_tools": True, **common},
        {"model_id": "text", "completion": True, **common},
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models), "utf-8")  # which is YAML too

    def ask(model: str, *arguments: str, prompt: str = PROMPT) -> str:
        options = ("-m", model, "-o", "temperature", "0", *arguments)
        environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "any"}
        command = [sys.executable, "-m", "llm", *options, prompt]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.removesuffix("\n")

    assert ask("chat", "-o", "max_tokens", "24") == text
    assert ask("chat", "-o", "max_tokens", "24", "--no-stream") == text
    assert ask("text", "-o", "max_tokens", "24", prompt=f"{PROMPT}\n") == text
    assert json.loads(ask("chat", "-o", "max_tokens", "200", "--schema", json.dumps(POINT))).keys() == {"x"}
    assert ask("chat", "-o", "max_tokens", "8", "-s", "import os", "-T", "llm_version")
    assert ask("chat", "-o", "max_tokens", "8", "-c")  # with the call's turn before it


# -- Open WebUI --------------------------------------------------------------------------------------------------------


def test_what_open_webui_sends(server: Server, text: str) -> None:
    """Its list of models, a chat with usage at the end, the task of a title, and a call of its own tools."""
    headers = {
        "Authorization": "Bearer any",
        "X-OpenWebUI-User-Name": "Ada",
        "X-OpenWebUI-User-Id": "1",
        "X-OpenWebUI-User-Email": "ada@localhost",
        "X-OpenWebUI-User-Role": "admin",
        "X-OpenWebUI-Chat-Id": "2",
    }
    models = server.get("/v1/models", headers=headers).json()["data"]
    assert [model["id"] for model in models] == [NAME]

    user = {"role": "user", "content": PROMPT}
    chat = {"model": NAME, "messages": [user], "stream": True, "stream_options": {"include_usage": True}}
    params = {"temperature": 0.0, "top_p": 1.0, "max_tokens": 24, "frequency_penalty": 0.0, "seed": 7, "stop": ["\x00"]}
    streamed = _streamed(server, {**chat, **params}, headers)
    assert "".join(choice["delta"].get("content") or "" for chunk in streamed for choice in chunk["choices"]) == text
    assert streamed[-1]["usage"]["completion_tokens"] == 24

    title = {"model": NAME, "messages": [user], "stream": False, "max_completion_tokens": 16}
    answer = server.post("/v1/chat/completions", title, headers=headers).json()
    assert answer["choices"][0]["message"]["content"]

    tools = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    pieces = _streamed(server, {**chat, **tools, "seed": 1}, headers)
    call = _joined(
        call for chunk in pieces for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", ())
    )
    reply = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
    turns = [user, {"role": "assistant", "content": "", "tool_calls": [call]}, reply]
    again = _streamed(server, {**chat, **params, "messages": turns, "tools": TOOLS}, headers)
    assert again[-1]["usage"]["completion_tokens"] > 0


def _streamed(server: Server, body: Any, headers: dict[str, str]) -> list[Any]:
    with server.stream("/v1/chat/completions", body, headers=headers) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert response.status_code == 200, lines
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def _joined(pieces: Iterator[Any]) -> Any:
    """One call, of its pieces, with the index that streams give it."""
    first = next(pieces)
    for piece in pieces:
        first["function"]["arguments"] += piece["function"]["arguments"]
    assert first["index"] == 0
    return first


# -- load generators ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs("guidellm")
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(server: Server, route: str, tmp_path: Path) -> None:
    """It counts tokens by the usage that each chunk tells, and no request of it fails."""
    report = tmp_path / "report.json"
    command = [
        *(sys.executable, "-m", "guidellm", "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={server.url},model={NAME},request_format={route}"),
        *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=4"),
        *("--tokenizer", f"kind=hf_auto,model={default_model('target')}"),
        *("--data", "kind=synthetic_text,prompt_tokens=12,output_tokens=8", "--output", f"kind=json,path={report}"),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(report.read_text("utf-8"))["benchmarks"]
    assert found["metrics"]["request_totals"]["successful"] == 4, found["requests"]["errored"]
    assert [each["output_metrics"]["text_tokens"] for each in found["requests"]["successful"]] == [8] * 4


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_each_chunk_tells_the_usage_so_far(server: Server, path: str) -> None:
    body: Any = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {**body, "temperature": 0, "max_tokens": 24, "stream": True, "stream_options": options}
    with server.stream(path, asked) as response:
        lines = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    told = [line["usage"]["completion_tokens"] for line in lines]
    assert told == sorted(told)
    assert len(set(told)) > 3
    assert told[-2:] == [24, 24]
    assert {line["usage"]["prompt_tokens"] for line in lines} == {lines[-1]["usage"]["prompt_tokens"]}
    without = {**asked, "stream_options": {"include_usage": True}}
    with server.stream(path, without) as response:
        lines = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert [line["usage"] for line in lines[:-1]] == [None] * (len(lines) - 1)
