"""Accelerate and Lightning with gradaccum, against the same with their own accumulation: time of ordinary windows."""

from __future__ import annotations

import functools
import itertools
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.harness import arguments, publish, ratios, table

STEPS, ROWS = 4, 16
FIRST, LAST = 65, 127
"""The windows that are timed, of a run from its start: the 64th and the 128th are watched."""


def layers(*widths: int) -> nn.Module:
    """Linear layers, with ReLU between them."""
    made = [layer for one, other in itertools.pairwise(widths) for layer in (nn.ReLU(), nn.Linear(one, other))]
    return nn.Sequential(*made[1:])


NETWORKS = {
    "784-512-512-10": functools.partial(layers, 784, 512, 512, 10),
    "32-64-10": functools.partial(layers, 32, 64, 10),
    "58 parameters": functools.partial(layers, *[64] * 29, 10),
}
loss_function = nn.CrossEntropyLoss()


class Timed:
    """Batches for a run; between the first and the last window that count, it takes the time."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches
        self.seconds = 0.0

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._batches):
            if number == FIRST * STEPS:
                self.seconds = -time.process_time()
            if number == LAST * STEPS:
                self.seconds += time.process_time()
            yield batch

    def __len__(self) -> int:
        return len(self._batches)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def accelerate(make: Callable[[], nn.Module], batches: list[Any], ours: bool) -> float:
    from accelerate import Accelerator

    from gradaccum.integrations.accelerate import prepare_optimizer

    accelerator = Accelerator(cpu=True)
    accelerator.gradient_accumulation_steps = 1 if ours else STEPS  # one number for the whole process
    model = make()
    inner = sgd(model)
    model = accelerator.prepare(model)
    timed = Timed(batches)
    optimizer: Any
    loader: Iterable[Any]
    if ours:
        optimizer = prepare_optimizer(accelerator, inner, STEPS)
        loader = optimizer.batches(timed)
    else:
        optimizer, loader = accelerator.prepare(inner), timed
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_function(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return timed.seconds


def lightning(make: Callable[[], nn.Module], batches: list[Any], callback: Any = None) -> float:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = make()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

        def training_step(self, batch: tuple, index: int) -> torch.Tensor:
            return loss_function(self.network(batch[0]), batch[1])

    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accumulate_grad_batches=STEPS if callback is None else 1,
        callbacks=[] if callback is None else [callback()],
    )  # fmt: skip
    timed = Timed(batches)
    trainer.fit(Module(), timed)
    return timed.seconds


def main() -> None:
    from lightning.pytorch import Callback

    from gradaccum.integrations.lightning import GradientAccumulation

    class Idle(Callback):
        """What it costs that Lightning calls a callback where ours needs to be called."""

        def on_train_batch_start(self, *args: Any) -> None: ...
        def on_before_backward(self, *args: Any) -> None: ...
        def on_after_backward(self, *args: Any) -> None: ...

        def setup(self, trainer: Any, *args: Any, **more: Any) -> None:
            trainer.accumulate_grad_batches = STEPS

    options = arguments(__doc__)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows, rounds = [], 1 if options.quick else 15
    for name, make in NETWORKS.items():
        width = next(make().parameters()).shape[1]
        batches = [(torch.randn(ROWS, width), torch.randint(10, (ROWS,))) for _ in range((LAST + 1) * STEPS)]
        within = {
            "Accelerate": functools.partial(accelerate, make, batches, False),
            "prepare_optimizer": functools.partial(accelerate, make, batches, True),
        }
        found = ratios(within, "Accelerate", rounds, about=name)
        within = {
            "Lightning": functools.partial(lightning, make, batches),
            "a callback that does nothing": functools.partial(lightning, make, batches, Idle),
            "GradientAccumulation": functools.partial(
                lightning, make, batches, functools.partial(GradientAccumulation, STEPS)
            ),
        }
        found |= ratios(within, "Lightning", rounds, about=name)
        rows.append([name, *(found[key] for key in ("prepare_optimizer", *list(within)[1:]))])
    body = (
        f"Time of windows {FIRST + 1} to {LAST} of {STEPS} micro-batches of {ROWS} rows, against the trainer's own "
        "accumulation, which is exact only for equal batches and full windows (one thread).\n\n"
        + table(
            [
                "network",
                "`prepare_optimizer` / Accelerate",
                "a callback that does nothing / Lightning",
                "`GradientAccumulation` / Lightning",
            ],
            rows,
        )
    )
    versions = ["torch", "accelerate", "lightning"]
    publish(
        "trainers",
        "Inside Lightning and Accelerate",
        body,
        versions,
        options,
        ours=["prepare_optimizer", "GradientAccumulation"],
    )


if __name__ == "__main__":
    main()
