"""The Python of Keras' pages runs, the examples learn or compare what they say, and the demo's runs are PyTorch's."""

import pytest

from tests.demo.shells import program
from tests.documents import OF_KERAS, ROOT
from tests.keras.marks import BACKEND, compiled_on, slow_where_compiled

PAGES = [*sorted((ROOT / "docs").rglob("keras*.md")), *(OF_KERAS if BACKEND == "torch" else [])]


@pytest.fixture
def printed(fresh_process, tmp_path):
    """The lines that a page or a program prints."""

    def run(*program):
        done = fresh_process(program[0], tmp_path, *program[1:])
        assert done.ok, done.stderr
        return done.stdout.splitlines()

    return run


@compiled_on("tensorflow")  # for up to twenty seconds
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


@compiled_on("tensorflow")
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_quickly_and_prints_what_it_says(name, printed):
    EXAMPLES[name](printed(ROOT / "examples" / "keras" / name, "--quick"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_says_how_to_run_it(name):
    text = (ROOT / "examples" / "keras" / name).read_text()
    assert f"python examples/keras/{name} " in text
    assert "--quick" in text


@slow_where_compiled
def test_in_the_demo_accumulated_is_the_large_batch_and_each_run_is_pytorchs(tmp_path, printed):
    assert printed(program("keras", tmp_path))[-1] == "equal"
