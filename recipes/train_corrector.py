"""Train a small model with an encoder, and a draft model for it, to correct lines of code that a generator makes.

    python recipes/train_corrector.py DIR --minutes 27        # DIR/target and DIR/draft become checkpoints
    python recipes/train_corrector.py DIR --measure           # tokens of a pass with several drafts

Both are T5, 256 wide: the target has three layers in its encoder and four in its decoder, and the draft model two and one.
They learn side by side from the same texts (`corrections.py`), which are short in the first sixth of the time. Heads that
copy are there from the start (`plant_copying`). The tokenizer is that of the embedded target. The optimisers and the
schedule, which follows the time, are those of `train_target.py`.
"""

import argparse
import itertools
import pathlib
import time

import torch
from corrections import Correction, corrections
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

from outrider import LLM, DraftModel, Ngram, SamplingParams, SpeculationConfig, Suffix
from outrider.config import default_model
from outrider.lab.train.settings import fast_precision
from outrider.lab.train.trainer import Muon

LR, HELD_OUT_SEED = 3e-3, 2**20
#: The most tokens of the sources of a step, and the texts that are drawn at a time, to go by their length.
TOKENS, DRAWN = 1536, 128
#: Steps of the draft model: one in so many.
DRAFT_EVERY = 2
#: Products in bf16 take ten times as long as in float32 where a processor has none.
PRECISION = fast_precision()


def fresh_model(tokenizer, encoder_layers: int, decoder_layers: int) -> T5ForConditionalGeneration:
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=256,
            d_kv=64,
            d_ff=768,
            num_layers=encoder_layers,
            num_decoder_layers=decoder_layers,
            num_heads=4,
            relative_attention_num_buckets=32,
            relative_attention_max_distance=128,
            dropout_rate=0.0,
            feed_forward_proj="gated-gelu",
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            decoder_start_token_id=tokenizer.pad_token_id,
        )
    )
    plant_copying(model)
    return model


@torch.no_grad()
def plant_copying(model: T5ForConditionalGeneration) -> None:
    """Let two heads of the encoder write down beside each token the two before it, and one of the decoder the one before
    its own. A head of the last decoder layer looks where both its tokens were written down, and copies what stands there. A
    short training finds no such heads by itself."""
    size, width = model.config.d_kv, model.config.d_model
    half = size // 2
    token, one, two, own, copied = (torch.linalg.qr(torch.randn(width, n))[0].T for n in (half, half, half, half, size))
    encoder, decoder = (each.block[0].layer[0].SelfAttention for each in (model.encoder, model.decoder))
    for attention, head, distance, into in ((encoder, 0, 1, one), (encoder, 1, 2, two), (decoder, 0, 1, own)):
        first = head * size
        attention.relative_attention_bias.weight[distance, head] = 8.0  # so near, each distance has a bucket of its own
        attention.v.weight[first : first + half], attention.o.weight[:, first : first + half] = token, 2.8 * into.T
    source = model.decoder.block[-1].layer[1].EncDecAttention
    source.q.weight[:size] = 0.6 * torch.cat([token, own])
    source.k.weight[:size] = 0.6 * torch.cat([one, two])
    source.v.weight[:size], source.o.weight[:, :size] = copied, 2.0 * copied.T


class Trainee:
    """A model with its optimisers."""

    def __init__(self, model: T5ForConditionalGeneration) -> None:
        self.model, self.steps, self.tokens = model, 0, 0
        named = list(model.named_parameters())
        tables = ("shared", "relative_attention_bias", "lm_head")
        matrices = [p for n, p in named if p.dim() == 2 and not any(table in n for table in tables)]
        others = [p for n, p in named if p.dim() != 2 or any(table in n for table in tables)]
        self.optimisers = [
            Muon(matrices, lr=LR, weight_decay=0.02, precision=PRECISION),
            torch.optim.AdamW(others, lr=LR, weight_decay=0.0, betas=(0.9, 0.95)),
        ]

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=PRECISION == "bf16"):
            return self.model(**batch).loss

    def step(self, batch: dict[str, torch.Tensor], done: float) -> float:
        rate = LR * min(1, (self.steps + 1) / 40) * (1 if done < 0.5 else max(0.02, 2 * (1 - done)))
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
        loss = self.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.steps, self.tokens = self.steps + 1, self.tokens + int((batch["labels"] >= 0).sum())
        return loss.item()


