"""`outrider doctor` on real models: a pair that fits, tokens that do not, a slow draft, and heads that know nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.config import default_model
from outrider.errors import ContradictionError, InputError, InvalidParameterError
from outrider.lab.prove.tiny_heads import save_random_heads, save_random_mtp
from tests.model.vocabularies import save_permuted_and_cut

pytestmark = [
    pytest.mark.usefixtures("believing"),
    pytest.mark.by_change(
        "src/outrider/lab/doctor/", "src/outrider/cli/", "src/outrider/lab/measure/", "tests/model/test_doctor.py"
    ),
]
SHORT = ("--num-prompts", "2", "--max-tokens", "48")


def examined(*options: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the report."""
    result = CliRunner().invoke(app, ["doctor", *SHORT, *options, "--json"])
    assert result.exit_code in (0, 1), result.output
    found: dict[str, Any] = json.loads(result.stdout)
    assert (result.exit_code == 0) is found["healthy"]
    return result.exit_code, found


def topics(method: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["topic"]: finding for finding in method["findings"]}


@pytest.mark.core
def test_the_embedded_pair_fits() -> None:
    """Its vocabulary, template, context and acceptance do. Whether it gains depends on the machine."""
    _, found = examined("--method", "draft_model")
    (method,) = found["methods"]
    said = topics(method)
    assert [said[topic]["level"] for topic in ("vocabulary", "chat template", "context", "acceptance")] == ["ok"] * 4
    assert "same 4,096 tokens" in said["vocabulary"]["text"]
    assert method["acceptance"]["tau"] > 1.7
    assert method["acceptance"]["shifts"]["0"] > 0.3  # the drafts are for their own places
    assert method["predicted"] == pytest.approx(
        method["terms"]["tokens"] / sum(method["terms"][part] for part in ("verify", "propose", "host"))
    )
    assert method["measured"] > 0
    assert len(method["rounds"]) == 2
    target = found["target"]
    assert (target["context"], target["dtype"]) == (2048, "bfloat16")
    assert target["kv_tokens"] // 2048 == target["requests"]["2048"]
    assert found["row_cost_ratio"]["1"] == 1.0


def test_what_rows_of_8_bits_would_gain_is_told_where_weights_are_rounded() -> None:
    for options, tried in (("--quantization", "int8"), True), (("--quantization", "int8", "--activations", "none"), False):
        _, found = examined("--method", "ngram", *options)
        assert found["rounding"]["speed"] > 0
        assert (found["rounded_rows"] is not None) is tried
        if tried:
            assert found["rounded_rows"]["speed"] > 0
            assert 0 < found["rounded_rows"]["agreement"]["distance"] < 0.2
    _, found = examined("--method", "ngram")
    assert (found["rounding"], found["rounded_rows"]) == (None, None)


def test_several_texts_share_the_rows_of_a_pass() -> None:
    _, found = examined("--method", "draft_model", "--batch", "4", "-k", "3")
    (method,) = found["methods"]
    assert found["batch"] == 4
    assert method["num_draft_tokens"] == 3
    assert "predicted" in topics(method)["speed"]["text"]


def test_without_a_method_it_looks_at_all_that_the_engine_would_choose_from() -> None:
    _, found = examined()
    assert [method["name"] for method in found["methods"]][:2] == ["draft_model", "suffix"]


def test_plain_decoding_has_facts_and_no_findings() -> None:
    code, found = examined("--method", "none")
    assert (code, found["methods"]) == (0, [])
    assert found["plain_tokens_per_second"] > 0


def test_other_tokens_are_wrong_and_the_way_out_is_named(tmp_path: Path) -> None:
    other = save_permuted_and_cut(tmp_path / "draft", num_merges=500)
    code, found = examined("--draft-model", other)
    method, _ = found["methods"]
    said = topics(method)["vocabulary"]
    assert (code, said["level"], method["measured"]) == (1, "wrong", None)
    assert "cross_vocabulary" in said["remedy"]
    assert "tokens are shared" in said["text"]
    settings = {"method": "cross_vocabulary", "model": other}
    _, found = examined("--method", json.dumps(settings))
    assert topics(found["methods"][0])["vocabulary"]["level"] == "ok"
    assert found["methods"][0]["measured"] is not None


