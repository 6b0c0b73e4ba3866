"""Settings of the server, beside the model."""

from __future__ import annotations

from pydantic import Field

from outrider.validation import Frozen


class ServerSettings(Frozen):
    """Address, names and limits.

    Attributes:
        model_name: What clients call the model.
        hosts: What requests may name as Host; None for anything. See `access.allowed_hosts`.
        origins: Where pages may be from that ask, beside this server; "*" for anywhere.
        max_queue: Sequences that may wait beside those that run; further requests are refused with 429.
        max_n: Samples, prompts times n, of one request.
        max_stops: Stop strings of one request.
        max_list_items: Entries of logit_bias, bad_words, stop_token_ids or allowed_token_ids, each by itself.
        max_list_characters: Of the texts in stop, and of those in bad_words.
        max_body_bytes: Of one request.
        max_body_values: Names and values in the body of one request; reading them takes time in which nothing else is read.
        max_structure_bytes: Of a JSON schema, regular expression or grammar.
        step_seconds: An engine that has been at work on one step for so long hangs, and is of no use any more.
        request_seconds: After so long a request is ended with an error; None for no limit.
    """

    model_name: str = Field(min_length=1, description="Use a name.")
    hosts: tuple[str, ...] | None = None
    origins: tuple[str, ...] = ()
    max_queue: int = Field(256, ge=0, description="Use 0 or more.")
    max_n: int = Field(16, ge=1, description="Use 1 or more.")
    max_stops: int = Field(16, ge=0, description="Use 0 or more.")
    max_list_items: int = Field(1024, ge=0, description="Use 0 or more.")
    max_list_characters: int = Field(16 * 2**10, ge=0, description="Use 0 or more.")
    max_body_bytes: int = Field(4 * 2**20, ge=1, description="Use 1 or more.")
    max_body_values: int = Field(100_000, ge=1, description="Use 1 or more.")
    max_structure_bytes: int = Field(64 * 2**10, ge=1, description="Use 1 or more.")
    step_seconds: float = Field(120.0, gt=0, description="Use a number of seconds above 0.")
    request_seconds: float | None = Field(None, gt=0, description="Use a number of seconds above 0, or None.")
