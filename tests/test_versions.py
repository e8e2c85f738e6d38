"""docs/versions.md is made from its record, and the record has what pyproject.toml promises."""

import json
import re
from pathlib import Path

import pytest
import yaml

from scripts import versions
from tests.documents import ROOT

RECORDS = json.loads(versions.RECORDS.read_text(encoding="utf-8"))


def test_the_table_is_the_records():
    assert versions.table(RECORDS) in versions.PAGE.read_text(encoding="utf-8")


CELLS = {text: text for text in ("317", "3 errors", "no tests", "")}
CELLS["5 failed, 241 passed, 12 skipped, 768 deselected"] = "241, 5 failed"
CELLS["1 failed, 20 passed, 2 errors"] = "20, 1 failed, 2 errors"


def test_a_cell_says_how_many_have_passed_and_how_many_have_not():
    assert {said: versions.shown(said) for said in CELLS} == CELLS


@pytest.mark.parametrize("package", [name for names, _ in versions.LOWEST for name in names])
def test_the_lowest_version_that_is_promised_has_passed_or_the_page_says_what_has_not(package):
    found = [row["suites"] for row in RECORDS if row["packages"].get(package) == versions.lowest(package)]
    assert found, f"python -m scripts.versions {package}=={versions.lowest(package)} --write"
    if not all(said.isdigit() for said in found[0].values()):
        prose = versions.PAGE.read_text(encoding="utf-8").partition(versions.END)[2]
        assert f"**{package} {versions.lowest(package)}**" in prose, found


@pytest.mark.parametrize("project", [".", "compat/runai"])
def test_each_python_among_the_classifiers_has_passed(project):
    text = Path(versions.ROOT, project, "pyproject.toml").read_text(encoding="utf-8")
    claimed = set(re.findall(r"Python :: (3\.\d+)", text))
    rows = [row for row in RECORDS if "Python" in row["packages"]]
    all_suites = [row for row in rows if row["suites"].keys() == versions.SUITES.keys()]
    passed = [row["packages"]["Python"] for row in all_suites if all(n.isdigit() for n in row["suites"].values())]
    assert claimed <= {version.rpartition(".")[0] for version in passed}


BRING_IT = {"torch", "accelerate", "transformers", "lightning", "sentence-transformers", "peft", "trl"}
ASKED = {  # suites: (what their environment has, what it lacks)
    ("test-jax",): ({"jax", "pytest"}, BRING_IT | {"keras"}),
    ("test-keras-tensorflow",): ({"keras", "hypothesis", "tensorflow-cpu"}, BRING_IT | {"jax"}),
    tuple(versions.WITHOUT_TORCH): ({"keras", "jax", "optax", "pytest", "hypothesis", "tensorflow-cpu"}, BRING_IT),
    ("test-jax", "test-centre"): (BRING_IT | {"keras", "jax", "optax", "pytest"}, set()),
}


@pytest.mark.parametrize("suites", ASKED)
def test_an_environment_for_suites_without_pytorch_asks_for_nothing_that_brings_it(suites, monkeypatch, tmp_path):
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((versions.ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]

    def names(extra):
        """What it asks for, that of the extras it names included."""
        for requirement in extras[extra]:
            name, inner = re.match(r"([\w-]+)(?:\[([\w,-]+)\])?", requirement).groups()
            yield from (one for part in inner.split(",") for one in names(part)) if name == "gradaccum" else [name]

    asked = []
    monkeypatch.setattr(versions, "pip", lambda python, *arguments: asked.extend(arguments))
    monkeypatch.setattr(versions.subprocess, "check_call", lambda command: None)
    monkeypatch.setattr(versions.subprocess, "check_output", lambda *args, **kwargs: '{"Python": "3.99.0"}')
    assert versions.fresh(tmp_path, "python3.12", list(suites)) == {"Python": "3.99.0"}
    (chosen,) = re.findall(r"\[(.*)\]$", asked[3])
    found, (has, lacks) = {name for extra in chosen.split(",") for name in names(extra)}, ASKED[suites]
    assert has <= found
    assert not found & lacks


def test_the_workflow_tests_the_pythons_of_the_classifiers():
    workflow = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    classifiers = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert job["strategy"]["matrix"]["python"] == classifiers
    assert job["steps"][-1] == {"run": "make test"}
