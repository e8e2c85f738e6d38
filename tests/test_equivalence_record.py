"""The record of a check: its verdict, its error message, its files."""

import dataclasses
import json
import math

import pytest

import gradaccum
from gradaccum.core.equivalence import Cause, Difference, Equivalence

CAUSE = Cause("batch_norm", "layer1.bn", "'layer1.bn' is a BatchNorm2d: it normalises each micro-batch by itself.")


def record(*differences, causes=(), **more):
    found = [Difference(*each) for each in differences]
    return Equivalence(tuple(found), 1e-6, tuple(causes), rows=8, partitions=((5, 3), (4, 4)), **more)


def test_it_is_ok_if_nothing_differs_beyond_rounding():
    result = record(("loss", 1e-16, "loss"), ("a.weight", 1e-6), ("b.mean", 0.0, "buffer"))
    assert result.ok
    assert result.max_error == 1e-6
    assert result.raise_if_different() is result
    twice = dataclasses.replace(result, partitions=((5, 3), (5, 3), (4, 4)))  # two orders of rows
    assert "8 rows at once against 5 + 3; 4 + 4 rows" in str(twice)


def test_any_difference_or_cause_is_an_error():
    equal, buffer = ("a.weight", 0.0), ("b.mean", 0.5, "buffer")
    different = [record(("a.weight", error)) for error in (1.1e-6, math.inf)]
    for result in (*different, record(equal, buffer), record(equal, causes=[CAUSE]), record(causes=[CAUSE])):
        assert not result.ok
        with pytest.raises(gradaccum.NotEquivalentError):
            result.raise_if_different()


def test_the_error_lists_gradients_first_and_then_the_causes():
    buffers = [(f"layer1.bn.{name}", 9.0, "buffer") for name in ("mean", "var")]
    gradients = [("layer1.bn.weight", 1.19), ("layer1.conv.weight", 2.5), ("fc.weight", 0)]
    with pytest.raises(gradaccum.NotEquivalentError) as raised:
        record(*buffers, *gradients, causes=[CAUSE]).raise_if_different()
    assert str(raised.value).splitlines() == [
        "accumulated gradients differ from the large batch's.",
        "  layer1.conv.weight   relative error 2.5   (1e-06 allowed)",
        "  layer1.bn.weight     relative error 1.19   (1e-06 allowed)",
        "  layer1.bn.mean       relative error 9   (1e-06 allowed)",
        "  layer1.bn.var        relative error 9   (1e-06 allowed)",
        CAUSE.message,
    ]


def test_the_verdict_tells_buffers_from_gradients():
    result = record(("a.weight", 0.0), ("b.count", 4.0, "buffer"))
    assert "gradient is the large batch's, but the buffers left behind are NOT: largest relative error 4" in str(result)
    with pytest.raises(gradaccum.NotEquivalentError, match="buffers differ from the large batch's"):
        result.raise_if_different()


def test_gradients_are_grouped_by_module_in_the_models_order():
    names = {"z.weight": 2.0, "z.bias": 3.0, "a.b.weight": 1.0, "scale": 0.5}
    result = record(*((name, error, "gradient", 4) for name, error in names.items()))
    assert result.groups() == [("z", 2, 8, 3.0), ("a.b", 1, 4, 1.0), ("", 1, 4, 0.5)]
    assert "(the model)" in str(result)


def test_it_is_saved_as_a_report_or_as_json_that_is_valid_with_infinite_errors(tmp_path):
    result = record(("a.weight", math.inf), causes=[CAUSE], notes=("Evidence.",))
    path = result.save(tmp_path / "new" / "result.json")
    told = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (told["ok"], told["max_error"], told["rows"]) == (False, "inf", 8)
    assert told["causes"] == [{"kind": "batch_norm", "where": "layer1.bn", "message": CAUSE.message}]
    assert told["differences"] == [{"name": "a.weight", "error": "inf", "part": "gradient", "entries": 1}]
    assert told["notes"] == ["Evidence."]
    result = record(("a.weight", math.inf), ("b.weight", 0.5), causes=[CAUSE])
    for ending in (".html", ".png", ".txt"):
        assert result.save(tmp_path / f"report{ending}").stat().st_size > 100
    with pytest.raises(ValueError, match="saved as"):
        record().save(tmp_path / "report.pdf")
