"""Probe every type of model that the installed transformers knows to write text, and write docs/reference/models.md.

    python docs/make_models.py               some minutes
    python docs/make_models.py llama phi3    show these, write nothing
    python docs/make_models.py files         write the table of files again, and nothing else

Each type is built from its own configuration class with small sizes and random weights of a wide spread, in a process of
its own with a limit on time and memory. It is tested by the same probe that runs when a model is loaded.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import track
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from outrider.kernels.library import kernel_library
from outrider.loading import hf_modules
from outrider.loading.gguf.architecture import ARCHITECTURES
from outrider.loading.gguf.splitting import SPLITTINGS
from outrider.loading.gguf.tokenizer import WITH_PIECES
from outrider.loading.loaded_model import EncoderFacts, LoadedModel
from outrider.model.factory import BACKENDS
from outrider.model.families import FAMILIES
from outrider.model.probe import probe, reference

PAGE = Path(__file__).parent / "reference" / "models.md"
SECONDS, BYTES = 8, 12 * 2**30

#: Small values for whatever sizes a configuration has.
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim": 32, "embed_dim": 32, "ffn_dim": 48,
    "intermediate_size": 48, "ffn_hidden_size": 48, "n_inner": 48, "d_ff": 48, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48,
    "num_hidden_layers": 3, "num_layers": 3, "n_layer": 3, "n_layers": 3, "decoder_layers": 3, "encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "n_positions": 64, "n_ctx": 64, "max_seq_len": 64, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "sliding_window": 6,
    "attention_chunk_size": 8, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "embedding_size": 32, "word_embed_proj_dim": 32, "rotary_dim": 4, "layer_types": None,
    "linear_head_dim": 8, "linear_num_heads": 4, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
    "mamba_d_ssm": 64, "d_kv": 8, "num_decoder_layers": 3, "decoder_start_token_id": 1,
    "vocab_size_per_layer_input": 61,
}  # fmt: skip


@dataclass(frozen=True)
class Probed:
    """What the probe found for a type: paged, gather, refused or not built, the reason, and whether our kernels run it."""

    kind: str
    outcome: str
    reason: str = ""
    fused: bool = False

    @property
    def shown(self) -> str:
        return f"fused, {self.outcome}" if self.fused else self.outcome


def kinds() -> list[str]:
    """Causal language models, and models with an encoder that read text and write text."""
    with_encoder = (
        kind for kind in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES if hf_modules.has_encoder(CONFIG_MAPPING[kind]())
    )
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *with_encoder})


def judge(kind: str) -> Probed:
    """Build one type and probe it."""
    if kind in hf_modules.ASSISTANTS:
        return Probed(kind, "refused", "an assistant, which reads the keys and values of a target")
    default = CONFIG_MAPPING[kind]()
    if hf_modules.has_encoder(default) and not hf_modules.reads_text(default):
        return Probed(kind, "refused", "an encoder-decoder whose encoder reads no text")
    try:
        model = _build(kind)
    except Exception as error:
        return Probed(kind, "not built", _first_line(error))
    loaded = _loaded(kind, model)
    stock = reference(loaded)
    if not stock.is_causal:
        return Probed(kind, "refused", "an encoder: tokens see those after them")
    fused = _obstacle(loaded, "fused", stock.logits) is None
    reasons = []
    for name in ("paged", "gather"):
        obstacle = _obstacle(loaded, name, stock.logits)
        if obstacle is None:
            return Probed(kind, name, "; ".join(reasons), fused)
        reasons.append(f"{name}: {obstacle}")
    return Probed(kind, "refused", "; ".join(reasons))


def _obstacle(loaded: LoadedModel, name: str, want: Tensor) -> str | None:
    """Why a backend does not drive this model; None where it does."""
    backend = BACKENDS[name]()
    try:
        probe(loaded, backend, want)
    except Exception as error:
        return _first_line(error)
    finally:
        backend.uninstall()
    return None


#: Sizes that some families must have otherwise; tried in turn until a plain forward pass runs.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4, "num_kv_heads": 4},
    {"num_key_value_heads": 4, "num_kv_heads": 4, "head_dim": None},
    {"head_dim": None, "layer_types": None, "sliding_window": None, "rotary_dim": None, "num_layers": None},
)


def _build(kind: str) -> Any:
    """A model of wide random weights whose plain forward pass runs; raises what the last variant raised."""
    problem: Exception = ValueError("no variant")
    nested = any(isinstance(value, dict) and "model_type" in value for value in CONFIG_MAPPING[kind]().to_dict().values())
    configs = [partial(_composite, kind)] if nested else [partial(_config, kind, variant) for variant in VARIANTS]
    for make_config in configs:
        try:
            torch.manual_seed(0)
            config = make_config()
            auto = AutoModelForSeq2SeqLM if hf_modules.has_encoder(config) else AutoModelForCausalLM
            model = auto.from_config(config).float().eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
                text = torch.arange(12)[None]
                model(text, **({"decoder_input_ids": text} if hf_modules.has_encoder(config) else {}), use_cache=False)
        except Exception as error:
            problem = error
        else:
            return model
    raise problem


def _config(kind: str, variant: dict[str, Any]) -> Any:
    default = CONFIG_MAPPING[kind]()
    known = {**default.to_dict(), **dict.fromkeys(default.attribute_map)}
    sizes = {name: value for name, value in {**SIZES, **variant}.items() if name in known}
    left_out = {name for name, value in variant.items() if value is None}
    return AutoConfig.for_model(kind, **{name: value for name, value in sizes.items() if name not in left_out})


def _composite(kind: str) -> Any:
    return CONFIG_MAPPING[kind].from_dict(_shrunk(CONFIG_MAPPING[kind]().to_dict()))


def _shrunk(values: dict[str, Any]) -> dict[str, Any]:
    """A configuration's values with small sizes, in its parts too. Types of layers say what differs in some."""
    shrunk = {}
    for name, value in values.items():
        if name == "per_layer_config":
            continue  # it numbers the layers of the whole model
        if isinstance(value, dict) and "model_type" in value:
            shrunk[name] = _shrunk(value)
        else:
            shrunk[name] = SIZES[name] if name in SIZES and value is not None else value
    return shrunk


