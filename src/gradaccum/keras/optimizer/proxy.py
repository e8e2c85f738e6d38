"""The inner optimizer: whether it can be wrapped, and settings that stay its own."""

from __future__ import annotations

from typing import Any

import keras

__all__ = ["check_inner", "of_inner"]


def of_inner(name: str) -> Any:
    """A setting that is the inner optimizer's, to read and to write."""

    def read(self: Any) -> Any:
        return getattr(self.inner_optimizer, name)

    def write(self: Any, value: Any) -> None:
        # Keras' own constructor writes defaults, before there is an inner optimizer.
        if "inner_optimizer" in self.__dict__:
            setattr(self.inner_optimizer, name, value)

    return property(read, write, doc=f"`{name}` of the inner optimizer.")


def check_inner(optimizer: Any) -> None:
    """Whether this can be wrapped.

    Raises:
        TypeError: It is no Keras optimizer.
        ValueError: It accumulates already, by itself or wrapped.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        where = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        hint = " For a PyTorch optimizer use gradaccum.torch.optim." if where.startswith("torch.") else ""
        raise TypeError(
            f"`optimizer` must be a keras.optimizers.Optimizer of the {keras.backend.backend()} backend. Received: "
            f"{optimizer!r} of type {where}.{hint}"
        )
    inside = [optimizer, getattr(optimizer, "inner_optimizer", None), *getattr(optimizer, "optimizers", [])]
    for inner in inside:
        if hasattr(inner, "_steps_are_fixed"):  # one of ours
            raise ValueError(f"`optimizer` accumulates already, over {inner._schedule} steps. Wrap it once.")
        if getattr(inner, "gradient_accumulation_steps", None):
            raise ValueError(
                "`optimizer` must not accumulate by itself. Received: "
                f"{type(inner).__name__}(gradient_accumulation_steps={inner.gradient_accumulation_steps}). "
                "Leave that argument out, and pass `steps` here."
            )
