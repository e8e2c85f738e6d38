"""The experiment in Keras and JAX beside PyTorch's: a program for a process of its own, as the command runs it."""

from tests.documents import ROOT

PROGRAM = """
import sys
sys.path.insert(0, {root!r})
import importlib
from tests.demo import fashion_mnist
from tests.reference import FLOAT32, FLOAT64, relative_error

from examples.demo import guide_torch
from examples.demo.guide import Setup, initial_parameters, plans

shell = importlib.import_module("examples.demo.guide_{framework}")
data = fashion_mnist.data()
setup = Setup({framework!r}, batch_size=32, steps=4, epochs=2, dtype="float64", learning_rate=0.05)
initial, runs = initial_parameters(784, setup.seed), []
for plan in plans(setup):
    notified = []
    runs.append(shell.train(setup, data, plan, initial, notified.append))
    ours, large = runs[-1], runs[0]
    assert list(ours.epochs) == notified and len(notified) == 2
    theirs = guide_torch.train(setup, data, plan, initial, lambda epoch: None)
    assert ours.updates == theirs.updates == 6, (plan, ours.updates)
    if single := ours.single_precision:  # then it is compared with its own large batch
        import keras
        assert keras.backend.backend() == "torch"  # where later versions of Keras multiply so
        theirs = large
    error = relative_error(ours.parameters, theirs.parameters)
    assert error <= (FLOAT32 if single else FLOAT64), (plan, error)
    if ours.first_gradients is not None:
        assert relative_error(ours.first_gradients, large.first_gradients) <= FLOAT64
    for mine, other in zip(ours.epochs, theirs.epochs, strict=True):
        assert abs(mine.test_loss - other.test_loss) <= (FLOAT32 if single else 1e-9), (plan, mine, other)
        assert round(40 * mine.accuracy, 5) == round(40 * other.accuracy), (plan, mine, other)  # of 40 pictures
print("equal")
"""


def program(framework, folder):
    """The file in which it stands."""
    path = folder / "experiment.py"
    path.write_text(PROGRAM.format(root=str(ROOT), framework=framework), encoding="utf-8")
    return path
