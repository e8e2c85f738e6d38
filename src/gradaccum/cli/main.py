"""The command `gradaccum`.

Exit code 0: done; 1: checked and found different; 2: bad input, said in one line; 3: broke down on the way.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import click

import gradaccum

__all__ = ["BadInput", "Failed", "commands"]

DIFFERENT = 1


class BadInput(click.ClickException):
    """What the user gave cannot be used. The message is one line."""

    exit_code = 2


class Failed(click.ClickException):
    """It broke down on the way."""

    exit_code = 3


class Commands(click.Group):
    """A group that says what is wrong with its input in one line, where click would print the usage as well."""

    def main(  # type: ignore[override]  # its overloads, in one
        self, args: Sequence[str] | None = None, **extra: Any
    ) -> Any:
        if not extra.pop("standalone_mode", True):
            return super().main(args, standalone_mode=False, **extra)
        try:
            code = super().main(args, standalone_mode=False, **extra)
        except click.Abort:
            click.echo("Aborted.", err=True)
            code = 130  # as a shell has it for Ctrl-C
        except click.ClickException as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # the help itself, since click 8.2
                error.show()
            else:
                click.echo(f"Error: {error.format_message()}", err=True)
            code = error.exit_code
        sys.exit(code if isinstance(code, int) else 0)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(gradaccum.__version__, prog_name="gradaccum")
def commands() -> None:
    """Train with the batch size you want on the memory you have, and get the same update."""


@commands.command()
@click.option("--framework", type=click.Choice(["torch", "keras"]), default="torch", show_default=True)
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
@click.option("--dtype", type=click.Choice(["float32", "float64"]), default="float32", show_default=True)
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
    out: pathlib.Path,
) -> None:
    """Train with a large batch, with accumulated small ones, and with small ones alone; compare.

    Exit code 1 says that the accumulated run differs from the large batch's by more than rounding.
    """
    from gradaccum.demo.data import DataError, load
    from gradaccum.demo.experiment import RunError, Setup, perform
    from gradaccum.demo.findings import findings
    from gradaccum.demo.progress import Progress

    if batch_size % steps:
        raise BadInput(f"--batch-size must be a multiple of --steps. Received: {batch_size} and {steps}.")
    if steps % ranks:
        raise BadInput(f"--steps must be a multiple of --ranks. Received: {steps} and {ranks}.")
    if ranks > 1 and framework != "torch":
        raise BadInput("--ranks is for --framework torch. With Keras, use keras.distribution.")
    _require_framework(framework)
    with Progress() as progress:
        try:
            data = load(dataset, folder, progress=progress)  # type: ignore[arg-type]  # click checked the choice
        except (DataError, ModuleNotFoundError) as error:
            raise BadInput(str(error)) from None
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"--out {out}: {error.strerror}.") from None
        progress.say(
            f"{data.name} from {data.source}: {len(data.train_x):,} rows to train, {len(data.test_x):,} to test"
        )
        epochs = epochs or {"digits": 100}.get(data.name, Setup.epochs)
        setup = Setup(framework, batch_size, steps, epochs, dtype, ranks=ranks)  # type: ignore[arg-type]  # click checked the choices
        try:
            outcome = perform(setup, data, progress)
        except RunError as error:
            raise Failed(str(error)) from None
    report = findings(outcome)
    click.echo()
    report.show()
    click.echo()
    for name in ("report.png", "report.html"):
        click.echo(report.save(out / name).resolve())
    context.exit(0 if outcome.ok else DIFFERENT)


@commands.command()
@click.argument("target", required=False, metavar="FILE.py:MAKE")
@click.option(
    "--micro-batch-size", type=click.IntRange(min=1), help="Rows of a micro-batch; ragged sizes are tried too."
)
@click.option("--device", default="cpu", show_default=True, help="Where to compute, such as cuda.")
@click.option("--json", is_flag=False, flag_value="-", help="Print the result as JSON, or write it to a file.")
@click.option("--html", is_flag=False, flag_value="gradaccum-check.html", help="Write a report.")
@click.pass_context
def check(
    context: click.Context,
    target: str | None,
    micro_batch_size: int | None,
    device: str,
    json: str | None,
    html: str | None,
) -> None:
    """Check that micro-batches give the large batch's gradient, and name what keeps them from it.

    FILE.py:MAKE is a function without arguments that returns (model, batch, loss_fn); in place of loss_fn, it may
    return a dict of check_equivalence's keywords: {"compute_loss": ..., "weight": ...}. For a compiled Keras model it
    returns (model, (x, y), None).

    Exit code 1 says that they differ.
    """
    from gradaccum.cli.user_code import UserCodeError, one_line, subject

    # An option whose value may be left out takes the argument for it.
    if target is None and html is not None and ":" in html:
        target, html = html, "gradaccum-check.html"
    if target is None and json is not None and ":" in json:
        target, json = json, "-"
    if target is None:
        raise BadInput("Name what to check: gradaccum check path/to/file.py:make")
    for path, ending in ((json, ".json"), (html, ".html")):
        if path not in (None, "-") and not str(path).lower().endswith(ending):
            raise BadInput(f"--{ending[1:]} takes a file name that ends in {ending}. Received: {path}.")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is no part of the result
            model, batch, keywords = subject(target)
            result = _checked(model, batch, {"micro_batch_size": micro_batch_size, **keywords}, device)
    except UserCodeError as error:
        raise BadInput(str(error)) from None
    except click.ClickException:
        raise
    except (TypeError, ValueError) as error:
        raise BadInput(" ".join(str(error).split())) from None
    except Exception as error:  # out of the user's model or loss
        raise BadInput(f"{target}: the model or its loss raised {one_line(error)}") from None
    try:
        for path in (json, html):
            if path not in (None, "-"):
                result.save(str(path))
    except OSError as error:
        raise BadInput(f"{error.filename}: {error.strerror}.") from None
    if json == "-":
        click.echo(result.to_json())
    else:
        result.report().show()
    context.exit(0 if result.ok else DIFFERENT)


def _checked(model: Any, batch: Any, keywords: dict[str, Any], device: str) -> Any:
    """What the check of the model's own framework finds."""
    if any(base.__module__.partition(".")[0] == "keras" for base in type(model).__mro__):
        if device != "cpu":
            raise BadInput("--device is for PyTorch models: Keras computes where its backend does.")
        import gradaccum.keras

        given = {name: value for name, value in keywords.items() if value is not None}  # its loss is compiled in
        return gradaccum.keras.check_equivalence(model, *(batch if isinstance(batch, tuple) else (batch,)), **given)
    _require_framework("torch")
    import gradaccum.torch

    return gradaccum.torch.check_equivalence(model, batch, **keywords, device=device)


