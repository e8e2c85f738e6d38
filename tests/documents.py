"""Runs the Python blocks of a Markdown page as its reader would: in order, in one namespace, in a fresh process."""

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent

# What Keras and NumPy have to say about each other, which no reader can mend.
_FRAMEWORKS_OWN = ["-W", "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"]

# Run with the page's path. Each block is compiled with its own line numbers, so that a traceback points into the page.
_RUNNER = """
import pathlib, re, sys
path = pathlib.Path(sys.argv[1])
text = path.read_text(encoding="utf-8")
namespace = {"__name__": "__main__"}
for block in re.finditer(r"^```python\\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
    lines_before = text.count("\\n", 0, block.start(1))
    exec(compile("\\n" * lines_before + block[1], str(path), "exec"), namespace)
"""


def blocks(path):
    """The number of Python blocks of a page."""
    return len(re.findall(r"^```python$", path.read_text(encoding="utf-8"), re.MULTILINE))


def run(path, folder, **environment):
    """Run a page's blocks in this folder, with warnings as errors. Returns the finished process."""
    return subprocess.run(
        [sys.executable, "-W", "error", *_FRAMEWORKS_OWN, "-c", _RUNNER, str(path)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
