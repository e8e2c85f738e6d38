"""`python -m examples.demo`: an attention network's memory, then runs on pictures, with a report of both.

Exit code 0: equal; 1: accumulated and large batch differ by more than rounding; 2: bad input; 3: a run failed.
"""

from __future__ import annotations

import pathlib
import sys

import click
from examples.demo import text
from examples.demo.data import DataError, load
from examples.demo.findings import findings
from examples.demo.guide import Setup, perform
from examples.demo.processes import RunError
from examples.demo.progress import Progress

from gradaccum.cli.commands import DIFFERENT, BadInput, Commands, Failed, checked_output, require_framework, save

__all__ = ["demo", "main"]

OUTPUTS = ("report.png", "report.html")
EPOCHS = {"digits": 60}
"""Of data sets that are much smaller than FashionMNIST."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
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
    "--batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="Rows of the large batch."
)
@click.option("--steps", type=click.IntRange(min=1), default=4, show_default=True, help="Micro-batches per update.")
@click.option("--epochs", type=click.IntRange(min=1), help="Default: 4 of FashionMNIST, 60 of the digits.")
@click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float64", show_default=True)
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
    epochs: int | None,
    dtype: str,
    out: pathlib.Path,
) -> None:
    """Train with a large batch and with accumulated small ones, and compare memory, time and result.

    First a small attention network on text (PyTorch), then a network of two hidden layers on pictures.
    """
    if batch_size % steps:
        raise BadInput(f"--batch-size must be a multiple of --steps. Received: {batch_size} and {steps}.")
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
        epochs = epochs or EPOCHS.get(data.name, Setup.epochs)
        setup = Setup(framework, batch_size, steps, epochs, dtype)  # type: ignore[arg-type]  # click checked the choices
        try:
            on_text = None
            if framework == "torch":
                on_text = text.perform(text.TextSetup(), progress)
                page = out / OUTPUTS[-1]
                save(findings(on_text), page)
                progress.say(f"The first part's pictures: {page.resolve()}")
            progress.say(f"{data.name} from {data.source}: {rows:,} rows to train, {len(data.test_x):,} to test")
            outcome = perform(setup, data, progress)
        except RunError as error:
            raise Failed(str(error)) from None
    report = findings(on_text, outcome)
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


class _Alone(Commands):
    """Runs the demo with the exit codes and one-line errors that the commands of `gradaccum` have."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(context, ["demo", *args])


main = _Alone("python -m examples.demo", commands={"demo": demo})
"""Run the command, with these arguments or those of the process."""


if __name__ == "__main__":
    try:
        main()
    except ModuleNotFoundError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(BadInput.exit_code)
