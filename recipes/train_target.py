"""Train the embedded target, a small model, on the Python standard library's own source.

    python recipes/train_target.py corpus DIR                     # text -> tokenizer.json, train.bin, held.bin
    python recipes/train_target.py train DIR --out target --minutes 80

It is a Llama with a byte-level BPE of 4096 tokens (0 is the end of a file), tied embeddings, and a RoPE base of 10000.
Muon optimises matrices, and AdamW embeddings and norms, under bf16 autocast where products are faster so. The last
quarter of the time uses 1024 tokens. The schedule follows the time and not the steps, so that one command fits any
machine. One file in fifty, chosen by the hash of its path, is held out. Its draft model is made by `outrider train`;
docs/how-to/recipes.md has the commands.
"""

import argparse
import pathlib
import time

import numpy as np
import torch
import torch.nn.functional as F
from library_files import library_files
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.lab.train.settings import fast_precision
from outrider.lab.train.trainer import Muon

VOCAB = 4096
#: Products in bf16 take ten times as long as in float32 where a processor has none.
PRECISION = fast_precision()


def corpus(folder: pathlib.Path) -> None:
    texts: dict[str, list[str]] = {"train": [], "held": []}
    for held_out, _, text in library_files():
        texts["held" if held_out else "train"].append(text)
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"\n[ \t]*|[ ]?[A-Za-z_]+|[0-9]{1,3}|[ ]?[^\sA-Za-z_0-9]+|[ \t]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts["train"],
        trainers.BpeTrainer(
            vocab_size=VOCAB, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for split, parts in texts.items():
        ids = np.concatenate([np.array([*e.ids, 0], np.uint16) for e in tokenizer.encode_batch(parts)])
        ids.tofile(folder / f"{split}.bin")
        print(split, len(parts), "files", ids.size, "tokens")


def loss_of(model, x, y):  # x, y: [batch, time]
    return F.cross_entropy(model(x, use_cache=False).logits.float().view(-1, VOCAB), y.reshape(-1))


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=args.hidden,
            intermediate_size=args.ffn,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            num_key_value_heads=args.kv_heads,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
    )
    model.to(device)
    data = {
        s: torch.from_numpy(np.fromfile(args.folder / f"{s}.bin", np.uint16).astype(np.int64)) for s in ("train", "held")
    }
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    optimisers = [
        Muon(matrices, lr=args.lr, weight_decay=0.05, precision=PRECISION),
        torch.optim.AdamW(others, lr=args.lr, weight_decay=0.0, betas=(0.9, 0.95), fused=True),
    ]
    generator = torch.Generator().manual_seed(1)
    length, batch, order = 512, args.batch, torch.empty(0, dtype=torch.long)
    start, step, tokens = time.time(), 0, 0

    def held_out() -> float:
        x, y = (data["held"][i : i + 64 * 512].view(-1, 512).to(device) for i in (0, 1))
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=PRECISION == "bf16"):
            return sum(loss_of(model, x[i : i + 8], y[i : i + 8]).item() for i in range(0, 64, 8)) / 8

    while (done := (time.time() - start) / (60 * args.minutes)) < 1:
        if done > 0.75 and length == 512:
            length, batch, order = 1024, max(1, batch // 2), order[:0]
        if order.numel() < batch:
            shift = int(torch.randint(length, (1,), generator=generator))
            order = torch.randperm((data["train"].numel() - 2 * length - 1) // length, generator=generator) * length + shift
        rows, order = order[:batch], order[batch:]
        x = torch.stack([data["train"][i : i + length] for i in rows]).to(device)
        y = torch.stack([data["train"][i + 1 : i + length + 1] for i in rows]).to(device)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = args.lr * min(1, (step + 1) / 60) * (1 if done < 0.5 else max(0.02, 2 * (1 - done)))
        with torch.autocast(device.type, torch.bfloat16, enabled=PRECISION == "bf16"):
            loss = loss_of(model, x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + x.numel()
        if step % 50 == 0:
            print(f"{done:6.1%} step {step} tokens {tokens} loss {loss.item():.3f} held-out {held_out():.3f}", flush=True)
    print(f"held-out {held_out():.4f} nats a token after {tokens} tokens")
    model.to("cpu", torch.bfloat16).save_pretrained(args.out, max_shard_size="12MB")
    PreTrainedTokenizerFast(
        tokenizer_file=str(args.folder / "tokenizer.json"),
        eos_token="<|end|>",
        bos_token="<|end|>",
        pad_token="<|end|>",
        model_max_length=1024,
    ).save_pretrained(args.out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("corpus")
    verb.add_argument("folder", type=pathlib.Path)
    verb.set_defaults(run=lambda a: corpus(a.folder))
    verb = verbs.add_parser("train")
    verb.add_argument("folder", type=pathlib.Path)
    verb.add_argument("--out", required=True)
    for name, default in (("hidden", 384), ("layers", 8), ("heads", 6), ("kv-heads", 2), ("ffn", 1024), ("batch", 8)):
        verb.add_argument(f"--{name}", type=int, default=default)
    verb.add_argument("--minutes", type=float, required=True)
    verb.add_argument("--lr", type=float, default=8e-3)
    verb.set_defaults(run=train)
    arguments = parser.parse_args()
    arguments.run(arguments)
