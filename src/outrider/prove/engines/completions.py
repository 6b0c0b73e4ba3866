"""A client for `/v1/completions` of any OpenAI-compatible server, with token probabilities."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from outrider.errors import EngineAnswerError

#: The largest number that every server allows.
NUM_LOGPROBS = 5


@dataclass(frozen=True)
class Answer:
    """One completion.

    Attributes:
        text: The text as a string.
        tokens: Its tokens as strings. Some servers leave out the token that ended the text.
        token_ids: The ids of the tokens. None where the server does not tell them.
        probs: For each token, the probabilities that the server reports for it and for its likeliest rivals.
        num_drafted: The number of draft tokens that were verified. None where the server does not tell (llama.cpp does).
    """

    text: str
    tokens: tuple[str, ...]
    token_ids: tuple[int, ...] | None
    probs: tuple[Mapping[str, float], ...]
    num_drafted: int | None = None


@dataclass(frozen=True)
class CompletionsClient:
    """A client for one model of one server.

    Attributes:
        url: The address of the server, with or without `/v1`. The key is taken from OPENAI_API_KEY where that is set.
        model: The name of the model in requests. None takes the first model that the server lists.
        body: Further fields of every request.
        timeout: The number of seconds to wait for an answer.
        concurrency: The largest number of requests at a time.
    """

    url: str
    model: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 120.0
    concurrency: int = 16

    def name(self) -> str:
        """The name of the model. Raises EngineAnswerError where the server lists none."""
        if self.model is not None:
            return self.model
        listed = self._send("models", None)
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise EngineAnswerError(self.url, "lists no model", "Name one with --model.") from error

    def complete(self, prompts: Sequence[str | Sequence[int]], **fields: Any) -> list[Answer]:
        """One completion for each prompt, requested side by side.

        Args:
            prompts: Strings or token ids.
            fields: Fields of the requests: max_tokens, temperature, seed, ...

        Raises:
            EngineAnswerError: A request failed, or an answer has no token probabilities.
        """
        common = {"model": self.name(), "logprobs": NUM_LOGPROBS, "stream": False, **fields, **self.body}

        def one(prompt: str | Sequence[int]) -> Answer:
            words = prompt if isinstance(prompt, str) else list(prompt)
            return self._read(self._send("completions", {**common, "prompt": words}))

        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(one, prompts))

    def _send(self, path: str, body: Mapping[str, Any] | None) -> Any:
        root = self.url.rstrip("/").removesuffix("/v1")
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with urlopen(Request(f"{root}/v1/{path}", data, headers), timeout=self.timeout) as answer:
                return json.load(answer)
        except HTTPError as error:
            said = error.read(500).decode("utf-8", "replace").strip()
            raise EngineAnswerError(self.url, f"answers {error.code} on {path}: {said}", "See its log.") from error
        except (URLError, HTTPException, TimeoutError, ConnectionError) as error:
            raise EngineAnswerError(
                self.url, f"does not answer: {error}", "Is the server up, and the port right?"
            ) from error
        except ValueError as error:
            raise EngineAnswerError(self.url, "does not answer in JSON", "Is it an OpenAI-compatible server?") from error

    def _read(self, answer: Any) -> Answer:
        try:
            choice = answer["choices"][0]
            reported = choice.get("logprobs") or {}
            tokens, ids, probs = _entries(reported) if "content" in reported else _columns(reported)
            ids = choice.get("token_ids", ids)
            num_drafted = answer["timings"].get("draft_n", 0) if "timings" in answer else None
            num_drafted = (
                answer["speculation"]["draft_tokens"] if "speculation" in answer else num_drafted
            )  # our own server
            return Answer(choice["text"], tokens, None if ids is None else tuple(ids), probs, num_drafted)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            remedy = "It must support `logprobs` in /v1/completions; some servers need a flag for it."
            raise EngineAnswerError(self.url, f"an answer without token probabilities ({error!r})", remedy) from error


_Parts = tuple[tuple[str, ...], tuple[int, ...] | None, tuple[dict[str, float], ...]]


def _columns(reported: Mapping[str, Any]) -> _Parts:
    """Read the older form of logprobs, which has parallel lists. It tells tokens apart by their strings alone."""
    tokens = tuple(reported["tokens"])
    probs = []
    for token, logprob, rivals in zip(tokens, reported["token_logprobs"], reported["top_logprobs"], strict=True):
        probs.append({rival: math.exp(value) for rival, value in {token: logprob, **rivals}.items()})
    named = all(token.startswith("token_id:") for token in tokens)  # vLLM names ids like this when it is asked to
    return tokens, tuple(int(token[9:]) for token in tokens) if named and tokens else None, tuple(probs)


def _entries(reported: Mapping[str, Any]) -> _Parts:
    """Read the form of the chat protocol, which llama.cpp uses for completions too. It has one entry for each token."""
    content = reported["content"]
    probs = tuple({_word(r): math.exp(r["logprob"]) for r in (*entry["top_logprobs"], entry)} for entry in content)
    ids = tuple(entry["id"] for entry in content) if content and all("id" in entry for entry in content) else None
    return tuple(map(_word, content)), ids, probs


def _word(entry: Mapping[str, Any]) -> str:
    return f"{entry['id']}:{entry['token']}" if "id" in entry else str(entry["token"])
