"""The PyTorch example that Run:AI's readme names."""

import runpy
import sys

import torch

from tests.documents import ROOT


def test_mnist_learns(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mnist.py", "--quick"])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    runpy.run_path(str(ROOT / "examples" / "torch" / "mnist.py"), run_name="__main__")
    torch.set_num_threads(threads)
    assert float(capsys.readouterr().out.split()[-1].rstrip("%")) > 50
