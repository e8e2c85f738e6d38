"""Runs the suites of tests with other versions of what they test against, and writes the table of docs/versions.md.

    python -m scripts.versions                                  # all lowest versions of pyproject.toml
    python -m scripts.versions torch==2.15.0                    # what goes with these packages, in an environment
    python -m scripts.versions jax==0.8.2 optax==0.2.5 flax==0.12.2 equinox==0.13.2
    python -m scripts.versions --python python3.13 [SUITE ...]  # all or these, in an environment with constraints.txt;
                                                                # without PyTorch, if none of these needs it
    python -m scripts.versions --installed [SUITE ...]          # all or these, in this environment

With `--write` the run becomes a row of docs/versions.json, in the place of one of the same versions, and the table is
made anew. An environment lies in a temporary folder (or in `--folder`, to be used again), sees the packages of this
one, and has those that are named in front of them. torch from an index without builds for the CPU is several GB.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "docs" / "versions.json"
PAGE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- versions -->\n", "<!-- /versions -->"

SUITES = {
    "test-torch": "PyTorch",
    "test-ranks": "ranks",
    "test-keras-torch": "Keras on PyTorch",
    "test-keras-tensorflow": "on TensorFlow",
    "test-keras-jax": "on JAX",
    "test-jax": "JAX",
    "test-integrations": "trainers",
    "test-centre": "all else",
}
"""The Makefile's targets, and what the table calls them."""
TRAINERS = ("transformers", "accelerate", "lightning", "sentence-transformers", "peft", "trl")
OF = {
    "torch": ["test-torch", "test-ranks", "test-keras-torch"],
    "keras": ["test-keras-torch", "test-keras-tensorflow", "test-keras-jax"],
    "tensorflow-cpu": ["test-keras-tensorflow"],
    **{name: ["test-jax"] for name in ("jax", "optax")},
    **{name: ["test-integrations"] for name in TRAINERS},
}
"""The suites that go with a package."""
WITHOUT_TORCH = {"test-keras-tensorflow": ["keras"], "test-keras-jax": ["keras", "jax"], "test-jax": ["jax"]}
"""Suites that need no PyTorch, and the extras of pyproject.toml that they do need."""
LOWEST: tuple[tuple[tuple[str, ...], dict[str, str]], ...] = (
    (("torch",), {}),
    (("keras",), {}),
    (("jax", "optax"), {"flax": "0.12.2", "equinox": "0.13.2"}),  # later ones need a later JAX
    (TRAINERS, {}),
)
"""Packages whose lowest versions are installed together, and what goes with them."""


def lowest(package: str) -> str:
    """What pyproject.toml asks for at least, of three numbers."""
    found = re.search(rf'"{package}>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit(f"pyproject.toml has no lowest version of {package}.")
    return ".".join([*found[1].split("."), "0", "0"][:3])


def pip(python: Path, *arguments: str) -> None:
    subprocess.check_call([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments])


def overlay(folder: Path, packages: dict[str, str]) -> None:
    """Make an environment with these versions before everything that this one has."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.check_call([sys.executable, "-m", "venv", folder])
    asks = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(subprocess.check_output([python, "-c", asks], text=True).strip())
    others = [sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("site-packages"))]
    lines = [str(ROOT / "src"), str(ROOT / "compat" / "runai" / "src"), *dict.fromkeys(others)]
    (own / "others.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    held = [f"{name}=={importlib.metadata.version(name)}" for name in ("torch", "numpy") if name not in packages]
    pip(python, *(f"{name}=={version}" for name, version in packages.items()), *held)


def fresh(folder: Path, interpreter: str, suites: list[str]) -> dict[str, str]:
    """Make an environment of another Python, with what these suites need. Returns what is not as in this one."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.check_call([interpreter, "-m", "venv", folder])
    if WITHOUT_TORCH.keys() >= set(suites):
        extras = ["test", *sorted({extra for suite in suites for extra in WITHOUT_TORCH[suite]})]
    else:
        extras = ["dev"]
    own = ["--editable", f"{ROOT}[{','.join(extras)}]", "--editable", str(ROOT / "compat" / "runai")]
    pip(python, "--constraint", str(ROOT / "constraints.txt"), *own)
    asks = "import json; from scripts.versions import installed; print(json.dumps(installed()))"
    there = json.loads(subprocess.check_output([python, "-c", asks], cwd=ROOT, text=True))
    here = installed()
    return {name: version for name, version in there.items() if version != here.get(name)}


def run(folder: Path, suite: str, options: str = "") -> str:
    """How many tests of a suite have passed, or the last line of what it prints; `options` are for pytest."""
    command = ["make", "--no-print-directory", "--silent", suite, f"VENV={folder}"]
    settings = os.environ | {"PYTEST_ADDOPTS": f"{os.environ.get('PYTEST_ADDOPTS', '')} {options}"}
    result = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=False)
    print(result.stdout[-4000:], result.stderr[-2000:], flush=True)
    last = result.stdout.strip().splitlines()[-1] if result.stdout.strip() else "no tests"
    passed = re.match(r"\d+ passed", last)
    return passed[0].split()[0] if result.returncode == 0 and passed else last.split(" in ")[0]


