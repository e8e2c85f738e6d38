"""The command `gradaccum`: check, size and report."""

from __future__ import annotations

import pathlib
from typing import Any

import click

import gradaccum
from gradaccum.cli.group import (
    DIFFERENT,
    BadInput,
    Commands,
    advice_on,
    checked_output,
    framework_of,
    require_framework,
    save,
    subject,
    user_errors,
)
from gradaccum.core.sizes import MARGIN, DoesNotFit, parse_bytes
from gradaccum.extras import require


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(gradaccum.__version__, prog_name="gradaccum")
def commands() -> None:
    """Train with the batch size you want on the memory you have, and get the same update."""


_HTML = "gradaccum-check.html"


@commands.command(short_help="Does accumulation match a model's large batch? If not, why?")
@click.argument("target", required=False, metavar="FILE.py:MAKE")
@click.option(
    "--micro-batch-size", type=click.IntRange(min=1), help="Rows of a micro-batch; ragged sizes are tried too."
)
@click.option("--framework", type=click.Choice(["torch", "keras", "jax"]), help="Default: the model's framework.")
@click.option("--device", default="cpu", show_default=True, help="Where to compute, such as cuda.")
@click.option(
    "--json", is_flag=False, flag_value="-", metavar="[FILE]", help="Print the result as JSON, or write it to FILE."
)
@click.option(
    "--html", is_flag=False, flag_value=_HTML, metavar="[FILE]", help=f"Write a report: to {_HTML}, or to FILE."
)
@click.pass_context
def check(
    context: click.Context,
    target: str | None,
    micro_batch_size: int | None,
    framework: str | None,
    device: str,
    json: str | None,
    html: str | None,
) -> None:
    """Check that micro-batches give the large batch's gradient, and name the cause if they don't.

    FILE.py:MAKE is a function without arguments that returns (model, batch, loss_fn); in place of loss_fn, it may
    return a dict of check_equivalence's keywords: {"compute_loss": ..., "weight": ...}. For a compiled Keras model it
    returns (model, (x, y), None); for JAX (params, batch, loss_fn), where loss_fn(params, batch) is the loss, or a dict
    with "loss_fn" and, for its other arguments, "more": (key,).

    Exit code 1 says that they differ.
    """
    # An option whose value may be left out takes the argument for it.
    if target is None and html is not None and ":" in html:
        target, html = html, _HTML
    if target is None and json is not None and ":" in json:
        target, json = json, "-"
    if target is None:
        raise BadInput("Name what to check: gradaccum check path/to/file.py:make")
    if json not in (None, "-"):
        checked_output("--json", str(json), ".json")
    if html is not None:
        checked_output("--html", html, ".html")
    if json != "-":
        require("rich")
    with user_errors(target) as advice:
        model, batch, keywords = subject(target)
        framework = framework_of(model, framework)
        advice += advice_on(framework, batch, keywords)
        result = _checked(model, batch, {"micro_batch_size": micro_batch_size, **keywords}, device, framework)
    try:
        for path in (json, html):
            if path not in (None, "-"):
                save(result, str(path))
    finally:  # a full disk costs the files, and a closed pipe what is printed
        if json == "-":
            click.echo(result.to_json())
        else:
            result.report().show()
    context.exit(0 if result.ok else DIFFERENT)


def _checked(model: Any, batch: Any, keywords: dict[str, Any], device: str, framework: str) -> Any:
    """What the check of the model's own framework finds."""
    if framework != "torch" and device != "cpu":
        computes = "Keras computes where its backend does" if framework == "keras" else "JAX computes where it does"
        raise BadInput(f"--device is for PyTorch models: {computes}.")
    require_framework(framework)
    if framework == "jax":
        import gradaccum.jax

        loss_fn = keywords.pop("loss_fn", None)
        return gradaccum.jax.check_equivalence(loss_fn, model, batch, *keywords.pop("more", ()), **keywords)
    if framework == "keras":
        import gradaccum.keras

        given = {name: value for name, value in keywords.items() if value is not None}  # its loss is compiled in
        return gradaccum.keras.check_equivalence(model, *(batch if isinstance(batch, tuple) else (batch,)), **given)
    import torch

    import gradaccum.torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # a name that isn't one, or a device not there
        raise BadInput(f"--device {device}: {str(error).splitlines()[0]}.") from None
    return gradaccum.torch.check_equivalence(model, batch, **keywords, device=device)


