"""The examples run, in `--quick`, and learn or compare what they say."""

import pytest

from tests.documents import ROOT
from tests.keras.problems import BACKEND, slow_where_compiled


@pytest.fixture
def run(fresh_process, tmp_path):
    def printed(name):
        done = fresh_process(ROOT / "examples" / "keras" / name, tmp_path, "--quick")
        assert done.ok, done.stderr
        return done.stdout

    return printed


@slow_where_compiled
def test_mlp(run):
    last = run("mlp.py").splitlines()[-1]
    assert "updates, test loss" in last
    assert float(last.split()[-1].rstrip("%")) > 50


@slow_where_compiled
def test_vgg16(run):
    assert run("vgg16.py").splitlines()[-1] == "2 updates of 4 pictures"


@slow_where_compiled
def test_batch_optimizer(run):
    lines = [line.split() for line in run("batch_optimizer.py").splitlines() if line.startswith("float")]
    assert [(dtype, powers) for dtype, _, _, powers, _ in lines] == [
        (dtype, powers) for dtype in ("float32", "float64") for powers in ("yes", "no")
    ]
    for dtype, *_, difference in lines:
        # On JAX and PyTorch, Keras' losses compute in single precision whatever is set.
        assert float(difference) <= (1e-12 if dtype == "float64" and BACKEND == "tensorflow" else 2e-6)


@slow_where_compiled
def test_contrastive(run):
    large, chunked, naive = (float(line.split()[-1]) for line in run("contrastive.py").splitlines()[-3:])
    assert abs(large - chunked) <= 2e-4 < abs(large - naive)


@pytest.mark.parametrize("name", ["mlp.py", "vgg16.py", "batch_optimizer.py", "contrastive.py"])
def test_each_example_says_how_to_run_it(name):
    text = (ROOT / "examples" / "keras" / name).read_text()
    assert f"python examples/keras/{name} " in text
    assert "--quick" in text
