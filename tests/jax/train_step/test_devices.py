"""Several devices: every micro-batch is spread over all of them, and gradients are reduced once per update."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum.jax
from tests.jax.problems import at_once, in_micro_batches, network, outputs, rows, squared_error, tree_error
from tests.reference import FLOAT64

KINDS = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}


def mesh_of(kind, shape=(4,), names=("data",)):
    return jax.make_mesh(shape, names, axis_types=(KINDS[kind],) * len(shape))


def placed(tree, mesh, spec):
    return jax.device_put(tree, NamedSharding(mesh, spec))


def loops(text):
    """The computations of a compiled program that are bodies of loops, as text."""
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
    return [part for part in re.split(r"\n(?=%|ENTRY)", text) if re.match(r"%?([\w.\-]+)", part)[1] in bodies]


def collectives(text):
    return re.findall(r"= .*? (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text)


@pytest.mark.parametrize("size", [16, 24])
def test_with_explicit_axes_gradients_are_reduced_once_per_update(size):
    mesh = mesh_of("explicit")
    params, batch = placed(network(), mesh, P()), placed(rows(64), mesh, P("data"))
    step = in_micro_batches(squared_error, size).lower(params, batch).compile()
    bodies = loops(step.as_text())
    assert bodies
    assert not collectives("".join(bodies))
    assert set(collectives(step.as_text())) == {"all-reduce"}
    dots = re.findall(r"f64\[(\d+),7\]\S* dot\(", step.as_text())
    assert {int(n) for n in dots} <= {size // 4, 5, 3}, "16 rows on a device: 4 4 4 4, or 6 5 5"
    assert tree_error(step(params, batch), at_once(squared_error)(network(), rows(64))) <= FLOAT64


def test_with_auto_axes_every_micro_batch_is_spread_over_all_devices():
    mesh = mesh_of("auto")
    params, batch = placed(network(), mesh, P()), placed(rows(64), mesh, P("data"))
    step = in_micro_batches(squared_error, 16).lower(params, batch).compile()
    assert set(collectives(step.as_text())) == {"all-reduce"}, "rows were moved between devices"
    dots = re.findall(r"f64\[(\d+),7\]\S* dot\(", step.as_text())
    assert {int(n) for n in dots} <= {3, 4, 5}, "a device computes more than its rows; kernels have 5 and 3"
    assert tree_error(step(params, batch), at_once(squared_error)(network(), rows(64))) <= FLOAT64


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_are_spread_over_the_same_devices_keep_their_shardings(kind):
    mesh = mesh_of(kind)
    specs = {"hidden": {"kernel": P(None, "data"), "bias": P("data")}, "out": {"kernel": P("data"), "bias": P()}}
    plain = network(inputs=5)
    plain = {
        "hidden": {"kernel": jnp.ones((5, 8)) * 0.1, "bias": jnp.linspace(0, 1, 8)},
        "out": {"kernel": jnp.linspace(-1, 1, 24).reshape(8, 3), "bias": plain["out"]["bias"]},
    }
    params = jax.tree.map(lambda leaf, spec: placed(leaf, mesh, spec), plain, specs)
    batch = placed(rows(64), mesh, P("data"))

    def loss_fn(params, batch):
        if kind == "explicit":  # FSDP: whole where it is used, and its gradient is spread again
            params = jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, P()), params)
        return squared_error(params, batch)

    with jax.set_mesh(mesh):
        loss, grads = in_micro_batches(loss_fn, 16)(params, batch)
    for gradient, param in zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True):
        assert gradient.sharding.is_equivalent_to(param.sharding, param.ndim)
    assert tree_error((loss, grads), at_once(squared_error)(plain, rows(64))) <= FLOAT64


def test_the_sum_of_spread_gradients_is_spread_too():
    mesh = mesh_of("auto")
    w = placed(jnp.ones((256, 8)), mesh, P("data"))
    x = placed(jnp.ones((64, 256)), mesh, P("data"))
    step = in_micro_batches(lambda w, x: ((x @ w) ** 2).mean(), 16).lower(w, x).compile()
    carried = re.findall(r"= \((.*?)\) while\(", step.as_text())
    assert any("f64[64,8]" in part for part in carried), carried


def test_weights_aux_keys_and_gradients_of_the_batch_on_explicit_axes():
    mesh = mesh_of("explicit")
    (x, y), mask = rows(32), np.arange(32) % 5 != 0
    mask[:8] = False  # all of the first device's

    def loss_fn(params, batch, key):
        x, y, mask = batch
        errors = ((outputs(params, x) - y) ** 2).sum(-1)
        drawn = jax.random.normal(key, x.shape[:1])
        return (errors * mask).sum() / mask.sum(), {"error": errors, "right": (errors < 5).sum(), "drawn": drawn}

    hows = {"error": "concat", "right": "sum", "drawn": "concat"}
    keywords = {"has_aux": True, "aux": hows, "weight": lambda b: b[2].sum(), "rng_argnum": 2}
    batch, key = placed((x, y, mask), mesh, P("data")), placed(jax.random.key(0), mesh, P())
    step = in_micro_batches(loss_fn, 8, **keywords).lower(placed(network(), mesh, P()), batch, key).compile()
    assert not collectives("".join(loops(step.as_text())))
    (loss, aux), grads = step(placed(network(), mesh, P()), batch, key)
    (expected, expected_aux), expected_grads = at_once(loss_fn, has_aux=True)(network(), (x, y, mask), key)
    assert len(np.unique(aux.pop("drawn"))) == 32, "devices or micro-batches share random numbers"
    expected_aux.pop("drawn")
    assert tree_error(((loss, aux), grads), ((expected, expected_aux), expected_grads)) <= FLOAT64


def test_losses_with_a_denominator_each_and_gradients_of_rows_on_explicit_axes():
    mesh = mesh_of("explicit", (2, 2), ("data", "rest"))

    def loss_fn(w, batch):
        odd = batch["n"] % 2
        return {
            "odd": ((batch["x"] @ w * batch["scale"]) ** 2 * odd).sum() / odd.sum(),
            "all": (batch["x"] @ w).mean(),
        }

    def weighed(w, batch):
        losses = loss_fn(w, batch)
        return {"odd": (losses["odd"], (batch["n"] % 2).sum()), "all": (losses["all"], len(batch["n"]))}

    w, axes = jnp.linspace(-1, 1, 5), {"x": 0, "n": 0, "scale": None}
    batch = {"x": rows(16)[0], "n": jnp.arange(16) // 3, "scale": jnp.asarray(1.5)}
    # Integers can't be differentiated, so the batch is two arguments.
    step = in_micro_batches(
        lambda w, x, rest: weighed(w, {**x, **rest}), 4, argnums=(0, 1), batch_argnums=(1, 2),
        in_axes=({"x": 0, "scale": None}, 0),
    )  # fmt: skip
    spread = {name: placed(leaf, mesh, P() if axes[name] is None else P("data")) for name, leaf in batch.items()}
    losses, grads = step(placed(w, mesh, P()), {"x": spread["x"], "scale": spread["scale"]}, {"n": spread["n"]})

    def total(w, x):
        losses = loss_fn(w, {**x, "n": batch["n"]})
        return losses["odd"] + losses["all"], losses

    (_, expected), expected_grads = at_once(total, argnums=(0, 1), has_aux=True)(
        w, {"x": batch["x"], "scale": batch["scale"]}
    )
    assert tree_error((losses, grads), (expected, expected_grads)) <= FLOAT64


def test_a_loss_that_names_the_mesh_itself_is_exact_and_says_what_it_costs(caplog):
    mesh = mesh_of("explicit")
    params, batch = placed(network(), mesh, P()), placed(rows(64), mesh, P("data"))

    def loss_fn(params, batch):
        x, y = batch
        return squared_error(params, (jax.sharding.reshard(x, P("data", None)), y))

    with jax.set_mesh(mesh), caplog.at_level(logging.INFO, "gradaccum"):
        found = in_micro_batches(loss_fn, 16)(params, batch)
    assert tree_error(found, at_once(squared_error)(network(), rows(64))) <= FLOAT64
    assert "gradients are added up over devices once per micro-batch" in caplog.text


def test_the_same_array_as_parameter_and_batch_is_cut_as_batch_only():
    mesh = mesh_of("explicit")
    x = placed(jnp.arange(8.0), mesh, P("data"))
    grad_fn = gradaccum.jax.value_and_grad(lambda w, x: (w.sum() * x).mean(), micro_batch_size=4)
    with jax.set_mesh(mesh):
        loss, gradient = grad_fn(x, x)
    assert (float(loss), gradient.tolist()) == (98.0, [3.5] * 8)
    whole = placed(jnp.arange(8.0), mesh, P())
    loss, gradient = grad_fn(whole, whole)
    assert (float(loss), gradient.tolist()) == (98.0, [3.5] * 8)


def test_an_error_of_the_loss_on_devices_is_its_own():
    mesh = mesh_of("explicit")
    params, batch = placed(network(), mesh, P()), placed(rows(64), mesh, P("data"))
    with pytest.raises(TypeError, match="`loss_fn` must return a scalar"):
        in_micro_batches(lambda params, batch: outputs(params, batch[0]), 16)(params, batch)


@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map_gradients_are_those_of_jax_and_reduced_once(check_vma):
    mesh = mesh_of("auto")
    params, batch = network(), rows(64)

    def sharded(value_and_grad):
        def local(params, batch):
            loss, grads = value_and_grad(params, batch)
            if not check_vma:
                grads = jax.lax.psum(grads, "data")
            return jax.lax.pmean(loss, "data"), jax.tree.map(lambda leaf: leaf / 4, grads)

        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma))

    step = sharded(gradaccum.jax.value_and_grad(squared_error, micro_batch_size=4)).lower(params, batch).compile()
    assert not collectives("".join(loops(step.as_text())))
    found = step(params, batch)
    assert tree_error(found, sharded(jax.value_and_grad(squared_error))(params, batch)) <= FLOAT64
    assert tree_error(found, at_once(squared_error)(params, batch)) <= FLOAT64


def test_state_keys_and_ragged_rows_under_shard_map():
    mesh = mesh_of("auto")

    def loss_fn(params, batch, key, state):
        x, y = batch
        noise = jax.random.normal(key, x.shape) * 0.1
        return squared_error(params, (x + noise - state, y)), 0.9 * state + 0.1 * x.mean(0)

    grad_fn = gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=3, rng_argnum=2, state_argnum=3)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(P(), P("data"), P(), P()), out_specs=(P(), P("data"), P()))
    def step(params, batch, key, state):
        (loss, state), grads = grad_fn(params, batch, key, state)
        return jax.lax.pmean(loss, "data"), state[None], grads

    params, batch, key = network(), rows(32), jax.random.key(0)
    loss, states, grads = step(params, batch, key, jnp.zeros(5))
    alone = [
        jax.jit(grad_fn)(params, jax.tree.map(lambda leaf: leaf[start : start + 8], batch), key, jnp.zeros(5))  # noqa: B023
        for start in range(0, 32, 8)
    ]
    assert tree_error(list(states), [state for (_, state), _ in alone]) <= FLOAT64
    assert tree_error([loss], [sum(loss for (loss, _), _ in alone) / 4]) <= FLOAT64
    assert tree_error(grads, jax.tree.map(lambda *leaves: sum(leaves), *(g for _, g in alone))) <= FLOAT64


@pytest.mark.parametrize("is_sum", [True, False])
def test_a_loss_of_all_devices_in_a_shard_map_needs_a_weight_of_all_devices(is_sum):
    mesh, batch = mesh_of("auto"), (*rows(16), jnp.arange(16) % 3 > 0)

    def total(number):
        return jax.lax.psum(number, "data")

    def loss_fn(params, batch, total=total):
        x, y, mask = batch
        return total((((outputs(params, x) - y) ** 2).sum(-1) * mask).sum()) / total(mask.sum())

    weight = lambda batch: total(batch[2].sum()) if is_sum else batch[2].sum()  # noqa: E731
    grad_fn = gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=2, weight=weight)
    step = jax.jit(jax.shard_map(grad_fn, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    if is_sum:
        expected = jax.value_and_grad(lambda params, batch: loss_fn(params, batch, jnp.asarray))(network(), batch)
        assert tree_error(step(network(), batch), expected) <= FLOAT64
    else:
        with pytest.raises(ValueError, match=r"the weight.*its weight covers one device's rows|psum\(weight, 'data'\)"):
            step(network(), batch)