@commands.command()
@click.argument("file", type=click.Path(path_type=pathlib.Path))
@click.option("--html", help="Write the report to this file, too.")
def report(file: pathlib.Path, html: str | None) -> None:
    """Show what a Recorder has written, as far as FILE can be read."""
    from gradaccum.run import read

    if html is not None and not html.lower().endswith(".html"):
        raise BadInput(f"--html takes a file name that ends in .html. Received: {html}.")
    try:
        run = read(file)
        if not run.updates and not run.starts:
            raise BadInput(f"{file} holds no record of a run.")
        found = run.report()
        found.show()
        if html is not None:
            click.echo()
            click.echo(found.save(html).resolve())
    except OSError as error:
        raise BadInput(f"{error.filename}: {error.strerror}.") from None


@commands.command()
@click.argument("target", metavar="FILE.py:MAKE")
@click.option("--memory", help="What the device has, such as 16GiB. Default: what is free on this one.")
@click.option(
    "--margin", type=click.FloatRange(0, 1, max_open=True), default=0.1, show_default=True, help="Part to leave free."
)
def size(target: str, memory: str | None, margin: float) -> None:
    """Estimate the largest micro-batch that fits into memory, without the device that has it.

    FILE.py:MAKE is a function without arguments that returns (model, batch, loss_fn), as for `gradaccum check`; a dict
    in place of loss_fn may name the optimizer, too, whose state counts (Adam's, where it doesn't).

    Exit code 1 says that not even one row fits.
    """
    from gradaccum.cli.user_code import UserCodeError, one_line, subject

    _require_framework("torch")
    from gradaccum.torch.measure import DoesNotFit, estimate_size

    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is no part of the result
            model, batch, keywords = subject(target)
            known = inspect.signature(estimate_size).parameters
            keywords = {name: value for name, value in keywords.items() if name in known}
            estimate = estimate_size(model, batch, **({"memory_limit": memory, "margin": margin} | keywords))
    except UserCodeError as error:
        raise BadInput(str(error)) from None
    except DoesNotFit as error:
        click.echo(str(error))
        sys.exit(DIFFERENT)
    except (TypeError, ValueError) as error:
        raise BadInput(" ".join(str(error).split())) from None
    except Exception as error:  # out of the user's model or loss
        raise BadInput(f"{target}: the model or its loss raised {one_line(error)}") from None
    click.echo(str(estimate))


def _require_framework(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise BadInput(f'{name} is not installed. Install it with: pip install "gradaccum[{name}]"')
