"""The examples run, in `--quick`, and learn or compare what they say."""

import os
import subprocess
import sys

import pytest

from tests.documents import ROOT
from tests.keras.problems import BACKEND


def run(name, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KERAS_BACKEND": BACKEND, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, str(ROOT / "examples" / "keras" / name), "--quick"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_mlp(tmp_path):
    last = run("mlp.py", tmp_path).splitlines()[-1]
    assert "updates, test loss" in last
    assert float(last.split()[-1].rstrip("%")) > 50


def test_vgg16(tmp_path):
    assert run("vgg16.py", tmp_path).splitlines()[-1] == "2 updates of 4 pictures"


def test_batch_optimizer(tmp_path):
    lines = [line.split() for line in run("batch_optimizer.py", tmp_path).splitlines() if line.startswith("float")]
    assert [(dtype, powers) for dtype, _, _, powers, _ in lines] == [
        (dtype, powers) for dtype in ("float32", "float64") for powers in ("yes", "no")
    ]
    for dtype, *_, difference in lines:
        # On JAX and PyTorch, Keras' losses compute in single precision whatever is set.
        assert float(difference) <= (1e-12 if dtype == "float64" and BACKEND == "tensorflow" else 2e-6)


@pytest.mark.parametrize("name", ["mlp.py", "vgg16.py", "batch_optimizer.py"])
def test_each_example_says_how_to_run_it(name):
    text = (ROOT / "examples" / "keras" / name).read_text()
    assert f"python examples/keras/{name} " in text
    assert "--quick" in text
