"""What is used of Keras beyond its public API: each name, what for, and a public way to go on where there is one.

Others write `private.layers_in(model)`: no other module of `gradaccum.keras` imports `keras.src`, or touches a private
attribute of an object of Keras'. `NAMES` lists them all, and `missing` says which another version of Keras lacks.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras

from gradaccum.extras import PrivateName

NAMES: tuple[PrivateName, ...] = (
    PrivateName("model", "_flatten_layers", "every layer of a model, nested ones too"),
    PrivateName("model", "_layers", "the layers directly inside: a layer without any is a leaf"),
    PrivateName("model", "_functional", "the graph of a sequential model"),
    PrivateName("functional", "_nodes_by_depth", "the calls of a functional model, in their order"),
    PrivateName("functional", "_standardize_inputs", "a functional model's inputs as it takes them", "as they are"),
    PrivateName("model", "_call_has_training_arg", "whether call() takes `training`", "the signature of call()"),
    PrivateName("model", "_trainable_variables", "a layer's own variables, frozen ones too"),
    PrivateName("model", "_symbolic_build", "builds model, losses and metrics from one batch, without running it"),
    PrivateName("model", "_compile_loss", "the compiled losses of a model"),
    PrivateName("model", "_compile_metrics", "the compiled metrics of a model"),
    PrivateName("model", "_loss_tracker", "the metric that fit() logs as `loss`", "the metric of that name"),
    PrivateName("model", "_compute_loss", "calls a compute_loss() without `training` too", "compute_loss()"),
    PrivateName("losses", "_flat_losses", "the losses of all outputs in a row, each with its weight"),
    PrivateName("losses", "_metrics", "the trackers with which fit() logs each of several losses"),
    PrivateName("metric", "_fn", "the function that a metric averages"),
    PrivateName("embedding", "_embeddings", "the table itself, where `embeddings` is merged with an adapter"),
    PrivateName("variable", "_value", "puts a value back that fit() on JAX took out of a variable"),
    PrivateName("jax: variable", "_layout", "how keras.distribution spreads a variable over devices"),
    PrivateName("optimizer", "_iterations", "the wrapper leaves the count of its own out of its variables"),
    PrivateName("optimizer", "_trainable_variables", "stateless_apply() checks and maps them"),
    PrivateName("optimizer", "_trainable_variables_indices", "whether an optimizer knows a variable"),
    PrivateName("optimizer", "_variables", "the wrapper's own variables, next to the inner optimizer's"),
    PrivateName("EMA optimizer", "_model_variables_moving_average", "SwapEMAWeights reads it from the wrapper"),
    PrivateName("keras.src.backend", "get_keras_mask", "the mask that travels with a tensor", "its attribute"),
    PrivateName("keras.src.backend", "set_keras_mask", "the same", "its attribute"),
    PrivateName("keras.src.backend.common.global_state", "get_global_attribute", "a forward pass that is run again"),
    PrivateName("keras.src.backend.common.global_state", "set_global_attribute", "the same"),
    PrivateName("keras.src.losses.loss", "squeeze_or_expand_to_same_rank", "how a loss multiplies mask and weights"),
    PrivateName("keras.src.losses.loss", "reduce_weighted_values", "a loss's weighted sum, before it is divided"),
    PrivateName("keras.src.losses.loss", "scale_loss_for_distribution", "divides a loss by the number of replicas"),
    PrivateName("keras.src.losses.loss", "unscale_loss_for_distribution", "what fit() logs on several replicas"),
    PrivateName("keras.src.backend", "random", "holds random numbers while an update is proved"),
    PrivateName("torch: keras.src.backend.torch.core", "get_device", "where PyTorch's tensors are made"),
    PrivateName("tensorflow: optimizer", "_distribution_strategy", "the strategy that an optimizer was made under"),
)
"""All of them. Modules and objects of one backend only are marked with it."""


def missing(samples: Mapping[str, Any]) -> list[str]:
    """Which of `NAMES` this version of Keras lacks, a sentence each."""
    sentences = []
    for name in NAMES:
        backend, _, kind = name.owner.rpartition(": ")
        if backend not in ("", keras.backend.backend()):
            continue
        owner = _module(kind) if kind.startswith("keras.") else samples[kind]
        sentences.append(name._replace(owner=kind).missing_from(owner, f"Keras {keras.version()}"))
    return [sentence for sentence in sentences if sentence is not None]


def _module(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ImportError:
        return None


# Functions.


def _function(path: str, name: str, otherwise: Callable[..., Any] | None = None) -> Any:
    return getattr(_module(path), name, otherwise)


# keras_mask(tensor): the mask that travels with a tensor, or None; set_keras_mask(tensor, mask) lets one travel.
keras_mask = _function("keras.src.backend", "get_keras_mask", lambda tensor: getattr(tensor, "_keras_mask", None))
set_keras_mask = _function(
    "keras.src.backend", "set_keras_mask", lambda tensor, mask: setattr(tensor, "_keras_mask", mask)
)
# (mask, sample_weight): both, so that a loss can multiply them.
squeeze_or_expand_to_same_rank = _function("keras.src.losses.loss", "squeeze_or_expand_to_same_rank")
# (values, sample_weight, mask, reduction, dtype): what a loss makes of its values.
reduce_weighted_values = _function("keras.src.losses.loss", "reduce_weighted_values")
# (loss): divided by the number of replicas, whose gradients are added; and back.
scale_loss_for_distribution = _function("keras.src.losses.loss", "scale_loss_for_distribution")
unscale_loss_for_distribution = _function("keras.src.losses.loss", "unscale_loss_for_distribution")


def torch_device() -> str:
    """Where Keras on PyTorch makes its tensors."""
    return _function("keras.src.backend.torch.core", "get_device")()


def random_functions() -> Any:
    """The module in which Keras' layers and `keras.random` look for the backend's random functions."""
    return _function("keras.src.backend", "random")


# What surrounds the call of a layer.


def _surrounding(name: str) -> Any:
    return _function("keras.src.backend.common.global_state", "get_global_attribute")(name)


@contextlib.contextmanager
def surroundings(attributes: Mapping[str, Any]) -> Iterator[None]:
    """While this is open, Keras' global attributes are these."""
    put = _function("keras.src.backend.common.global_state", "set_global_attribute")
    found = {name: _surrounding(name) for name in attributes}
    for name, value in attributes.items():
        put(name, value)
    try:
        yield
    finally:
        for name, value in found.items():
            put(name, value)


