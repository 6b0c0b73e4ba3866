"""Every verb takes GGUF files, as the target and as the draft, with the vocabularies that are in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.lab.convert.gguf import write_gguf
from outrider.lab.convert.gguf_vocabulary import own_vocabulary
from tests.model import checkpoints
from tests.model.core import of_formats
from tests.model.test_gguf_vocabularies import byte_level_tokenizer
from tests.server.running import running

pytest.importorskip("gguf")
pytestmark = of_formats
SHAPE: dict[str, Any] = {"layers": 2, "hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 4096}


def write(folder: Path, family: str, splitting: str, seed: int) -> str:
    """A small random model with a vocabulary of its own."""
    tokenizer = byte_level_tokenizer(splitting)
    changes = SHAPE | {"vocab_size": len(tokenizer) + 3, "eos_token_id": tokenizer.eos_token_id}
    checkpoint = checkpoints.save(family, folder / f"{family}-{seed}", seed=seed, head_dim=16, **changes)
    tokenizer.save_pretrained(checkpoint)
    return write_gguf(checkpoint, folder / f"{family}-{seed}.gguf", "int8", own_vocabulary(checkpoint))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target, a draft model with the same tokens and one with others, and prompts."""
    folder = tmp_path_factory.mktemp("verbs")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i} words are low"}) + "\n" for i in range(12)), "utf-8")
    models = [write(folder, *which) for which in (("qwen3", "qwen2", 1), ("qwen3", "qwen2", 2), ("llama", "gpt-2", 3))]
    names = ("target", "draft", "other")
    return {**dict(zip(names, models, strict=True)), "prompts": str(prompts), "folder": str(folder)}


def run(files: dict[str, str], *asked: str, typed: str | None = None) -> tuple[int, str]:
    """Run a verb, where words in capitals are files, and tell how it ended and what it wrote; of what is JSON, standard
    output alone."""
    words = [files.get(word.lower(), word) if word.isupper() else word for word in asked]
    done = CliRunner().invoke(app, words, input=typed, catch_exceptions=False)
    return done.exit_code, done.stdout if "--json" in words and done.exit_code == 0 else done.output


#: What these files are computed in, as it is shown: their norms have numbers that bfloat16 does not hold.
COMPUTED = "bfloat16, rows of 8 bits where weights are rounded"
WRITE = (
    "generate",
    "TARGET",
    "-p",
    "low world",
    "-p",
    "a b",
    "--max-tokens",
    "12",
    "--json",
    "--temperature",
    "0",
    "--raw",
)


@pytest.mark.parametrize("rows", [(), ("--activations", "none")], ids=["", "whole-rows"])
@pytest.mark.parametrize("way", [("DRAFT", "draft_model"), ("DRAFT", "auto"), ("OTHER", "cross_vocabulary")], ids=str)
def test_texts_are_written_with_drafts_of_another_file(
    files: dict[str, str], way: tuple[str, str], rows: tuple[str, ...]
) -> None:
    asked, drafts = (*WRITE, *rows), ("--draft-model", way[0], "--method", way[1])
    told = [run(files, *asked, *more) for more in (("--method", "none"), drafts)]
    assert [code for code, _ in told] == [0, 0]
    plain, ours = ([each["samples"][0] for each in json.loads(shown)["requests"]] for _, shown in told)
    assert [each["token_ids"] for each in plain] == [each["token_ids"] for each in ours]
    assert way[1] == "auto" or sum(each["stats"]["num_draft_tokens"] for each in ours) > 0


@pytest.mark.slow
def test_a_server_answers_with_drafts_of_another_file(files: dict[str, str]) -> None:
    """Its texts are those that the command writes plainly. Rows are rounded on both sides, asked or unasked."""
    code, shown = run(files, *WRITE, "--activations", "int8", "--method", "none")
    assert code == 0, shown
    plain = {each["prompt"]: each["samples"][0]["text"] for each in json.loads(shown)["requests"]}
    drafts = ("--draft-model", files["draft"], "--method", "draft_model")
    with running(files["target"], *drafts, OMP_NUM_THREADS="1") as server:
        body = {"model": files["target"], "max_tokens": 12, "temperature": 0}
        told = {prompt: server.post("/v1/completions", body | {"prompt": prompt}).json() for prompt in plain}
        assert {prompt: answer["choices"][0]["text"] for prompt, answer in told.items()} == plain
        assert server.metric("vllm:spec_decode_num_draft_tokens_total") > 0
        assert all("time" in line for line in server.lines), f"the log is JSON: {server.lines}"


