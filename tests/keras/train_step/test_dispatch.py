"""One device dispatch per update where the backend compiles: a loop on the device, traced once for each shape."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
from keras import layers, losses

from gradaccum.keras.micro_batched import micro_batched
from gradaccum.keras.train_step.proof import Proof
from tests.keras.marks import BACKEND
from tests.keras.problems import Traced

if BACKEND == "torch":
    pytest.skip("PyTorch runs a loop of Python's", allow_module_level=True)

ROWS, UPDATES = 24, 3
random = np.random.default_rng(5)
X, Y = random.normal(size=(ROWS, 5)).astype("float32"), random.normal(size=(ROWS, 3)).astype("float32")


def compiled(micro_batch_size, verify=False):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([layers.Input((5,)), Traced(7, activation="tanh"), layers.Dense(3)])
    model = micro_batched(model, micro_batch_size, verify=verify)
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", jit_compile=BACKEND == "jax")
    return model


def fit(model, updates):
    """Train for so many updates; how often Python ran through the model."""
    before = Traced.runs
    model.fit(np.tile(X, (updates, 1)), np.tile(Y, (updates, 1)), batch_size=ROWS, verbose=0)
    return Traced.runs - before


def test_python_runs_through_the_model_no_more_often_for_more_micro_batches_or_updates():
    traces = {size: fit(compiled(size), UPDATES) for size in (4, 1)}
    assert len(set(traces.values())) == 1, traces
    model = compiled(4)
    assert fit(model, 1) == traces[4]
    assert fit(model, UPDATES) == 0


def test_updates_that_are_proved_and_ordinary_ones_run_one_compiled_function(monkeypatch):
    inside, run = [0], Proof.run

    def counting(proof, *args):
        before = Traced.runs
        run(proof, *args)
        inside[0] += Traced.runs - before

    monkeypatch.setattr(Proof, "run", counting)
    runs = fit(compiled(4), 9)
    with_proofs = compiled(4, verify=True)
    assert fit(with_proofs, 9) - inside[0] <= runs
    inside[0] = 0
    assert fit(with_proofs, 9) == inside[0], "nothing is traced anew"


def program_on_jax(micro_batch_size, masked):
    """As text."""
    import jax

    keras.utils.set_random_seed(0)
    first = [layers.Masking(), layers.Dense(4)] if masked else [layers.Dense(4)]
    model = micro_batched(keras.Sequential([layers.Input((2, 5)), *first]), micro_batch_size, verify=False)
    reduction = "mean_with_sample_weight" if masked else "sum_over_batch_size"
    model.compile(optimizer="adam", loss=losses.MeanSquaredError(reduction=reduction))
    data = (np.ones((ROWS, 2, 5), "float32"), np.ones((ROWS, 2, 4), "float32"))
    model._symbolic_build(data_batch=data)
    parts = (model.trainable_variables, model.non_trainable_variables, model.optimizer.variables)
    state = tuple([v.value for v in part] for part in (*parts, model.metrics_variables))
    return str(jax.make_jaxpr(model.train_step)(state, data))


@pytest.mark.skipif(BACKEND != "jax", reason="JAX's")
@pytest.mark.parametrize("masked", [False, True])
def test_the_program_holds_one_loop_over_the_micro_batches_whatever_their_number(masked):
    programs = {size: program_on_jax(size, masked) for size in (12, 4, 1)}
    assert len({program.count(" = ") for program in programs.values()}) == 1, "as many operations"
    for size, program in programs.items():
        # With a mask a second one counts what it lets through.
        assert re.findall(r"length=(\d+)", program) == [str(ROWS // size)] * (1 + masked)
        products = re.findall(r"\w+:f32\[(\d+),[^\]]*\] = dot_general", program)
        assert products
        assert str(ROWS) not in products, "the model runs in the loop"
