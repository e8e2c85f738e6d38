"""sdists and wheels of both distributions: built, checked, installed into an empty environment and tried out.

    python -m scripts.package --repository https://host/owner/gradaccum

leaves them in dist/. The address goes into `project.urls`, and relative links of the READMEs, which a package index
could not follow, lead to files of this version there.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile

__all__ = ["main"]

ROOT = pathlib.Path(__file__).parent.parent
DISTRIBUTIONS = {"gradaccum": ".", "gradaccum_runai": "compat/runai"}

# What whoever installs the wheels tries first; run where nothing of the checkout is on the path.
_WITHOUT_FRAMEWORKS = """
import sys, gradaccum
assert gradaccum.__file__.startswith(sys.prefix), gradaccum.__file__
assert gradaccum.steps_for(256, 64) == 4
try:
    import gradaccum.torch
except ModuleNotFoundError as error:
    assert "pip install" in str(error)
else:
    raise AssertionError("PyTorch is here")
"""
_WITH_PYTORCH = """
import copy, sys, torch, gradaccum.torch, runai.ga.torch
assert gradaccum.torch.__file__.startswith(sys.prefix) and runai.ga.torch.__file__.startswith(sys.prefix)
large = torch.nn.Linear(5, 3).double()
small, x = copy.deepcopy(large), torch.randn(10, 5, dtype=torch.float64)
plain = torch.optim.SGD(large.parameters(), lr=0.1)
large(x).square().mean().backward()
plain.step()
optimizer = runai.ga.torch.optim.Optimizer(torch.optim.SGD(small.parameters(), lr=0.1), steps=3)
for rows in optimizer.batches(x.split(4)):
    optimizer.zero_grad()
    small(rows).square().mean().backward()
    optimizer.step()
assert (large.weight - small.weight).abs().max() < 1e-15
step = gradaccum.torch.TrainStep(large, plain, compute_loss=lambda model, x: model(x).square().mean())
step(x)
"""


def main(repository: str, out: pathlib.Path) -> list[pathlib.Path]:
    """The files that were built, in the folder `out`.

    Args:
        repository: The address under which people find the source, without a slash at its end.
        out: The folder; what was there is removed.

    Raises:
        SystemExit: Something failed; its output has been printed.
    """
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        source, environment = pathlib.Path(folder, "source"), pathlib.Path(folder, "environment")
        _copy(source)
        version = _read(source / "src/gradaccum/__init__.py", r'^__version__ = "(.+)"$')
        for place in DISTRIBUTIONS.values():
            _publish(source / place, place, repository, version)
            _run(sys.executable, "-m", "build", "--outdir", str(out), str(source / place))
        built = sorted(out.iterdir())
        _run(sys.executable, "-m", "twine", "check", "--strict", *map(str, built))
        for name, place in DISTRIBUTIONS.items():
            _check_contents(built, name, version, source / place)
        _try_out(environment, out)
    return built


def _copy(source: pathlib.Path) -> None:
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for file in filter(None, files.split("\0")):
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / file, source / file)


def _publish(folder: pathlib.Path, place: str, repository: str, version: str) -> None:
    """Write the repository's address into the metadata, and make the README's links absolute."""
    at = f"{repository}/blob/v{version}/"
    urls = {
        "Homepage": repository,
        "Documentation": f"{at}README.md#pages",
        "Changelog": f"{at}CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    settings = folder / "pyproject.toml"
    lines = "\n".join(f'{name} = "{address}"' for name, address in urls.items())
    settings.write_text(f"{settings.read_text(encoding='utf-8')}\n[project.urls]\n{lines}\n", encoding="utf-8")

    readme = folder / "README.md"
    prefix = at if place == "." else f"{at}{place}/"
    text = re.sub(r"\]\((?![a-z]+:|#)([^)\s]+)\)", rf"]({prefix}\1)", readme.read_text(encoding="utf-8"))
    readme.write_text(text, encoding="utf-8")


def _check_contents(built: list[pathlib.Path], name: str, version: str, source: pathlib.Path) -> None:
    """Every file of the package is in the wheel, and every file of the wheel's package in the sdist."""
    (wheel,) = (path for path in built if path.name.startswith(f"{name}-{version}-") and path.suffix == ".whl")
    (sdist,) = (path for path in built if path.name == f"{name}-{version}.tar.gz")
    packaged = {path.relative_to(source / "src").as_posix() for path in (source / "src").rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheel) as file:
        names = {entry for entry in file.namelist() if ".dist-info/" not in entry}
        metadata = file.read(f"{name}-{version}.dist-info/METADATA").decode()
    with tarfile.open(sdist) as file:
        in_sdist = {entry.partition("/src/")[2] for entry in file.getnames() if "/src/" in entry}
    description = metadata.partition("\n\n")[2]
    problems = {
        "missing from the wheel": packaged - names,
        "in the wheel alone": names - packaged,
        "missing from the sdist": packaged - in_sdist,
        "links that an index can't follow": set(re.findall(r"\]\((?![a-z]+:|#)[^)\s]+\)", description)),
        "metadata that is missing": {
            field
            for field in ("Project-URL: Homepage", "License-File: LICENSE", "Classifier:")
            if field not in metadata
        },
    }
    found = {problem: sorted(files) for problem, files in problems.items() if files}
    if found:
        raise SystemExit(f"{wheel.name}: {found}")


def _try_out(environment: pathlib.Path, out: pathlib.Path) -> None:
    venv.create(environment, with_pip=True)
    python = str(environment / "bin/python")
    _run(python, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(out), "gradaccum-runai")
    _run(python, "-c", _WITHOUT_FRAMEWORKS)
    pytorch = importlib.util.find_spec("torch")
    if pytorch is not None and pytorch.origin is not None:  # lent, as it is large; its .pth files don't count there
        (packages,) = environment.glob("lib/python*/site-packages")
        (packages / "lent.pth").write_text(f"{pathlib.Path(pytorch.origin).parent.parent}\n", encoding="utf-8")
        _run(python, "-c", _WITH_PYTORCH)
        _run(str(environment / "bin/gradaccum"), "--version")


def _read(path: pathlib.Path, pattern: str) -> str:
    (found,) = re.findall(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    return str(found)


def _run(*command: str) -> None:
    """Run it away from the checkout, and without its paths."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tempfile.gettempdir(), env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"failed with {done.returncode}: {' '.join(command)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--repository", required=True, help="where people find the source: https://host/owner/gradaccum"
    )
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    for path in main(arguments.repository.rstrip("/"), arguments.out.resolve()):
        print(path)
