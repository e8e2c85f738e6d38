"""`gradaccum size`: the largest micro-batch that fits into a device's memory."""

from __future__ import annotations

import inspect
from typing import Any

import click

from gradaccum.cli.group import DIFFERENT, BadInput, framework_of, require_framework, user_errors
from gradaccum.cli.user_code import subject
from gradaccum.sizes import MARGIN, DoesNotFit

__all__ = ["size"]


@click.command()
@click.argument("target", metavar="FILE.py:MAKE")
@click.option("--framework", type=click.Choice(["torch", "jax"]), help="Default: what the model is of.")
@click.option("--memory", help="What the device has, such as 16GiB. Default: what is free on this one.")
@click.option(
    "--margin",
    type=click.FloatRange(0, 1, max_open=True),
    default=MARGIN,
    show_default=True,
    help="Part to leave free.",
)
@click.pass_context
def size(context: click.Context, target: str, framework: str | None, memory: str | None, margin: float) -> None:
    """Estimate the largest micro-batch that fits into memory, without the device that has it.

    FILE.py:MAKE is a function without arguments that returns (model, batch, loss_fn), as for `gradaccum check`; a dict
    in place of loss_fn may name the optimizer, too, whose state counts (Adam's, where it doesn't).

    Exit code 1 says that not even one row fits.
    """
    with user_errors(target):
        model, batch, keywords = subject(target)
        framework = framework_of(model, framework)
        if framework == "keras":
            raise BadInput(
                "gradaccum size estimates PyTorch models, and this is a Keras model. "
                'gradaccum.keras.micro_batched(model, "auto") finds its size when it trains.'
            )
        require_framework(framework)
        try:
            found = str(_estimated(framework, model, batch, {"memory_limit": memory, "margin": margin} | keywords))
            code = 0
        except DoesNotFit as error:
            found, code = str(error), DIFFERENT
    click.echo(found)
    context.exit(code)


def _estimated(framework: str, model: Any, batch: Any, keywords: dict[str, Any]) -> Any:
    """The estimate for the model's own framework."""
    if framework == "jax":
        from gradaccum.jax.measure import estimate_size as of_jax

        loss_fn = keywords.pop("loss_fn", None)
        return of_jax(loss_fn, model, batch, *keywords.pop("more", ()), **keywords)
    from gradaccum.torch.measure import estimate_size

    known = inspect.signature(estimate_size).parameters
    return estimate_size(model, batch, **{name: value for name, value in keywords.items() if name in known})
