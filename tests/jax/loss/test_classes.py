"""What once passed in silence and is not the large batch's: each class is refused, or is a line; its like passes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum.jax
from tests.jax.loss.test_verdict import LABELS, MASK, TEXT, WIDE, W, X, tokens

RANDOM = np.random.default_rng(1)
SOFT = jnp.asarray(RANDOM.random((8, 3)))
TABLE = jnp.asarray(RANDOM.normal(size=(20, 4)))


def seen(caplog, loss_fn, params, batch, *more, **options):
    """What is said of a loss: an error, a line, or nothing."""
    caplog.clear()
    grad_fn = gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=4, **options)
    try:
        jax.eval_shape(grad_fn, params, batch, *more)
    except ValueError as error:
        assert not caplog.records  # no line before an error that says the same
        return str(error)
    return " ".join(record.getMessage() for record in caplog.records)


def token_mean(p, b):
    return tokens(p, b) / b[1].sum()


SHIFTED = lambda p, b: tokens(p, (b[0], b[1][:, 1:])) / b[1][:, 1:].sum()  # noqa: E731


OLDER = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="a gather, which is not followed: it says it can't tell"
)


@pytest.mark.parametrize(
    ("weight", "is_it"),
    [
        (lambda b: b[1][:, 1:].sum(), True),
        (lambda b: b[1][:, 1:].T.astype(float).sum(), True),
        pytest.param(lambda b: b[1][:, :0:-1].sum(), True, marks=OLDER),
        (lambda b: b[1].sum(), False),
        (lambda b: b[1][:, :-1].sum(), False),
    ],
)
def test_a_weight_that_counts_other_entries_than_the_loss_is_a_line(weight, is_it, caplog):
    said = seen(caplog, SHIFTED, W, (X, MASK), weight=weight)
    assert said == "" if is_it else "Whether `weight` equals that is unknown" in said


BY_ROWS = {
    "a branch between the sizes that are tried and the real ones": (
        lambda p, x: (x @ p).mean() * (3.0 if len(x) > 4 else 1.0), W, X, "number of rows",
    ),
    "a number of rounds": (
        lambda p, x: jax.lax.fori_loop(0, len(x), lambda i, a: a * 0.9, 1.0) * (x @ p).mean(), W, X, "4 rounds",
    ),
    "a power": (lambda p, x: (x @ p).mean() * p[0] ** len(x), W, X, "y=4 for 4 rows, y=8 for 8"),
    "as many of a row as there are rows": (
        lambda p, x: jax.lax.top_k(x.reshape(len(x), -1) * p[0], len(x) // 3)[0].mean(), W, TEXT, "k=1 for 4 rows",
    ),
    "where a slice of each row begins": (
        lambda p, x: (x.reshape(len(x), -1)[:, len(x) // 3] * p[0]).mean(), W, TEXT, "limit_indices=",
    ),
    "as much of the parameters": (lambda p, x: p[: len(x)].sum() * x.mean(), TABLE, X, "limit_indices"),
    "a parameter for each place": (lambda p, x: (p[jnp.arange(len(x))] * x).mean(), TABLE, X, "looks across the rows"),
}  # fmt: skip
GUARDED = {
    "any of the mask": (lambda p, b: jnp.where(b[1].any(), token_mean(p, b), 0.0), True),
    "a count, in a branch": (
        lambda p, b: jax.lax.cond(b[1].sum() > 0, lambda: token_mean(p, b), lambda: 0.0), True,
    ),
    "1 where there is nothing": (lambda p, b: tokens(p, b) / jnp.where(b[1].sum() == 0, 1, b[1].sum()), True),
    "a mean that may be below 0": (lambda p, b: jnp.where(b[0].mean() > 0, token_mean(p, b), 0.0), False),
    "the same in a branch": (
        lambda p, b: jax.lax.cond(b[0].sum() > 0, lambda: token_mean(p, b), lambda: 0.0), False,
    ),
    "a loss that isn't divided by it": (
        lambda p, b: token_mean(p, b) + jnp.where(b[1].any(1).sum() > 0, (p**2).sum(), 0.0), False,
    ),
}  # fmt: skip


def mean_over(denominator):
    return lambda p, b: tokens(p.astype(b[0].dtype), b) / denominator(b[1].sum())


HALF = X.astype(jnp.float32)
DENOMINATORS = {  # what a mask's sum is guarded with
    "at least 1, of booleans": (lambda n: jnp.maximum(n, 1), X, MASK, ""),
    "at least 1, of whole numbers": (lambda n: jnp.maximum(n, 1), X, MASK.astype(int), ""),
    "at least 1, of others": (
        lambda n: jnp.maximum(n, 1.0), X, SOFT, "(0.25 becomes 1)",
    ),
    "1e-8 more in double precision": (
        lambda n: n.astype(float) + 1e-8, HALF, MASK.astype(jnp.float32),
        "`add` at test_classes.py",
    ),
    "1e-8 more": (lambda n: n + jnp.float32(1e-8), HALF, MASK.astype(jnp.float32), ""),
    "1e-13 more in double precision": (lambda n: n + 1e-13, X, SOFT, ""),
}  # fmt: skip


def own(forward, backward):
    function = jax.custom_vjp(lambda x: forward(x))
    function.defvjp(lambda x: (forward(x), x), lambda x, g: (backward(x, g),))
    return function


@jax.custom_jvp
def leaky(x):
    return jnp.maximum(x, 0.0)


leaky.defjvp(lambda x, t: (leaky(x[0]), jnp.where(x[0] > 0, t[0], 0.1 * t[0])))
clipped = own(lambda x: x, lambda x, g: jnp.clip(g, -0.01, 0.01))
normalised = own(lambda x: x, lambda x, g: g / jnp.sqrt((g**2).sum()))
reversal = own(lambda x: x, lambda x, g: -0.5 * g)
scaled = own(lambda x: x, lambda x, g: g * x)
OWN = {
    "a reversed gradient": (lambda p, x: (reversal(x @ p) ** 2).mean(), True),
    "a reversed gradient of parameters": (lambda p, x: ((x @ reversal(p)) ** 2).mean(), True),
    "a derivative of each entry": (lambda p, x: (leaky(x @ p) ** 2).mean(), True),
    "in a loop over layers": (
        lambda p, x: jax.lax.scan(lambda h, k: (reversal(jnp.tanh(h * k)), None), x @ p, jnp.ones(3))[0].mean(),
        True,
    ),
    "each row scaled by itself": (lambda p, x: scaled((x @ p) ** 2).mean(), True),
    "the loss scaled by itself": (lambda p, x: scaled(((x @ p) ** 2).mean()), False),
    "rows that are normalised together": (lambda p, x: (normalised(x @ p) ** 2).mean(), False),
    "clipped rows": (lambda p, x: (clipped(x @ p) ** 2).mean(), False),
    "clipped gradients of parameters": (lambda p, x: ((x @ clipped(p)) ** 2).mean(), False),
}


STATES = {
    "a counter": (lambda p, x, s: ((x @ p).mean(), {"n": s["n"] + 1, "u": s["u"]}), True),
    "what stands still": (lambda p, x, s: ((x @ p * s["u"]).mean(), {"n": s["n"] + 1, "u": s["u"]}), True),
    "a power iteration": (
        lambda p, x, s: ((x @ p / s["u"]).mean(), {"n": s["n"], "u": s["u"] * 0.5 + p.sum()}), False,
    ),
    "a key of state": (
        lambda p, x, s: (
            (x @ p * jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), s["n"]), 0.5, (len(x),))).mean(),
            {"n": s["n"] + 1, "u": s["u"]},
        ), True,
    ),
}  # fmt: skip


ASIDE = {
    "a mean": ("mean", lambda p, b: (b[0] @ p).mean(), ""),
    "the norm of parameters": ("mean", lambda p, b: (p**2).sum(), ""),
    "a root of a mean": ("mean", lambda p, b: jnp.sqrt(((b[0] @ p) ** 2).mean()), "no mean over rows"),
    "a largest": (
        "mean",
        lambda p, b: (b[0] @ p).max(),
        "no mean over rows: It looks across the rows of the batch: `reduce_max`",
    ),
    "a sum": ("sum", lambda p, b: {"right": ((b[0] @ p) > 0).sum(), "of": len(b[0])}, ""),
    "a mean that is summed": ("sum", lambda p, b: (b[0] @ p).mean(), "no sum over rows: It is a mean over rows"),
    "a mean over tokens": ("mean", lambda p, b: token_mean(p, b), "no mean over rows: It divides by"),
    "rows": ("concat", lambda p, b: jax.nn.softmax(b[0][:, :, None] * p, axis=1), ""),
    "ranks": ("concat", lambda p, b: jnp.argsort(b[0] @ p), "those of aux['it'] look at other rows"),
    "centred rows": ("concat", lambda p, b: b[0] @ p - (b[0] @ p).mean(), "those of aux['it'] look at other rows"),
    "numbers of rows": ("concat", lambda p, b: jnp.arange(len(b[0])), "those of aux['it'] look at other rows"),
}


TRIPLE, DOUBLE, MATRIX = (jnp.asarray(RANDOM.normal(size=shape)) for shape in ((4, 12), (4, 8), (3, 3)))
SQUARES = jnp.asarray(RANDOM.normal(size=(8, 3, 3)))
IDS = jnp.asarray(RANDOM.permutation(100)[:8])
KEY = jax.random.key(0)
MESH = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
SHARD = jax.sharding.PartitionSpec("d")
ALL = jax.sharding.PartitionSpec()
COUNTED = {"weight": lambda b: b[1].sum()}


def attention(p, x):
    q, k, v = jnp.split(x @ p, 3, -1)
    return jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k)) @ v


def gated(p, x):
    a, b = jnp.split(x @ p, 2, -1)
    return a * jax.nn.sigmoid(b)


def recurrent(p, x):
    def step(h, u):
        reset, update, new = jnp.split((u + h) @ p, 3, -1)
        return jax.nn.sigmoid(update) * h + jnp.tanh(reset * new), h

    return jnp.swapaxes(jax.lax.scan(step, jnp.zeros_like(x[:, 0]), jnp.swapaxes(x, 0, 1))[1], 0, 1)


def over(model):
    return lambda p, b: ((model(p, b[0]) ** 2).mean(-1) * b[1]).sum() / b[1].sum()


def positive(x):
    return x @ jnp.swapaxes(x, -1, -2) + 3 * jnp.eye(3)


def on_devices(function, out=ALL):
    return jax.shard_map(function, mesh=MESH, in_specs=(ALL, SHARD, SHARD), out_specs=out)


def over_devices(p, b, x=lambda x: x, of=lambda total, count: total / count):
    def local(p, x, mask):
        return of(jax.lax.psum(((x @ p) ** 2 * mask).sum(), "d"), jax.lax.psum(mask.sum(), "d"))

    return on_devices(local)(p, x(b[0]), b[1])


def batch_wide_softmax(p, x):
    weights = jax.nn.softmax((x @ p).mean(0))
    return ((x @ p * weights).sum(-1) / weights.sum()).mean()


def reversed_mean(p, x):
    mean = (x @ p).mean(0)
    return (x @ p * mean / mean[::-1]).mean()


def dropped_and_counted(p, x):
    mask = jax.random.bernoulli(KEY, 0.5, x.shape) + 0.1
    return ((x * p * mask).sum(-1) / mask.sum(-1)).mean()


def folded(p, b, key=KEY):
    keep = jax.vmap(lambda i: jax.random.bernoulli(jax.random.fold_in(key, i), 0.5))
    return ((b[0] @ p) * keep(b[1])).mean()


FOLLOWED = {
    "query, key and value of one product": (over(attention), TRIPLE, (TEXT, MASK), COUNTED, ""),
    "a gate of one product": (over(gated), DOUBLE, (TEXT, MASK), COUNTED, ""),
    "gates of a recurrent cell": (over(recurrent), TRIPLE, (TEXT, MASK), COUNTED, ""),
    "tokens behind a split": (over(attention), TRIPLE, (TEXT, MASK), {}, "Pass weight="),
    "tokens behind gates": (over(recurrent), TRIPLE, (TEXT, MASK), {}, "Pass weight="),
    "halves of the batch": (
        lambda p, x: (lambda a, b: (a * b).mean())(*jnp.split(x @ p, 2)), WIDE, X, {}, "looks across the rows",
    ),
    "systems of rows": (
        lambda p, b: jnp.linalg.solve(positive(b[0]) * p[0] ** 2, b[1][:, :3, None]).mean(), W, (SQUARES, X), {}, "",
    ),
    "inverses of rows": (lambda p, x: jnp.linalg.inv(positive(x) * p[0] ** 2).mean(), W, SQUARES, {}, ""),
    "one system": (
        lambda p, x: (jnp.linalg.solve(positive(p), x[:, :3].T) ** 2).mean(), MATRIX, X, {}, "",
    ),
    "a system that is solved step by step": (
        lambda p, x: (x[:, :3] @ jax.scipy.sparse.linalg.cg(lambda v: positive(p) @ v, jnp.ones(3))[0]).mean(),
        MATRIX, X, {}, "",
    ),
    "a system of all rows": (
        lambda p, x: (x @ jnp.linalg.solve(x.T @ x + jnp.eye(4), x.T @ (x @ p))).mean(), W, X, {}, "looks across",
    ),
    "a density": (
        lambda p, x: -jax.scipy.stats.multivariate_normal.logpdf(x[:, :3], p[0], positive(p)).mean(), MATRIX, X, {}, "",
    ),
    "what isn't NaN": (lambda p, b: jnp.nanmean(b[0] @ p[:, None] * b[1]), W, (X, SOFT), {}, "Pass weight="),
    "what isn't NaN, with its weight": (
        lambda p, b: (lambda z: {"it": (jnp.nanmean(z), (~jnp.isnan(z)).sum())})(b[0] @ p[:, None] * b[1]), W,
        (X, SOFT), {}, "",
    ),
    "a list in each row": (
        lambda p, b: optax.losses.ranking_softmax_loss(b[0] @ p, b[1], reduce_fn=jnp.mean), W, (TEXT, SOFT), {}, "",
    ),
    "keys by ids": (folded, W, (X, IDS), {}, ""),
    "keys by place": (lambda p, x: folded(p, (x, jnp.arange(len(x)))), W, X, {}, "rng_argnum="),
    "rows on devices": (
        lambda p, b: (on_devices(lambda p, x, y: jnp.tanh(x @ p), SHARD)(p, *b) ** 2).mean(), WIDE, (X, X), {}, "",
    ),
    "tokens on devices": (over_devices, W, (TEXT, MASK), COUNTED, ""),
    "tokens on devices, unweighed": (over_devices, W, (TEXT, MASK), {}, "Pass weight="),
    "means of devices": (
        lambda p, b: on_devices(
            lambda p, x, m: jax.lax.pmean(((x @ p) ** 2 * m).sum() / m.sum(), "d")
        )(p, *b), W, (TEXT, MASK), COUNTED, "Whether `weight` equals that is unknown",
    ),
    "statistics of devices": (
        lambda p, b: (on_devices(lambda p, x, y: jnp.tanh(x @ p - (x @ p).mean(0)), SHARD)(p, *b) ** 2).mean(),
        WIDE, (X, X), {}, "looks across the rows",
    ),
    "sums with weights of the batch": (batch_wide_softmax, WIDE, X, {}, "looks across the rows"),
    "a statistic over its mirror image": (reversed_mean, WIDE, X, {}, "looks across the rows"),
    "a half of what is negative, by a sum that may be": (
        lambda p, x: (jax.nn.relu((x @ p) * x[:, 0].sum()) / x[:, 0].sum()).mean(), W, X, {}, "looks across the rows",
    ),
    "a loss that isn't NaN, where something else is so": (
        lambda p, x: (lambda it: jnp.where(jnp.isfinite(it) & (x.mean() > 0), 2 * it, 0.0))((x @ p).mean()), W, X,
        {}, "can't be decided",
    ),
    "the size of a mean": (lambda p, x: jnp.abs((x @ p).mean()), W, X, {}, "can't be decided"),
    "columns by the counts of others": (
        lambda p, b: ((b[0] @ p[:, :3]) * b[1].mean(0) / jnp.roll(b[1].mean(0), 1)).mean(), WIDE, (X, MASK), {},
        "looks across the rows",
    ),
    "a mean as weight": (
        lambda p, b: tokens(p, b) / b[1].mean(), W, (X, MASK), {"weight": lambda b: b[1].mean()}, "a sum over the rows",
    ),
    "a weight by a statistic": (
        lambda p, b: tokens(p, b) / (b[1] * b[1].mean()).sum(), W, (X, MASK),
        {"weight": lambda b: (b[1] * b[1].mean()).sum()}, "a sum over the rows",
    ),
    "parts that make the whole": (
        lambda p, x: sum((part**2).mean() for part in jnp.split(x @ p, 2)) / 2, W, X, {}, "can't be decided",
    ),
    "dropout over its count": (dropped_and_counted, W, X, {}, "rng_argnum="),
    "a sum in a loop over rows": (
        lambda p, x: jax.lax.scan(lambda c, r: (c + r @ p, None), 0.0, x)[0] / len(x), W, X, {}, "can't be decided",
    ),
    "masks with what all rows share": (
        lambda p, b: (b[0] @ p * (b[1] | (jnp.arange(3) == 0))).mean(), WIDE[:, :3], (X, MASK), {}, "",
    ),
    "a shift by the largest": (
        lambda p, x: (lambda z: jax.nn.logsumexp(z - z.max(), axis=-1) - (z - z.max())[:, 0])(x @ p).mean(), WIDE, X,
        {}, "can't be decided",
    ),
}  # fmt: skip


def known(z):
    return jnp.where(jnp.isnan(z), 0.0, 1.0)


def known_mean(p, b):
    return ((b[0] @ p)[:, None] ** 2 * known(b[1])).sum() / known(b[1]).sum()


def beside(aside, loss=lambda p, b: (b[0] @ p).mean()):
    return lambda p, b: (loss(p, b), {"it": aside(p, b)})


def over_a_mapped_axis(p, x):
    means = jax.vmap(lambda r: (r @ p) ** 2 / jax.lax.pmean((r @ p) ** 2, "i"), axis_name="i")(x)
    return (means * x[:, 0]).mean()


STATE = {"n": jnp.zeros((), int), "u": jnp.ones(())}
MOVING = "computed from state that each micro-batch moves: state['u']"
WEIGHED = COUNTED | {"has_aux": True, "aux": "mean"}
ANYTHING = " "
CASES = {
    **{name: (loss, p, b, {}, message) for name, (loss, p, b, message) in BY_ROWS.items()},
    **{name: (loss, W, (X, MASK), COUNTED, "" if right else ANYTHING) for name, (loss, right) in GUARDED.items()},
    **{name: (mean_over(f), W, (x, mask), COUNTED, said) for name, (f, x, mask, said) in DENOMINATORS.items()},
    **{name: (loss, W, X, {}, "" if right else "The custom derivative") for name, (loss, right) in OWN.items()},
    **{
        name: (loss, W, X, {"state_argnum": 2}, "" if right else MOVING, STATE)
        for name, (loss, right) in STATES.items()
    },
    **{
        f"aux: {name}": (beside(aside), W, (X, MASK), {"has_aux": True, "aux": how}, message)
        for name, (how, aside, message) in ASIDE.items()
    },
    "aux: a mean over the same": (beside(token_mean, token_mean), W, (X, MASK), WEIGHED, ""),
    "aux: a mean over others": (
        beside(lambda p, b: (b[0] @ p).mean(), token_mean), W, (X, MASK), WEIGHED,
        "no mean over what the loss is a mean over",
    ),
    "targets that are NaN": (known_mean, W, (X, SOFT), {}, "It divides by"),
    "targets that are NaN, weighed": (known_mean, W, (X, SOFT), {"weight": lambda b: known(b[1]).sum()}, ""),
    "a weight that isn't a sum": (
        lambda p, b: token_mean(p, b) * b[1].sum() / (b[1].sum() + 1), W, (X, MASK),
        {"weight": lambda b: b[1].sum() + 1}, "(1 becomes 2)",
    ),
    "labels by place, in NumPy's numbers": (
        lambda p, b: -jax.nn.log_softmax(b[0] @ p)[np.arange(len(b[1])), b[1]].mean(), WIDE, (X, LABELS), {}, "",
    ),
    "one-hot labels, written by place": (
        lambda p, b: (jnp.zeros((len(b[1]), 5)).at[jnp.arange(len(b[1])), b[1]].set(1.0) * (b[0] @ p)).mean(), WIDE,
        (X, LABELS), {}, "",
    ),
    "labels by place": (
        lambda p, b: -jax.nn.log_softmax(b[0] @ p)[jnp.arange(len(b[1])), b[1]].mean(), WIDE, (X, LABELS), {}, "",
    ),
    "the mean over a mapped axis": (over_a_mapped_axis, W, X, {}, "looks across the rows"),
    **FOLLOWED,
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_loss_passes_in_silence_or_is_named(name, caplog):
    loss_fn, params, batch, options, message, *more = CASES[name]
    said = seen(caplog, loss_fn, params, batch, *more, **options)
    assert message in said
    assert bool(said) == bool(message)


def test_an_error_of_the_loss_comes_without_a_line_before_it(caplog):
    grad_fn = gradaccum.jax.value_and_grad(lambda p, x: (x.reshape(-1, 5) @ p).mean(), micro_batch_size=3)
    with pytest.raises(TypeError, match="reshape"):
        jax.eval_shape(grad_fn, W, X[:, :3])
    assert not caplog.records
