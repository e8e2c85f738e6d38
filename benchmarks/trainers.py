"""Accelerate and Lightning with gradaccum, against the same with their own accumulation: time per epoch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.harness import arguments, publish, ratios, table

STEPS, ROWS = 4, 16
NETWORKS: dict[str, tuple[int, Callable[[], nn.Module]]] = {
    "784-512-512-10": (
        784,
        lambda: nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)),
    ),
    "32-64-10": (32, lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))),
}
loss_function = nn.CrossEntropyLoss()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def accelerate(make: Callable[[], nn.Module], batches: list, ours: bool) -> Callable[[], None]:
    from accelerate import Accelerator

    from gradaccum.integrations.accelerate import prepare_optimizer

    accelerator = Accelerator(cpu=True)
    accelerator.gradient_accumulation_steps = 1  # one number for the whole process
    model = make()
    inner = sgd(model)
    model = accelerator.prepare(model)
    optimizer = prepare_optimizer(accelerator, inner, STEPS) if ours else accelerator.prepare(inner)

    def epoch() -> None:
        accelerator.gradient_accumulation_steps = 1 if ours else STEPS
        for x, y in optimizer.batches(batches) if ours else batches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_function(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

    return epoch


def lightning(make: Callable[[], nn.Module], batches: list, ours: bool) -> Callable[[], None]:
    import lightning.pytorch as pl

    from gradaccum.integrations.lightning import GradientAccumulation

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = make()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

        def training_step(self, batch: tuple, index: int) -> torch.Tensor:
            return loss_function(self.network(batch[0]), batch[1])

    module = Module()
    loader = torch.utils.data.DataLoader(batches, batch_size=None)

    def epoch() -> None:
        trainer = pl.Trainer(
            max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, accumulate_grad_batches=1 if ours else STEPS,
            callbacks=[GradientAccumulation(STEPS)] if ours else [],
        )  # fmt: skip
        trainer.fit(module, loader)

    return epoch


def main() -> None:
    options = arguments(__doc__)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows = []
    for name, (width, make) in NETWORKS.items():
        batches = [(torch.randn(ROWS, width), torch.randint(10, (ROWS,))) for _ in range(40 if options.quick else 400)]
        found = {}
        for rival, contenders in (
            (
                "Accelerate",
                {
                    "Accelerate": lambda make, batches: accelerate(make, batches, False),
                    "prepare_optimizer": lambda make, batches: accelerate(make, batches, True),
                },
            ),
            (
                "Lightning",
                {
                    "Lightning": lambda make, batches: lightning(make, batches, False),
                    "GradientAccumulation": lambda make, batches: lightning(make, batches, True),
                },
            ),
        ):
            found |= ratios(
                {key: build(make, batches) for key, build in contenders.items()},
                rival,
                3 if options.quick else 7,
                about=name,
            )
        rows.append([name, found["prepare_optimizer"], found["GradientAccumulation"]])
    body = (
        f"Time of an epoch of {len(batches)} micro-batches of {ROWS} rows in windows of {STEPS}, relative to the "
        "trainer's own accumulation, which is exact only for equal batches and full windows (one thread).\n\n"
        + table(["network", "`prepare_optimizer` / Accelerate", "`GradientAccumulation` / Lightning"], rows)
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
