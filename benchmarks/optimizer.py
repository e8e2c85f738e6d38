"""The wrapped optimizer and TrainStep against the hand-written loop and Accelerate: time per micro-batch of 16 rows."""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gradaccum.torch
from benchmarks.harness import (
    Ratio,
    arguments,
    in_fresh_process,
    keep_freed_memory,
    looks,
    publish,
    ratio_of,
    ratios,
    recorded,
    seconds,
    table,
)

NETWORKS = {
    "784-512-512-10": lambda: nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    ),
    "32-64-10": lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)),
}
loss_function = nn.CrossEntropyLoss()
CLOCK = time.process_time
"""One thread computes; what else a shared machine does in the meantime doesn't count."""
STEPS = 4
WINDOWS = 32
"""In a round. With four rounds of warm-up, the next three hold windows 129 to 224, none of them watched or proven."""
WARM_UP = 4


def by_hand(
    make: Callable[[], nn.Module], batches: list, steps: int, only_finite: bool = False, clips: bool = False
) -> Callable[[], None]:
    model = make()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-3)

    def epoch() -> None:
        for index, (x, y) in enumerate(batches):
            (loss_function(model(x), y) / steps).backward()
            if (index + 1) % steps == 0:
                if clips:
                    nn.utils.clip_grad_norm_(parameters, 1.0)
                if not only_finite or nn.utils.get_total_norm([p.grad for p in parameters]).isfinite():
                    optimizer.step()
                optimizer.zero_grad()

    return epoch


def wrapped(
    make: Callable[[], nn.Module], batches: list, steps: int, way: str = "", **options: Any
) -> Callable[[], None]:
    model = make()
    optimizer = gradaccum.torch.optim.SGD(model.parameters(), lr=1e-3, steps=steps, **options)

    def epoch() -> None:
        for x, y in optimizer.batches(batches) if way == "batches" else batches:
            optimizer.zero_grad()
            loss_function(model(x), y).backward()
            optimizer.step()

    def weighted() -> None:
        for x, y in batches:
            optimizer.zero_grad()
            optimizer.backward(loss_function(model(x), y), weight=16)
            optimizer.step()

    return weighted if way == "weighted" else epoch


def large_batches(batches: list, steps: int) -> list:
    return [tuple(map(torch.cat, zip(*batches[i : i + steps]))) for i in range(0, len(batches), steps)]


def split_by_hand(make: Callable[[], nn.Module], batches: list, steps: int) -> Callable[[], None]:
    """The same rows as large batches, which the loop splits."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    large = large_batches(batches, steps)

    def epoch() -> None:
        for batch in large:
            for x, y in zip(*[tensor.split(16) for tensor in batch], strict=True):
                (loss_function(model(x), y) / steps).backward()
            optimizer.step()
            optimizer.zero_grad()

    return epoch


def split(make: Callable[[], nn.Module], batches: list, steps: int, *, verify: bool = True) -> Callable[[], None]:
    """TrainStep on these large batches."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = gradaccum.torch.TrainStep(model, optimizer, loss_fn=loss_function, micro_batch_size=16, verify=verify)
    large = large_batches(batches, steps)

    def epoch() -> None:
        for x, y in large:
            step(x, y)

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


HEAD = ["network", "by hand", "gradaccum", "`batches()`", "`backward(loss, weight)`", "Accelerate", "TrainStep"]


def per_micro_batch(rounds: int, count: int) -> str:
    rows = []
    for name, make in NETWORKS.items():
        features = make()[0].in_features
        batches = [(torch.randn(16, features), torch.randint(10, (16,))) for _ in range(count)]
        found = ratios(
            lambda make=make, batches=batches: {
                "by hand": by_hand(make, batches, STEPS),
                "gradaccum": wrapped(make, batches, STEPS),
                "gradaccum, batches()": wrapped(make, batches, STEPS, "batches"),
                "gradaccum, backward(loss, weight)": wrapped(make, batches, STEPS, "weighted"),
                "Accelerate": accelerate(make, batches, STEPS),
            },
            "by hand",
            rounds,
            CLOCK,
            about=name,
            warm_up=WARM_UP,
        )
        splitting = ratios(
            lambda make=make, batches=batches: {
                "split by hand": split_by_hand(make, batches, STEPS),
                "TrainStep": split(make, batches, STEPS),
            },
            "split by hand",
            rounds,
            CLOCK,
            about=f"{name}, large batches",
            warm_up=WARM_UP,
        )
        rows.append([name, *found.values(), splitting["TrainStep"]])
    return table(HEAD, rows)