def record(packages: dict[str, str], suites: dict[str, str]) -> None:
    """Put a run among the records: suites that were run now replace those of an earlier run of the same versions."""
    records = json.loads(RECORDS.read_text(encoding="utf-8")) if RECORDS.exists() else []
    same = next((row for row in records if row["packages"] == packages), None)
    if same is None:
        records.append(same := {"packages": packages, "suites": {}})
    same["suites"] |= suites
    RECORDS.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


def shown(said: str) -> str:
    """What pytest said of a suite, as a cell of the table: how many tests have passed, and how many have not."""
    counts = re.findall(r"(\d+) (passed|failed|errors?)", said)
    counts.sort(key=lambda count: count[1] != "passed")
    return ", ".join(number if word == "passed" else f"{number} {word}" for number, word in counts) or said


def table(records: list[dict[str, dict[str, str]]]) -> str:
    """The records as Markdown: a row per environment, a column per suite."""
    lines = [f"| versions | {' | '.join(SUITES.values())} |", f"|---|{'---:|' * len(SUITES)}"]
    for row in records:
        versions = ", ".join(f"{name} {version}" for name, version in row["packages"].items())
        lines.append(f"| {versions} | {' | '.join(shown(row['suites'].get(suite, '')) for suite in SUITES)} |")
    return "\n".join(lines)


def write() -> None:
    """Put the table of the records into the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    made = table(json.loads(RECORDS.read_text(encoding="utf-8")))
    PAGE.write_text(f"{before}{BEGIN}{made}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def installed() -> dict[str, str]:
    """This Python and what is tested against, as far as it is there."""
    found = {d.name.replace("_", "-"): d.version for d in importlib.metadata.distributions()}
    ordered = ("torch", "keras", "tensorflow-cpu", "jax", "optax", *TRAINERS)
    return {"Python": platform.python_version()} | {name: found[name] for name in ordered if name in found}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="NAME==VERSION | SUITE", help="packages, or targets of the Makefile")
    parser.add_argument("--python", help="another interpreter")
    parser.add_argument("--installed", action="store_true", help="this environment")
    parser.add_argument("--folder", type=Path, help="keep the environment here")
    parser.add_argument("--write", action="store_true", help="into docs/versions.json and docs/versions.md")
    options = parser.parse_args()
    pins = dict(one.split("==") for one in options.what if "==" in one)
    suites = [one for one in options.what if "==" not in one]
    if unknown := set(suites) - set(SUITES):
        parser.error(f"no suites: {', '.join(sorted(unknown))}. They are {', '.join(SUITES)}.")
    if bool(pins) + bool(options.python) + options.installed > 1:
        parser.error("give packages, --python or --installed")
    trials = [pins]
    if not (pins or options.python or options.installed):
        trials = [{name: lowest(name) for name in names} | more for names, more in LOWEST]
    failed = False
    for packages in trials:
        chosen = suites or [s for s in SUITES if not packages or any(s in OF.get(name, ()) for name in packages)]
        with tempfile.TemporaryDirectory() as temporary:
            folder, for_pytest = options.folder or Path(temporary), ""
            if options.installed:
                folder, packages = Path(sys.prefix), installed()
            elif options.python:
                packages = fresh(folder, options.python, chosen)
                if WITHOUT_TORCH.keys() >= set(chosen):  # the shells have modules for frameworks that are not there
                    for_pytest = "--doctest-ignore-import-errors"
            else:
                overlay(folder, packages)
            results = {suite: run(folder.absolute(), suite, for_pytest) for suite in chosen}
        print(table([{"packages": packages, "suites": results}]))
        failed |= not all(said.isdigit() for said in results.values())
        if options.write:
            record(packages, results)
            write()
    return int(failed)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
