"""Pieces that losses are put together from: what makes rows of rows, what mixes them, and what makes a loss of them.

A piece takes parameters, the batch, and an array of `(rows, TIME, WIDTH)`, and gives another one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

__all__ = ["ENDINGS", "MIXING", "ROW_WISE", "TIME", "WIDTH", "data", "parameters"]

TIME, WIDTH = 3, 4
KEY = jax.random.key(0)
Piece = Callable[[Any, Any, Any], Any]


def parameters() -> Any:
    """What is differentiated."""
    random = np.random.default_rng(0)
    shapes = {"w": (WIDTH, WIDTH), "v": (WIDTH,), "table": (8, WIDTH), "layers": (2, WIDTH, WIDTH), "s": ()}
    return {name: jnp.asarray(0.7 * random.normal(size=shape)) for name, shape in shapes.items()}


def data(rows: int, seed: int) -> Any:
    """A batch: for seed 0 of positive numbers, larger in later rows; for 3 nothing counts in the first half."""
    random = np.random.default_rng(seed)
    x, y = random.normal(size=(rows, TIME, WIDTH)), random.normal(size=rows)
    if seed == 0:
        x, y = np.abs(x) * np.linspace(0.2, 1.8, rows)[:, None, None], np.abs(y) * np.linspace(0.2, 1.8, rows)
    mask = random.random((rows, TIME)) < np.linspace(0.3, 0.9, rows)[:, None]
    mask[:, 0] |= seed != 1
    mask[: (rows + 1) // 2] &= seed != 3
    ids, kinds = random.integers(0, 8, (rows, TIME)), random.integers(0, WIDTH, rows)
    return jax.tree.map(jnp.asarray, {"x": x, "y": y, "mask": mask, "ids": ids, "kinds": kinds})


def own(backward: Callable[[Any, Any], Any]) -> Any:
    """The identity with a derivative of its own."""
    function = jax.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x, x), lambda x, g: (backward(x, g),))
    return function


@jax.custom_jvp
def leaky(x: Any) -> Any:
    """Its derivative isn't 0 below 0."""
    return jnp.maximum(x, 0.0)


leaky.defjvp(lambda x, t: (leaky(x[0]), jnp.where(x[0] > 0, t[0], 0.1 * t[0])))
reversal = own(lambda x, g: -0.5 * g)
scaled = own(lambda x, g: g * jnp.tanh(x))
clipped = own(lambda x, g: jnp.clip(g, -0.01, 0.01))
normalised = own(lambda x, g: g / jnp.sqrt((g**2).sum() + 1e-3))


def _attention(p: Any, b: Any, h: Any) -> Any:
    scores = jnp.where(b["mask"][:, None, :], jnp.einsum("btd,bsd->bts", h @ p["w"], h), -1e9)
    return jax.nn.softmax(scores) @ h


def _over_time(p: Any, b: Any, h: Any) -> Any:
    step = lambda c, x: (jnp.tanh(c + x @ p["w"]), c)  # noqa: E731
    return jnp.swapaxes(lax.scan(step, jnp.zeros((len(h), WIDTH)), jnp.swapaxes(h, 0, 1))[1], 0, 1)


def _merged(p: Any, b: Any, h: Any) -> Any:
    return (h.reshape(-1, WIDTH) @ p["w"]).reshape(-1, TIME, WIDTH)


def _convolved(p: Any, b: Any, h: Any) -> Any:
    kernel = jnp.broadcast_to(p["w"][None], (3, WIDTH, WIDTH))
    return lax.conv_general_dilated(h, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))


def _penalty(p: Any, b: Any, h: Any) -> Any:
    return jax.grad(lambda z: (jnp.tanh(z @ p["w"]) ** 2).sum())(h)


