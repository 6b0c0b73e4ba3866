"""Make a *wide* copy of a Llama-style checkpoint: the same function at many times the weight traffic.

The hidden state, the heads and the feed-forward units are tiled and the matching input weights divided, so the network
computes what it computed before (up to the rounding of longer sums; powers of two make the divisions exact). Acceptance
measured on the wide copy is therefore the real pair's, while a forward pass reads as many bytes as a model of that size: a
memory-bound target for benchmarks, made from a checkpoint small enough to ship. Say so wherever such a figure is reported.

    python recipes/widen.py SOURCE_DIR TARGET_DIR --hidden 4 --ffn 8 --dtype bfloat16    # 384 x 1024 -> 1536 x 8192
"""

import argparse

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def widen(source: str, target: str, hidden: int, ffn: int, dtype: torch.dtype) -> int:
    """Write the wide copy of `source` to `target`; returns its number of parameters."""
    config = AutoConfig.from_pretrained(source)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    config.hidden_size *= hidden
    config.num_attention_heads *= hidden
    config.num_key_value_heads *= hidden
    config.head_dim = head_dim
    config.intermediate_size *= ffn
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    state = model.state_dict()
    for name, w in state.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):  # [vocab, hidden]
            state[name] = w.repeat(1, hidden)
        elif name == "model.norm.weight":  # the tied head sums `hidden` copies
            state[name] = w.repeat(hidden) / hidden
        elif w.dim() == 1:  # inner norms
            state[name] = w.repeat(hidden)
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")):  # [heads, hidden]
            state[name] = w.repeat(hidden, hidden) / hidden
        elif name.endswith(("gate_proj.weight", "up_proj.weight")):  # [ffn, hidden]
            state[name] = w.repeat(ffn, hidden) / hidden
        elif name.endswith("down_proj.weight"):  # [hidden, ffn]
            state[name] = w.repeat(hidden, ffn) / ffn
    wide = AutoModelForCausalLM.from_config(config).to(dtype)
    wide.load_state_dict({k: v.to(dtype) for k, v in state.items()})
    wide.generation_config = model.generation_config
    wide.save_pretrained(target)
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    return sum(p.numel() for p in wide.parameters())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--hidden", type=int, default=4)
    parser.add_argument("--ffn", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    print(f"{widen(args.source, args.target, args.hidden, args.ffn, getattr(torch, args.dtype)) / 1e6:.1f} M parameters")
