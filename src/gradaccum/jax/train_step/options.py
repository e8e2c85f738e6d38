"""What the user asks of `value_and_grad`, checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gradaccum.core.sizes import parse_bytes
from gradaccum.jax.batch import argument_numbers, axes_of_each
from gradaccum.schedule import checked_count

AUX = ("concat", "sum", "mean", "last")


class Options(NamedTuple):
    """The keywords of `value_and_grad`, checked."""

    loss_fn: Callable[..., Any]
    micro_batch_size: int | str
    argnums: int | tuple[int, ...]
    batch_argnums: int | tuple[int, ...]
    in_axes: Any
    weight: Callable[..., Any] | None
    reduction: str
    has_aux: bool
    aux: Any
    rng_argnum: int | None
    state_argnum: int | None
    accumulate_dtype: Any
    memory_limit: int | None
    noise_scale: bool
    verification: Any
    """What looks at the loss when it is traced; None if nothing is to."""

    @property
    def differentiated(self) -> tuple[int, ...]:
        """`argnums` as a tuple."""
        return self.argnums if isinstance(self.argnums, tuple) else (self.argnums,)

    @property
    def batches(self) -> tuple[int, ...]:
        """`batch_argnums` as a tuple."""
        return self.batch_argnums if isinstance(self.batch_argnums, tuple) else (self.batch_argnums,)

    @property
    def axes(self) -> tuple[Any, ...]:
        """`in_axes` for each batch argument."""
        return axes_of_each(self.in_axes, self.batch_argnums)

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Options:
        """The options for a call with these arguments: no number is negative."""
        roles = {"argnums": self.differentiated, "batch_argnums": self.batches}
        for name in ("rng_argnum", "state_argnum"):
            number = getattr(self, name)
            roles[name] = () if number is None else (number,)
        for name, numbers in roles.items():
            if numbers and not -len(args) <= min(numbers) <= max(numbers) < len(args):
                keywords = f", and with the keywords {', '.join(kwargs)}, which can't be counted" if kwargs else ""
                raise TypeError(
                    f"`{name}` is {getattr(self, name)}, but loss_fn was called with {len(args)} positional arguments, "
                    f"0 to {len(args) - 1}{keywords}." + (" Pass numbered arguments by position." if kwargs else "")
                )
        numbers = tuple(number % len(args) for number in self.differentiated)
        if numbers == self.differentiated:
            return self
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"`argnums` must name each argument once. Received: argnums={self.argnums}.")
        _check_roles(roles | {"argnums": numbers})
        return self._replace(argnums=numbers if isinstance(self.argnums, tuple) else numbers[0])

    def sum_dtype(self, dtype: Any) -> Any:
        """The dtype that numbers of this dtype are summed in: at least float32, or `accumulate_dtype`."""
        if not jnp.issubdtype(dtype, jnp.inexact):
            return dtype
        if self.accumulate_dtype is not None:
            if jnp.issubdtype(dtype, jnp.complexfloating):
                return jnp.promote_types(self.accumulate_dtype, jnp.complex64)
            return self.accumulate_dtype
        return jnp.dtype(jnp.float32) if jnp.finfo(dtype).bits < 32 else dtype


def checked_options(loss_fn: Any, **keywords: Any) -> Options:
    """The options."""
    if not callable(loss_fn):
        raise TypeError(f"`loss_fn` must be a function. Received: {loss_fn!r}.")
    size = keywords["micro_batch_size"]
    if isinstance(size, str):
        if size != "auto":
            raise ValueError(f'`micro_batch_size` must be an int >= 1 or "auto". Received: {size!r}.')
    else:
        size = checked_count(size, "micro_batch_size")
    keywords["memory_limit"] = parse_bytes(keywords["memory_limit"])
    if keywords["memory_limit"] is not None and size != "auto":
        raise ValueError(
            f'`memory_limit` is for micro_batch_size="auto", which looks for the size that fits. Received: '
            f"micro_batch_size={size}."
        )
    roles: dict[str, tuple[int, ...]] = {}
    for name in ("argnums", "batch_argnums", "rng_argnum", "state_argnum"):
        optional = keywords[name] is None and not name.endswith("argnums")
        roles[name] = () if optional else argument_numbers(name, keywords[name], from_end=name == "argnums")
        if name.endswith("argnums"):
            keywords[name] = roles[name] if isinstance(keywords[name], tuple | list) else roles[name][0]
    _check_roles(roles)
    _check_loss(keywords["weight"], keywords["reduction"])
    if keywords["accumulate_dtype"] is not None:
        keywords["accumulate_dtype"] = _dtype(keywords["accumulate_dtype"])
    _check_aux(keywords["aux"], keywords["has_aux"], keywords["state_argnum"])
    if not keywords["has_aux"]:
        keywords["aux"] = None  # what is said of nothing must not decide how devices share the work
    return Options(loss_fn=loss_fn, **keywords)


def _check_aux(aux: Any, has_aux: bool, state_argnum: int | None) -> None:
    for how in jax.tree.leaves(aux):
        if how not in AUX:
            raise ValueError(
                f"`aux` must be one of {', '.join(map(repr, AUX))}, or a pytree of these. Received: {how!r}."
            )
    if state_argnum is not None and not has_aux and aux not in ("concat", "last"):
        raise ValueError(
            "`aux` combines what has_aux=True returns beside the loss, and a state passes through micro-batches one "
            f"after the other. Received: aux={aux!r} with `state_argnum`, without has_aux=True. To combine what moves, "
            "return it as the aux, and leave out `state_argnum`."
        )


def _check_roles(roles: dict[str, tuple[int, ...]]) -> None:
    for name, other in [
        ("batch_argnums", "rng_argnum"), ("batch_argnums", "state_argnum"), ("rng_argnum", "state_argnum"),
        ("argnums", "rng_argnum"), ("argnums", "state_argnum"),
    ]:  # fmt: skip
        if both := set(roles[name]) & set(roles[other]):
            raise ValueError(f"Argument {min(both)} of loss_fn can't be in both `{name}` and `{other}`.")


def _check_loss(weight: Any, reduction: Any) -> None:
    if reduction not in ("mean", "sum"):
        raise ValueError(f'`reduction` must be "mean" or "sum". Received: {reduction!r}.')
    if weight is not None and not callable(weight):
        raise TypeError(
            "`weight` must be a function of the batch arguments that returns what the loss is a mean over. Received: "
            f"{weight!r}."
        )
    if weight is not None and reduction == "sum":
        raise ValueError('`weight` is what a mean is over, so reduction="sum" takes none.')


def _dtype(given: Any) -> Any:
    try:
        dtype = jnp.dtype(given)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"`accumulate_dtype` must be a floating-point dtype. Received: {given!r}.")
    return dtype
