"""The command line."""

from gradaccum.cli.main import commands

__all__ = ["commands"]
