"""The gallery's PyTorch examples, in `--quick`: each compares itself with the large batch."""

import re
import runpy
import sys

import pytest

from tests.documents import ROOT

PAGE = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")


@pytest.fixture
def printed(monkeypatch, capsys):
    def run(name):
        monkeypatch.setattr(sys, "argv", [name, "--quick"])
        runpy.run_path(str(ROOT / "examples" / "torch" / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_a_gpt_in_packed_micro_batches_makes_the_whole_batchs_updates_and_learns(printed):
    said = printed("gpt.py")
    before, after = map(float, re.findall(r"([\d.]+) bits a byte before, ([\d.]+) after", said)[0])
    assert after < before - 0.05
    assert float(re.findall(r"against the whole batch (\S+)", said)[0]) < 1e-11
    assert said.count("update 4: ") == 2, "one training packed, one of whole batches"


@pytest.mark.slow
def test_a_resnet_with_exact_batch_norm_is_the_large_batchs_and_one_without_is_not(printed):
    far = [float(number) for number in re.findall(r"parameters and statistics (\S+) from", printed("resnet18.py"))]
    assert far[0] == 0
    assert far[1] < 1e-11
    assert far[2] > 0.1


def test_the_gallery_shows_examples_that_are_there_and_how_to_try_them():
    named = set(re.findall(r"examples/[\w/]+\.py", PAGE))
    assert all((ROOT / name).exists() for name in named)
    for line in re.findall(r"^\$ (.*)$", PAGE, re.MULTILINE):
        (name,) = re.findall(r"examples/[\w/]+\.py", line)
        for option in re.findall(r"--[a-z-]+", line.partition(name)[2]):
            assert f'"{option}"' in (ROOT / name).read_text(encoding="utf-8"), f"{name} has no {option}"