ROW_WISE: dict[str, Piece] = {
    "tanh": lambda p, b, h: jnp.tanh(h),
    "linear": lambda p, b, h: h @ p["w"],
    "merged": _merged,
    "square": lambda p, b, h: h**2,
    "layer norm": lambda p, b, h: (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-2),
    "unit rows": lambda p, b, h: h / jnp.sqrt((h**2).sum((1, 2), keepdims=True) + 1e-2),
    "softmax": lambda p, b, h: jax.nn.softmax(h * p["v"], axis=1) * h,  # alone, its sum over that axis would be 1
    "attention": _attention,
    "remat": jax.checkpoint(lambda p, b, h: jnp.sin(h @ p["w"])),
    "scan over layers": lambda p, b, h: lax.scan(lambda c, w: (jnp.tanh(c @ w), None), h, p["layers"])[0],
    "scan over time": _over_time,
    "fori_loop": lambda p, b, h: lax.fori_loop(0, 2, lambda i, c: jnp.tanh(c) * p["s"], h),
    "map": lambda p, b, h: lax.map(lambda row: jnp.tanh(row @ p["w"]), h),
    "vmap": lambda p, b, h: jax.vmap(lambda row, y: row * y + p["v"])(h, b["y"]),
    "cumsum": lambda p, b, h: jnp.cumsum(h, axis=1),
    "sort": lambda p, b, h: jnp.sort(h, axis=1),
    "top_k": lambda p, b, h: lax.top_k(h * p["v"], WIDTH)[0],
    "fft": lambda p, b, h: jnp.real(jnp.fft.fft(h, axis=1)) * p["s"],
    "flip": lambda p, b, h: h[:, ::-1] * p["v"],
    "embed": lambda p, b, h: h + p["table"][b["ids"]],
    "where": lambda p, b, h: jnp.where(b["mask"][..., None], h, p["s"]),
    "two axes": lambda p, b, h: jnp.swapaxes(jnp.swapaxes(h, 1, 2).at[:, 0].multiply(p["s"]), 1, 2),
    "pad": lambda p, b, h: jnp.pad(h[:, 1:], ((0, 0), (1, 0), (0, 0))),
    "concatenate": lambda p, b, h: jnp.concatenate([h[:, :1] * p["s"], h[:, 1:]], axis=1),
    "set": lambda p, b, h: h.at[:, 0].set(p["v"]),
    "one hot": lambda p, b, h: h * (jax.nn.one_hot(b["kinds"], WIDTH) @ p["w"])[:, None],
    "leaky": lambda p, b, h: leaky(h),
    "reversal": lambda p, b, h: reversal(h),
    "scaled": lambda p, b, h: scaled(h),
    "reversed parameters": lambda p, b, h: h @ reversal(p["w"]),
    "detached": lambda p, b, h: h * lax.stop_gradient(h).mean((1, 2), keepdims=True),
    "cond on parameters": lambda p, b, h: lax.cond(p["s"] > 0, jnp.sin, jnp.tanh, h),
    "convolution": _convolved,
    "convolution of its own": lambda p, b, h: jax.vmap(lambda row, y: _convolved({"w": p["w"] * y}, b, row[None])[0])(
        h, b["y"]
    ),
    "maximum": lambda p, b, h: jnp.maximum(h, h.max(1, keepdims=True) - 0.5) * p["s"],
    "gradient": _penalty,
    "a shared coin": lambda p, b, h: h * jax.random.uniform(KEY),
    "by target": lambda p, b, h: h * b["y"][:, None, None] + b["kinds"][:, None, None],
    "no NaN": lambda p, b, h: jnp.nan_to_num(h * p["s"]),
    "transposed": lambda p, b, h: jnp.einsum("btd,de->tbe", h, p["w"]).swapaxes(0, 1),
}  # fmt: skip
"""Each row's own, whatever the others are: after these nothing may be said of a mean."""


def _batch_norm(p: Any, b: Any, h: Any) -> Any:
    return (h - h.mean((0, 1))) / jnp.sqrt(h.var((0, 1)) + 1e-2) * p["v"]


def _across(p: Any, b: Any, h: Any) -> Any:
    return jnp.einsum("tbc,ctd->btd", jax.nn.softmax(jnp.einsum("btd,ctd->tbc", h @ p["w"], h)), h)


def _running(p: Any, b: Any, h: Any) -> Any:
    return lax.scan(lambda c, row: (0.9 * c + row.mean(), row - c), 0.0, h)[1] * p["s"]


