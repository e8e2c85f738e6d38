"""`gradaccum size`: the largest micro-batch that fits into a device's memory."""

from __future__ import annotations

from typing import Any

import click

from gradaccum.cli.group import DIFFERENT, BadInput, framework_of, require_framework, user_errors
from gradaccum.cli.user_code import subject
from gradaccum.core.sizes import MARGIN, DoesNotFit, parse_bytes

__all__ = ["size"]


@click.command(short_help="Which micro-batch fits into a memory, and which way in.")
@click.argument("target", metavar="FILE.py:MAKE")
@click.option("--framework", type=click.Choice(["torch", "jax"]), help="Default: what the model is of.")
@click.option(
    "--memory", metavar="BYTES", help="What the device has, such as 16GiB. Default: what is free on this one."
)
@click.option(
    "--margin",
    type=click.FloatRange(0, 1, max_open=True),
    default=MARGIN,
    show_default=True,
    help="Part to leave free.",
)
@click.pass_context
def size(
    context: click.Context,
    target: str,
    framework: str | None,
    memory: str | None,
    margin: float,
) -> None:
    """Estimate the largest micro-batch that fits into memory, without the device that has it.

    FILE.py:MAKE is a function without arguments that returns (model, batch, loss_fn), as for `gradaccum check`; a dict
    in place of loss_fn may name the optimizer, too, whose state counts (Adam's, where it doesn't).

    For PyTorch it begins with the fastest way that fits, and then lists each: an ordinary step, accumulated, layer by
    layer, with updates in backward. "blocks" in that dict names the blocks; by default they are the longest list of
    modules of one class.

    Exit code 1 says that not even one row fits, in none of the ways.
    """
    try:
        limit = parse_bytes(memory)
    except ValueError:
        raise BadInput(f"--memory takes bytes, as in --memory 16GiB. Received: {memory}.") from None
    with user_errors(target):
        model, batch, keywords = subject(target)
        framework = framework_of(model, framework)
        if framework == "keras":
            raise BadInput(
                "gradaccum size estimates models of PyTorch and JAX, and this is a Keras model. "
                'gradaccum.keras.micro_batched(model, "auto") finds its size when it trains.'
            )
        require_framework(framework)
        found, code = _found(framework, model, batch, {"memory_limit": limit, "margin": margin} | keywords)
    click.echo(found)
    context.exit(code)


def _found(framework: str, model: Any, batch: Any, keywords: dict[str, Any]) -> tuple[str, int]:
    """What to print, and the exit code."""
    if framework == "jax":
        from gradaccum.jax.measure import estimate_size

        loss_fn = keywords.pop("loss_fn", None)
        try:
            return str(estimate_size(loss_fn, model, batch, *keywords.pop("more", ()), **keywords)), 0
        except DoesNotFit as error:
            return str(error), DIFFERENT
    from gradaccum.torch.measure import SIZE_KEYWORDS, estimate_ways

    known = keywords.keys() & {*SIZE_KEYWORDS, "blocks"}
    ways = estimate_ways(model, batch, **{name: keywords[name] for name in known})
    return str(ways), DIFFERENT if ways.best is None else 0
