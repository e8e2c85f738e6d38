"""Runs programs as their users would, each in a process of its own: scripts, and the Python blocks of Markdown pages.

Importing a framework takes longer than most of them do. So the processes are forks of one that has imported it already,
but nothing has run in: of a new one, or of the tests' own before the first test.
"""

import atexit
import builtins
import contextlib
import functools
import importlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import warnings
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent

PYTORCH = "gradaccum.torch gradaccum.torch.check gradaccum.torch.losses gradaccum.torch.optim gradaccum.torch.packing"
"""The whole PyTorch shell, which imports what is used when it is used."""

OF_KERAS = [ROOT / "README.md", ROOT / "compat/runai/README.md"]
"""The pages beside Keras' own that tests/keras runs, with PyTorch: they import both."""

OF_TRAINERS = [
    path
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if re.search(r"^(from|import) (\w*transformers|accelerate)", path.read_text(encoding="utf-8"), re.MULTILINE)
]
"""The pages that tests/integrations runs: what they import takes long, and is there already."""

# What Keras and NumPy have to say about each other, which no reader can mend.
_FRAMEWORKS_OWN = ["-W", "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"]

# Each line that it reads is a program, a folder and arguments; it answers with a line. Every block of a page is
# compiled with its own line numbers, so that a traceback points into the page.
_SERVER = """
import gc, json, os, pathlib, re, signal, sys, traceback, warnings

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

def serve(lines, answers):
    gc.collect()
    gc.freeze()  # or each program's own collections would look at what the imports have left, and copy its memory
    warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
    for line in lines:
        program, folder, *arguments = json.loads(line)
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            print("over", file=answers, flush=True)
            continue
        signal.alarm(600)
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = open(0, encoding="utf-8", closefd=False)
        for name, number in (("stdout", 1), ("stderr", 2)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
            setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))
        try:
            run(program, arguments)
            pathlib.Path("finished").touch()
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
"""
_IMPORTS = """
import importlib
for module in sys.argv[1:]:
    importlib.import_module(module)
serve(sys.stdin, sys.stdout)
"""


class Finished(NamedTuple):
    """How a program ended, and what it printed."""

    ok: bool
    stdout: str
    stderr: str


def _asking(questions, answers):
    """The function that has a server run a page, its warnings as errors, or a script in a folder."""

    def program(path, folder, *arguments):
        questions.write(json.dumps([str(path), str(folder), *arguments]) + "\n")
        questions.flush()
        assert answers.readline() == "over\n", "the interpreter did not start"
        texts = [(folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr")]
        return Finished((folder / "finished").exists(), *texts)

    return program


@contextlib.contextmanager
def interpreter(modules="", **environment):
    """A function that runs a page, its warnings as errors, or a script in a folder, with these modules imported."""
    command = [sys.executable, "-W", "error", *_FRAMEWORKS_OWN, "-c", _SERVER + _IMPORTS, *modules.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    ) as process:
        yield _asking(process.stdin, process.stdout)
        process.stdin.close()


def forked(modules):
    """As `interpreter`, in forks of this process as it is now: what tests import, too, isn't imported again.

    To be called before anything has run. A module that isn't installed is left to the program that needs it.
    """
    for module in modules.split():
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(module)
    (asked, asks), (told, tells) = os.pipe(), os.pipe()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
        server = os.fork()
    if server:
        os.close(asked)
        os.close(tells)
        questions, answers = os.fdopen(asks, "w", encoding="utf-8"), os.fdopen(told, encoding="utf-8")
        atexit.register(_end, os.getpid(), server, questions, answers)
        return _asking(questions, answers)
    try:
        os.close(asks)  # its end is the server's
        os.close(told)
        leave_pytest()
        sys.path[:] = ["", *(place for place in sys.path if place not in ("", str(ROOT)))]
        warnings.simplefilter("error", append=True)
        for option in _FRAMEWORKS_OWN[1::2]:
            action, message, category = option.split(":")
            warnings.filterwarnings(action, re.escape(message), getattr(builtins, category))
        namespace = {}
        exec(_SERVER, namespace)
        with open(asked, encoding="utf-8") as lines, open(tells, "w", encoding="utf-8") as said:
            namespace["serve"](lines, said)
    finally:
        os._exit(0)


def _end(parent, server, *pipes):
    """When the tests' process ends, and no fork of it."""
    if os.getpid() == parent:
        os.kill(server, signal.SIGTERM)
        os.waitpid(server, 0)
        for pipe in pipes:
            pipe.close()


def leave_pytest():
    """In a fork of the tests' process, modules are imported as they are, and warnings written down."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_pytest")]
    warnings.showwarning = lambda *warning, file=None, line=None: sys.stderr.write(warnings.formatwarning(*warning[:4]))


@functools.cache
def with_pytorch():
    """The one interpreter that has imported PyTorch, and nothing of Keras or JAX, for all tests of this process."""
    opened = contextlib.ExitStack()
    atexit.register(opened.close)
    return opened.enter_context(interpreter(f"torch._dynamo {PYTORCH} matplotlib.figure", KERAS_BACKEND="torch"))
