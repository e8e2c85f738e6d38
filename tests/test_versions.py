"""docs/versions.md is made from its record, and the record has what pyproject.toml promises."""

import json
import re
from pathlib import Path

import pytest

from scripts import versions

RECORDS = json.loads(versions.RECORDS.read_text(encoding="utf-8"))


def test_the_table_is_the_records():
    assert versions.table(RECORDS) in versions.PAGE.read_text(encoding="utf-8")


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
    passed = {
        row["packages"]["Python"].rpartition(".")[0] for row in rows if all(n.isdigit() for n in row["suites"].values())
    }
    assert claimed <= passed
