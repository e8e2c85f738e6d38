"""The command `gradaccum`: check, size and report; exit codes, errors of one line, the function that a user names.

Exit code 0: done; 1: checked and found different; 2: bad input, said in one line; 3: broke down on the way.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import pathlib
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

import gradaccum
from gradaccum.core.sizes import MARGIN, DoesNotFit, parse_bytes
from gradaccum.extras import how_to_install, require
from gradaccum.report import check_writable

DIFFERENT = 1
_DRAWN_WITH = {".html": ("jinja2", "matplotlib"), ".png": ("matplotlib",)}


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
            if sys.stdout is not None:
                sys.stdout.flush()
        except SystemExit:  # click's 1, where nobody reads the output any more, would say "different"
            code = Failed.exit_code
        except click.Abort:
            click.echo("Aborted.", err=True)
            code = 130  # as a shell has it for Ctrl-C
        except click.ClickException as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # the help itself, since click 8.2
                error.show()
            else:
                click.echo(f"Error: {error.format_message()}", err=True)
            code = error.exit_code
        except ModuleNotFoundError:
            raise  # `gradaccum.__main__` says how to install it
        except OSError as error:  # of the output: the disk is full, say
            click.echo(f"Error: {error}", err=True)
            sys.stdout = io.StringIO()  # what waits for its flush at exit can't be written either
            code = Failed.exit_code
        except Exception:
            traceback.print_exc()
            code = Failed.exit_code  # 1, Python's own for a traceback, would say "different"
        sys.exit(code if isinstance(code, int) else 0)


def require_framework(name: str) -> None:
    """Raises BadInput where the framework is not installed."""
    if importlib.util.find_spec(name) is None:
        raise BadInput(f"{name} is not installed. {how_to_install(name)}")


def framework_of(model: Any, given: str | None = None) -> str:
    """`"keras"`, `"torch"` or `"jax"`: what the user said, or what the model is of.

    A Keras model may be a PyTorch module as well. For JAX it is the parameters, a pytree with arrays in it.
    """
    if given is not None:
        return given
    if any(base.__module__.partition(".")[0] == "keras" for base in type(model).__mro__):
        return "keras"
    jax = sys.modules.get("jax")  # who has arrays has imported it
    return "jax" if jax is not None and any(isinstance(a, jax.Array) for a in jax.tree.leaves(model)) else "torch"


def checked_output(option: str, path: str | pathlib.Path, ending: str = "") -> None:
    """Try all that writing a report to the path takes, before anything takes long."""
    if not str(path).lower().endswith(ending):
        raise BadInput(f"{option} takes a file name that ends in {ending}. Received: {path}.")
    for library in _DRAWN_WITH.get(pathlib.Path(path).suffix.lower(), ()):
        require(library)
    try:
        check_writable(path)
    except OSError as error:
        raise BadInput(f"{option} {path}: {error.strerror}.") from None


def save(document: Any, path: str | pathlib.Path) -> None:
    """Save a report or a result; Failed where it cannot be written after all, as the disk is full by now."""
    try:
        document.save(path)
    except OSError as error:
        raise Failed(f"{path}: {error.strerror}.") from None


@contextlib.contextmanager
def user_errors(target: str) -> Iterator[list[str]]:
    """Errors of the user's model, loss and arguments, in one line; what their code prints goes to standard error.

    What is in the list that is yielded is said behind the error.
    """
    advice = list[str]()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield advice
    except (click.ClickException, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, too: its code would be taken for the command's
        if isinstance(error, (TypeError, ValueError)) and not users_frames(error):
            raise BadInput(". ".join([" ".join(str(error).split()), *advice])) from None
        raise BadInput(". ".join([f"{target}: the model or its loss raised {one_line(error)}", *advice])) from None


def advice_on(framework: str, batch: Any, keywords: Mapping[str, Any]) -> list[str]:
    """What to say where a PyTorch model's loss fails that is given as `loss_fn`."""
    if framework != "torch" or not isinstance(batch, Mapping) or not callable(keywords.get("loss_fn")):
        return []
    return [
        "A batch that is a dict goes to a function of model and batch: return (model, batch, "
        '{"compute_loss": lambda model, batch: ...}).'
    ]


# The function that a user names as `path/to/file.py:make`.


def subject(target: str) -> tuple[Any, Any, dict[str, Any]]:
    """What `make()` in the user's file returns: `(model, batch, keywords)`.

    `make` returns `(model, batch, loss_fn)`, or a dict of keywords such as `{"compute_loss": ..., "weight": ...}` in
    the third place.
    """
    function, (path, _, name) = _loaded(target), target.rpartition(":")
    with _errors_in(f"{name}() in {path}"):
        made = function()
    if not isinstance(made, tuple) or len(made) != 3:
        received = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise BadInput(f"{target} must return (model, batch, loss_fn). Received: {received}.")
    model, batch, loss = made
    return model, batch, dict(loss) if isinstance(loss, Mapping) else {"loss_fn": loss}


def _loaded(target: str) -> Any:
    """The function named by `path/to/file.py:make`."""
    path_text, colon, name = target.rpartition(":")
    if not colon or not path_text or not name.isidentifier():
        raise BadInput(f"Name the function as path/to/file.py:make. Received: {target!r}.")
    path = pathlib.Path(path_text)
    if not path.is_file():
        raise BadInput(f"{path_text}: no such file.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadInput(f"{path_text} is not a Python file. Name the function as path/to/file.py:make.")
    module = importlib.util.module_from_spec(spec)
    # As `python path/to/file.py` has it: its neighbours can be imported, and it can find itself.
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules.setdefault(path.stem, module)
    with _errors_in(path_text):
        spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        functions = sorted(
            n for n, o in vars(module).items() if callable(o) and getattr(o, "__module__", "") == path.stem
        )
        there = f" It has {', '.join(functions)}." if functions else ""
        raise BadInput(f"{path_text} has no function {name!r}.{there}")
    return function


@contextlib.contextmanager
def _errors_in(what: str) -> Iterator[None]:
    """Whatever the user's code raises becomes one line that says where."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise BadInput(f"{what} raised {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """An exception in one line: its type, its first line, and the last place outside of libraries where it was."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} (line {error.lineno})"
    text = (str(error).strip().splitlines() or [""])[0]
    frames = users_frames(error)
    where = f" ({pathlib.Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text}{where}" if text else f"{type(error).__name__}{where}"


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Where it passed, outside of libraries and of this package."""
    libraries = {pathlib.Path(str(module.__file__)).parent for module in (gradaccum, traceback)}
    return [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename[0] != "<"
        and not libraries & {*pathlib.Path(frame.filename).parents}
        and not {"site-packages", "dist-packages"} & {*pathlib.Path(frame.filename).parts}
    ]


# The commands.


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
    from gradaccum.torch.layers import estimate_ways
    from gradaccum.torch.measure import SIZE_KEYWORDS

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
