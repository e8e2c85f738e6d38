"""The demo's numbers: the attention network's memory, and three runs on pictures."""

from __future__ import annotations

import dataclasses

from examples.demo import text
from examples.demo.data import load
from examples.demo.guide import Setup, perform
from examples.demo.progress import Progress

from benchmarks.harness import arguments, publish


def main() -> None:
    """Run what `make demo` does, and for `--quick` a little of it on scikit-learn's digits."""
    options = arguments(__doc__)
    quick = options.quick
    with Progress() as progress:
        data = load("digits" if quick else "auto", progress=progress)
        setup = Setup(epochs=1 if quick else Setup.epochs)
        small = dataclasses.replace(text.TextSetup(), rows=64, epochs=1) if quick else text.TextSetup()
        on_text = text.perform(small, progress)
        outcome = perform(setup, data, progress)
    large, ours, written = on_text.loops
    lines = [
        f"| attention network, {len(large.losses)} updates in float64 | peak memory | distance from the whole batch |",
        "|---|--:|--:|",
        f"| whole batch of {small.batch_size} | {large.peak_bytes / 2**20:.1f} MiB | |",
        f"| {small.steps} micro-batches, gradaccum | {ours.peak_bytes / 2**20:.2f} MiB | {ours.distances[-1]:.1e} |",
        f"| {small.steps} micro-batches, `loss / {small.steps}` by hand | {written.peak_bytes / 2**20:.2f} MiB | "
        f"{written.distances[-1]:.0%} |",
        "",
        f"| {data.name}, a 784-512-512-10 network, {setup.epochs} epochs in {setup.dtype} | accuracy | loss | "
        "updates | distance |",
        "|---|--:|--:|--:|--:|",
    ]
    for run, name, differs in zip(
        outcome.runs,
        (f"batch {setup.batch_size}", *(run.plan.name[4:] for run in outcome.runs[1:])),
        ("", f"{outcome.difference:.1e}", f"{outcome.difference_of(2):.1e}"),
        strict=True,
    ):
        last = run.epochs[-1]
        lines.append(f"| {name} | {last.accuracy:.2%} | {last.test_loss:.5f} | {run.updates:,} | {differs} |")
    block = "\n".join(lines)
    publish("demo", "The demo", block, ["torch"], options, ours=[])


if __name__ == "__main__":
    main()
