"""The experiment's JAX side: in a process of its own, as the command runs it."""

import pytest

from tests.documents import ROOT

PROGRAM = (
    f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
"""
    + """
import numpy as np
from tests.demo import fashion_mnist
from tests.reference import FLOAT64, relative_error

from examples.demo import guide_jax
from examples.demo.guide import Setup, initial_parameters, plans

data = fashion_mnist.data()
setup = Setup("jax", batch_size=32, steps=4, epochs=2, dtype="float64", learning_rate=0.05)
runs, notified = {}, []
for plan in plans(setup):
    runs[plan.key] = guide_jax.train(
        setup, data, plan, initial_parameters(784, setup.seed), notified.append
    )
large, accumulated = runs.values()
assert notified == [epoch for run in runs.values() for epoch in run.epochs] and len(notified) == 4
assert [run.updates for run in runs.values()] == [6, 6]
assert relative_error(accumulated.parameters, large.parameters) <= FLOAT64
assert relative_error(accumulated.first_gradients, large.first_gradients) <= FLOAT64

# The large batch, written out: two layers of ReLU, plain SGD.
w = [p.copy() for p in initial_parameters(784, setup.seed)]
for _ in range(2):
    for start in range(0, 90, 32):
        rows, y = data.train_x[start : start + 32] / 255, data.train_y[start : start + 32]
        a = rows @ w[0] + w[1]
        b = np.maximum(a, 0) @ w[2] + w[3]
        out = np.maximum(b, 0) @ w[4] + w[5]
        p = np.exp(out - out.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(y)), y] -= 1
        d3 = p / len(y)
        d2 = d3 @ w[4].T * (b > 0)
        d1 = d2 @ w[2].T * (a > 0)
        gradients = [rows.T @ d1, d1.sum(0), np.maximum(a, 0).T @ d2, d2.sum(0), np.maximum(b, 0).T @ d3, d3.sum(0)]
        w = [each - 0.05 * gradient for each, gradient in zip(w, gradients)]
assert relative_error(large.parameters, w) <= FLOAT64
print("equal")
"""
)


@pytest.mark.slow  # tests/demo makes the claim of PyTorch's side
def test_accumulated_is_the_large_batch_written_out(tmp_path, fresh_process):
    (tmp_path / "experiment.py").write_text(PROGRAM, encoding="utf-8")
    done = fresh_process(tmp_path / "experiment.py", tmp_path)
    assert done.ok, done.stderr
    assert done.stdout.splitlines()[-1] == "equal"
