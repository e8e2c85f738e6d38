"""Random windows: ragged rows, rows not known, None gradients, new steps, flushes, and saving anywhere."""

import numpy as np
import pytest

from gradaccum.keras.optimizers import Optimizer
from tests.keras.problems import SHAPES, adam, compiled_on, micro_gradients, sgd, slow, train_by_hand, variables_like
from tests.reference import relative_error


class Oracle:
    """What a window of micro-batches has seen, and the large batch's gradient: in numpy."""

    def __init__(self, inner, variables, steps):
        self.inner, self.variables = inner, variables
        self.steps = self.next_steps = steps
        self.held = []
        self.updates = 0
        inner.build(variables)

    def add(self, gradients, rows):
        if rows is None:
            weights = [weight for _, weight, _ in self.held]
            rows_of_others = sum(weights) / len(weights) if weights else 1
            self.held.append((gradients, int(rows_of_others + 0.5), any(known for *_, known in self.held)))
        else:
            if not any(known for *_, known in self.held):
                self.held = [(some, rows, True) for some, _, _ in self.held]
            self.held.append((gradients, rows, True))
        if len(self.held) >= self.steps:
            self.close()

    def close(self):
        weights = [weight for _, weight, _ in self.held]
        mean = []
        for index, shape in enumerate(SHAPES):
            some = [gradients[index] for gradients, _, _ in self.held]
            absent = all(gradient is None for gradient in some)
            filled = [np.zeros(shape) if gradient is None else gradient for gradient in some]
            mean.append(None if absent else np.average(filled, axis=0, weights=weights))
        if any(gradient is not None for gradient in mean):
            train_by_hand(self.inner, self.variables, [mean], by="eager")
            self.updates += 1
        self.held, self.steps = [], self.next_steps


def copied(optimizer, make, steps, variables):
    """Another optimizer that was loaded from what this one saves."""
    store = {}
    optimizer.save_own_variables(store)
    other = Optimizer(make(), steps)
    other.build(variables)
    other.load_own_variables(store)
    return other


def run(seed, bound):
    random = np.random.default_rng(seed)
    make = [sgd, adam][random.integers(2)]
    steps = int(random.integers(1, 6))
    known = random.choice(["always", "never", "sometimes"])
    variables, expected = variables_like(SHAPES), variables_like(SHAPES)
    optimizer, oracle = Optimizer(make(), steps), Oracle(make(), expected, steps)
    for index, gradients in enumerate(micro_gradients(int(random.integers(5, 16)), seed)):
        absent = random.random(len(SHAPES)) < random.choice([0.0, 0.4])
        absent[random.integers(len(SHAPES))] = False
        gradients = [None if none else gradient for none, gradient in zip(absent, gradients)]
        rows = (
            int(random.integers(1, 9))
            if known == "always" or (known == "sometimes" and random.random() < 0.5)
            else None
        )
        with optimizer.window.with_rows(0, rows):
            train_by_hand(optimizer, variables, [gradients], by="eager")
        oracle.add(gradients, rows)
        assert optimizer.micro_batches == len(oracle.held), f"seed {seed}, micro-batch {index}"
        assert (optimizer.updated, optimizer.steps) == (not oracle.held, oracle.steps), f"seed {seed}, {index}"
        event = random.random()
        if event < 0.1:
            assert optimizer.flush() == bool(oracle.held)
            assert optimizer.updated
            if oracle.held:
                oracle.close()
        elif event < 0.3:
            optimizer = copied(optimizer, make, steps, variables)
        elif event < 0.4:  # inside a window: from the next one on
            optimizer.steps = oracle.next_steps = steps = int(random.integers(1, 6))
            oracle.steps = oracle.steps if oracle.held else steps
        assert relative_error(variables, expected) <= bound, f"seed {seed}, micro-batch {index}"
    assert int(optimizer.iterations) == oracle.updates


@compiled_on("tensorflow")
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    "seed", [0, *map(slow, range(1, 8)), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 300))]
)
def test_random_windows_are_the_large_batches(seed, bound):
    run(seed, bound)
