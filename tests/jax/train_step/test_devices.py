"""Several devices: every micro-batch is spread over all of them, and gradients are reduced once per update."""

import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import gradaccum.jax
from tests.jax.comparisons import assert_same, at_once, in_micro_batches, mesh_of, placed
from tests.jax.problems import counted, errors, masked_error, network, outputs, rows, squared_error, taken
from tests.jax.train_step.test_calls import Case, by_hand

ALL = P()


def in_loops(text):
    """The computations of a compiled program that are bodies of loops, as text."""
    bodies = set(re.findall(r"body=%?([\w.\-]+)", text))
    found = [part for part in re.split(r"\n(?=%|ENTRY)", text) if re.match(r"%?([\w.\-]+)", part)[1] in bodies]
    assert found
    return "".join(found)


def collectives(text):
    names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return set(re.findall(rf"= .*? ({names})(?:-start)?\(", text))


@pytest.mark.parametrize(("kind", "size"), [("Explicit", 16), ("Explicit", 24), ("Auto", 16)])
def test_every_micro_batch_is_spread_over_all_devices_and_gradients_are_reduced_once(kind, size):
    mesh = mesh_of(kind)
    params, batch = placed(network(), mesh, ALL), placed(rows(64), mesh)
    step = in_micro_batches(squared_error, size).lower(params, batch).compile()
    assert collectives(step.as_text()) == {"all-reduce"}, "rows were moved between devices"
    dots = {int(n) for n in re.findall(r"f64\[(\d+),7\]\S* dot\(", step.as_text())}
    assert dots <= {size // 4, 5, 3}, "16 rows on a device: 4 4 4 4, or 6 5 5; kernels have 5 and 3"
    if kind == "Explicit":
        assert not collectives(in_loops(step.as_text()))
    assert_same(step(params, batch), at_once(squared_error)(network(), rows(64)))


@pytest.mark.parametrize("kind", ["Explicit", "Auto"])
def test_parameters_that_are_spread_over_the_same_devices_keep_their_shardings(kind):
    mesh = mesh_of(kind)
    specs = {"hidden": {"kernel": P(None, "data"), "bias": P("data")}, "out": {"kernel": P("data"), "bias": ALL}}
    plain = {
        "hidden": {"kernel": jnp.ones((5, 8)) * 0.1, "bias": jnp.linspace(0, 1, 8)},
        "out": {"kernel": jnp.linspace(-1, 1, 24).reshape(8, 3), "bias": network()["out"]["bias"]},
    }
    params = jax.tree.map(lambda leaf, spec: placed(leaf, mesh, spec), plain, specs)

    def loss_fn(params, batch):
        if kind == "Explicit":  # FSDP: whole where it is used, and its gradient is spread again
            params = jax.tree.map(lambda leaf: jax.sharding.reshard(leaf, ALL), params)
        return squared_error(params, batch)

    with jax.set_mesh(mesh):
        loss, grads = in_micro_batches(loss_fn, 16)(params, placed(rows(64), mesh))
    for gradient, param in zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True):
        assert gradient.sharding.is_equivalent_to(param.sharding, param.ndim)
    assert_same((loss, grads), at_once(squared_error)(plain, rows(64)))


def test_the_sum_of_spread_gradients_is_spread_too():
    mesh = mesh_of("Auto")
    w, x = placed(jnp.ones((256, 8)), mesh), placed(jnp.ones((64, 256)), mesh)
    step = in_micro_batches(lambda w, x: ((x @ w) ** 2).mean(), 16).lower(w, x).compile()
    carried = re.findall(r"= \((.*?)\) while\(", step.as_text())
    assert any("f64[64,8]" in part for part in carried), carried


CALLS = {
    "aux of tokens, none of them on the first device": Case(32, 8, "tokens", (0, 8), aux=True, last=False),
    "losses by name, and gradients of rows": Case(16, 4, "both", of_rows=True, last=False),
}


@pytest.mark.parametrize("name", CALLS)
def test_on_explicit_axes_a_call_is_what_it_is_on_one_device(name):
    case = CALLS[name]
    mesh = mesh_of("Explicit") if case.aux else mesh_of("Explicit", (2, 2), ("data", "rest"))
    params, x, more, key, state = case.args
    args = placed(params, mesh, ALL), placed(x, mesh), placed(more, mesh), placed(key, mesh, ALL), state
    step = in_micro_batches(case.loss, case.size, **case.options).lower(*args).compile()
    assert case.over == "both" or not collectives(in_loops(step.as_text()))
    assert_same(step(*args), by_hand(case))


@pytest.mark.parametrize("aux", ["last", {"none": "sum"}])
def test_what_is_said_of_an_aux_that_there_is_none_of_changes_nothing(aux):
    mesh = mesh_of("Explicit")
    args = placed(network(), mesh, ALL), placed(rows(64), mesh)
    step = in_micro_batches(squared_error, 16, aux=aux).lower(*args).compile()
    assert not collectives(in_loops(step.as_text()))


