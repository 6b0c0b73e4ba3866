"""Make a *wide* copy of a checkpoint like Llama, Qwen3.5 or T5, the same function with many times the weights.

    python recipes/widen.py SOURCE_DIR TARGET_DIR --hidden 4 --ffn 8 --dtype bfloat16

With these factors the embedded target's 384 x 1024 becomes 1536 x 8192. See outrider.widen.
"""

import argparse

import torch

from outrider.widen import widen

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--hidden", type=int, default=4)
    parser.add_argument("--ffn", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    print(f"{widen(args.source, args.target, args.hidden, args.ffn, getattr(torch, args.dtype)) / 1e6:.1f} M parameters")
