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
    model, optimizer = network(), keras.optimizers.SGD(0.1, use_ema=True)
    model.compile(optimizer=optimizer, loss="mse")
    model.train_on_batch(*regression(4))
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


def test_this_version_of_keras_has_every_private_name_that_is_used_and_a_missing_one_is_told_with_its_use():
    found = samples()
    assert private.missing(found) == []
    assert private.missing(found | {"metric": object()}) == [
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


def test_modules_that_do_without_private_names_of_keras_still_do():
    names, found = ["optimizers.py", "callbacks.py", "batch_optimizer.py"], []
    for path in [*(HOME / name for name in names), *sorted((HOME / "optimizer").rglob("*.py"))]:
        source = path.read_text()
        found += [f"{path.relative_to(HOME)}: keras.src"] * source.count("keras.src")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and node.attr[0] == "_" and node.attr[1] != "_":
                owner, of_named_tuples = ast.unparse(node.value), ("_replace", "_fields")
                if owner not in ("self", "super()", "torch") and node.attr not in of_named_tuples:
                    found.append(f"{path.relative_to(HOME)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []
