"""ChunkedMultipleNegativesRankingLoss against sentence-transformers' cached loss: time, memory, gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor, nn

from benchmarks.harness import WARM_UP, arguments, first_call, publish, ratios, table
from gradaccum.integrations.sentence_transformers import ChunkedMultipleNegativesRankingLoss
from gradaccum.torch.measure.fake_memory import LiveBytes

COLUMNS, WIDTH, ROWS, TOKENS, SCALE = 64, 64, 32, 1024, 20.0


class Encoder(nn.Module):
    """Two layers of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        x = self.embedding(features["input_ids"])
        features["token_embeddings"] = self.layers(x, src_key_padding_mask=features["attention_mask"] == 0)
        return features


def texts(rows: int, seed: int) -> dict[str, Tensor]:
    """Lengths of a few to all columns, most of them short."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randn(rows, generator=generator).mul(0.8).add(2.5).exp().long().clamp(2, COLUMNS)
    mask = (torch.arange(COLUMNS) < lengths[:, None]).long()
    return {"input_ids": torch.randint(1, 1000, mask.shape, generator=generator) * mask, "attention_mask": mask}


def main() -> None:
    options = arguments(__doc__)
    pairs = 128 if options.quick else 512
    torch.manual_seed(0)
    model = SentenceTransformer(modules=[Encoder(), Pooling(WIDTH)], device="cpu").train()
    batch = [texts(pairs, seed) for seed in range(2)]

    def update(loss: Any) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad()
            loss([dict(features) for features in batch], None).backward()

        return run

    exact = copy.deepcopy(model).double()
    MultipleNegativesRankingLoss(exact)([dict(features) for features in batch], None).backward()
    expected = torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None])

    def error() -> float:
        found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        return float((found - expected).abs().max() / expected.abs().max())

    cached, ours = CachedMultipleNegativesRankingLoss, ChunkedMultipleNegativesRankingLoss
    contenders = {
        "MultipleNegativesRankingLoss, the whole batch": update(MultipleNegativesRankingLoss(model, SCALE)),
        f"Cached, mini_batch_size={ROWS}": update(cached(model, SCALE, mini_batch_size=ROWS)),
        f"Chunked, mini_batch_size={ROWS}": update(ours(model, SCALE, mini_batch_size=ROWS)),
        f"Cached, mini_batch_num_tokens={TOKENS}": update(
            cached(model, SCALE, mini_batch_size=ROWS, mini_batch_num_tokens=TOKENS)
        ),
        f"Chunked, mini_batch_num_tokens={TOKENS}": update(ours(model, SCALE, mini_batch_num_tokens=TOKENS)),
    }
    rival = f"Cached, mini_batch_size={ROWS}"
    rounds, warm_up = (2, 1) if options.quick else (7, WARM_UP)
    time = ratios(contenders, rival, rounds, about="loss and gradients", warm_up=warm_up)
    first = first_call(lambda: update(ours(model, SCALE, mini_batch_size=ROWS)), 1 if options.quick else 5)
    rows = []
    for name, run in contenders.items():
        with LiveBytes() as live:
            run()
        rows.append([name, time[name], f"{live.peak / 2**20:.1f}", f"{error():.1e}"])
    body = (
        f"{pairs} pairs of texts of 2 to {COLUMNS} tokens, most of them short, padded to {COLUMNS}; two layers of a "
        f"transformer of {WIDTH}, float32, without dropout. Loss and gradients: time relative to the cached "
        "loss, peak MiB of live tensors, largest error against float64.\n\n"
        + table(["", "time", "MiB", "gradient error"], rows)
        + f"\n\nThe first call of the chunked loss, which is proven, takes {first} later ones."
    )
    rows_alone, tokens = time[f"Chunked, mini_batch_size={ROWS}"], time[f"Chunked, mini_batch_num_tokens={TOKENS}"]
    block = (
        f"By micro-batches of rows it takes {rows_alone:.2f} of the cached loss's time; with a token budget, texts of\n"
        f"uneven lengths took {tokens:.2f} of it ([measured](benchmarks.md#sentence-transformers))."
    )
    publish(
        "sentence_transformers",
        "sentence-transformers",
        body,
        ["torch", "sentence-transformers"],
        options,
        ours=[key for key in contenders if key.startswith("Chunked")],
        blocks={"docs/sentence_transformers.md#sentence_transformers": block},
    )


if __name__ == "__main__":
    main()
