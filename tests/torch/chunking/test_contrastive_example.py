"""The example of docs/chunked.md, small."""

import pathlib
import runpy

import pytest

ROOT = pathlib.Path(__file__).parents[3]


def test_the_contrastive_example_follows_the_large_batch_where_naive_accumulation_does_not(tmp_path, capsys):
    pytest.importorskip("sklearn")
    main = runpy.run_path(str(ROOT / "examples" / "contrastive.py"))["main"]
    picture = tmp_path / "picture.png"
    runs = main(["--quick", "--out", str(picture)])
    large, chunks, naive = (runs[kind] for kind in ("large batch", "chunked", "naive"))
    assert chunks.losses == pytest.approx(large.losses, rel=1e-10)
    assert (chunks.gradient - large.gradient).norm() <= 1e-12 * large.gradient.norm()
    way = (large.path[-1] - large.path[0]).norm()
    assert (chunks.path[-1] - large.path[-1]).norm() <= 1e-8 * way
    assert (naive.gradient - large.gradient).norm() > 1e-2 * large.gradient.norm()
    assert (naive.path[-1] - large.path[-1]).norm() > 1e-2 * way
    assert abs(naive.losses[-1] - large.losses[-1]) > 0.1
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "naive" in capsys.readouterr().out