def test_what_a_file_does_not_say_of_sampling_is_as_in_llama_cpp(files: dict[str, str]) -> None:
    asked = ("generate", "TARGET", "--raw", "-p", "low world", "--max-tokens", "4", "--method", "none")
    said = "says nothing of sampling, so as llama.cpp does: "
    assert f"{said}temperature 0.8, top_k 40, top_p 0.95, min_p 0.05" in run(files, *asked)[1]
    assert f"{said}top_k 40, top_p 0.95, min_p 0.05" in run(files, *asked, "--temperature", "1.5")[1]
    assert said not in run(files, *asked, "--temperature", "0")[1]
    blob = Path(files["target"]).with_name("sha256-ab")
    blob.symlink_to(files["target"])
    assert said in run(files, "generate", str(blob), *asked[2:])[1], "a file without an ending"
    seeded = (*asked, "--seed", "3", "--json")
    ours = ("--temperature", "0.8", "--top-k", "40", "--top-p", "0.95", "--min-p", "0.05")
    texts = [json.loads(run(files, *seeded, *more)[1])["requests"] for more in ((), ours)]
    assert texts[0][0]["samples"][0]["token_ids"] == texts[1][0]["samples"][0]["token_ids"]


def test_a_chat_uses_the_template_of_the_file(files: dict[str, str]) -> None:
    code, shown = run(files, "chat", "TARGET", "--draft-model", "DRAFT", "--max-tokens", "8", typed="Hello\n")
    assert code == 0, shown
    assert "8 tokens in" in shown
    assert f"{files['target']}: {COMPUTED}; --activations none leaves rows as they are" in shown
    code, shown = run(files, "chat", "TARGET", "--activations", "none", "--max-tokens", "8", typed="Hello\n")
    assert code == 0, shown
    assert "8 bits" not in shown


def test_files_are_examined_and_tuned(files: dict[str, str]) -> None:
    pair = ("TARGET", "--draft-model", "DRAFT")
    code, shown = run(files, "doctor", *pair, "--num-prompts", "1", "--max-tokens", "8")
    assert code in (0, 1), shown  # 1 where nothing gains
    assert "acceptance" in shown
    assert f"{COMPUTED} on cpu" in shown
    assert "times as fast" in shown, "what rounding gains"
    out = str(Path(files["folder"]) / "tuned")
    asked = ("--traffic", "PROMPTS", "--way", "draft_model:2", "-n", "4", "--max-tokens", "16", "--out", out)
    code, shown = run(files, "tune", *pair, *asked)
    assert code == 0, shown


@pytest.mark.slow
@pytest.mark.parametrize("rows", [(), ("--activations", "none")], ids=["", "whole-rows"])
def test_a_file_writes_data_and_its_draft_is_trained(files: dict[str, str], rows: tuple[str, ...]) -> None:
    folder = Path(files["folder"], "whole" if rows else "as-llama-cpp")
    data, out = str(folder / "data"), str(folder / "trained")
    asked = ("--prompts", "PROMPTS", "--out", data, "--max-tokens", "8", "--held-out", "0.4", *rows)
    code, shown = run(files, "train", "data", "--target", "TARGET", *asked)
    assert code == 0, shown
    asked = ("--target", "TARGET", "--init", "DRAFT", "--steps", "2", "--out", out, *rows)
    code, shown = run(files, "train", "distill", "--data", data, *asked)
    assert code == 0, shown
    assert json.loads(Path(out, "training.json").read_text("utf-8"))["target"]["activations"] == (rows[1] if rows else None)
    code, shown = run(files, "generate", "TARGET", "--draft-model", out, "-p", "low", "--max-tokens", "4")
    assert code == 0, shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [("bench",), ("prove",), ("bench", "--dtype", "float32"), ("prove", "--activations", "none")], ids=" ".join
)
def test_files_are_measured_and_proven(files: dict[str, str], asked: tuple[str, ...]) -> None:
    code, shown = run(files, *asked, "TARGET", "--draft-model", "DRAFT", "--quick")
    assert code == 0, shown