def _loaded(kind: str, model: Any) -> LoadedModel:
    head = model.get_output_embeddings()
    vocab_size = int(head.weight.shape[0]) if head is not None else model.config.get_text_config().vocab_size
    slices = "logits_to_keep" in type(model).forward.__code__.co_varnames
    encoder = None
    if hf_modules.has_encoder(model.config):
        encoder = EncoderFacts(64, int(hf_modules.decoder_config(model.config).hidden_size), (1,))
    where = torch.device("cpu"), torch.float32
    return LoadedModel(kind, model, None, vocab_size, 64, frozenset(), *where, slices, encoder=encoder)


def _first_line(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text[:110].replace("|", "/")


def _child(kind: str, answers: Any) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    logging.disable(logging.CRITICAL)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
        answers.send(judge(kind))


def in_a_process(kind: str) -> Probed:
    """Probe one type in a forked process, which may die or take too long. A fork does not import everything again."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(kind, theirs))
    process.start()
    theirs.close()
    probed = Probed(kind, "not built", f"no answer within {SECONDS} seconds")
    try:
        if mine.poll(SECONDS):
            probed = mine.recv()
    except EOFError:
        probed = Probed(kind, "not built", f"its process ended (more than {BYTES >> 30} GiB at the sizes given)")
    process.kill()
    process.join()
    return probed


def page(found: list[Probed]) -> str:
    counts = Counter(v.outcome for v in found)
    totals = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("paged", "gather", "refused", "not built"))
    head = f"""# Models

At every load, a probe runs the model to find out whether it can be driven exactly. Its name decides nothing. This page
shows the result of this probe for all {len(found)} types of models in transformers {transformers.__version__} that write
text, causal language models and models whose encoder reads a text first,
each with small sizes and random weights (`python docs/make_models.py`): {totals}.
Of the paged ones, {sum(v.fused for v in found)} are fused too.

- **paged**: the fast backend gives the logits of a plain forward pass, over a ragged batch, two chunks and a small tree.
- **fused**: our own kernels give them too, and are faster, since they run a whole pass in one call. They are used on CPUs
  in float32, bfloat16 and float64 where they are compiled. Anywhere else the model runs as paged.
- **gather**: the portable backend gives these logits, and the fast one does not, for the reason given.
- **refused**: neither backend gives them; or the model keeps a running state in a way that is not known here, so that
  rejected draft tokens would corrupt it; or it is an encoder alone, or its
  encoder reads no text; or it is an assistant, which drafts beside a target and writes no text alone.
- **not built**: the small random model could not be made from the configuration alone. A real checkpoint is probed at load
  like any other.

Of models that read pictures, too, the language model is loaded alone, for text: `mistral3`, `qwen2_vl`, `qwen2_5_vl` and
`qwen3_vl` as the Mistral, Qwen2 and Qwen3 that they are (not where their weights are quantised), `gemma3`, `gemma4`,
`gemma4_unified`, `qwen3_5` and other types as they are listed. A type that is not in the table is refused.

{_families()}

| type | result | why |
|---|---|---|
"""
    return head + "".join(f"| {v.kind} | {v.shown} | {v.reason} |\n" for v in found) + files()


def _families() -> str:
    names = ", ".join(f"`{name}`" for name in sorted(FAMILIES))
    return f"""Whole passes run in the kernels for {len(FAMILIES)} families, by the `model_type` of their configuration:
{names}.
Families that are not among them use the kernels for their linear layers and for attention. More than the probe is tested
for llama, mistral, qwen2, qwen3, gemma2, gemma3, phi3 (longrope too), gpt2, gpt_neox, falcon, olmo2, starcoder2, mixtral,
gpt_oss and deepseek_v3; and, of models with a running state, for qwen3_next, qwen3_5_text, qwen3_5_moe_text, olmo_hybrid,
kimi_linear, bailing_hybrid, lfm2, lfm2_moe, lfm3, granitemoehybrid, bamba, falcon_h1, nemotron_h, mamba2, mamba,
falcon_mamba and jamba; and, of models with an encoder, for t5, mt5, umt5, longt5, bart, mbart, plbart, pegasus, marian,
blenderbot, blenderbot-small and bigbird_pegasus."""


# --- The table of GGUF files, from what is known of files alone.


#: Repositories by the architecture, the vocabulary and the pre-tokenizer of their files.
FILES: dict[tuple[str, str, str], str] = {
    ("llama", "gpt2", "llama-bpe"): "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF bartowski/Llama-3.2-1B-Instruct-GGUF "
    "bartowski/Llama-3.2-3B-Instruct-GGUF bartowski/Llama-3.3-70B-Instruct-GGUF unsloth/DeepSeek-R1-Distill-Llama-8B-GGUF",
    ("llama", "llama", ""): "TheBloke/Llama-2-7B-Chat-GGUF TheBloke/Mistral-7B-Instruct-v0.2-GGUF "
    "TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF",
    ("llama", "gpt2", "tekken"): "bartowski/Mistral-Nemo-Instruct-2407-GGUF "
    "unsloth/Mistral-Small-3.2-24B-Instruct-2506-GGUF",
    ("llama", "gpt2", "smollm"): "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF",
    ("mistral3", "gpt2", "tekken"): "unsloth/Ministral-3-8B-Instruct-2512-GGUF",
    ("llama4", "gpt2", "llama4"): "unsloth/Llama-4-Scout-17B-16E-Instruct-GGUF",
    ("qwen2", "gpt2", "qwen2"): "Qwen/Qwen2.5-0.5B-Instruct-GGUF Qwen/Qwen2.5-7B-Instruct-GGUF "
    "Qwen/Qwen2.5-Coder-7B-Instruct-GGUF",
    ("qwen2", "gpt2", "deepseek-r1-qwen"): "bartowski/DeepSeek-R1-Distill-Qwen-7B-GGUF",
    ("qwen2vl", "gpt2", "qwen2"): "ggml-org/Qwen2.5-VL-7B-Instruct-GGUF",
    ("qwen3", "gpt2", "qwen2"): "Qwen/Qwen3-0.6B-GGUF Qwen/Qwen3-8B-GGUF unsloth/Qwen3-4B-Instruct-2507-GGUF",
    ("qwen3moe", "gpt2", "qwen2"): "unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF",
    ("qwen3vl", "gpt2", "qwen2"): "Qwen/Qwen3-VL-8B-Instruct-GGUF",
    ("qwen3next", "gpt2", "qwen2"): "unsloth/Qwen3-Coder-Next-GGUF",
    ("qwen35", "gpt2", "qwen35"): "unsloth/Qwen3.5-4B-GGUF unsloth/Qwen3.5-9B-GGUF unsloth/Qwen3.6-27B-GGUF",
    ("qwen35moe", "gpt2", "qwen35"): "unsloth/Qwen3.6-35B-A3B-GGUF",
    ("gemma2", "llama", ""): "bartowski/gemma-2-9b-it-GGUF",
    ("gemma3", "llama", ""): "ggml-org/gemma-3-1b-it-GGUF google/gemma-3-4b-it-qat-q4_0-gguf unsloth/gemma-3-270m-it-GGUF",
    ("gemma3n", "llama", ""): "unsloth/gemma-3n-E4B-it-GGUF",
    ("gemma4", "gemma4", ""): "unsloth/gemma-4-E4B-it-GGUF unsloth/gemma-4-26B-A4B-it-GGUF unsloth/gemma-4-31B-it-GGUF",
    ("gpt-oss", "gpt2", "gpt-4o"): "unsloth/gpt-oss-20b-GGUF ggml-org/gpt-oss-120b-GGUF",
    ("phi3", "llama", ""): "microsoft/Phi-3-mini-4k-instruct-gguf",
    ("phi3", "gpt2", "dbrx"): "bartowski/phi-4-GGUF",
    ("phi3", "gpt2", "gpt-4o"): "unsloth/Phi-4-mini-instruct-GGUF",
    ("deepseek2", "gpt2", "deepseek-v3"): "unsloth/DeepSeek-V3-0324-GGUF",
    ("deepseek2", "gpt2", "kimi-k2"): "unsloth/Kimi-K2-Instruct-GGUF",
    ("deepseek32", "gpt2", "deepseek-v3"): "unsloth/DeepSeek-V3.2-GGUF",
    ("glm4moe", "gpt2", "glm4"): "unsloth/GLM-4.5-Air-GGUF",
    ("minimax-m2", "gpt2", "minimax-m2"): "unsloth/MiniMax-M2-GGUF",
    ("nemotron_h_moe", "gpt2", "pixtral"): "unsloth/Nemotron-3-Nano-30B-A3B-GGUF",
    ("lfm2", "gpt2", "lfm2"): "LiquidAI/LFM2-1.2B-GGUF",
    ("granitehybrid", "gpt2", "dbrx"): "ibm-granite/granite-4.0-h-tiny-GGUF",
}


def obstacle_of_a_file(architecture: str, vocabulary: str, splitting: str) -> str:
    """What is not known of a file; empty where all of it is."""
    if architecture not in ARCHITECTURES:
        return "the architecture"
    in_pieces = vocabulary == "llama" and architecture in WITH_PIECES
    known = in_pieces or vocabulary == "gemma4" or (vocabulary == "gpt2" and splitting in SPLITTINGS)
    return "" if known else "the tokenizer"


def files() -> str:
    """The part of the page about GGUF files."""
    rows = []
    for (architecture, vocabulary, splitting), names in FILES.items():
        missing = obstacle_of_a_file(architecture, vocabulary, splitting)
        result = f"no: {missing} is not known" if missing else "yes"
        shown = splitting or {"llama": "(SentencePiece)"}.get(vocabulary, f"({vocabulary})")
        rows += [f"| {name} | {architecture} | {shown} | {result} |" for name in names.split()]
    taken = sum(row.endswith("| yes |") for row in rows)
    return f"""
{FILES_HEADING}

These are {len(rows)} files that many people use, of every family that is often downloaded, and {taken} of them load. They
are a selection, and no ranking. A row is decided by what is known of architectures and pre-tokenizers when this page is
written (`python docs/make_models.py files`). A file may still hold blocks of a type that is
[not taken](../how-to/llama_cpp_files.md).

| file | architecture | pre-tokenizer | loads |
|---|---|---|---|
""" + "".join(f"{row}\n" for row in rows)


FILES_HEADING = "## Files of llama.cpp"


def main() -> None:
    torch.set_num_threads(1)
    chosen = sys.argv[1:]
    if chosen == ["files"]:
        before = PAGE.read_text("utf-8").partition(f"\n{FILES_HEADING}")[0]
        PAGE.write_text(before + files(), "utf-8")
        return
    if not chosen and kernel_library() is None:
        sys.exit("the kernels are not compiled here, or are off: no row could say fused")
    found = [in_a_process(kind) for kind in track(chosen or kinds(), "probing")]
    if chosen:
        sys.stdout.write("".join(f"{v.kind}: {v.shown} {v.reason}\n" for v in found))
    else:
        PAGE.write_text(page(found), "utf-8")


if __name__ == "__main__":
    main()
