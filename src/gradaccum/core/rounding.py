"""What rounding may change in a result, by dtype and device."""

from __future__ import annotations

IN_FLOAT64 = 1e-9
"""What a comparison in float64 allows."""

_LAST_PLACE = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def rounding(dtype: str, device: str = "cpu") -> float:
    """The largest relative difference that rounding makes, with room for other kernels at other sizes.

    Relative to the largest entry of the tensor that is compared. float32 has more room on accelerators, whose products
    may have 10 bits (TF32).

    Example:
        >>> rounding("float64"), rounding("torch.float32"), rounding("float32", "cuda"), rounding("bfloat16")
        (1e-09, 0.0001, 0.005, 0.05)
    """
    dtype = dtype.removeprefix("torch.").replace("complex128", "float64").replace("complex64", "float32")
    return {"float64": IN_FLOAT64, "float32": 1e-4 if device == "cpu" else 5e-3}.get(dtype, 5e-2)


def last_place(dtype: str) -> float:
    """A relative difference in the last place of a dtype: what a single rounding is, of half a dtype's width.

    Gradients that cancel out (of a bias before a BatchNormalization) are nothing but such roundings: each of the terms
    that cancel is off by this, however small their sum is. What moving the weights by so much changes tells them.
    """
    return _LAST_PLACE.get(dtype, _LAST_PLACE["float32"])
