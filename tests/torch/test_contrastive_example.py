"""The example of docs/chunked.md, small."""

import pathlib
import runpy

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent


def test_the_contrastive_example_follows_the_large_batch_where_naive_accumulation_does_not(tmp_path, capsys):
    pytest.importorskip("sklearn")
    main = runpy.run_path(str(ROOT / "examples" / "contrastive.py"))["main"]
    picture = tmp_path / "picture.png"
    small = ["--dataset", "digits", "--batch-size", "192", "--updates", "4", "--dtype", "float64"]
    results = main([*small, "--out", str(picture)])
    expected, gradient = results["large batch"]
    losses, own = results["chunked"]
    assert losses == pytest.approx(expected, rel=1e-10)
    assert (own - gradient).norm() <= 1e-12 * gradient.norm()
    naive, other = results["naive"]
    assert (other - gradient).norm() > 1e-2 * gradient.norm()
    assert abs(naive[-1] - expected[-1]) > 1e-4
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "naive" in capsys.readouterr().out
