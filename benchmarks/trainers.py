"""Accelerate and Lightning with gradaccum, against the same with their own accumulation: time of ordinary windows."""

from __future__ import annotations

import functools
import itertools
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.harness import arguments, keep_freed_memory, publish, ratio_of, ratios, recorded, table

STEPS, ROWS = 4, 16
FIRST, LAST = 129, 191
"""The windows that are timed, of a run from its start: between two that are watched, 1, 2, 4, ..., 128 and 256."""


def layers(*widths: int) -> nn.Module:
    """Linear layers, with ReLU between them."""
    made = [layer for one, other in itertools.pairwise(widths) for layer in (nn.ReLU(), nn.Linear(one, other))]
    return nn.Sequential(*made[1:])


NETWORKS = {
    "784-512-512-10": functools.partial(layers, 784, 512, 512, 10),
    "32-64-10": functools.partial(layers, 32, 64, 10),
    "58 parameters": functools.partial(layers, *[64] * 29, 10),
}
HEAD = {
    "prepare_optimizer": "`prepare_optimizer` / Accelerate",
    "a callback that does nothing": "a callback that does nothing / Lightning",
    "GradientAccumulation": "`GradientAccumulation` / Lightning",
}
loss_function = nn.CrossEntropyLoss()


class Timed:
    """Batches for a run, which take the time at each window's first."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches
        self._starts: list[float] = []

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self._batches):
            if number % STEPS == 0:
                self._starts.append(time.process_time())
            yield batch

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def seconds(self) -> float:
        return self._starts[LAST] - self._starts[FIRST - 1]

    @property
    def watched(self) -> list[float]:
        """Windows 16, 32, 64 and 128 over an ordinary one. Some loops fetch a batch ahead: each with what follows."""
        times = [end - start for start, end in itertools.pairwise(self._starts)]
        ordinary = statistics.median(times[FIRST:LAST])
        return [(times[n - 1] + times[n]) / ordinary - 1 for n in (16, 32, 64, 128)]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def accelerate(make: Callable[[], nn.Module], batches: list[Any], ours: bool) -> Timed:
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
    return timed


def lightning(make: Callable[[], nn.Module], batches: list[Any], callback: Any = None) -> Timed:
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
    return timed


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
    keep_freed_memory()
    rows, rounds = [], 1 if options.quick else 11
    watched: dict[str, list[float]] = {"prepare_optimizer": [], "GradientAccumulation": []}

    def timed(name: str, run: Callable[..., Timed], *args: Any) -> Callable[[], float]:
        def one() -> float:
            found = run(make, batches, *args)
            watched.get(name, []).extend(found.watched)
            return found.seconds

        return one

    for network, make in NETWORKS.items():
        width = next(make().parameters()).shape[1]
        batches = [(torch.randn(ROWS, width), torch.randint(10, (ROWS,))) for _ in range((LAST + 1) * STEPS)]
        found = {}
        for rival, runs in {
            "Accelerate": {"Accelerate": (accelerate, False), "prepare_optimizer": (accelerate, True)},
            "Lightning": {
                "Lightning": (lightning,),
                "a callback that does nothing": (lightning, Idle),
                "GradientAccumulation": (lightning, functools.partial(GradientAccumulation, STEPS)),
            },
        }.items():
            contenders = {name: timed(name, *run) for name, run in runs.items()}
            found |= ratios(contenders, rival, rounds, about=network, warm_up=1)  # each call is a run from its start
        rows.append([network, *(found[key] for key in HEAD)])
    looks = ", ".join(
        f"{ratio:.1f} (`{name}`)"
        for name, ratio in recorded({name: ratio_of(w) for name, w in watched.items()}, "a window", rounds).items()
    )
    body = (
        f"Time of windows {FIRST} to {LAST} of {STEPS} micro-batches of {ROWS} rows, against the trainer's own "
        f"accumulation (one thread). Watched windows take {looks} ordinary ones.\n\n"
        + table(["network", *HEAD.values()], rows)
    )
    publish(
        "trainers",
        "Inside Lightning and Accelerate",
        body,
        ["torch", "accelerate", "lightning"],
        options,
        ours=["prepare_optimizer", "GradientAccumulation"],
    )


if __name__ == "__main__":
    main()