MIXING: dict[str, Piece] = {
    "centred": lambda p, b, h: h - h.mean(0),
    "batch norm": _batch_norm,
    "softmax of rows": lambda p, b, h: jax.nn.softmax(h, axis=0),
    "a neighbour": lambda p, b, h: h * jnp.roll(h, 1, axis=0),
    "its place": lambda p, b, h: h * jnp.arange(len(h))[:, None, None],
    "a place in the table": lambda p, b, h: h + p["table"][jnp.arange(len(h))][:, None],
    "as many of the table": lambda p, b, h: h * p["table"][: len(h)].mean(),
    "the largest": lambda p, b, h: h / lax.stop_gradient(jnp.abs(h).max() + 0.1),
    "across": _across,
    "sorted rows": lambda p, b, h: jnp.sort(h, axis=0),
    "reversed rows": lambda p, b, h: h[::-1] * p["s"],
    "cumsum of rows": lambda p, b, h: jnp.cumsum(h, axis=0) * p["s"],
    "running": _running,
    "times rows": lambda p, b, h: h * len(h),
    "over a root of rows": lambda p, b, h: h / np.sqrt(len(h)),
    "to the power of rows": lambda p, b, h: h * p["s"] ** len(h),
    "rounds": lambda p, b, h: lax.fori_loop(0, len(h), lambda i, c: 0.9 * c, h),
    "more rows than 5": lambda p, b, h: h * (2.0 if len(h) > 5 else 1.0),
    "a count": lambda p, b, h: h * b["mask"].sum(),
    "a count over itself": lambda p, b, h: h * (b["mask"].sum() / b["mask"].sum()),
    "a mean of the batch": lambda p, b, h: h * b["y"].mean(),
    "above the mean": lambda p, b, h: h * (b["y"] > b["y"].mean())[:, None, None],
    "if the mean": lambda p, b, h: jnp.where(b["y"].mean() > 0.1, h, 2 * h),
    "cond on the mean": lambda p, b, h: lax.cond(b["y"].mean() > 0.1, jnp.sin, jnp.tanh, h),
    "if any": lambda p, b, h: jnp.where((b["ids"] > 6).any(), h, 0.5 * h),
    "a number if any": lambda p, b, h: h * jnp.where((b["ids"] > 6).any(), 1.0, 0.5),
    "a number by cond": lambda p, b, h: h * lax.cond((b["ids"] > 6).any(), lambda: 1.0, lambda: 0.5),
    "bins": lambda p, b, h: h * jnp.bincount(b["kinds"], length=WIDTH)[b["kinds"]][:, None, None],
    "ranks": lambda p, b, h: h * jnp.argsort(b["y"])[:, None, None],
    "normalised gradients": lambda p, b, h: normalised(h),
    "clipped gradients": lambda p, b, h: clipped(h),
    "clipped gradients of parameters": lambda p, b, h: h @ clipped(p["w"]),
    "gradient of the mean": lambda p, b, h: jax.grad(lambda z: (z @ p["w"]).mean() ** 2)(h),
    "convolved over rows": lambda p, b, h: jnp.swapaxes(_convolved(p, b, jnp.swapaxes(h, 0, 1)), 0, 1),
    "convolved features": lambda p, b, h: h * lax.conv_general_dilated(
        h[None, :, 1, :], h[None, :, 1, :1], (1,), "SAME", dimension_numbers=("NCW", "OIW", "NCW")
    ).mean(),
    "grams": lambda p, b, h: h @ jnp.einsum("btd,bte->de", h, h) / len(h),
    "merged and shifted": lambda p, b, h: jnp.roll(h.reshape(-1, WIDTH), 1, 0).reshape(h.shape) * p["s"],
    "noise": lambda p, b, h: h * jax.random.uniform(jax.random.key(0), h.shape),
    "mapped mean": lambda p, b, h: jax.vmap(lambda row: row - lax.pmean(row, "rows"), axis_name="rows")(h),
}  # fmt: skip
"""What takes several rows, or their number, to know. Some of it cancels out in some losses."""


def _tokens(p: Any, b: Any, h: Any) -> Any:
    return ((h**2).sum(-1) * b["mask"]).sum()


def _labelled(p: Any, b: Any, h: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(h.sum(1) * p["v"]), b["kinds"][:, None], 1).mean()


def _count(b: Any) -> Any:
    return b["mask"].sum()


