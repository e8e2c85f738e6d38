"""The command line."""

from gradaccum.cli.commands import commands

__all__ = ["commands"]
