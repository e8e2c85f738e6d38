"""The experiment's Keras side: in a process of its own, as the command runs it."""

from tests.documents import ROOT
from tests.keras.problems import slow_where_compiled

PROGRAM = (
    f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
"""
    + """
import keras
from tests.demo import fashion_mnist
from tests.reference import FLOAT32, FLOAT64, relative_error

from examples.demo import guide_keras, guide_torch
from examples.demo.guide import Setup, initial_parameters, plans

data = fashion_mnist.data()
setup = Setup("keras", batch_size=32, steps=4, epochs=2, dtype="float64", learning_rate=0.05)
initial = initial_parameters(784, setup.seed)
large = None
for plan in plans(setup):
    notified = []
    ours = guide_keras.train(setup, data, plan, initial, notified.append)
    single = ours.single_precision  # then it is compared with its own large batch
    assert not single or keras.backend.backend() == "torch"  # where later versions of Keras multiply so
    assert list(ours.epochs) == notified and len(notified) == 2
    theirs = guide_torch.train(setup, data, plan, initial, lambda epoch: None)
    assert ours.updates == theirs.updates, (plan, ours.updates)
    large = large or ours
    if single:
        if plan.key != "b":
            continue
        theirs = large
    error = relative_error(ours.parameters, theirs.parameters)
    assert error <= (FLOAT32 if single else FLOAT64), (plan, error)
    for mine, other in zip(ours.epochs, theirs.epochs, strict=True):
        assert abs(mine.test_loss - other.test_loss) <= (FLOAT32 if single else 1e-9), (plan, mine, other)
        assert mine.accuracy == other.accuracy, (plan, mine, other)
print("equal")
"""
)


@slow_where_compiled
def test_accumulated_is_the_large_batch_and_each_run_is_pytorchs(tmp_path, fresh_process):
    (tmp_path / "experiment.py").write_text(PROGRAM, encoding="utf-8")
    done = fresh_process(tmp_path / "experiment.py", tmp_path)
    assert done.ok, done.stderr
    assert done.stdout.splitlines()[-1] == "equal"
