"""Train a small model with running states, and a layer that predicts two tokens ahead, on the Python standard library.

    python recipes/train_hybrid.py DIR --minutes 30         # DIR becomes a checkpoint
    python recipes/train_hybrid.py DIR --measure            # tokens of a pass with its own layer, and with other drafts

It is a Qwen3.5 of four layers: three gated delta rules, and attention in the last one. The layer of its checkpoint that
predicts several tokens (`mtp.*`) learns beside it, from the model's own probabilities of the next token but one. Tokenizer,
embeddings, norms and feed-forward parts are at first those of the embedded target, so that a short training is enough.
The files are those of `train_target.py`, and so are the optimisers and the schedule, which follows the time.
"""

import argparse
import pathlib
import time

import torch
import torch.nn.functional as F
from library_files import library_files
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm, Qwen3_5TextModel

from outrider import LLM, DraftModel, Mtp, SamplingParams, SpeculationConfig
from outrider.config import default_model
from outrider.lab.train.settings import fast_precision
from outrider.lab.train.trainer import Muon
from outrider.propose.own_layers import EarlyExit

#: The layers of the embedded target whose norms and feed-forward parts the layers of the hybrid and of `Ahead` begin with.
BEGIN, LAST = (0, 2, 4, 6), 7
LENGTH, LR = 256, 4e-3
#: Products in bf16 take ten times as long as in float32 where a processor has none.
PRECISION = fast_precision()


def config_of(target, layer_types: list[str]) -> Qwen3_5TextConfig:
    c = target.config
    return Qwen3_5TextConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=len(layer_types),
        layer_types=layer_types,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=6,
        linear_num_value_heads=6,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


class Ahead(torch.nn.Module):
    """The layer that predicts several tokens: it reads a token beside what the model says of the one before."""

    def __init__(self, target, model) -> None:
        super().__init__()
        size = model.config.hidden_size
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size), Qwen3_5RMSNorm(size)
        self.stack = Qwen3_5TextModel(config_of(target, ["full_attention"]))
        del self.stack.embed_tokens
        with torch.no_grad():
            through = torch.cat([torch.zeros(size, size), torch.eye(size)], 1)
            self.fc.weight.copy_(through + 0.02 * torch.randn(size, 2 * size))

    def forward(self, embeddings, hidden):  # [batch, time, hidden] each
        both = torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], -1)
        return self.stack(inputs_embeds=self.fc(both), use_cache=False).last_hidden_state

    def tensors(self) -> dict[str, torch.Tensor]:
        """By the names that checkpoints have."""
        return {f"mtp.{name.removeprefix('stack.')}": value for name, value in self.state_dict().items()}


def begin(layer, theirs) -> None:
    """Norms multiply by 1 + w here, and by w there."""
    for name in ("input_layernorm", "post_attention_layernorm"):
        getattr(layer, name).weight.copy_(getattr(theirs, name).weight - 1)
    layer.mlp.load_state_dict(theirs.mlp.state_dict())


def fresh_models() -> tuple[torch.nn.Module, Ahead]:
    target = AutoModelForCausalLM.from_pretrained(default_model("target"), dtype=torch.float32)
    model = Qwen3_5ForCausalLM(config_of(target, ["linear_attention"] * 3 + ["full_attention"]))
    ahead = Ahead(target, model)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
        model.model.norm.weight.copy_(target.model.norm.weight - 1)
        ahead.stack.norm.weight.copy_(target.model.norm.weight - 1)
        for layer, number in zip(model.model.layers, BEGIN, strict=True):
            begin(layer, target.model.layers[number])
        begin(ahead.stack.layers[0], target.model.layers[LAST])
    return model, ahead


def losses(model, ahead, x, y) -> tuple[torch.Tensor, torch.Tensor]:
    """Nats a token of the model, and how far the layer's probabilities of the token behind the next are from its own."""
    hidden = model.model(x, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden).float()
    guess = model.lm_head(ahead(model.model.embed_tokens(x[:, 1:]).detach(), hidden[:, :-1].detach())).float()
    want = logits[:, 1:].detach().log_softmax(-1)
    gap = F.kl_div(guess.log_softmax(-1), want, log_target=True, reduction="none").sum(-1).mean()
    return F.cross_entropy(logits.flatten(0, 1), y.flatten()), gap


