"""Runs the tests of other people's trainers with the lowest versions of them that pyproject.toml asks for, all of them
at once, and with the installed ones.

    python -m scripts.versions                # an environment in a temporary folder; torch is the installed one
    python -m scripts.versions --write        # and write the table of docs/trainers.md
    python -m scripts.versions --with transformers==5.5.0 --lowest-alone    # any other version
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "trainers.md"
BEGIN, END = "<!-- versions -->\n", "<!-- /versions -->"

_TRANSFORMERS = ["tests/integrations/transformers", "tests/integrations/fuzz"]
TESTS = {
    "transformers": _TRANSFORMERS,
    "trl": _TRANSFORMERS,
    "peft": _TRANSFORMERS,
    "accelerate": ["tests/integrations/test_accelerate.py", "tests/torch/optimizer/test_accelerate.py"],
    "lightning": ["tests/integrations/test_lightning.py"],
    "sentence-transformers": ["tests/integrations/sentence_transformers"],
}


def lowest(package: str) -> str:
    """What pyproject.toml asks for at least, of three numbers."""
    found = re.search(rf'"{package}>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    if found is None:
        raise SystemExit(f"pyproject.toml has no lowest version of {package}.")
    return ".".join([*found[1].split("."), "0", "0"][:3])


def environment(folder: Path, packages: dict[str, str]) -> Path:
    """An environment with these versions; everything else, `torch` above all, is that of this interpreter."""
    venv.EnvBuilder(with_pip=True).create(folder)
    python = folder / "bin" / "python"
    own = subprocess.check_output(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
    ).strip()
    others = [sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("site-packages"))]
    Path(own, "others.pth").write_text("\n".join(dict.fromkeys(others)) + f"\n{ROOT / 'src'}\n")
    pins = [f"{name}=={version}" for name, version in packages.items()]
    held = [f"{name}=={importlib.metadata.version(name)}" for name in ("torch", "numpy")]
    subprocess.check_call([python, "-m", "pip", "install", "--quiet", *pins, *held])
    return python


def run(python: str | Path, paths: list[str]) -> str:
    """How many passed, or the last line of what pytest says."""
    select = ["-m", "not slow and not fuzz and not gpu"]
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *select, *paths]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(result.stdout[-4000:], result.stderr[-2000:], flush=True)
    last = result.stdout.strip().splitlines()[-1]
    passed = re.match(r"\d+ passed", last)
    return passed[0] if result.returncode == 0 and passed else last


def results(python: str | Path, packages: list[str]) -> dict[str, str]:
    found: dict[tuple[str, ...], str] = {}
    for paths in dict.fromkeys(tuple(TESTS[name]) for name in packages):
        found[paths] = run(python, list(paths))
    return {name: found[tuple(TESTS[name])] for name in packages}


def table(packages: dict[str, str], low: dict[str, str], new: dict[str, str]) -> str:
    lines = ["| package | lowest | its tests | newest | its tests |", "| --- | --- | --- | --- | --- |"]
    for name, version in packages.items():
        newest = importlib.metadata.version(name)
        lines.append(f"| {name} | {version} | {low[name]} | {newest} | {new[name]} |")
    made = f"torch {importlib.metadata.version('torch')}. Made by `python -m scripts.versions --write`."
    return "\n".join([*lines, "", made])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table of docs/trainers.md")
    parser.add_argument("--with", nargs="*", default=[], dest="others", metavar="NAME==VERSION", help="in its place")
    parser.add_argument("--lowest-alone", action="store_true", help="leave out the installed ones")
    options = parser.parse_args()
    packages = {name: lowest(name) for name in TESTS} | dict(pin.split("==") for pin in options.others)
    with tempfile.TemporaryDirectory() as folder:
        low = results(environment(Path(folder), packages), list(packages))
    new = dict.fromkeys(packages, "not run") if options.lowest_alone else results(sys.executable, list(packages))
    print(made := table(packages, low, new))
    if options.write:
        text = PAGE.read_text()
        before, _, rest = text.partition(BEGIN)
        PAGE.write_text(before + BEGIN + made + "\n" + END + rest.partition(END)[2])
    said = [*low.values(), *new.values()]
    return int(not all(re.fullmatch(r"\d+ passed|not run", line) for line in said))


if __name__ == "__main__":
    sys.exit(main())
