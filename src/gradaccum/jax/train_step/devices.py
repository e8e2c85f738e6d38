"""A batch whose type says that its rows are on several devices: each sums its own, and they are added up once."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from gradaccum.jax.train_step.call import Call

logger = logging.getLogger("gradaccum")


def data_axes(call: Call) -> tuple[str, ...]:
    """The mesh axes, of type Explicit, that the rows are spread over, where each device can do its own rows alone.

    Not where parameters are spread over devices, too, nor where micro-batches hand on a state: that of BatchNorm is to
    see the rows of all devices.
    """
    options = call.options
    if options.state_argnum is not None or "last" in jax.tree.leaves(options.aux):
        return ()
    leaves, places, _ = call.leaves()
    found = {_spread(leaf)[axis] for leaf, axis in zip(leaves, places) if axis is not None}
    axes = found.pop() if len(found) == 1 else ()
    for leaf, axis in zip(leaves, places):
        spread = [name for names in _spread(leaf) for name in names] if hasattr(leaf, "shape") else []
        if spread and (axis is None or spread != list(axes)):
            return ()
    return axes


def on_each_device(call: Call, axes: tuple[str, ...], compute: Callable[[Call], Any]) -> Any:
    """What `compute` gives for the call's arguments, on every device for the rows that it has."""
    leaves, places, _ = call.leaves()
    mesh = next(jax.typeof(leaf).sharding.mesh for leaf, axis in zip(leaves, places) if axis is not None)
    arrays = call.arrays()
    specs = tuple(_spec(places[number], axes) for number in arrays)

    def on_one_device(*values: Any) -> Any:
        args, kwargs = call.filled(arrays, values)
        if call.options.rng_argnum is not None:
            index = jax.lax.axis_index(axes)
            number = call.options.rng_argnum
            key = jax.tree.map(lambda key: jax.random.fold_in(key, index), args[number])
            args = (*args[:number], key, *args[number + 1 :])
        return compute(Call(call.options, args, kwargs, axes=axes, devices=math.prod(mesh.shape[n] for n in axes)))

    try:
        return jax.shard_map(
            on_one_device,
            mesh=mesh,
            in_specs=specs,
            out_specs=_results(call, axes),
            axis_names=set(axes),
            check_vma=False,  # the sums are added up in one place, and a loss may begin loops with plain zeros
        )(*(leaves[number] for number in arrays))
    except Exception as error:
        result = compute(call)  # an error of the loss itself is raised here
        logger.info(
            "gradaccum.jax: gradients are added up over devices once per micro-batch, because loss_fn can't be traced "
            "for the rows of one device: %s",
            str(error).partition("\n")[0],
        )
        return result


def _spread(leaf: Any) -> list[tuple[str, ...]]:
    """For each dimension of an array, the axes of type Explicit that it is spread over."""
    kind = jax.typeof(leaf)
    mesh = getattr(getattr(kind, "sharding", None), "mesh", None)
    if mesh is None or mesh.empty or any(each != AxisType.Explicit for each in mesh.axis_types):
        return [()] * len(kind.shape)
    names = [part if isinstance(part, tuple) else (part,) for part in kind.sharding.spec]
    return [tuple(name for name in part if name is not None and mesh.shape[name] > 1) for part in names]


def _spec(axis: int | None, axes: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec() if axis is None else PartitionSpec(*(None,) * axis, axes)


def _results(call: Call, axes: tuple[str, ...]) -> Any:
    """How what `accumulated` returns is spread: losses, state, aux, gradients, norms."""
    options = call.options
    hows = jax.tree.map(lambda how: _spec(0 if how == "concat" else None, axes), options.aux)
    gradients = []
    for number in options.differentiated:
        structure = jax.tree.structure(call.args[number])
        places: list[int | None] = [None] * structure.num_leaves
        if number in options.batches:
            places = call.batch.axes_of(options.batches.index(number))
        gradients.append(jax.tree.unflatten(structure, [_spec(axis, axes) for axis in places]))
    return PartitionSpec(), PartitionSpec(), hows, tuple(gradients), PartitionSpec()
