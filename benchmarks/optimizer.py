"""The wrapped optimizer against the hand-written loop, and against Accelerate's: time per micro-batch of 16 rows."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable

import torch
from torch import nn

import gradaccum.torch
from benchmarks.harness import arguments, in_fresh_process, keep_freed_memory, publish, ratios, seconds, table

NETWORKS = {
    "the guide's, 784-512-512-10": lambda: nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    ),
    "32-64-10": lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)),
}
loss_function = nn.CrossEntropyLoss()


def by_hand(make: Callable[[], nn.Module], batches: list, steps: int) -> Callable[[], None]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def epoch() -> None:
        for index, (x, y) in enumerate(batches):
            (loss_function(model(x), y) / steps).backward()
            if (index + 1) % steps == 0:
                optimizer.step()
                optimizer.zero_grad()

    return epoch


def wrapped(make: Callable[[], nn.Module], batches: list, steps: int, through_batches: bool) -> Callable[[], None]:
    model = make()
    optimizer = gradaccum.torch.optim.SGD(model.parameters(), lr=1e-3, steps=steps)

    def epoch() -> None:
        for x, y in optimizer.batches(batches) if through_batches else batches:
            optimizer.zero_grad()
            loss_function(model(x), y).backward()
            optimizer.step()

    return epoch


def accelerate(make: Callable[[], nn.Module], batches: list, steps: int) -> Callable[[], None]:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=steps, cpu=torch.get_default_device().type == "cpu")
    model = make()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))

    def epoch() -> None:
        for x, y in batches:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(loss_function(model(x), y))
                optimizer.step()

    return epoch


def per_micro_batch(rounds: int, count: int) -> str:
    rows = []
    for name, make in NETWORKS.items():
        features = make()[0].in_features
        batches = [(torch.randn(16, features), torch.randint(10, (16,))) for _ in range(count)]
        found = ratios(
            {
                "by hand": by_hand(make, batches, 4),
                "gradaccum": wrapped(make, batches, 4, through_batches=False),
                "gradaccum, batches()": wrapped(make, batches, 4, through_batches=True),
                "Accelerate": accelerate(make, batches, 4),
            },
            "by hand",
            rounds,
            about=name,
        )
        rows.append([name, *found.values()])
    return table(["network", "by hand", "gradaccum", "gradaccum, `batches()`", "Accelerate"], rows)


def long_windows(rounds: int) -> float:
    """Time per micro-batch in windows of 256 over that in windows of 4, both over the hand-written loop's."""
    make = NETWORKS["32-64-10"]
    batches = [(torch.randn(16, 32), torch.randint(10, (16,))) for _ in range(512)]
    contenders = {}
    for steps in (4, 256):
        contenders[f"by hand, {steps}"] = by_hand(make, batches, steps)
        contenders[f"wrapped, {steps}"] = wrapped(make, batches, steps, through_batches=False)
    against_4 = ratios(contenders, "wrapped, 4", rounds)
    return against_4["wrapped, 256"]


def open_step(count: int, windows_before: int) -> float:
    """Microseconds of `step()` and `zero_grad()` in an open window of 1000 parameters."""
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(1000)]
    steps = lambda _, update: 1 if update < windows_before else 10**9  # noqa: E731
    optimizer = gradaccum.torch.optim.SGD(parameters, lr=0.1, steps=steps)
    for _ in range(windows_before + 1):
        torch.stack(parameters).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def repeat() -> None:
        for _ in range(1000):
            optimizer.step()
            optimizer.zero_grad()

    return statistics.median(seconds(repeat) / 1000 for _ in range(count)) * 1e6


IMPORT = "import time; s = time.perf_counter(); import gradaccum; print(time.perf_counter() - s)"


def main() -> None:
    options = arguments(__doc__, cuda=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep_freed_memory()
    rounds, count = (3, 40) if options.quick else (21, 200)
    imported = statistics.median(float(in_fresh_process(IMPORT)) for _ in range(3 if options.quick else 9)) * 1e3
    per_network = per_micro_batch(rounds, count)
    body = f"""Time per micro-batch of 16 rows, windows of 4, SGD, as a ratio to the hand-written loop (one thread,
median of {rounds} interleaved rounds).

{per_network}

- A window of 256 micro-batches takes {long_windows(rounds):.2f} times as long per micro-batch as one of 4.
- An open `step()` with `zero_grad()` takes {open_step(rounds, 4):.1f} microseconds, with 1000 parameters; in windows 1,
  2, 4, 8, ..., where every parameter is watched, {open_step(rounds, 1):.0f}.
- `import gradaccum` takes {imported:.0f} ms."""
    block = (
        "Time per micro-batch of 16 rows in windows of 4, as a ratio to the hand-written loop\n"
        "([docs/benchmarks.md](docs/benchmarks.md) has the machine, the script, and everything else that was measured):"
        f"\n\n{per_network}"
    )
    publish(
        "optimizer",
        "Wrapping the optimizer",
        body,
        ["torch", "accelerate"],
        options,
        ours=["gradaccum", "gradaccum, batches()"],
        blocks={"README.md#speed": block},
    )


if __name__ == "__main__":
    main()
