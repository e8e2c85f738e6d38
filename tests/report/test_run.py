"""The record of a training run: what can be read of it becomes a report, however the file ends."""

import json
import math

import pytest

from gradaccum.report import Table
from gradaccum.report.run import encode, parse, read
from tests.cli.results import assert_one_clear_line, full_disk, invoke

START = '{"start": {"gradaccum": "0.1.0", "torch": "2.13.0"}}'


def lines(count=6):
    return [START] + [
        encode({"update": i, "loss": 1 / i, "grad_norm": 2.0 + i, "seconds": 0.4 + i % 2 / 5, "peak_memory": i * 2**20})
        for i in range(1, count + 1)
    ]


def test_every_quantity_gets_a_row_and_a_figure():
    report = parse("run.jsonl", lines()).report()
    titles = ["Loss", "Gradient norm, before clipping", "Time per update", "Peak memory"]
    assert [figure.title for figure in report.figures] == titles
    assert report.summary == "6 updates, 3 seconds, at most 6.0 MiB of memory."
    text = str(report)
    assert "Peak memory, MiB" in text
    assert "Recorded with gradaccum 0.1.0, torch 2.13.0." in text


@pytest.mark.parametrize("kept", range(0, 400, 21))
def test_a_file_cut_off_anywhere_still_becomes_a_report(kept, tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_bytes("\n".join(lines()).encode()[:kept])
    run = read(path)
    assert run.damaged <= 1
    assert [line["update"] for line in run.updates] == list(range(1, len(run.updates) + 1))
    report = run.report()
    assert str(report)
    assert report.summary.startswith(f"{len(run.updates)} update") or report.summary == "No update was recorded."
    if run.damaged:
        assert "1 line of the file could not be read" in str(report)


def test_damage_costs_only_its_own_line(tmp_path):
    damaged = lines()
    damaged[3] = '{"update": 3, "loss"\x00\x00'
    run = parse("run", [*damaged[:4], "", "[1, 2]", '"text"', '{"update": null}', *damaged[4:]])
    assert [line["update"] for line in run.updates] == [1, 2, 4, 5, 6]
    assert run.damaged == 4
    path = tmp_path / "run.jsonl"
    path.write_bytes("\n".join(lines(2)).encode() + b"\n\xff\xfe\x00garbage")
    assert (len(read(path).updates), read(path).damaged) == (2, 1)


def test_numbers_that_json_does_not_have_survive():
    line = encode({"update": 1, "loss": math.nan, "grad_norm": math.inf, "noise": {"high": math.inf}})
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    run = parse("run", [line, encode({"update": 2, "loss": 1.0, "grad_norm": -math.inf})])
    _, losses = run.column("loss")
    assert math.isnan(losses[0])
    assert run.column("grad_norm")[1] == [math.inf, -math.inf]
    assert "nan" in str(run.report())


def test_a_run_with_nan_and_infinity_that_was_cut_off_becomes_html_and_png(tmp_path):
    few = [encode({"update": i, "loss": v, "seconds": 0.5 + i}) for i, v in enumerate([1.0, math.nan, math.inf, 2.0])]
    report = parse("run", [START, *few, few[-1][:-20]]).report()
    assert "could not be read" in report.save(tmp_path / "run.html").read_text(encoding="utf-8")
    assert report.save(tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_the_noise_scale_gives_its_advice():
    noise = {"value": 4000.0, "low": 3000.0, "high": 6000.0, "batch_size": 64.0, "updates": 99, "unit": "rows"}
    run = parse("run", [*lines(), encode({"update": 7, "noise_scale": 4000.0, "noise": noise}), *lines()[1:]])
    assert run.noise_scale is not None
    assert run.noise_scale.interval == (3000.0, 6000.0)
    assert "larger batch pays" in str(run.report())


def test_the_command_shows_a_file_that_was_cut_off(tmp_path):
    path, page = tmp_path / "run.jsonl", tmp_path / "run.html"
    path.write_text("\n".join(lines())[:-20], encoding="utf-8")
    result = invoke("report", path, "--html", page)
    assert result.exit_code == 0, result.output
    assert "5 updates" in result.stdout
    assert "1 line of the file could not be read" in result.stdout
    assert result.stdout.splitlines()[-1] == str(page)
    assert "Gradient norm" in page.read_text(encoding="utf-8")
    page.unlink()
    with full_disk():
        assert_one_clear_line(invoke("report", path, "--html", page), f"--html {page}: File too large.")
    assert not page.exists()


def test_a_file_that_is_no_record_is_one_clear_line(tmp_path):
    notes = tmp_path / "notes.txt"
    notes.write_text("notes", encoding="utf-8")
    for arguments, part in [
        ([tmp_path / "absent.jsonl"], "No such file"),
        ([tmp_path], "Is a directory"),
        ([notes], "holds no record of a run"),
        ([notes, "--html", "run.pdf"], "ends in .html"),
    ]:
        assert_one_clear_line(invoke("report", *arguments), part)


def test_what_never_changes_is_a_sentence_and_no_picture_and_other_numbers_get_their_own():
    steps = [encode({"update": i, "loss": 3.0 / i, "steps": 4, "micro_batch_size": 16}) for i in (1, 2, 3)]
    report = parse("run", steps).report()
    assert [figure.title for figure in report.figures] == ["Loss"]
    (table,) = [block for block in report.blocks if isinstance(block, Table)]
    assert [row[0] for row in table.rows] == ["Loss"]
    assert "The same in each update: Micro-batch size 16 rows, Micro-batches per update 4." in str(report)
    assert "The same" not in str(parse("run", steps[:1]).report()), "one update says nothing of that"
    others = [encode({"update": i, "loss": 1.0 + i, "accuracy": 0.5 * i}) for i in range(3)]
    assert [figure.title for figure in parse("run", others).report().figures] == ["Loss", "accuracy"]


def test_numbers_too_long_and_nesting_too_deep_are_damage_and_no_traceback():
    long = "9" * 400
    run = parse("run", [f'{{"update": 1, "loss": {long}}}', f'{{"update": {long}}}', "[" * 100_000])
    assert (len(run.updates), run.damaged, run.column("loss")) == (1, 2, ([], []))
    assert "1 update." in str(run.report())
