"""One call of the user's loss on a micro-batch: its arguments in, losses, weights, state and aux out, checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gradaccum.jax.batch import NEED_VALUES, Batch, Group, as_varying, varying_axes
from gradaccum.jax.train_step.options import Options


class Outcome(NamedTuple):
    """What one call of the loss gave."""

    losses: dict[str, Any]
    """Scalars; by the name "" where the loss is one number."""
    weights: dict[str, Any]
    """What each is a mean over; empty where the loss is one number."""
    state: Any
    aux: Any


class Call:
    """The loss with the arguments of one call of `value_and_grad`."""

    def __init__(
        self,
        options: Options,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: Batch | None = None,
        axes: tuple[str, ...] = (),
        devices: int = 1,
    ) -> None:
        self.options = options = options.of(args, kwargs)
        self.args = args
        self.kwargs = kwargs
        self.axes = axes
        self.devices = devices
        numbers = options.batches
        names = ("batch",) if len(numbers) == 1 else tuple(f"argument {number}" for number in numbers)
        self.batch = batch or Batch(tuple(args[number] for number in numbers), options.axes, names)
        self.state = None if options.state_argnum is None else args[options.state_argnum]
        self.key = None if options.rng_argnum is None else args[options.rng_argnum]
        wrong = [leaf for leaf in jax.tree.leaves(self.key) if not _is_key(leaf)]
        if wrong or (options.rng_argnum is not None and not jax.tree.leaves(self.key)):
            raise TypeError(
                "`rng_argnum` must name a key, or a pytree of keys, such as jax.random.key(0). Received: "
                f"{_kind(wrong[0] if wrong else self.key)}."
            )

    def arguments(self, micro_batch: tuple[Any, ...], state: Any, key: Any) -> list[Any]:
        """The arguments for one micro-batch."""
        values = list(self.args)
        for number, argument in zip(self.options.batches, micro_batch, strict=True):
            values[number] = argument
        if self.options.state_argnum is not None:
            values[self.options.state_argnum] = state
        if self.options.rng_argnum is not None:
            values[self.options.rng_argnum] = key
        return values

    def replaced(self, number: int, argument: Any) -> Call:
        """The same call with another argument."""
        args = (*self.args[:number], argument, *self.args[number + 1 :])
        return Call(self.options, args, self.kwargs, self.batch, self.axes, self.devices)

    def leaves(self) -> tuple[list[Any], list[int | None], Any]:
        """The leaves of all arguments and keywords, the axis of each one's rows, if it has any, and their structure."""
        return self.batch.with_others(self.args, self.kwargs, self.options.batches)

    def shapes(self) -> Any:
        """What a trace of the call depends on, as a key."""
        leaves, _, structure = self.leaves()
        return structure, tuple((tuple(x.shape), str(x.dtype)) if hasattr(x, "shape") else repr(x) for x in leaves)

    @property
    def is_traced(self) -> bool:
        """Whether it stands inside of a `jit` or another transformation."""
        return any(isinstance(leaf, jax.core.Tracer) for leaf in self.leaves()[0])

    def arrays(self) -> list[int]:
        """The positions of the arrays among its leaves."""
        return [number for number, leaf in enumerate(self.leaves()[0]) if hasattr(leaf, "shape")]

    def filled(self, numbers: list[int], values: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Its arguments and keywords, with other leaves at these positions."""
        leaves, _, structure = self.leaves()
        replaced = dict(zip(numbers, values))
        return jax.tree.unflatten(structure, [replaced.get(number, leaf) for number, leaf in enumerate(leaves)])

    def compiled(self, function: Callable[..., Any]) -> Any:
        """What the function gives for these arguments, inside of a `jit`, where types name meshes without devices."""
        leaves, numbers = self.leaves()[0], self.arrays()

        def run(values: list[Any]) -> Any:
            args, kwargs = self.filled(numbers, values)
            return function(*args, **kwargs)

        return jax.jit(run)([leaves[number] for number in numbers])

    def of_all_devices(self, number: Any) -> Any:
        """The sum of this number over the devices that have rows of the batch."""
        return jax.lax.psum(number, self.axes) if self.axes else number

    def kinds(self, group: Group) -> Outcome:
        """The shapes and dtypes of what the loss gives for a micro-batch of this group."""

        def weighed() -> Outcome:
            values = self.arguments(self.batch.micro_batch(group, 0), self.state, self.key)
            if self.options.weight is not None:
                self.weight(values)
            return self.outcome(values)

        try:
            return jax.eval_shape(weighed)
        except jax.errors.JAXTypeError as error:
            if not isinstance(error, NEED_VALUES):
                raise
            raise TypeError(
                "`loss_fn` (or `weight`) can't be traced: the micro-batches run in a compiled loop, so it can't "
                f"look at values. {str(error).splitlines()[0]}"
            ) from error

    def state_like(self, state: Any, kinds: Any) -> Any:
        """The state as every micro-batch takes and returns it."""

        def typed(leaf: Any, kind: Any) -> Any:
            leaf = jnp.asarray(leaf)
            if not jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
                leaf = jax.lax.convert_element_type(leaf, leaf.dtype)  # no longer the weak type of a Python number
            return as_varying(leaf, varying_axes(kind))

        return jax.tree.map(typed, state, kinds)

    def outcome(self, values: list[Any]) -> Outcome:
        """What the loss gives for these arguments."""
        options = self.options
        try:
            returned = options.loss_fn(*values, **self.kwargs)
        except (TypeError, ValueError) as error:
            if not isinstance(error, NEED_VALUES):
                self._explain(error)
            raise
        state = aux = None
        if options.state_argnum is not None:
            must = f"`loss_fn` must return (loss, {'(new_state, aux)' if options.has_aux else 'new_state'})"
            returned, state = _pair(returned, f"{must}, as `state_argnum` says")
            if options.has_aux:
                asked = f"{must}, as `state_argnum` and `has_aux` are given"
                state, aux = _pair(state, asked, " in second place")
            self._check_state(state, values[options.state_argnum])
        elif options.has_aux:
            returned, aux = _pair(returned, "`loss_fn` must return (loss, aux), as `has_aux` says")
        losses, weights = self._losses(returned)
        if options.weight is not None and not set(options.differentiated).isdisjoint(options.batches):
            weights = {"": self.weight(values)}  # it is an error if it depends on what is differentiated
        return Outcome(losses, weights, state, aux)

    def _explain(self, error: Exception) -> None:
        """Add to an error of the loss what has as many entries as the batch has rows, and isn't cut."""
        roles = {*self.options.batches, *self.options.differentiated, self.options.state_argnum}
        whole = {f"argument {number}": arg for number, arg in enumerate(self.args) if number not in roles}
        lines = [
            f"  {name}{jax.tree_util.keystr(path)}: {_kind(leaf)}"
            for name, argument in {**whole, **self.kwargs}.items()
            for path, leaf in jax.tree_util.tree_flatten_with_path(argument)[0]
            if (kind := _type(leaf)) is not None and kind.shape[:1] == (self.batch.rows,)
        ]
        note = (
            f"These have as many entries as the batch has rows, {self.batch.rows}, and every micro-batch gets all of "
            "them:\n" + "\n".join(lines) + "\nIf they are rows of the batch, name them in `batch_argnums`, as in "
            "batch_argnums=(1, 2), and pass them by position: keywords are never cut."
        )
        if lines and note not in getattr(error, "__notes__", ()):
            getattr(error, "add_note", str)(note)  # since Python 3.11

    def weight(self, values: list[Any]) -> Any:
        """What the loss of these arguments is a mean over, by the user's `weight`."""
        assert self.options.weight is not None
        return _checked_weight(self.options.weight(*(values[number] for number in self.options.batches)), "`weight`")

    def _losses(self, returned: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        if not isinstance(returned, dict):
            return {"": _checked_loss(returned, "`loss_fn`")}, {}
        if self.options.reduction == "sum" or self.options.weight is not None:
            asked = "reduction='sum'" if self.options.reduction == "sum" else "weight="
            raise TypeError(
                f"`loss_fn` returned a dict of losses, each with a weight of its own; {asked} is for a single loss."
            )
        losses, weights = {}, {}
        for name, term in returned.items():
            if not isinstance(term, tuple | list) or len(term) != 2:
                raise TypeError(
                    f"`loss_fn` may return {{name: (loss, weight)}}: the weight is what the loss is a mean over. "
                    f"Received for {name!r}: {_kind(term)}."
                )
            losses[name] = _checked_loss(term[0], f"`loss_fn`, as the loss {name!r},")
            weights[name] = _checked_weight(term[1], f"`loss_fn`, as the weight of {name!r},")
        if not losses:
            raise TypeError("`loss_fn` returned an empty dict of losses.")
        return losses, weights

    def _check_state(self, new: Any, old: Any) -> None:
        def kinds(state: Any) -> Any:
            return jax.tree_util.tree_flatten_with_path(jax.tree.map(_kind, state))

        (found, structure), (expected, old_structure) = kinds(new), kinds(old)
        if structure != old_structure:
            raise TypeError(
                "`loss_fn` must return a new state of the same structure as the state of `state_argnum`. Received: "
                f"{structure}. Expected: {old_structure}."
            )
        lines = [
            f"  state{jax.tree_util.keystr(path)}: {before} -> {after}"
            for (path, after), (_, before) in zip(found, expected)
            if before != after
        ]
        if lines:
            raise TypeError(
                "`loss_fn` must return a new state of the shapes and dtypes of the state that `state_argnum` names, "
                "so that the next micro-batch can take it:\n" + "\n".join(lines)
            )


def _pair(returned: Any, asked: str, where: str = "") -> tuple[Any, Any]:
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise TypeError(f"{asked}. Received{where}: {_kind(returned)}.")
    return returned[0], returned[1]


def _is_key(leaf: Any) -> bool:
    """Whether this is one key: of a key type, or the raw numbers that `jax.random.PRNGKey` gives."""
    try:
        jax.eval_shape(jax.random.split, leaf)
    except (TypeError, ValueError):
        return False
    return True


def _kind(value: Any) -> str:
    """What a message calls this value: `float32[3,4]`, or its type."""
    if isinstance(value, dict | tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    kind = _type(value)
    return type(value).__name__ if kind is None else f"{kind.dtype}[{','.join(map(str, kind.shape))}]"


def _type(value: Any) -> Any:
    """Its shape and dtype; None if it is no array and no number."""
    try:
        return jax.typeof(value)
    except TypeError:
        return None


def _checked_loss(value: Any, who: str) -> Any:
    must = f"{who} must return a scalar, the mean or sum over the rows it is given. Received: {_kind(value)}."
    if isinstance(value, tuple | list):
        raise TypeError(f"{must} Pass has_aux=True if it returns an aux with the loss.")
    kind = _type(value)
    if kind is None:
        raise TypeError(must)
    if kind.shape != ():
        raise TypeError(f"{must} Take the mean over all of its entries.")
    if not jnp.issubdtype(kind.dtype, jnp.floating):
        raise TypeError(f"{who} must return a real floating-point number. Received: {_kind(value)}.")
    return jnp.asarray(value)


def _checked_weight(value: Any, who: str) -> Any:
    kind = _type(value)
    if kind is None or kind.shape != () or jnp.issubdtype(kind.dtype, jnp.complexfloating):
        raise TypeError(
            f"{who} must return a real number: what the loss of the rows it is given is a mean over, such as "
            f"mask.sum(). Received: {_kind(value)}."
        )
    if not isinstance(value, jax.core.Tracer) and not (np.isfinite(value) and value >= 0):
        raise ValueError(
            f"{who} must be finite and >= 0: what the loss of some rows is a mean over. Received: {value}."
        )
    return _constant(jnp.asarray(value))


@jax.custom_jvp
def _constant(weight: Any) -> Any:
    """The weight; an error where it is differentiated."""
    return weight


def _differentiated(primals: Any, tangents: Any) -> Any:
    if isinstance(tangents[0], jax.custom_derivatives.SymbolicZero):
        return primals[0], tangents[0]
    raise ValueError(
        "The weight of a loss depends on what is differentiated, so the weighted mean has a gradient through it that "
        "`weight` leaves out. If the large batch's loss takes it for a constant, too, return "
        "jax.lax.stop_gradient(weight)."
    )


_constant.defjvp(_differentiated, symbolic_zeros=True)
