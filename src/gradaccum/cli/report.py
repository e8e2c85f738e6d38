"""`gradaccum report`: a recorded run."""

from __future__ import annotations

import pathlib

import click

from gradaccum.cli.group import BadInput, checked_output, save

__all__ = ["report"]


@click.command(short_help="Show what a Recorder has written.")
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
