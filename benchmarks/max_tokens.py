"""`max_tokens` against a loop packed by hand, and against micro-batches of padded rows with the same peak."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import arguments, publish, ratios, table
from gradaccum.torch import TrainStep
from gradaccum.torch.measure.fake_memory import LiveBytes

ROWS, COLUMNS, BUDGET, WORDS = 256, 512, 2048, 1000


class Small(nn.Module):
    """A transformer of two layers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(WORDS, width)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0))


def text() -> dict[str, Tensor]:
    torch.manual_seed(1)
    lengths = torch.empty(ROWS).log_normal_(4.0, 0.8).round().clamp(16, COLUMNS).long()
    mask = (torch.arange(COLUMNS) < lengths[:, None]).long()
    input_ids = torch.randint(1, WORDS, mask.shape) * mask
    return {"input_ids": input_ids, "attention_mask": mask, "labels": input_ids.masked_fill(mask == 0, -100)}


def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    outputs = model(batch["input_ids"], batch["attention_mask"])
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


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


def by_step(batch: dict[str, Tensor], **keywords: int) -> Callable[[], None]:
    model, optimizer = make()
    step = TrainStep(model, optimizer, compute_loss=compute_loss, weight=valid, **keywords)  # type: ignore[arg-type]

    def update() -> None:
        step(batch)

    return update


def peak(update: Callable[[], None]) -> int:
    """Of the third update: the first two prove themselves."""
    update(), update()
    with LiveBytes() as live:
        update()
    return live.peak


def main() -> None:
    options = arguments(__doc__, cuda=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
    batch = text()
    padded = BUDGET // COLUMNS
    contenders = {
        "packed by hand": packed_by_hand(batch),
        "max_tokens": by_step(batch, max_tokens=BUDGET),
        "padded rows": by_step(batch, micro_batch_size=padded),
    }
    peaks = {name: peak(update) for name, update in contenders.items()}
    found = ratios(contenders, "padded rows", 1 if options.quick else 9, about="an update on ragged text")
    rows = [[name, found[name], peaks[name] / peaks["padded rows"]] for name in contenders]
    lengths = batch["attention_mask"].sum(1).double()
    body = f"""{ROWS} rows of log-normal lengths ({int(lengths.min())} to {int(lengths.max())}, mean
{lengths.mean():.0f}) padded to {COLUMNS}, a transformer of two layers, {torch.get_num_threads()} threads. Packed into
micro-batches of at most {BUDGET} padded tokens, against micro-batches of {padded} padded rows.

{table(["micro-batches", "time per update", "peak of live bytes"], rows)}

`max_tokens` takes {found["max_tokens"] / found["packed by hand"]:.2f} of the time of the loop packed by hand."""
    publish("max_tokens", "Packing text by tokens", body, ["torch"], options, ours=["max_tokens"])


if __name__ == "__main__":
    main()