def train(folder: pathlib.Path, minutes: float, batch: int) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(default_model("target"))
    texts: dict[bool, list[str]] = {True: [], False: []}
    for held_out, _, text in library_files():
        texts[held_out].append(text)
    data = {
        held_out: torch.tensor([t for text in parts for t in (*tokenizer.encode(text, add_special_tokens=False), 0)])
        for held_out, parts in texts.items()
    }
    model, ahead = fresh_models()
    named = [*model.named_parameters(), *ahead.named_parameters()]
    matrices = [p for n, p in named if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in named if p.dim() != 2 or "embed" in n]
    optimisers = [
        Muon(matrices, lr=LR, weight_decay=0.05, precision=PRECISION),
        torch.optim.AdamW(others, lr=LR / 4, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
    generator = torch.Generator().manual_seed(1)
    start, step, tokens = time.time(), 0, 0
    held = data[True][: 16 * LENGTH + 1]

    def held_out() -> str:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=PRECISION == "bf16"):
            loss, gap = losses(model, ahead, held[:-1].view(16, LENGTH), held[1:].view(16, LENGTH))
        return f"held-out {loss.item():.3f} nats a token, {gap.item():.3f} from there to the layer's"

    while (done := (time.time() - start) / (60 * minutes)) < 1:
        starts = torch.randint(len(data[False]) - LENGTH - 1, (batch,), generator=generator)
        rows = torch.stack([data[False][s : s + LENGTH + 1] for s in starts.tolist()])
        for optimiser, rate in zip(optimisers, (LR, LR / 4), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = rate * min(1, (step + 1) / 20) * (1 if done < 0.5 else max(0.02, 2 * (1 - done)))
        with torch.autocast("cpu", torch.bfloat16, enabled=PRECISION == "bf16"):
            loss, gap = losses(model, ahead, rows[:, :-1], rows[:, 1:])
        (loss + gap).backward()
        torch.nn.utils.clip_grad_norm_([*model.parameters(), *ahead.parameters()], 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + batch * LENGTH
        if step % 25 == 0:
            print(f"{done:6.1%} step {step} tokens {tokens} loss {loss.item():.3f}; {held_out()}", flush=True)
    print(f"{held_out()}, after {tokens} tokens")
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "model.safetensors"
    added = {name: value.to(torch.bfloat16) for name, value in ahead.tensors().items()}
    save_file(load_file(file) | added, file, {"format": "pt"})


def measure(folder: pathlib.Path) -> None:
    """What the verified drafts of several methods yield behind the beginnings of held-out files, at temperature 1."""
    texts = [text for held_out, _, text in library_files() if held_out]
    prompts = ["".join(text.splitlines(keepends=True)[:12]) for text in texts[:8]]
    params = SamplingParams(temperature=1, max_tokens=64, ignore_eos=True)
    ways = {
        **{f"mtp, {count}": SpeculationConfig(method=Mtp(), num_draft_tokens=count) for count in (1, 2, 3)},
        "embedded draft, 3": SpeculationConfig(method=DraftModel(model=default_model("draft")), num_draft_tokens=3),
        "its first 3 layers, 2": SpeculationConfig(method=EarlyExit(layers=3), num_draft_tokens=2),
    }
    with LLM(str(folder), speculation="none") as llm:
        for name, way in ways.items():
            llm.stats.reset()
            llm.generate(prompts, params, speculation=way)
            stats = llm.stats.finished
            tau = 1 + stats.num_accepted_tokens / stats.num_drafts
            stood = zip(stats.accepted_per_position, stats.tried_per_position, strict=True)
            print(f"{name}: {tau:.2f} tokens of a pass; accepted", *(f"{some} of {all_}," for some, all_ in stood))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--measure", action="store_true")
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.folder)
    else:
        train(arguments.folder, arguments.minutes, arguments.batch)
