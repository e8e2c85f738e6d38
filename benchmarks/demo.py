"""The demo's numbers in README.md: three runs on pictures, and the attention network's memory."""

from __future__ import annotations

import dataclasses

from benchmarks.harness import arguments, publish
from gradaccum.demo import text
from gradaccum.demo.data import load
from gradaccum.demo.experiment import Setup, perform
from gradaccum.demo.progress import Progress


def main() -> None:
    """Run it: what `gradaccum demo` does, and for `--quick` a little of it on scikit-learn's digits."""
    options = arguments(__doc__)
    quick = options.quick
    with Progress() as progress:
        data = load("digits" if quick else "auto", progress=progress)
        setup = Setup(epochs=1 if quick else 6)
        small = dataclasses.replace(text.TextSetup(), rows=64, epochs=1) if quick else text.TextSetup()
        on_text = text.perform(small, progress)
        single = perform(setup, data, progress)
        double = perform(dataclasses.replace(setup, dtype="float64", epochs=1), data.first(10_000), progress, keys="ab")
    a, b, c = single.runs
    lines = [
        "| run | accuracy | loss | updates | activations | largest relative parameter difference to (a) |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    difference = f"{double.difference:.1e} in float64, {single.difference:.1e} in float32"
    names = (f"(a) batch {setup.batch_size}", f"(b) {b.plan.name[4:]}, through gradaccum", f"{c.plan.name} alone")
    for run, name, differs in zip((a, b, c), names, ("", difference, "another training"), strict=True):
        last = run.epochs[-1]
        activations = f"{(run.activation_bytes or 0) / 2**10:.1f} KiB"
        lines.append(
            f"| {name} | {last.accuracy:.2%} | {last.test_loss:.5f} | {run.updates:,} | {activations} | {differs} |"
        )
    large, ours, written = on_text.loops
    block = "\n".join(
        [
            f"The attention network takes {on_text.memory_ratio:.1f} times less memory in {on_text.setup.steps} "
            f"micro-batches ({large.peak_bytes / 2**20:.1f} MiB at the peak of a window, {ours.peak_bytes / 2**20:.2f} "
            f"MiB accumulated), and ends {ours.distances[-1]:.1e} from the whole batch's parameters, relative to how "
            f"far those have moved; the loop that people write ends {written.distances[-1]:.0%} away.",
            "",
            f"Then it trains a 784-512-512-10 network on {data.name} three times, {setup.epochs} epochs from the same "
            "weights and on the same rows:",
            "",
            *lines,
            "",
            f"A single update's gradient agrees to {single.gradient_difference:.1e} in float32; over thousands of "
            "updates rounding grows there, wherever it decides whether a ReLU fires. Float64 shows what is left "
            "without it, on 10,000 rows.",
        ]
    )
    publish("demo", "The demo", block, ["torch"], options, ours=[], blocks={"README.md#demo": block})


if __name__ == "__main__":
    main()
