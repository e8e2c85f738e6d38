"""Runs the Python blocks of Markdown pages as their readers would: in order, in one namespace, each page in a process.

Importing a framework takes longer than most pages do. So the processes are forks of one that has imported it already,
but nothing has run in.
"""

import os
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent

# What Keras and NumPy have to say about each other, which no reader can mend.
_FRAMEWORKS_OWN = ["-W", "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"]

# Run with a framework's modules, and a page and a folder each. Every block is compiled with its own line numbers, so
# that a traceback points into the page.
_RUNNER = """
import importlib, os, pathlib, re, sys, traceback, warnings

def run(page):
    path = pathlib.Path(page)
    text = path.read_text(encoding="utf-8")
    namespace = {"__name__": "__main__"}
    for block in re.finditer(r"^```python\\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        lines_before = text.count("\\n", 0, block.start(1))
        exec(compile("\\n" * lines_before + block[1], str(path), "exec"), namespace)

modules, *pages = sys.argv[1:]
for module in modules.split():
    importlib.import_module(module)
warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
for page, folder in zip(pages[::2], pages[1::2]):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    os.chdir(folder)
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
    try:
        run(page)
        pathlib.Path("finished").touch()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
"""


class Finished(NamedTuple):
    """How a page ended, and what it printed."""

    ok: bool
    stdout: str
    stderr: str


def blocks(path):
    """The number of Python blocks of a page."""
    return len(re.findall(r"^```python$", path.read_text(encoding="utf-8"), re.MULTILINE))


def run(paths, folder, modules="", **environment):
    """Run pages, each in an empty folder of its own, with warnings as errors and these modules imported before."""
    folders = [folder / str(number) for number in range(len(paths))]
    for place in folders:
        place.mkdir()
    command = [sys.executable, "-W", "error", *_FRAMEWORKS_OWN, "-c", _RUNNER, modules]
    command += [str(part) for pair in zip(paths, folders, strict=True) for part in pair]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    texts = ([(place / name).read_text(encoding="utf-8") for name in ("stdout", "stderr")] for place in folders)
    return [Finished((place / "finished").exists(), *pair) for place, pair in zip(folders, texts, strict=True)]
