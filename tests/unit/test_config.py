"""Configurations: every range, every contradiction, and nothing unknown gets in."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from outrider.config import CacheConfig, Frozen, ModelConfig, SchedulerConfig
from outrider.errors import ContradictionError, InvalidParameterError

NEEDED: dict[type[Frozen], dict[str, Any]] = {ModelConfig: {"model": "m"}}
KINDS = [ModelConfig, CacheConfig, SchedulerConfig]


def make(kind: type[Frozen], **values: Any) -> Frozen:
    return kind(**{**NEEDED.get(kind, {}), **values})


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (ModelConfig, "max_model_len", 2),
        (ModelConfig, "max_model_len", None),
        *[(ModelConfig, "dtype", name) for name in ("auto", "float64", "float32", "bfloat16", "float16")],
        *[(ModelConfig, "attention_backend", name) for name in ("auto", "paged", "gather")],
        (CacheConfig, "block_size", 1),
        (CacheConfig, "block_size", 1024),
        (CacheConfig, "kv_cache_tokens", 1),
        (CacheConfig, "kv_cache_tokens", None),
        (SchedulerConfig, "max_num_seqs", 1),
    ],
)
def test_both_ends_of_every_range_are_allowed(kind: type[Frozen], field: str, value: Any) -> None:
    assert getattr(make(kind, **{field: value}), field) == value


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (ModelConfig, "model", ""),
        (ModelConfig, "model", 3),
        (ModelConfig, "dtype", "float8"),
        (ModelConfig, "dtype", None),
        (ModelConfig, "device", 0),
        (ModelConfig, "trust_remote_code", "yes"),
        (ModelConfig, "attention_backend", "flash"),
        (ModelConfig, "max_model_len", 1),
        (ModelConfig, "max_model_len", 8.0),
        (CacheConfig, "block_size", 0),
        (CacheConfig, "block_size", 1025),
        (CacheConfig, "block_size", "16"),
        (CacheConfig, "kv_cache_tokens", 0),
        (CacheConfig, "prefix_caching", 1),
        (SchedulerConfig, "max_num_seqs", 0),
        (SchedulerConfig, "max_num_seqs", True),
        (SchedulerConfig, "max_num_batched_tokens", 0),
    ],
)
def test_a_value_outside_is_refused_by_field_value_and_remedy(kind: type[Frozen], field: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        make(kind, **{field: value})
    assert (caught.value.field, caught.value.value) == (field, value)
    assert caught.value.remedy.endswith(".")


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_key_is_refused_and_the_known_ones_listed(kind: type[Frozen]) -> None:
    with pytest.raises(InvalidParameterError, match="no such setting") as caught:
        make(kind, num_speculative_tokens=5)
    assert caught.value.field == "num_speculative_tokens"
    for name in kind.model_fields:
        assert name in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "near"), [("block_sizes", "block_size"), ("prefix_cache", "prefix_caching"), ("xyzzy", None)]
)
def test_the_nearest_known_key_is_offered_where_one_is_near(name: str, near: str | None) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        CacheConfig(**{name: 1})
    offered = f"Did you mean {near}? CacheConfig knows: " if near else "CacheConfig knows: "
    assert caught.value.remedy.startswith(offered)


@pytest.mark.parametrize("kind", KINDS)
def test_configs_are_frozen(kind: type[Frozen]) -> None:
    config = make(kind)
    field = next(iter(kind.model_fields))
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        setattr(config, field, getattr(config, field))


def test_a_missing_model_is_named() -> None:
    with pytest.raises(InvalidParameterError) as caught:
        ModelConfig()
    assert caught.value.field == "model"
    assert caught.value.remedy == "Use a local folder or a hub id."


def test_batch_invariant_mode_takes_backends_whose_bits_may_hold() -> None:
    for name in ("auto", "fused", "paged"):
        assert ModelConfig(model="m", batch_invariant=True, attention_backend=name).attention_backend == name
    with pytest.raises(ContradictionError) as caught:
        ModelConfig(model="m", batch_invariant=True, attention_backend="gather")
    assert (caught.value.field, caught.value.value) == ("attention_backend", "gather")


def test_rounded_weights_are_asked_for_elsewhere() -> None:
    with pytest.raises(InvalidParameterError, match="dtype='int8'") as caught:
        ModelConfig(model="m", dtype="int8")
    assert caught.value.remedy == "Use quantization='int8'."


def test_every_running_sequence_can_have_a_row() -> None:
    assert SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=8).max_num_batched_tokens == 8
    with pytest.raises(ContradictionError, match="max_num_seqs=8") as caught:
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=7)
    assert (caught.value.field, caught.value.value) == ("max_num_batched_tokens", 7)


def test_replace_validates() -> None:
    config = ModelConfig(model="m", batch_invariant=True)
    assert config.replace(max_model_len=7) == ModelConfig(model="m", batch_invariant=True, max_model_len=7)
    with pytest.raises(ContradictionError):
        config.replace(attention_backend="gather")
    with pytest.raises(InvalidParameterError):
        config.replace(lenght=3)