def surroundings_of_call() -> dict[str, Any]:
    """What the layers inside of a call find around them: its `training`, and the dtype that variables are cast to."""
    return {name: _surrounding(name) for name in ("current_call_ctx", "autocast_scope")}


def training_of_call() -> Any:
    """Whether the call of a layer that runs is one in training, as the layers around it were told."""
    return getattr(_surrounding("current_call_ctx"), "training", None)


def outside_of_scopes() -> Any:
    """While this is open, variables hold their own values and may be assigned, and a batch is on one device."""
    return surroundings({"stateless_scope": None, "symbolic_scope": None, "distribution": None})


def is_symbolic() -> bool:
    """Whether a layer is called for the shapes of its outputs alone."""
    return _surrounding("symbolic_scope") is not None


def in_stateless_scope() -> bool:
    """Whether variables are given values by a `keras.StatelessScope`, which keeps what is assigned."""
    return _surrounding("stateless_scope") is not None


def uncast_values(variables: Iterable[Any]) -> list[Any]:
    """The values of variables in their own dtype, inside a call with mixed precision, too."""
    with surroundings({"autocast_scope": None}):
        return [variable.value for variable in variables]


@contextlib.contextmanager
def replaced(thing: Any, **attributes: Any) -> Iterator[None]:
    """While this is open, these are attributes of an object, past Keras' tracking of what is set."""
    own = {name: vars(thing)[name] for name in attributes if name in vars(thing)}
    vars(thing).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            vars(thing).pop(name, None)
        vars(thing).update(own)


# Models and layers.


def layers_in(model: Any) -> list[Any]:
    """Every layer of a model, nested ones too, without the model itself."""
    return list(model._flatten_layers(include_self=False))


def inside(layer: Any) -> list[Any]:
    """The layers and operations directly inside a layer; none in an operation."""
    return [*getattr(layer, "_layers", ()), *getattr(layer, "operations", ())]


def functional_of(model: Any) -> Any:
    """The functional model that a functional or sequential one computes by; None of another."""
    functional = getattr(model, "_functional", None) if isinstance(model, keras.Sequential) else model
    if functional is None or not hasattr(functional, "_nodes_by_depth"):
        return None
    kinds: list[Any] = [
        one for one in type(functional).__mro__ if is_of_keras(one) and "_standardize_inputs" in vars(one)
    ]
    known = (keras.Sequential.call, (kinds or [keras.Model])[0].call)
    return functional if type(model).call in known else None


def nodes_of(functional: Any) -> Iterator[tuple[Any, Any, Any, list[Any]]]:
    """The calls of a functional model in their order: the operation, its arguments, and its outputs, symbolic."""
    for _, nodes in sorted(functional._nodes_by_depth.items(), reverse=True):
        for node in nodes:
            if node.operation is not None and not node.is_input:
                yield node.operation, node.arguments.args, node.arguments.kwargs, list(node.outputs)


