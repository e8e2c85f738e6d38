"""The experiment's JAX side: in a process of its own, as the command runs it."""

import pytest

from tests.documents import ROOT

PROGRAM = (
    f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
"""
    + """
import jax
from tests.demo import fashion_mnist
from tests.reference import FLOAT64, relative_error

from examples.demo import guide_jax
from examples.demo.guide import Setup, initial_parameters, plans

data = fashion_mnist.data()
setup = Setup("jax", batch_size=32, steps=4, epochs=2, dtype="float64", learning_rate=0.05)
runs, notified = {}, []
for plan in plans(setup):
    runs[plan.key] = guide_jax.train(setup, data, plan, initial_parameters(784, setup.seed), notified.append)
large, accumulated = runs.values()
assert notified == [epoch for run in runs.values() for epoch in run.epochs] and len(notified) == 4
assert [run.updates for run in runs.values()] == [6, 6]
assert relative_error(accumulated.parameters, large.parameters) <= FLOAT64
assert relative_error(accumulated.first_gradients, large.first_gradients) <= FLOAT64

# The large batch, written out: two layers of ReLU, plain SGD.
def loss(w, x, y):
    h = jax.nn.relu(jax.nn.relu(x @ w[0] + w[1]) @ w[2] + w[3]) @ w[4] + w[5]
    return -jax.nn.log_softmax(h)[jax.numpy.arange(len(y)), y].mean()

w = initial_parameters(784, setup.seed)
for _ in range(2):
    for start in range(0, 90, 32):
        rows = slice(start, start + 32)
        gradients = jax.grad(loss)(w, data.train_x[rows] / 255, data.train_y[rows])
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
