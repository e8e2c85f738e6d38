"""Where the axis of the rows goes, as arrays are reshaped, reduced, multiplied, cut and joined."""

from __future__ import annotations

import math
from typing import Any

from gradaccum.jax.loss.values import CannotTell, MixesRows, Place

__all__ = [
    "broadcast",
    "concatenated",
    "contracted",
    "convolved",
    "gathered",
    "reduced",
    "reshaped",
    "sliced",
    "transposed",
]

Shape = tuple[int, ...]


def reshaped(place: Place, old: Shape, new: Shape, rows: int) -> Place:
    """The rows of an array of shape `old`, in the shape `new`."""
    before = math.prod(old[: place.axis]) * place.outer
    after = place.inner * math.prod(old[place.axis + 1 :])
    for axis, length in enumerate(new):
        ahead, behind = math.prod(new[:axis]), math.prod(new[axis + 1 :])
        if ahead and behind and before % ahead == 0 and after % behind == 0:
            outer, inner = before // ahead, after // behind
            if outer * rows * inner == length:
                return Place(axis, outer, inner)
    raise MixesRows("reshape")


def transposed(place: Place, permutation: tuple[int, ...]) -> Place:
    """After a transposition."""
    return place._replace(axis=permutation.index(place.axis))


def broadcast(place: Place, dimensions: tuple[int, ...]) -> Place:
    """After `broadcast_in_dim`."""
    return place._replace(axis=dimensions[place.axis])


def reduced(place: Place, axes: tuple[int, ...]) -> Place | None:
    """After a reduction of these axes; None if the rows are among them."""
    if place.axis in axes:
        return None
    return place._replace(axis=place.axis - sum(axis < place.axis for axis in axes))


def sliced(place: Place, start: Shape, limit: Shape, strides: Shape | None, length: int, rows: int) -> Place:
    """A part of an array: all of its rows, or whole blocks of rows where there are several."""
    axis = place.axis
    first, last = start[axis], limit[axis]
    if strides is not None and strides[axis] != 1:
        raise MixesRows("slice")
    if (first, last) == (0, length):
        return place
    block = rows * place.inner
    if first % block or last % block:
        raise MixesRows("slice")
    return place._replace(outer=(last - first) // block)


def concatenated(places: list[Place | None], dimension: int) -> Place:
    """Arrays behind each other."""
    found = [place for place in places if place is not None]
    kinds = {place._replace(outer=1) for place in found}
    if len(kinds) > 1:
        raise MixesRows("concatenate")
    if found[0].axis != dimension:
        if len(set(found)) > 1:
            raise MixesRows("concatenate")
        return found[0]
    if len(found) < len(places):
        raise CannotTell("concatenate")
    return found[0]._replace(outer=sum(place.outer for place in found))


def contracted(
    left: Place | None, right: Place | None, dimensions: Any, ranks: tuple[int, int]
) -> tuple[Place | None, bool]:
    """Where a `dot_general` has its rows, and whether it has summed over them."""
    (contract_left, contract_right), (batch_left, batch_right) = dimensions
    if left is not None and right is not None:
        for pairs, summed in (((batch_left, batch_right), False), ((contract_left, contract_right), True)):
            if left.axis in pairs[0] and right.axis == pairs[1][pairs[0].index(left.axis)]:
                if left[1:] != right[1:]:
                    raise MixesRows("dot_general")
                return (None, True) if summed else (left._replace(axis=pairs[0].index(left.axis)), False)
        raise MixesRows("dot_general")
    place, mine, batch, start = (
        (left, contract_left, batch_left, 0)
        if left is not None
        else (right, contract_right, batch_right, ranks[0] - len(contract_left) - len(batch_left))
    )
    assert place is not None
    if place.axis in mine or place.axis in batch:
        raise CannotTell("dot_general")
    free = [axis for axis in range(ranks[0] if left is not None else ranks[1]) if axis not in (*mine, *batch)]
    return place._replace(axis=len(batch) + start + free.index(place.axis)), False


def convolved(
    left: Place | None, right: Place | None, params: dict[str, Any], shapes: list[Shape], groups_grow: bool
) -> tuple[Place | None, bool]:
    """Where a `conv_general_dilated` has its rows, and whether it has summed over them.

    Args:
        left, right: Where image and kernel have them.
        params: The equation's.
        shapes: Of image and kernel.
        groups_grow: Whether there are as many groups as rows.
    """
    numbers, of_features, of_batch = (
        params[name] for name in ("dimension_numbers", "feature_group_count", "batch_group_count")
    )
    (batch, feature, *space), (to, by, *window) = numbers.lhs_spec, numbers.rhs_spec
    out_batch, out_feature, *out_space = numbers.out_spec
    groups = of_features * of_batch  # one of them is 1
    if right is not None and right.axis == to:
        outer, inner = right[1:]
        if left is None and not groups_grow and outer % groups == 0:
            return right._replace(axis=out_feature), False
        if left is not None and groups_grow and left.axis == (feature if of_batch == 1 else batch):
            length = shapes[0][left.axis] // groups  # of a group, which is a row's
            if left.outer == outer and left.inner * (shapes[1][to] // groups) == inner * length:
                return right._replace(axis=out_feature), False
    elif right is not None and left is not None and (left.axis, right.axis) == (feature, by):
        if left == Place(feature, right.outer * of_features, right.inner):
            return None, True
    elif left is not None and right is None and left.axis == batch:
        if left.outer % of_batch == 0:
            return Place(out_batch, left.outer // of_batch, left.inner), False
    elif left is not None and right is None and left.axis in space:
        n = space.index(left.axis)
        alone = shapes[1][window[n]] == params["window_strides"][n] == params["lhs_dilation"][n] == 1
        if alone and tuple(params["padding"][n]) == (0, 0):
            return left._replace(axis=out_space[n]), False
    raise MixesRows("conv_general_dilated")


def gathered(
    operand: Place | None, indices: Place | None, params: dict[str, Any], shape: Shape, rank: int, counts_rows: Any
) -> Place | None:
    """Where the result of a `gather` has its rows.

    Args:
        operand, indices: Where these have them.
        params: The equation's.
        shape: Of the operand.
        rank: Of the result.
        counts_rows: Says of a component of the indices whether it is the number of the row.
    """
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    batch_axes = [axis for axis in range(rank) if axis not in numbers.offset_dims]
    from_indices = None if indices is None else indices._replace(axis=batch_axes[indices.axis])
    if operand is None:
        return from_indices
    axis = operand.axis
    if axis in numbers.operand_batching_dims:
        other = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
        if indices is None or indices != operand._replace(axis=other):
            raise MixesRows("gather")
        return from_indices
    if sizes[axis] == shape[axis]:
        if indices is not None:
            raise MixesRows("gather")
        kept = [
            n for n in range(len(shape))
            if n not in numbers.collapsed_slice_dims and n not in numbers.operand_batching_dims
        ]  # fmt: skip
        return operand._replace(axis=numbers.offset_dims[kept.index(axis)])
    if axis in numbers.start_index_map and sizes[axis] == 1 and operand[1:] == (1, 1):  # noqa: SIM102  # else too long
        if counts_rows(numbers.start_index_map.index(axis)):
            return from_indices
    raise MixesRows("gather")
