"""`max_tokens`, with and without `pack`, against a loop packed by hand and micro-batches of padded rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import WARM_UP, arguments, looks, publish, ratio_of, ratios, table
from gradaccum.torch import TrainStep
from gradaccum.torch.measure.fake_memory import LiveBytes

ROWS, COLUMNS, BUDGET, WORDS = 96, 512, 2048, 1000
TOKENS: list[int] = []
"""That the models were called with."""


class Small(nn.Module):
    """A transformer of two layers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(WORDS, width)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None, row: Tensor | None = None) -> Tensor:
        """With `row` a token sees those of the same row alone, wherever that lies."""
        TOKENS.append(input_ids.numel())
        apart = None if row is None else (row[:, :, None] != row[:, None, :]).repeat_interleave(4, 0)
        padding = None if attention_mask is None else attention_mask == 0
        return self.head(self.encoder(self.embedding(input_ids), mask=apart, src_key_padding_mask=padding))


def text() -> dict[str, Tensor]:
    torch.manual_seed(1)
    lengths = torch.empty(ROWS).log_normal_(4.0, 0.8).round().clamp(16, COLUMNS).long()
    mask = (torch.arange(COLUMNS) < lengths[:, None]).long()
    input_ids = torch.randint(1, WORDS, mask.shape) * mask
    return {"input_ids": input_ids, "attention_mask": mask, "labels": input_ids.masked_fill(mask == 0, -100)}


def compute_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    outputs = model(batch["input_ids"], batch["attention_mask"], batch.get("row"))
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def pack(batch: dict[str, Tensor], rows: list[list[int]]) -> dict[str, Tensor | None]:
    """Rows one behind the other, each token with the number of its row; what is left over is a row of padding."""
    lengths = batch["attention_mask"].sum(1).tolist()
    shape = len(rows), max(sum(lengths[row] for row in pack) for pack in rows)
    input_ids, labels, of_row = torch.zeros(shape).long(), torch.full(shape, -100), torch.full(shape, -1)
    for number, pack in enumerate(rows):
        at = 0
        for row in pack:
            here = slice(at, at := at + lengths[row])
            input_ids[number, here] = batch["input_ids"][row, : lengths[row]]
            labels[number, here] = batch["labels"][row, : lengths[row]]
            of_row[number, here] = row
    return {"input_ids": input_ids, "labels": labels, "row": of_row, "attention_mask": None}


def valid(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"] != -100).sum()


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Small()
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def packed_by_hand(batch: dict[str, Tensor]) -> Callable[[], None]:
    """What a careful user writes: sort, pack, trim, weigh."""
    model, optimizer = make()

    def update() -> None:
        optimizer.zero_grad()
        lengths = batch["attention_mask"].sum(1)
        total = valid(batch)
        order = lengths.argsort(descending=True).tolist()
        while order:
            longest = int(lengths[order[0]])
            rows, order = order[: max(BUDGET // longest, 1)], order[max(BUDGET // longest, 1) :]
            part = {name: value[rows, :longest] for name, value in batch.items()}
            (compute_loss(model, part) * (valid(part) / total)).backward()
        optimizer.step()

    return update


def by_step(batch: dict[str, Tensor], **keywords: Any) -> Callable[[], None]:
    model, optimizer = make()
    step = TrainStep(model, optimizer, compute_loss=compute_loss, weight=valid, **keywords)

    def update() -> None:
        step(batch)

    return update


def peak(update: Callable[[], None]) -> tuple[int, int]:
    """Of the third update, as the first two prove themselves; and the tokens that it computes."""
    update(), update()
    TOKENS.clear()
    with LiveBytes() as live:
        update()
    return live.peak, sum(TOKENS)


def main() -> None:
    options = arguments(__doc__, cuda=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
    batch = text()
    padded = BUDGET // COLUMNS
    contenders = {
        "packed by hand": packed_by_hand(batch),
        "max_tokens": by_step(batch, max_tokens=BUDGET),
        "max_tokens and pack": by_step(batch, max_tokens=BUDGET, pack=pack),
        "padded rows": by_step(batch, micro_batch_size=padded),
    }
    peaks = {name: peak(update) for name, update in contenders.items()}
    rounds, warm_up = (1, 1) if options.quick else (9, WARM_UP)
    found = ratios(contenders, "padded rows", rounds, about="an update on ragged text", warm_up=warm_up)
    proven = ratio_of(looks(by_step(batch, max_tokens=BUDGET), 8 if options.quick else 32))
    lengths = batch["attention_mask"].sum(1).double()
    most, tokens = peaks["padded rows"][0], float(lengths.sum())
    rows = [[name, found[name], peaks[name][0] / most, peaks[name][1] / tokens] for name in contenders]
    body = f"""{ROWS} rows of log-normal lengths ({int(lengths.min())} to {int(lengths.max())}, mean
{lengths.mean():.0f}) padded to {COLUMNS}, a transformer of two layers, {torch.get_num_threads()} threads. Micro-batches
of at most {BUDGET} tokens, relative to {padded} padded rows. "Computed tokens" counts padding, per real token.

{table(["micro-batches", "time per update", "peak of live bytes", "computed tokens"], rows)}

With `max_tokens` an update that is proven takes {proven} ordinary ones."""
    publish(
        "max_tokens", "Packing text by tokens", body, ["torch"], options, ours=["max_tokens", "max_tokens and pack"]
    )


if __name__ == "__main__":
    main()
