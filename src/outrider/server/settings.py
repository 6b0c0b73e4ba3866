"""Settings of the server beside the model: its name, who may reach it, and its limits, which are options of the command."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import Field

from outrider.config import Flag, Frozen
from outrider.server.thoughts import ThoughtForm
from outrider.server.tool_forms import ToolForm

_COUNT = "Use 0 or more."
_NUMBER = "Use 1 or more."
_SECONDS = "Use a number of seconds above 0."


def _limit(help: str, default: Any = ...) -> Flag:
    return Flag(help, ("serve",), default=default)


class ServerSettings(Frozen):
    """The server has these names and limits. `--replicas` knows no limit whose option has no value from the start."""

    model_name: str = Field(min_length=1, description="Use a name.")  # what clients call the model
    hosts: tuple[str, ...] | None = None  # what requests may name as Host; None for anything; see `access.allowed_hosts`
    origins: tuple[str, ...] = ()  # where pages may be from that ask, beside this server; "*" for anywhere
    tool_parser: Annotated[ToolForm | None, _limit("How the model writes calls of tools; its chat template tells.")] = (
        Field(None, description=f"Use one of {', '.join(sorted(get_args(ToolForm)))}.")
    )
    reasoning_parser: Annotated[
        ThoughtForm | None, _limit("What tells the model's thoughts apart, or none; its chat template tells.")
    ] = Field(None, description=f"Use one of {', '.join(get_args(ThoughtForm))}.")
    max_queue: Annotated[int, _limit("Texts of a tenant that may wait beside these; further ones get 429.")] = Field(
        256, ge=0, description=_COUNT
    )
    max_n: Annotated[int, _limit("Texts of one request.")] = Field(16, ge=1, description=_NUMBER)
    max_body_bytes: Annotated[int, _limit("Of one request.")] = Field(4 * 2**20, ge=1, description=_NUMBER)
    #: Reading them takes time in which nothing else is read.
    max_body_values: Annotated[int, _limit("Names and values in the body of one request.")] = Field(
        100_000, ge=1, description=_NUMBER
    )
    max_list_items: Annotated[int, _limit("Entries of logit_bias, of bad_words, or of a list of token ids.")] = Field(
        1024, ge=0, description=_COUNT
    )
    max_list_characters: Annotated[int, _limit("Characters of all stop strings, or of all bad_words.")] = Field(
        16 * 2**10, ge=0, description=_COUNT
    )
    max_stops: Annotated[int, _limit("Stop strings of one request.")] = Field(16, ge=0, description=_COUNT)
    max_structure_bytes: Annotated[int, _limit("Of a JSON schema, a regular expression or a grammar.")] = Field(
        64 * 2**10, ge=1, description=_NUMBER
    )
    step_seconds: Annotated[float, _limit("An engine whose step takes longer hangs: /health says so.")] = Field(
        120.0, gt=0, description=_SECONDS
    )
    request_seconds: Annotated[float | None, _limit("A request that takes longer, from its first byte on, is ended.")] = (
        Field(None, gt=0, description="Use a number of seconds above 0, or None.")
    )
    header_seconds: Annotated[
        float, _limit("A connection without the headers of a request is ended then; 30 unless given.", None)
    ] = Field(30.0, gt=0, description=_SECONDS)
    body_seconds: Annotated[float, _limit("A body that takes longer to come is refused; 60 unless given.", None)] = Field(
        60.0, gt=0, description=_SECONDS
    )
    max_connections: Annotated[
        int | None, _limit("Connections at a time; as many as files leave room for, up to 16384, unless given.")
    ] = None
    template_seconds: Annotated[float, _limit("CPU that the chat template may take for one conversation.")] = Field(
        2.0, gt=0, description=_SECONDS
    )
    template_mib: Annotated[int, _limit("Memory that it may take.")] = Field(512, ge=1, description=_NUMBER)
    drain_seconds: Annotated[int, _limit("How long requests may finish after SIGTERM.")] = Field(
        30, ge=0, description=_COUNT
    )
    #: Linux alone can tell.
    stalled_seconds: Annotated[
        int, _limit("A client that takes nothing for so long is cut off; 60 unless given.", None)
    ] = Field(60, ge=1, description=_NUMBER)