def standardized_inputs(functional: Any, inputs: Any) -> list[Any]:
    """The inputs of a functional model, flat, as it takes them."""
    return functional._standardize_inputs(inputs)


own_trainable_variables = operator.attrgetter("_trainable_variables")
"""`(layer)`: its own variables that train unless they are frozen, without those of the layers inside."""


def takes_training(layer: Any) -> bool:
    """Whether `layer.call` takes `training`."""
    if hasattr(layer, "_call_has_training_arg"):
        return layer._call_has_training_arg
    return "training" in inspect.signature(layer.call).parameters


def is_of_keras(thing: Any) -> bool:
    """Whether a class or function is Keras' own."""
    return thing.__module__.startswith("keras.src.")


embedding_table = operator.attrgetter("_embeddings")
"""`(embedding)`: its table, a variable."""


def stateful_layers(model: Any) -> list[Any]:
    """Layers that keep a state of each row of a batch."""
    return [layer for layer in layers_in(model) if getattr(layer, "stateful", False)]


def build_symbolically(model: Any, data: Any) -> None:
    """Build a compiled model with its losses and metrics for batches like this, without running it."""
    model._symbolic_build(data_batch=data)


def compiled_losses(model: Any) -> Any:
    """The losses that a model was compiled with, one callable; or None."""
    return getattr(model, "_compile_loss", None)  # a layer has none


compiled_metrics = operator.attrgetter("_compile_metrics")
"""`(model)`: the metrics that it was compiled with, one object; or None."""


def loss_tracker(model: Any) -> Any:
    """The metric that `fit` logs as `loss`."""
    if hasattr(model, "_loss_tracker"):
        return model._loss_tracker
    return next(metric for metric in model.metrics if metric.name == "loss")


def compute_loss(model: Any, **arguments: Any) -> Any:
    """`model.compute_loss`, also where the user's own takes no `training`."""
    return getattr(model, "_compute_loss", model.compute_loss)(**arguments)


def loss_entries(losses: Any) -> list[Any]:
    """The losses of all outputs in a row: named tuples with `.loss` and `.name`; none before they are first called."""
    return (losses and losses._flat_losses) or []


@contextlib.contextmanager
def replaced_losses(
    losses: Any, entry: Callable[[int, Any], Any], tracker: Callable[[int, Any], Any]
) -> Iterator[None]:
    """While this is open, `entry(index, loss)` and `tracker(index, tracker)` stand in for each compiled loss."""
    if losses is None or losses._flat_losses is None:  # never called: a model's own compute_loss() does without them
        yield
        return
    entries = [one._replace(loss=entry(index, one.loss)) for index, one in enumerate(losses._flat_losses)]
    trackers = [tracker(index, one) for index, one in enumerate(losses._metrics)]
    with replaced(losses, _flat_losses=entries, _metrics=trackers):
        yield


def metric_function(metric: Any) -> Any:
    """The function that a metric averages; None where it isn't one that does."""
    return getattr(metric, "_fn", None)


# Variables and optimizers.


def has_value(variable: Any) -> bool:
    """Whether a variable holds its value, asked outside of graphs.

    `fit` on JAX takes the values out while it trains, and what TensorFlow makes while it traces has none yet.
    """
    is_initialized = getattr(variable._value, "is_initialized", None)
    return variable._value is not None and (is_initialized is None or bool(is_initialized()))


def put_value(variable: Any, value: Any) -> None:
    """Put a value back that `fit` took out, unchecked."""
    variable._value = value


def layout_of(variable: Any) -> Any:
    """How `keras.distribution` spreads a variable over devices; None where it doesn't."""
    return getattr(variable, "_layout", None)


def is_built_for(optimizer: Any, variables: Sequence[Any]) -> bool:
    """Whether an optimizer that is built trains these variables, in this order."""
    return [id(variable) for variable in optimizer._trainable_variables] == [id(variable) for variable in variables]


def averages_of(optimizer: Any) -> Any:
    """The moving averages that `use_ema` keeps of the variables; None where there are none."""
    return vars(optimizer).get("_model_variables_moving_average")


def lend_averages(optimizer: Any, averages: Any) -> None:
    """Let SwapEMAWeights find these where it looks, past Keras' tracking of attributes."""
    vars(optimizer)["_model_variables_moving_average"] = averages


def is_overwritten(variable: Any) -> bool:
    """Whether its "gradient" is its next value, such as the largest entry seen (float8 scaling)."""
    return getattr(variable, "overwrite_with_gradient", False)


strategy_of = operator.attrgetter("_distribution_strategy")
"""`(optimizer)`: the `tf.distribute` strategy that one on TensorFlow was made under."""
