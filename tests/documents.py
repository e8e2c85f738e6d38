"""Runs programs as their users would, each in a process of its own: scripts, and the Python blocks of Markdown pages.

Importing a framework takes longer than most of them do. So the processes are forks of one that has imported it already,
but nothing has run in.
"""

import atexit
import contextlib
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent

PYTORCH = "gradaccum.torch gradaccum.torch.check gradaccum.torch.losses gradaccum.torch.optim gradaccum.torch.packing"
"""The whole PyTorch shell, which imports what is used when it is used."""

# What Keras and NumPy have to say about each other, which no reader can mend.
_FRAMEWORKS_OWN = ["-W", "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"]

# Run with a framework's modules. Each line that it reads is a program, a folder and arguments; it answers with a line.
# Every block of a page is compiled with its own line numbers, so that a traceback points into the page.
_RUNNER = """
import gc, importlib, json, os, pathlib, re, signal, sys, traceback, warnings

def run(program, arguments):
    path = pathlib.Path(program)
    text = path.read_text(encoding="utf-8")
    namespace = {"__name__": "__main__", "__file__": str(path)}
    sys.argv[:] = [str(path), *arguments]
    if path.suffix == ".py":
        warnings.simplefilter("default")  # warnings are errors in what readers copy
        exec(compile(text, str(path), "exec"), namespace)
        return
    for block in re.finditer(r"^```python\\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        lines_before = text.count("\\n", 0, block.start(1))
        exec(compile("\\n" * lines_before + block[1], str(path), "exec"), namespace)

for module in sys.argv[1:]:
    importlib.import_module(module)
gc.collect()
gc.freeze()  # or each program's own collections would look at what the imports have left, and copy its memory
warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
for line in sys.stdin:
    program, folder, *arguments = json.loads(line)
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        print("over", flush=True)
        continue
    signal.alarm(600)
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name, number in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
    try:
        run(program, arguments)
        pathlib.Path("finished").touch()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
"""


class Finished(NamedTuple):
    """How a program ended, and what it printed."""

    ok: bool
    stdout: str
    stderr: str


def blocks(path):
    """The number of Python blocks of a page."""
    return len(re.findall(r"^```python$", path.read_text(encoding="utf-8"), re.MULTILINE))


@contextlib.contextmanager
def interpreter(modules="", **environment):
    """A function that runs a page, its warnings as errors, or a script in a folder, with these modules imported."""
    command = [sys.executable, "-W", "error", *_FRAMEWORKS_OWN, "-c", _RUNNER, *modules.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    ) as process:

        def program(path, folder, *arguments):
            process.stdin.write(json.dumps([str(path), str(folder), *arguments]) + "\n")
            process.stdin.flush()
            assert process.stdout.readline() == "over\n", "the interpreter did not start"
            texts = [(folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr")]
            return Finished((folder / "finished").exists(), *texts)

        yield program
        process.stdin.close()


@functools.cache
def with_pytorch():
    """The one interpreter that has imported PyTorch, and nothing of Keras or JAX, for all tests of this process."""
    opened = contextlib.ExitStack()
    atexit.register(opened.close)
    return opened.enter_context(interpreter(f"torch._dynamo {PYTORCH} matplotlib.figure", KERAS_BACKEND="torch"))


def run(paths, folder, modules="", **environment):
    """Run pages, each in an empty folder of its own, with warnings as errors and these modules imported before."""
    with interpreter(modules, **environment) as program:
        return run_in(program, paths, folder)


def run_in(program, paths, folder):
    """Run pages in an interpreter, each in an empty folder of its own."""
    folders = [folder / str(number) for number in range(len(paths))]
    for place in folders:
        place.mkdir()
    return [program(path, place) for path, place in zip(paths, folders, strict=True)]
