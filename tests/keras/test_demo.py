"""The experiment's Keras side: in a process of its own, as the command runs it."""

import subprocess
import sys

PROGRAM = """
import numpy as np
from tests.demo import fashion_mnist
from tests.reference import FLOAT64, relative_error

from gradaccum.demo import keras_experiment, torch_experiment
from gradaccum.demo.data import Data
from gradaccum.demo.experiment import Setup, initial_parameters, plans

train_x, train_y = fashion_mnist.pictures(90, 0)
test_x, test_y = fashion_mnist.pictures(40, 1)
x = [images.reshape(len(images), -1) for images in (train_x, test_x)]
data = Data("FashionMNIST", "here", x[0], train_y.astype(np.int64), x[1], test_y.astype(np.int64), scale=255.0)
setup = Setup(framework="keras", batch_size=32, steps=4, epochs=2, dtype="float64", learning_rate=0.05)
initial = initial_parameters(784, setup.seed)
for plan in plans(setup):
    notified = []
    ours = keras_experiment.train(setup, data, plan, initial, notified.append)
    theirs = torch_experiment.train(setup, data, plan, initial, lambda epoch: None)
    assert ours.updates == theirs.updates == (24 if plan.key == "c" else 6), (plan, ours.updates)
    assert list(ours.epochs) == notified and len(notified) == 2
    error = relative_error(ours.parameters, theirs.parameters)
    assert error <= FLOAT64, (plan, error)
    for mine, other in zip(ours.epochs, theirs.epochs, strict=True):
        assert abs(mine.test_loss - other.test_loss) <= 1e-9, (plan, mine, other)
        assert mine.accuracy == other.accuracy, (plan, mine, other)
print("equal")
"""


def test_each_run_makes_the_updates_that_pytorch_makes():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "equal"