OVER_TOKENS: dict[str, Any] = {"weight": _count}
SHIFTED: dict[str, Any] = {"weight": lambda b: b["mask"][:, 1:].sum()}
SUM: dict[str, Any] = {"reduction": "sum"}
ENDINGS: dict[str, tuple[Piece, dict[str, Any], bool]] = {
    "a mean": (lambda p, b, h: (h**2).mean(), {}, True),
    "a mean and a penalty": (lambda p, b, h: (h * p["v"]).mean() + (p["w"] ** 2).sum(), {}, True),
    "a mean of means": (lambda p, b, h: ((h**2).mean((1, 2)) * p["s"]).mean(), {}, True),
    "labels": (_labelled, {}, True),
    "a sum": (lambda p, b, h: (h**2).sum(), SUM, True),
    "tokens": (lambda p, b, h: _tokens(p, b, h) / _count(b), OVER_TOKENS, True),
    "tokens or 1": (lambda p, b, h: _tokens(p, b, h) / jnp.maximum(_count(b), 1), OVER_TOKENS, True),
    "tokens if any": (lambda p, b, h: jnp.where(b["mask"].any(), _tokens(p, b, h) / _count(b), 0.0), OVER_TOKENS, True),
    "tokens over rows": (lambda p, b, h: _tokens(p, b, h) / len(h), {}, True),
    "tokens of each row": (
        lambda p, b, h: (((h**2).sum(-1) * b["mask"]).sum(1) / jnp.maximum(b["mask"].sum(1), 1)).mean(), {}, True,
    ),
    "a sum of means of tokens": (
        lambda p, b, h: {"a": (_tokens(p, b, h) / _count(b), _count(b)), "b": ((h * p["v"]).mean(), len(h))}, {}, True,
    ),
    "weights": (
        lambda p, b, h: ((h**2).mean((1, 2)) * jnp.abs(b["y"])).sum() / jnp.abs(b["y"]).sum(),
        {"weight": lambda b: jnp.abs(b["y"]).sum()}, True,
    ),
    "a sum, taken for a mean": (lambda p, b, h: (h**2).sum(), {}, False),
    "a mean, taken for a sum": (lambda p, b, h: (h**2).mean(), SUM, False),
    "a sum and a penalty": (lambda p, b, h: (h**2).sum() + (p["w"] ** 2).sum(), SUM, False),
    "over rows less 1": (lambda p, b, h: (h**2).sum() / (len(h) - 1), {}, False),
    "over rows to the half": (lambda p, b, h: (h**2).sum() / len(h) ** 0.5, {}, False),
    "tokens without weight": (lambda p, b, h: _tokens(p, b, h) / _count(b), {}, False),
    "tokens times their count": (lambda p, b, h: _tokens(p, b, h) / _count(b) * b["mask"].mean(), {}, False),
    "tokens by other tokens": (lambda p, b, h: _tokens(p, b, h) / _count(b), SHIFTED, False),
    "rows by tokens": (lambda p, b, h: (h**2).mean(), OVER_TOKENS, False),
    "tokens or many": (lambda p, b, h: _tokens(p, b, h) / jnp.maximum(_count(b), 8), OVER_TOKENS, False),
    "weights or 1": (
        lambda p, b, h: ((h**2).mean((1, 2)) * b["y"] ** 2).sum() / jnp.maximum(0.1 * (b["y"] ** 2).sum(), 1.0),
        {"weight": lambda b: 0.1 * (b["y"] ** 2).sum()}, False,
    ),
    "a root": (lambda p, b, h: jnp.sqrt((h**2).mean() + 0.1), {}, False),
    "the largest": (lambda p, b, h: (h**2).mean((1, 2)).max(), {}, False),
    "a variance": (lambda p, b, h: jnp.var(h), {}, False),
    "a product of means": (lambda p, b, h: (h**2).mean() * (1 + b["y"].mean()), {}, False),
    "at most": (lambda p, b, h: jnp.minimum((h**2).mean(), 0.5), {}, False),
    "above a mean": (lambda p, b, h: jnp.where(b["y"].mean() > 0.1, (h**2).mean(), 0.0), {}, False),
    "two denominators": (lambda p, b, h: _tokens(p, b, h) / _count(b) + (h**2).mean(), {}, False),
    "scaled by itself": (lambda p, b, h: scaled((h**2).mean()), {}, False),
    "balance": (lambda p, b, h: (jax.nn.softmax(h).mean((0, 1)) ** 2).sum(), {}, False),
    "the first row": (lambda p, b, h: (h[0] ** 2).mean(), {}, False),
    "all pairs": (lambda p, b, h: jax.nn.logsumexp(h.mean(1) @ h.mean(1).T, axis=1).mean(), {}, False),
}  # fmt: skip
"""Losses, the keywords that say what they are, and whether these are right."""