@commands.command(short_help="Which micro-batch fits into memory, and with which arguments.")
@click.argument("target", metavar="FILE.py:MAKE")
@click.option("--framework", type=click.Choice(["torch", "jax"]), help="Default: the model's framework.")
@click.option("--memory", metavar="BYTES", help="The device's memory, such as 16GiB. Default: what is free here.")
@click.option(
    "--margin",
    type=click.FloatRange(0, 1, max_open=True),
    default=MARGIN,
    show_default=True,
    help="Fraction to leave free.",
)
@click.pass_context
def size(context: click.Context, target: str, framework: str | None, memory: str | None, margin: float) -> None:
    """Estimate the largest micro-batch that fits into memory, without the device that has it.

    FILE.py:MAKE is a function without arguments that returns (model, batch, loss_fn), as for `gradaccum check`; a dict
    in place of loss_fn may name the optimizer, too, whose state counts (default: Adam).

    For PyTorch it begins with the fastest way that fits, and then lists each: an ordinary step, accumulated, layer by
    layer, with updates in backward. "blocks" in that dict names the blocks; by default they are the longest list of
    modules of one class.

    Exit code 1: not even one row fits, in any of these ways.
    """
    try:
        limit = parse_bytes(memory)
    except ValueError:
        raise BadInput(f"--memory takes bytes, as in --memory 16GiB. Received: {memory}.") from None
    with user_errors(target) as advice:
        model, batch, keywords = subject(target)
        framework = framework_of(model, framework)
        advice += advice_on(framework, batch, keywords)
        if framework == "keras":
            raise BadInput(
                "gradaccum size estimates models of PyTorch and JAX, and this is a Keras model. "
                'gradaccum.keras.micro_batched(model, "auto") finds its size when it trains.'
            )
        require_framework(framework)
        estimate = _of_jax if framework == "jax" else _of_torch
        found, fits = estimate(model, batch, {"memory_limit": limit, "margin": margin} | keywords)
    click.echo(found)
    context.exit(0 if fits else DIFFERENT)


def _of_jax(model: Any, batch: Any, keywords: dict[str, Any]) -> tuple[Any, bool]:
    """What to print, and whether anything fits."""
    from gradaccum.jax.measure import estimate_size

    loss_fn = keywords.pop("loss_fn", None)
    try:
        return estimate_size(loss_fn, model, batch, *keywords.pop("more", ()), **keywords), True
    except DoesNotFit as error:
        return error, False


def _of_torch(model: Any, batch: Any, keywords: dict[str, Any]) -> tuple[Any, bool]:
    from gradaccum.torch.measure import SIZE_KEYWORDS, estimate_ways

    known = keywords.keys() & {*SIZE_KEYWORDS, "blocks"}
    ways = estimate_ways(model, batch, **{name: keywords[name] for name in known})
    return ways, ways.best is not None


@commands.command(short_help="Show what a Recorder has written.")
@click.argument("file", type=click.Path(path_type=pathlib.Path))
@click.option("--html", metavar="FILE", help="Write the report to this file, too.")
def report(file: pathlib.Path, html: str | None) -> None:
    """Show what a Recorder has written, as far as FILE can be read."""
    from gradaccum.report.run import read

    if html is not None:
        checked_output("--html", html, ".html")
    try:
        run = read(file)
    except OSError as error:
        raise BadInput(f"{error.filename}: {error.strerror}.") from None
    if not run.updates and not run.starts:
        raise BadInput(f"{file} holds no record of a run.")
    found = run.report()
    found.show()
    if html is not None:
        save(found, html)
        click.echo()
        click.echo(pathlib.Path(html).resolve())