def test_a_target_that_drafts_for_itself_is_too_slow() -> None:
    _, found = examined("--draft-model", default_model("target"), "--max-tokens", "64")
    method, _ = found["methods"]
    assert method["acceptance"]["by_position"][0] > 0.95
    assert "the draft is too slow" in topics(method)["speed"]["text"]


def test_heads_that_were_never_trained_are_wrong(tmp_path: Path) -> None:
    heads = save_random_heads(tmp_path / "heads", default_model("target"), "medusa")
    code, found = examined("--method", json.dumps({"method": "medusa", "model": heads}))
    (method,) = found["methods"]
    said = topics(method)["acceptance"]
    assert (code, said["level"]) == (1, "wrong")
    assert all(word in said["remedy"] for word in ("offset", "layer id", "normalisation", "positions"))
    assert "Correct the acceptance first" in topics(method)["speed"]["remedy"]


def test_layers_of_a_checkpoint_that_know_nothing_are_wrong(tmp_path: Path) -> None:
    target = tmp_path / "target"
    shutil.copytree(default_model("target"), target)
    index = target / "model.safetensors.index.json"
    shown = json.loads(index.read_text())
    more = Path(save_random_mtp(tmp_path / "mtp", str(target), "deepseek_v3")) / "model.safetensors"
    shown["weight_map"] |= dict.fromkeys(load_file(more), "mtp.safetensors")
    more.rename(target / "mtp.safetensors")
    index.write_text(json.dumps(shown))
    code, found = examined(str(target), "--max-tokens", "16", "--method", "mtp")
    (method,) = found["methods"]
    said = topics(method)["acceptance"]
    assert (code, method["name"], said["level"]) == (1, "mtp", "wrong")
    assert "Layers or norms are probably read wrongly" in said["remedy"]
    assert "has no witness of the target's hidden states" in said["remedy"]
    _, found = examined(str(target), "--max-tokens", "16")  # where nobody says who drafts
    assert [method["name"] for method in found["methods"]] == ["mtp", "suffix"]
    assert found["target"]["prediction_layers"] == 1


def test_a_draft_model_that_is_no_checkpoint_is_a_finding(tmp_path: Path) -> None:
    """The target can be examined nonetheless."""
    (tmp_path / "config.json").write_text("{}")
    code, found = examined("--draft-model", str(tmp_path))
    assert (code, found["methods"][0]["level"]) == (1, "wrong")


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (("--batch", "0"), InvalidParameterError),
        (("--max-tokens", "2"), InvalidParameterError),
        (("--draft-model", "/no/such/folder"), InvalidParameterError),
        (("--prompts", "/no/such/file"), InvalidParameterError),
        (("--method", "no_such_method"), InvalidParameterError),
        (("model", "--wide"), ContradictionError),
    ],
)
def test_bad_input_is_an_input_error(options: tuple[str, ...], kind: type[InputError]) -> None:
    """The command ends with 2 on all of these."""
    result = CliRunner().invoke(app, ["doctor", *SHORT, *options])
    assert isinstance(result.exception, kind)


def test_the_tables_say_it_all() -> None:
    result = CliRunner().invoke(app, ["doctor", *SHORT, "--method", "draft_model", "--no-color"])
    for words in ("KV memory", "requests that fit", "C(n) = T(n) / T(1)", "predicted", "measured", "vocabulary"):
        assert words in result.stdout
    told = result.stderr.splitlines()  # of a pipe
    assert told[:3] == ["loading the model", "examining: passes of the target", "examining: plain decoding"]
    assert "examining: draft_model" in told
