"""What the command `gradaccum` runs; `python -m gradaccum` too."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; where a library is missing, say how to install it, and exit with 2."""
    try:
        from gradaccum.cli import commands

        commands(prog_name="gradaccum")
    except ModuleNotFoundError as error:
        if error.name == "click":
            message = 'The command needs click, which is not installed. Install it with: pip install "gradaccum[cli]"'
        elif "gradaccum[" in str(error):
            message = str(error)
        else:
            raise
        print(f"Error: {message}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
