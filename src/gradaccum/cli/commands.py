"""The command `gradaccum`."""

from __future__ import annotations

import click

import gradaccum
from gradaccum.cli.check import check
from gradaccum.cli.group import Commands
from gradaccum.cli.report import report
from gradaccum.cli.size import size

__all__ = ["commands"]


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(gradaccum.__version__, prog_name="gradaccum")
def commands() -> None:
    """Train with the batch size you want on the memory you have, and get the same update."""


for command in (check, size, report):
    commands.add_command(command)
