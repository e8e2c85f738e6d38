"""`gradaccum check`: is accumulation the large batch for this model, and if not, why."""

from __future__ import annotations

from typing import Any

import click

from gradaccum.cli.group import DIFFERENT, BadInput, checked_output, framework_of, require_framework, save, user_errors
from gradaccum.cli.user_code import subject
from gradaccum.extras import require

__all__ = ["check"]


@click.command(short_help="Is accumulation the large batch for a model, and if not, why?")
@click.argument("target", required=False, metavar="FILE.py:MAKE")
@click.option(
    "--micro-batch-size", type=click.IntRange(min=1), help="Rows of a micro-batch; ragged sizes are tried too."
)
@click.option("--framework", type=click.Choice(["torch", "keras", "jax"]), help="Default: what the model is of.")
@click.option("--device", default="cpu", show_default=True, help="Where to compute, such as cuda.")
@click.option(
    "--json", is_flag=False, flag_value="-", metavar="[FILE]", help="Print the result as JSON, or write it to FILE."
)
@click.option(
    "--html",
    is_flag=False,
    flag_value="gradaccum-check.html",
    metavar="[FILE]",
    help="Write a report: to gradaccum-check.html, or to FILE.",
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
    """Check that micro-batches give the large batch's gradient, and name what keeps them from it.

    FILE.py:MAKE is a function without arguments that returns (model, batch, loss_fn); in place of loss_fn, it may
    return a dict of check_equivalence's keywords: {"compute_loss": ..., "weight": ...}. For a compiled Keras model it
    returns (model, (x, y), None); for JAX (params, batch, loss_fn), where loss_fn(params, batch) is the loss, or a dict
    with "loss_fn" and, for its other arguments, "more": (key,).

    Exit code 1 says that they differ.
    """
    # An option whose value may be left out takes the argument for it.
    if target is None and html is not None and ":" in html:
        target, html = html, "gradaccum-check.html"
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
    with user_errors(target):
        model, batch, keywords = subject(target)
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


def _checked(model: Any, batch: Any, keywords: dict[str, Any], device: str, framework: str | None) -> Any:
    """What the check of the model's own framework finds."""
    framework = framework_of(model, framework)
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
