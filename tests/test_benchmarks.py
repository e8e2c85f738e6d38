"""Numbers of speed and memory come from benchmarks/, and `python -m benchmarks` runs all of it."""

import json
import math
import platform
import re
import sys
from xml.etree import ElementTree

import pytest

from benchmarks import __main__ as runner
from benchmarks import harness
from benchmarks.picture import drawn
from tests.documents import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKED = r"<!-- measured:(\w+) -->\n(.*?)<!-- /measured:\1 -->"
SCRIPTS = {name: (ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8") for name in runner.NAMES}
NUMBER = r"\d[\d.,]*\s(?:ms|ns|microseconds|milliseconds|[KMG]i?B\b)|\d+\.\d+\s(?:of|times)\s(?:the|its|as)\b"
SETTINGS = {
    "README.md": ["1.2 GB", "280 MB"],  # what the tests and the demo download
    "docs/contrastive.md": ["4 MiB"],  # 1024 x 1024 x 4 bytes
    "docs/scaling.md": ["25 MiB"],  # DDP's buckets
}
"""Numbers that nobody measures."""


def record(ratios, rival="by hand", **more):
    measured = {"about": "an update", "rival": rival, "rounds": 9, "ratios": ratios}
    made = {"title": "A `claim`", "body": "It is fast.", "made": "Here.", "ours": ["ours"], "measured": [measured]}
    return made | more


RECORDS = {
    "one": record({"by hand": [1.0, 1.0, 1.0], "ours": [0.9, 0.8, 1.0], "theirs": [20.0, 15.0, 30.0]}),
    "two": record({}, measured=[]),
}


def marked(page):
    return re.findall(MARKED, page.read_text(encoding="utf-8"), re.DOTALL)


def test_each_marked_block_has_a_script_that_writes_it():
    for page in PAGES:
        for name, _ in marked(page):
            place = f"{page.relative_to(ROOT).as_posix()}#{name}"
            if place == "docs/benchmarks.md#picture":
                continue
            if page.name == "benchmarks.md":
                assert f'"{name.removesuffix("_cuda")}"' in SCRIPTS[name.removesuffix("_cuda")], place
            elif page.name == "peers.md":
                assert f'"{page.name}", "{name}"' in SCRIPTS["peers"]
            else:
                assert any(f'"{place}"' in text for text in SCRIPTS.values()), f"no script writes {place}"


def test_no_page_has_a_number_of_speed_or_memory_that_no_script_has_printed():
    for page in PAGES:
        prose = re.sub(MARKED, "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        prose = re.sub(r"^```.*?^```$|`[^`]*`", "", prose, flags=re.MULTILINE | re.DOTALL)
        found = {re.sub(r"\s", " ", number) for number in re.findall(NUMBER, prose)}
        place = page.relative_to(ROOT).as_posix()
        assert found <= set(SETTINGS.get(place, [])), f"{place}: write it from benchmarks/, or leave it out"


def test_the_pages_sections_are_their_records():
    records = json.loads(harness.RECORDS.read_text(encoding="utf-8")) if harness.RECORDS.exists() else {}
    sections = dict(marked(harness.PAGE))
    for name, one in records.items():
        if name != "peers":
            assert sections[name] == harness.section_of(one), f"python -m benchmarks.{name} --write"
            assert not one["quick"], name


def test_numbers_on_other_pages_are_those_of_the_records():
    records = json.loads(harness.RECORDS.read_text(encoding="utf-8"))
    kept = {place: text for one in records.values() for place, text in one.get("blocks", {}).items()}
    on_pages = {
        f"{page.relative_to(ROOT).as_posix()}#{name}": text
        for page in PAGES if page not in (harness.PAGE, ROOT / "docs" / "peers.md")
        for name, text in marked(page)
    }  # fmt: skip
    assert on_pages == kept
    assert dict(marked(ROOT / "docs" / "peers.md")) == {"peers": "{body}\n\n{made}\n".format(**records["peers"])}
    (away,) = re.findall(r"\*\*(\d+) % away\*\*", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert f" {away}% |" in records["demo"]["body"]


def test_the_readmes_distances_are_those_of_the_page_of_peers():
    """Their rows have other words there, in a table of twelve."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    peers = (ROOT / "docs/peers.md").read_text(encoding="utf-8")
    rows = {"ragged": "4, 4 and 1", "short window": "ends inside", "tokens": "means over", "resume": "saved inside"}
    for case, words in rows.items():
        cells = re.search(rf"^\| \*\*{case}\*\*: .*?\| (.*) \|$", peers, re.MULTILINE)[1].split(" | ")
        _, accelerate, lightning, keras, optax, ours = (cell.removeprefix("off by ") for cell in cells)
        shown = re.search(rf"^\| [^|]*{words}[^|]*\| (.*) \|$", readme, re.MULTILINE)[1].split(" | ")
        assert shown == [ours, accelerate, lightning, keras, optax], case


def test_every_script_is_run_in_turn_and_what_fails_is_named(tmp_path, monkeypatch, capsys):
    """The loop: `python -m benchmarks --out folder`."""
    ran = []

    def measured(name, device, options):
        ran.append((name, device))
        return {} if name == "layers" else {f"{name}_{device}": RECORDS["one"]}

    monkeypatch.setattr(runner, "measured", measured)
    monkeypatch.setattr(runner, "cuda_is_found", lambda: True)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--out", str(tmp_path)])
    assert runner.main() == 1
    assert "failed, or not done in time: layers, layers" in capsys.readouterr().err
    on_cuda = [(name, "cuda") for name in runner.NAMES if name in runner.ON_CUDA]
    assert ran == [(name, "cpu") for name in runner.NAMES] + on_cuda
    assert len(json.loads((tmp_path / "benchmarks.json").read_text("utf-8"))) == len(ran) - 2
    assert (tmp_path / "benchmarks.md").read_text("utf-8").count("It is fast.") == len(ran) - 2
    ElementTree.fromstring((tmp_path / "benchmarks.svg").read_text("utf-8"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["fastest"], "no such benchmark: fastest. There are demo, "), (["--quick", "--write"], "not for the")],
)
def test_what_cannot_be_run_is_refused(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as exit:
        runner.main()
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_a_script_that_fails_or_hangs_is_said_and_left_out(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "broken.py").write_text("raise SystemExit('no such library')")
    (folder / "endless.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(runner, "HERE", folder)
    monkeypatch.setattr(runner, "TIME_LIMIT", 0.5)
    options = type("Options", (), {"out": tmp_path, "quick": True, "write": False, "end": math.inf})
    assert runner.measured("endless", "cpu", options) == {}
    monkeypatch.setattr(runner, "TIME_LIMIT", 60)
    assert runner.measured("broken", "cpu", options) == {}
    said = capsys.readouterr()
    assert "not done in the 0 s that were left" in said.err
    assert "no such library" in said.err
    assert "broken, cpu:" in said.out


def test_no_script_is_left_out_and_only_scripts_that_take_a_device_are_run_on_one():
    others = {"__init__", "__main__", "harness", "picture", "scaling_model"}
    assert sorted(runner.NAMES) == sorted({path.stem for path in (ROOT / "benchmarks").glob("*.py")} - others)
    assert {name for name, text in SCRIPTS.items() if "cuda=True" in text} == set(runner.ON_CUDA)


def test_a_section_takes_the_place_of_its_last_one_in_page_and_records(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(harness, "RECORDS", tmp_path / "page.json")
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.setattr(harness, "_MEASURED", [])
    harness.PAGE.write_text("# Measured\n")
    (tmp_path / "README.md").write_text("<!-- measured:speed -->\nold\n<!-- /measured:speed -->\nafter\n")
    options = type("Options", (), {"device": "cpu", "json": None, "write": True, "quick": False})
    for body in ("slow", "fast"):
        harness.recorded({"ours": harness.Ratio(0.5, 0.4, 0.6)}, "ours", 9)
        harness.publish("optimizer", "Title", body, [], options, blocks={"README.md#speed": f"{body}\n"})
    page = harness.PAGE.read_text()
    assert page.count("## Title\n\nfast\n\n`benchmarks.optimizer`: ") == 1
    assert "slow" not in page
    assert (tmp_path / "README.md").read_text() == ("<!-- measured:speed -->\nfast\n<!-- /measured:speed -->\nafter\n")
    (one,) = json.loads(harness.RECORDS.read_text()).values()
    assert one["measured"][0]["ratios"] == {"ours": [0.5, 0.4, 0.6]}


def test_the_machine_has_a_processor_and_no_name_of_its_own():
    assert re.fullmatch(r".+, \d+ cores", harness.machine())
    assert platform.node() not in harness.machine()


def test_the_picture_on_the_page_is_that_of_the_tables():
    records = json.loads(harness.RECORDS.read_text(encoding="utf-8"))
    shown = (ROOT / "docs/images/benchmarks.svg").read_text(encoding="utf-8")
    assert shown == drawn(records), "benchmarks.picture.write_picture() draws it anew"


def test_the_picture_has_each_contender_keeps_to_its_frame_and_counts_sizes_as_people_do():
    picture = drawn(RECORDS)
    root = ElementTree.fromstring(picture)
    width, height = (float(root.attrib[side]) for side in ("width", "height"))
    circles = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="4.5" style="fill:var\(--(\w+)\)"', picture)
    assert [colour for *_, colour in circles] == ["quiet", "a", "b"]
    assert all(0 < float(x) < width and 0 < float(y) < height for x, y, _ in circles)
    assert "ours 0.90; theirs 20.00" in root[0].text
    sizes = {name: [1.0, 1.0, 1.0] for name in ("1024", "128", "64", "`auto`", "16 x 4", "whole")}
    told = drawn({"one": record(sizes, rival="whole")})
    names = [name for name in re.findall(r">([^<>]+)</text>", told) if name.strip("`") in {"auto", *sizes}]
    assert names == ["16 x 4", "64", "128", "1024", "auto", "whole"]