def with_clipping(rounds: int, count: int) -> dict[str, Ratio]:
    """The guide's network, with gradients clipped by their norm."""
    make = next(iter(NETWORKS.values()))
    batches = [(torch.randn(16, 784), torch.randint(10, (16,))) for _ in range(count)]
    return ratios(
        lambda: {
            "by hand, clipped": by_hand(make, batches, STEPS, clips=True),
            "gradaccum, clip_grad_norm=": wrapped(make, batches, STEPS, clip_grad_norm=1.0),
        },
        "by hand, clipped",
        rounds,
        CLOCK,
        about="clipped gradients",
        warm_up=WARM_UP,
    )


def long_windows(rounds: int) -> float:
    """Time per micro-batch in windows of 256 over that in windows of 4."""
    make = NETWORKS["32-64-10"]
    batches = [(torch.randn(16, 32), torch.randint(10, (16,))) for _ in range(512)]
    found = ratios(
        lambda: {f"windows of {steps}": wrapped(make, batches, steps) for steps in (4, 256)},
        "windows of 4",
        rounds,
        CLOCK,
        warm_up=WARM_UP,  # eight windows of 256, or 512 of 4
    )
    return found["windows of 256"]


def deep(parameters: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(parameters // 2)])


WATCHED: dict[str, Callable[..., Callable[[], None]]] = {
    "wrapped": wrapped,
    "TrainStep, `verify=False`": functools.partial(split, verify=False),
    "TrainStep, with a proof": split,
}


def watched(rounds: int) -> str:
    """What windows that are watched take, and those that are proven, too, over an ordinary one."""
    batches, rows = [(torch.randn(16, 16), torch.randint(10, (16,))) for _ in range(STEPS)], []
    for parameters in (10, 1000):
        found = {}
        for way, contender in WATCHED.items():
            contenders = (contender(functools.partial(deep, parameters), batches, STEPS) for _ in range(rounds))
            times = [time for windows in contenders for time in looks(windows, clock=CLOCK)]
            found[way] = ratio_of(times)
        rows.append([parameters, *recorded(found, "an ordinary window", rounds, f"{parameters} parameters").values()])
    return table(["parameters", *WATCHED], rows)


def only_finite(rounds: int, count: int) -> dict[str, Ratio]:
    """The guide's network, whose windows are left out where they are not finite, over a loop that does not look."""
    make = next(iter(NETWORKS.values()))
    batches = [(torch.randn(16, 784), torch.randint(10, (16,))) for _ in range(count)]
    return ratios(
        lambda: {
            "by hand": by_hand(make, batches, STEPS),
            "by hand, where the norm is finite": by_hand(make, batches, STEPS, only_finite=True),
            'gradaccum, nonfinite="skip_window"': wrapped(make, batches, STEPS, nonfinite="skip_window"),
        },
        "by hand",
        rounds,
        CLOCK,
        about="only finite gradients",
        warm_up=WARM_UP,
    )


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
    rounds, count = 3 if options.quick else 21, STEPS * WINDOWS
    imported = statistics.median(float(in_fresh_process(IMPORT)) for _ in range(3 if options.quick else 9)) * 1e3
    per_network = per_micro_batch(rounds, count)
    _, testing, skipping = only_finite(rounds, count).values()
    _, clipping = with_clipping(rounds, count).values()
    looking = watched(min(rounds, 7))
    body = f"""Time per micro-batch of 16 rows in windows of 4 with SGD, relative to the loop written by hand (one
thread, median of {rounds} rounds, windows 129 to 224). TrainStep's rival splits the same batches.

{per_network}

- With `nonfinite="skip_window"`, {skipping} on the first network; a loop by hand that tests the norm takes {testing}.
- With `clip_grad_norm=`, {clipping} of a loop by hand that clips.
- In windows of 256, {long_windows(rounds):.2f} of the time per micro-batch in windows of 4.
- An open `step()` with `zero_grad()` takes {open_step(rounds, 4):.1f} microseconds with 1000 parameters; in watched
  windows, {open_step(rounds, 1):.0f}.
- `import gradaccum` takes {imported:.0f} ms.

Watched windows, relative to ordinary ones:

{looking}"""
    publish(
        "optimizer",
        "Wrapping the optimizer",
        body,
        ["torch", "accelerate"],
        options,
        ours=["gradaccum", "gradaccum, batches()", "gradaccum, backward(loss, weight)", "TrainStep"],
        blocks={"README.md#speed": per_network},
    )


if __name__ == "__main__":
    main()
