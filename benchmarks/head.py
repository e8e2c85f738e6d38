"""A vocabulary of 128k: the head and the loss in tiles against whole logits, in time and in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import WARM_UP, arguments, looks, publish, ratio_of, ratios, table
from gradaccum.torch import TrainStep
from gradaccum.torch.measure.fake_memory import LiveBytes

CLASSES, WIDTH, COLUMNS, ROWS, MICRO = 128_000, 64, 128, 8, 4


class Words(nn.Module):
    """An embedding, a layer, and the head that is tied to it."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(classes, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, classes, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.embedding(x))))


def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def main() -> None:
    options = arguments(__doc__, cuda=True)
    classes = 4_000 if options.quick else CLASSES
    x = torch.randint(classes, (ROWS, COLUMNS))

    def update(head: str | None, verify: bool = False) -> Callable[[], None]:
        model = Words(classes)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        step = TrainStep(
            model, optimizer, compute_loss=compute_loss, micro_batch_size=MICRO, head=head, verify=verify
        )  # fmt: skip

        def run() -> None:
            step(x)

        return run

    contenders = {"whole logits": update(None), "head in tiles": update("head")}
    peaks = {}
    for name, run in contenders.items():
        run()
        with LiveBytes() as live:
            run()
        peaks[name] = live.peak
    rounds, warm_up = (1, 1) if options.quick else (7, WARM_UP)
    about = f"an update over {classes:,} classes"
    found = ratios(contenders, "whole logits", rounds, about=about, warm_up=warm_up)
    proven = ratio_of(looks(update("head", verify=True), 8))
    rows = [[name, found[name], peaks[name] / peaks["whole logits"]] for name in contenders]
    logits, weights = (4 * classes * numbers / 2**20 for numbers in (MICRO * (COLUMNS - 1), WIDTH))
    whole, tiled = (peaks[name] / 2**20 for name in contenders)
    body = f"""{classes:,} classes, {WIDTH} features, micro-batches of {MICRO * COLUMNS} tokens, float32. A
micro-batch's logits take {logits:.0f} MiB, the head's weights and their gradient {weights:.0f} MiB each.

{table(["logits", "time per update", "peak of live bytes"], rows)}

Besides the parameters an update takes {tiled:.0f} MiB in tiles, and {whole:.0f} MiB with whole logits. A proven update
takes {proven} ordinary ones in tiles; the table has `verify=False`."""
    publish("head", "A head over 128k classes", body, ["torch"], options, ours=["head in tiles"])


if __name__ == "__main__":
    main()
