"""Runs the tests of other people's trainers with the lowest versions of them that are supported, beside the installed
ones.

    python -m scripts.versions            # an environment in a temporary folder; torch is the installed one
    python -m scripts.versions --write    # and write the table of docs/trainers.md

"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

LOWEST = {
    "transformers": "5.0.0",
    "accelerate": "1.10.0",
    "lightning": "2.6.0",
    "trl": "1.0.0",
    "peft": "0.18.0",
    "sentence-transformers": "6.0.0",
}
"""What pyproject.toml asks for at least; `trl` and `peft` are used by the tests alone."""
TESTS = {
    "transformers": ["tests/integrations/transformers"],
    "accelerate": ["tests/integrations/test_accelerate.py", "tests/torch/optimizer/test_accelerate.py"],
    "lightning": ["tests/integrations/test_lightning.py"],
    "trl": ["tests/integrations/transformers/test_trl.py"],
    "peft": ["tests/integrations/transformers/test_trl.py"],
    "sentence-transformers": ["tests/integrations/sentence_transformers"],
}
ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "trainers.md"
BEGIN, END = "<!-- measured:versions -->\n", "<!-- /measured:versions -->"


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


def run(python: Path, paths: list[str]) -> str:
    """`passed`, or the last lines of what pytest says."""
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow and not fuzz and not gpu",
        *paths,
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(result.stdout[-4000:], result.stderr[-2000:], flush=True)
    return "passed" if result.returncode == 0 else result.stdout.strip().splitlines()[-1]


def table(packages: dict[str, str], results: dict[str, str]) -> str:
    lines = ["| package | lowest | its tests | newest | its tests |", "| --- | --- | --- | --- | --- |"]
    for name, version in packages.items():
        newest = importlib.metadata.version(name)
        lines.append(f"| {name} | {version} | {results[name]} | {newest} | `make test` |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table of docs/trainers.md")
    parser.add_argument("--only", nargs="*", default=list(LOWEST), choices=list(LOWEST), help="these alone")
    options = parser.parse_args()
    packages = {name: LOWEST[name] for name in options.only}
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        python = environment(Path(folder), packages)
        for name in packages:
            found = [known for known in results if TESTS[known] == TESTS[name]]
            results[name] = results[found[0]] if found else run(python, TESTS[name])
    print(made := table(packages, results))
    if options.write:
        text = PAGE.read_text()
        before, _, rest = text.partition(BEGIN)
        PAGE.write_text(before + BEGIN + made + "\n" + END + rest.partition(END)[2])
    return int(any(result != "passed" for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
