"""A small GPT on Python's own documentation: 64 docstrings an update, packed by their bytes.

    python examples/torch/gpt.py                # some minutes
    python examples/torch/gpt.py --quick        # seconds, in float64, compared with the whole batch

The loss is a mean over bytes, and rows have 2 to 256 of them. `max_tokens` sorts, trims and packs the rows into
micro-batches of at most so many bytes, and `weight` counts the bytes of each, so the update is that of all 64 rows.
"""

from __future__ import annotations

import argparse
import copy
import math
import pathlib
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradaccum.torch import TrainStep

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))  # where `examples.demo` is found
from examples.demo.text import python_text

Batch = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)  # 4 heads
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Bytes in, the next byte's logits out. Rows are padded at their ends, and attention is causal."""

    def __init__(self, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)), nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, ids: Tensor) -> Tensor:
        return self.blocks(self.bytes(ids) + self.places.weight[: ids.shape[1]])


def padded(rows: list[str]) -> Batch:
    """Bytes, their mask, and the byte to predict from each; -100 is ignored."""
    texts = [torch.tensor(list(row.encode("ascii"))) for row in rows]
    ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(text) for text in texts], batch_first=True)
    labels = torch.cat([ids[:, 1:], ids[:, :1]], 1).masked_fill(torch.cat([mask[:, 1:], 0 * mask[:, :1]], 1) == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def compute_loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def targets(batch: Batch) -> Tensor:
    return (batch["labels"] != -100).sum()


def train(model: nn.Module, rows: list[str], updates: int, size: int, max_tokens: int | None) -> nn.Module:
    """Train for so many updates of `size` rows, in micro-batches of `max_tokens` bytes, or at once."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, updates + 1)
    how = {"max_tokens": max_tokens} if max_tokens else {"micro_batch_size": size}
    step = TrainStep(model, optimizer, compute_loss=compute_loss, weight=targets, clip_grad_norm=1.0, **how)
    for update in range(updates):
        first = update * size % (len(rows) - size)
        loss = step(padded(rows[first : first + size]))
        scheduler.step()
        if (update + 1) % max(updates // 5, 1) == 0:
            print(f"update {update + 1}: {loss.item() / math.log(2):.2f} bits a byte, gradient {step.grad_norm:.2f}")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds, in float64, compared with the whole batch")
    quick = parser.parse_args().quick
    length, width, depth, updates, size, tokens = (64, 16, 1, 4, 16, 128) if quick else (256, 128, 4, 150, 64, 2048)
    rows = python_text(length)
    held_out, rows = padded(rows[: 4 * size]), rows[4 * size :]
    torch.manual_seed(0)
    model = GPT(width, depth, length).to(torch.float64 if quick else torch.float32)
    print(f"{len(rows):,} rows, {sum(p.numel() for p in model.parameters()):,} parameters")
    with torch.no_grad():
        before = compute_loss(model, held_out)
    whole = train(copy.deepcopy(model), rows, updates, size, None) if quick else None
    train(model, rows, updates, size, tokens)
    with torch.no_grad():
        after = compute_loss(model, held_out)
    print(f"held-out rows: {before / math.log(2):.2f} bits a byte before, {after / math.log(2):.2f} after")
    if whole is not None:
        far = max((a - b).abs().max().item() for a, b in zip(model.parameters(), whole.parameters()))
        print(f"gpt: largest difference of a parameter against the whole batch {far:.1e}")


if __name__ == "__main__":
    main()
