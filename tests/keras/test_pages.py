"""The Python of Keras' pages runs, the examples learn or compare what they say, and the demo's runs are PyTorch's."""

import pytest

from tests.documents import OF_KERAS, ROOT
from tests.keras.marks import BACKEND, slow_where_compiled

PAGES = [*sorted((ROOT / "docs").rglob("keras*.md")), *(OF_KERAS if BACKEND == "torch" else [])]


@pytest.fixture
def printed(fresh_process, tmp_path):
    """The lines that a page or a program prints."""

    def run(*program):
        done = fresh_process(program[0], tmp_path, *program[1:])
        assert done.ok, done.stderr
        return done.stdout.splitlines()

    return run


@slow_where_compiled  # for up to twenty seconds
@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_pages_blocks_run(path, printed):
    printed(path)


def mlp(lines):
    assert "updates, test loss" in lines[-1]
    assert float(lines[-1].split()[-1].rstrip("%")) > 50


def vgg16(lines):
    assert lines[-1] == "2 updates of 4 pictures"


def batch_optimizer(lines):
    rows = [line.split() for line in lines if line.startswith("float")]
    assert [(dtype, powers) for dtype, _, _, powers, _ in rows] == [
        (dtype, powers) for dtype in ("float32", "float64") for powers in ("yes", "no")
    ]
    for dtype, *_, difference in rows:
        # On JAX and PyTorch, Keras' losses compute in single precision whatever is set.
        assert float(difference) <= (1e-12 if dtype == "float64" and BACKEND == "tensorflow" else 2e-6)


def contrastive(lines):
    large, chunked, naive = (float(line.split()[-1]) for line in lines[-3:])
    assert abs(large - chunked) <= 2e-4 < abs(large - naive)


EXAMPLES = {f"{check.__name__}.py": check for check in (mlp, vgg16, batch_optimizer, contrastive)}


@slow_where_compiled
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_quickly_and_prints_what_it_says(name, printed):
    EXAMPLES[name](printed(ROOT / "examples" / "keras" / name, "--quick"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_says_how_to_run_it(name):
    text = (ROOT / "examples" / "keras" / name).read_text()
    assert f"python examples/keras/{name} " in text
    assert "--quick" in text


DEMO = (
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
def test_in_the_demo_accumulated_is_the_large_batch_and_each_run_is_pytorchs(tmp_path, printed):
    """In a process of its own, as the command runs it."""
    (tmp_path / "experiment.py").write_text(DEMO, encoding="utf-8")
    assert printed(tmp_path / "experiment.py")[-1] == "equal"
