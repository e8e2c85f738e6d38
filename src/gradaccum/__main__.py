"""What the command `gradaccum` runs; `python -m gradaccum` too."""

from __future__ import annotations

import sys

from gradaccum.extras import how_to_install


def main() -> None:
    """Run the command line; where a library is missing, say how to install it, and exit with 2."""
    try:
        from gradaccum.cli import commands

        commands(prog_name="gradaccum")
    except ModuleNotFoundError as error:
        if error.name == "click":
            message = f"The command needs click, which is not installed. {how_to_install('cli')}"
        elif "gradaccum[" in str(error):
            message = str(error)
        else:
            raise
        print(f"Error: {message}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
