"""What is used of Keras beyond its public API is in one module, and all there."""

import ast
from pathlib import Path

import keras
import numpy as np

import gradaccum.keras
from gradaccum.keras import private
from tests.keras.problems import network, regression

HOME = Path(gradaccum.keras.__file__).parent


def samples():
    model, (x, y) = network(), regression(4)
    optimizer = keras.optimizers.SGD(0.1, use_ema=True)
    model.compile(optimizer=optimizer, loss="mse")
    model.train_on_batch(x, y)
    embedding = keras.layers.Embedding(2, 2)
    embedding.build()
    return {
        "model": model,
        "functional": private.functional_of(model),
        "losses": private.compiled_losses(model),
        "metric": keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error),
        "embedding": embedding,
        "variable": model.trainable_variables[0],
        "optimizer": optimizer,
        "EMA optimizer": optimizer,
    }


def test_this_version_of_keras_has_every_private_name_that_is_used():
    assert private.missing(samples()) == []


def test_a_missing_name_is_told_with_what_it_is_for():
    found = samples()
    found["metric"] = object()
    assert private.missing(found) == [
        f"Keras {keras.version()} has no _fn in its metric: the function that a metric averages."
    ]


def test_what_private_names_tell_agrees_with_public_ones():
    model = samples()["model"]
    assert set(private.layers_in(model)) >= set(model.layers)
    assert not list(private.inside(model.layers[0]))
    assert private.takes_training(keras.layers.Dropout(0.5))
    assert not private.takes_training(keras.layers.Flatten())
    assert private.loss_tracker(model).name == "loss"
    assert private.is_of_keras(keras.losses.MeanSquaredError)
    assert not private.is_of_keras(np.mean)


ADOPTED = ["optimizer", "optimizers.py", "callbacks.py", "batch_optimizer.py"]  # modules and wings that do without


def test_no_other_module_uses_private_names_of_keras():
    modules = [HOME / name for name in ADOPTED if name.endswith(".py")]
    modules += [path for name in ADOPTED for path in sorted((HOME / name).rglob("*.py"))]
    found = []
    for path in modules:
        source = path.read_text()
        found += [f"{path.relative_to(HOME)}: keras.src"] * source.count("keras.src")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and node.attr[0] == "_" and node.attr[1] != "_":
                owner = ast.unparse(node.value)
                if owner not in ("self", "super()", "torch") and node.attr not in (
                    "_replace",
                    "_fields",
                ):  # a named tuple's
                    found.append(f"{path.relative_to(HOME)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []
