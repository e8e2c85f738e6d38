"""The PyTorch example that Run:AI's readme names."""

import os
import subprocess
import sys

from tests.documents import ROOT


def test_mnist_learns(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "torch" / "mnist.py"), "--quick"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1].rstrip("%")) > 50