def test_devices_and_micro_batches_share_no_random_numbers():
    def loss_fn(params, batch, key):
        return squared_error(params, batch), jax.random.normal(key, batch[0].shape[:1])

    mesh = mesh_of("Explicit")
    step = in_micro_batches(loss_fn, 8, has_aux=True, rng_argnum=2, verify=False)
    (_, drawn), _ = step(placed(network(), mesh, ALL), placed(rows(32), mesh), placed(jax.random.key(0), mesh, ALL))
    assert len(np.unique(drawn)) == 32


def test_a_loss_that_names_the_mesh_itself_is_exact_and_says_what_it_costs(caplog):
    mesh = mesh_of("Explicit")

    def loss_fn(params, batch):
        x, y = batch
        return squared_error(params, (jax.sharding.reshard(x, P("data", None)), y))

    with jax.set_mesh(mesh), caplog.at_level(logging.INFO, "gradaccum"):
        found = in_micro_batches(loss_fn, 16)(placed(network(), mesh, ALL), placed(rows(64), mesh))
    assert_same(found, at_once(squared_error)(network(), rows(64)))
    assert "gradients are added up over devices once per micro-batch" in caplog.text


@pytest.mark.parametrize("spec", [P("data"), ALL], ids=["spread", "whole"])
def test_the_same_array_as_parameter_and_batch_is_cut_as_batch_only(spec):
    mesh = mesh_of("Explicit")
    x = placed(jnp.arange(8.0), mesh, spec)
    with jax.set_mesh(mesh):
        loss, gradient = gradaccum.jax.value_and_grad(lambda w, x: (w.sum() * x).mean(), micro_batch_size=4)(x, x)
    assert (float(loss), gradient.tolist()) == (98.0, [3.5] * 8)


def test_an_error_of_the_loss_on_devices_is_its_own():
    mesh = mesh_of("Explicit")
    with pytest.raises(TypeError, match="`loss_fn` must return a scalar"):
        step = in_micro_batches(lambda params, batch: outputs(params, batch[0]), 16)
        step(placed(network(), mesh, ALL), placed(rows(64), mesh))


@pytest.mark.parametrize("check_vma", [True, False])
def test_under_shard_map_gradients_are_those_of_jax_and_reduced_once(check_vma):
    def sharded(value_and_grad):
        def local(params, batch):
            loss, grads = value_and_grad(params, batch)
            if not check_vma:
                grads = jax.lax.psum(grads, "data")
            return jax.lax.pmean(loss, "data"), jax.tree.map(lambda leaf: leaf / 4, grads)

        specs = {"in_specs": (ALL, P("data")), "out_specs": ALL, "check_vma": check_vma}
        return jax.jit(jax.shard_map(local, mesh=mesh_of("Auto"), **specs))

    args = network(), rows(64)
    step = sharded(gradaccum.jax.value_and_grad(squared_error, micro_batch_size=4)).lower(*args).compile()
    assert not collectives(in_loops(step.as_text()))
    assert_same(step(*args), sharded(jax.value_and_grad(squared_error))(*args))
    assert_same(step(*args), at_once(squared_error)(*args))


def test_state_keys_and_ragged_rows_under_shard_map():
    def loss_fn(params, batch, key, state):
        x, y = batch
        noise = jax.random.normal(key, x.shape) * 0.1
        return squared_error(params, (x + noise - state, y)), 0.9 * state + 0.1 * x.mean(0)

    grad_fn = gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=3, rng_argnum=2, state_argnum=3)

    @jax.jit
    @jax.shard_map(mesh=mesh_of("Auto"), in_specs=(ALL, P("data"), ALL, ALL), out_specs=(ALL, P("data"), ALL))
    def step(params, batch, key, state):
        (loss, state), grads = grad_fn(params, batch, key, state)
        return jax.lax.pmean(loss, "data"), state[None], grads

    params, batch, key, state = network(), rows(32), jax.random.key(0), jnp.zeros(5)
    loss, states, grads = step(params, batch, key, state)
    alone = [jax.jit(grad_fn)(params, taken(batch, n, n + 8), key, state) for n in range(0, 32, 8)]
    assert_same(list(states), [state for (_, state), _ in alone])
    assert_same([loss], [sum(loss for (loss, _), _ in alone) / 4])
    assert_same(grads, jax.tree.map(lambda *leaves: sum(leaves), *(g for _, g in alone)))


@pytest.mark.parametrize("is_sum", [True, False])
def test_a_loss_of_all_devices_in_a_shard_map_needs_a_weight_of_all_devices(is_sum):
    args = network(), (*rows(16), jnp.arange(16) % 3 > 0)

    def loss_fn(params, batch):
        x, y, mask = batch
        return jax.lax.psum((errors(params, x, y) * mask).sum(), "data") / jax.lax.psum(mask.sum(), "data")

    weight = lambda batch: jax.lax.psum(counted(batch), "data") if is_sum else counted(batch)  # noqa: E731
    grad_fn = gradaccum.jax.value_and_grad(loss_fn, micro_batch_size=2, weight=weight)
    step = jax.jit(jax.shard_map(grad_fn, mesh=mesh_of("Auto"), in_specs=(ALL, P("data")), out_specs=ALL))
    if is_sum:
        assert_same(step(*args), at_once(masked_error)(*args))
    else:
        with pytest.raises(ValueError, match=r"the weight.*its weight covers one device's rows|psum\(weight, 'data'\)"):
            step(*args)