def batch_of(tokenizer, texts: list[Correction]) -> dict[str, torch.Tensor]:
    """Sources, and texts with their end, padded to the longest."""
    sources, answers = tokenizer([t.source for t in texts]).input_ids, tokenizer([t.text for t in texts]).input_ids
    longest, last = max(map(len, sources)), max(map(len, answers)) + 1
    pad = tokenizer.pad_token_id
    return {
        "input_ids": torch.tensor([s + [pad] * (longest - len(s)) for s in sources]),
        "attention_mask": torch.tensor([[1] * len(s) + [0] * (longest - len(s)) for s in sources]),
        "labels": torch.tensor([a + [tokenizer.eos_token_id] + [-100] * (last - len(a) - 1) for a in answers]),
    }


def batches(tokenizer, texts):
    """Texts of about one length each, in so many batches as they fill."""
    while True:
        drawn = sorted(itertools.islice(texts, DRAWN), key=lambda each: len(each.text))
        while drawn:
            size = max(1, TOKENS // (1 + len(tokenizer.encode(drawn[-1].source))))
            drawn, batch = drawn[:-size], drawn[-size:]
            yield batch_of(tokenizer, batch)


def train(folder: pathlib.Path, minutes: float) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(default_model("target"))
    target, draft = Trainee(fresh_model(tokenizer, 3, 4)), Trainee(fresh_model(tokenizer, 2, 1))
    held = batch_of(tokenizer, list(itertools.islice(corrections(HELD_OUT_SEED), 24)))
    short, every = batches(tokenizer, corrections(0, lines=(1, 3))), batches(tokenizer, corrections(1))
    start = time.time()

    def held_out() -> str:
        with torch.no_grad():
            return ", ".join(f"{each.loss(held).item():.4f}" for each in (target, draft))

    print(f"held-out {held_out()} nats a token before the training", flush=True)
    while (done := (time.time() - start) / (60 * minutes)) < 1:
        batch = next(short if done < 1 / 6 else every)
        loss = target.step(batch, done)
        if target.steps % DRAFT_EVERY == 0:
            draft.step(batch, done)
        if target.steps % 25 == 0:
            print(f"{done:6.1%} step {target.steps} loss {loss:.3f}; held-out {held_out()} nats a token", flush=True)
    print(f"held-out {held_out()} nats a token, after {target.tokens} and {draft.tokens} tokens")
    for name, each in (("target", target), ("draft", draft)):
        each.model.to(torch.bfloat16).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def measure(folder: pathlib.Path) -> None:
    """How many texts are corrected wholly, and what the verified drafts of several methods yield, at both temperatures."""
    texts = list(itertools.islice(corrections(HELD_OUT_SEED + 1, lines=(6, 9)), 16))
    ways = {
        "ngram, 8": SpeculationConfig(method=Ngram(), num_draft_tokens=8),
        "suffix, 8": SpeculationConfig(method=Suffix(), num_draft_tokens=8),
        "draft model, 6": SpeculationConfig(method=DraftModel(model=str(folder / "draft")), num_draft_tokens=6),
    }
    with LLM(str(folder / "target"), speculation="none") as llm:
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, max_tokens=256, seed=0)
            for name, way in ways.items():
                llm.stats.reset()
                outputs = llm.generate([each.source for each in texts], params, speculation=way)
                right = sum(out.outputs[0].text == each.text for out, each in zip(outputs, texts, strict=True))
                stats = llm.stats.finished
                tau = 1 + stats.num_accepted_tokens / stats.num_drafts
                print(f"temperature {temperature}: {right} of {len(texts)} right; {name}: {tau:.2f} tokens of a pass")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--minutes", type=float, default=27)
    parser.add_argument("--measure", action="store_true")
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.folder)
    else:
        train(arguments.folder, arguments.minutes)
