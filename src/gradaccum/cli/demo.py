"""`gradaccum demo`: the guide's experiment."""

from __future__ import annotations

import dataclasses
import pathlib

import click

from gradaccum.cli.group import DIFFERENT, BadInput, Failed, checked_output, require_framework, save
from gradaccum.extras import require

__all__ = ["demo"]

OUTPUTS = ("report.png", "report.html")
DOUBLE_ROWS = 10_000
"""What float64 is shown on: no multiple of the batch's 64 rows, so the last window is a short one."""


@click.command(short_help="A large batch, accumulated ones and small ones, compared.")
@click.option("--framework", type=click.Choice(["torch", "keras", "jax"]), default="torch", show_default=True)
@click.option(
    "--dataset",
    type=click.Choice(["auto", "fashion-mnist", "digits"]),
    default="auto",
    show_default=True,
    help="auto: FashionMNIST, or scikit-learn's digits where it is neither on disk nor to be downloaded.",
)
@click.option("--data", "folder", type=click.Path(path_type=pathlib.Path), help="A folder with FashionMNIST's files.")
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="Rows of the large batch, (a)."
)
@click.option(
    "--steps", type=click.IntRange(min=1), default=4, show_default=True, help="Micro-batches per update in (b)."
)
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes that share (b)'s micro-batches.",
)
@click.option("--epochs", type=click.IntRange(min=1), help="Default: 6 of FashionMNIST, 100 of the digits.")
@click.option(
    "--dtype",
    type=click.Choice(["both", "float32", "float64"]),
    default="both",
    show_default=True,
    help="both: in float32, then (a) and (b) in float64 on 10,000 rows.",
)
@click.option(
    "--show",
    type=click.Choice(["all", "guide"]),
    default="all",
    show_default=True,
    help="guide: without the attention network, which is PyTorch's alone.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=pathlib.Path),
    default=pathlib.Path("gradaccum-demo"),
    show_default=True,
    help="Folder for the picture and the report.",
)
@click.pass_context
def demo(
    context: click.Context,
    framework: str,
    dataset: str,
    folder: pathlib.Path | None,
    batch_size: int,
    steps: int,
    ranks: int,
    epochs: int | None,
    dtype: str,
    show: str,
    out: pathlib.Path,
) -> None:
    """Train with a large batch, with accumulated small ones, and with small ones alone; compare.

    Exit code 1 says that the accumulated run differs from the large batch's by more than rounding.
    """
    require("numpy")
    from gradaccum.demo import text
    from gradaccum.demo.data import DataError, load
    from gradaccum.demo.experiment import Setup, perform
    from gradaccum.demo.findings import findings
    from gradaccum.demo.processes import RunError
    from gradaccum.demo.progress import Progress

    if batch_size % steps:
        raise BadInput(f"--batch-size must be a multiple of --steps. Received: {batch_size} and {steps}.")
    if steps % ranks:
        raise BadInput(f"--steps must be a multiple of --ranks. Received: {steps} and {ranks}.")
    if ranks > 1 and framework != "torch":
        other = {"keras": "With Keras, use keras.distribution.", "jax": "With JAX, shard the batch."}[framework]
        raise BadInput(f"--ranks is for --framework torch. {other}")
    require_framework(framework)
    with Progress() as progress:
        try:
            data = load(dataset, folder, progress=progress)  # type: ignore[arg-type]  # click checked the choice
        except (DataError, ModuleNotFoundError) as error:
            raise BadInput(str(error)) from None
        for name in OUTPUTS:
            checked_output("--out", out / name)
        rows = len(data.train_x)
        if batch_size > rows:
            raise BadInput(f"--batch-size must be at most the {rows:,} rows of {data.name}. Received: {batch_size}.")
        progress.say(f"{data.name} from {data.source}: {rows:,} rows to train, {len(data.test_x):,} to test")
        epochs = epochs or {"digits": 100}.get(data.name, Setup.epochs)
        first = "float32" if dtype == "both" else dtype
        setup = Setup(framework, batch_size, steps, epochs, first, ranks=ranks)  # type: ignore[arg-type]  # click checked the choices
        try:
            with_text = show == "all" and framework == "torch"
            on_text = text.perform(text.TextSetup(), progress) if with_text else None
            outcome = perform(setup, data, progress)
            double = dataclasses.replace(setup, dtype="float64", epochs=1)
            again = perform(double, data.first(DOUBLE_ROWS), progress, keys="ab") if dtype == "both" else None
        except RunError as error:
            raise Failed(str(error)) from None
    report = findings(outcome, again, on_text)
    try:
        for name in OUTPUTS:
            save(report, out / name)
    finally:  # a full disk costs the report, and a closed pipe what is printed
        click.echo()
        report.show()
        click.echo()
    for name in OUTPUTS:
        click.echo((out / name).resolve())
    context.exit(0 if report.ok else DIFFERENT)
