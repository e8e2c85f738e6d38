"""Blocks updated in the backward pass: the large batch's update, by the user's own optimizer."""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradaccum.errors import WindowError
from gradaccum.torch import TrainStep
from tests.reference import FLOAT64, relative_error, torch_updates
from tests.torch.layers import test_blocks
from tests.torch.layers.test_blocks import (
    OPTIMIZERS,
    assert_same_updates,
    batches,
    loss_of,
    network,
    trained,
    unchanged,
)

IN_BACKWARD: dict[str, Any] = {"update": "in_backward"}
OPTIONS: dict[str, dict[str, Any]] = {"Adafactor": {"lr": 0.1}, "ASGD": {"lr": 0.1}, "Rprop": {"lr": 0.01}}
NAMES = [
    "Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
]  # fmt: skip
if torch.optim.Adagrad([nn.Parameter(torch.ones(1))]).state:
    NAMES.remove("Adagrad")  # torch 2.10 makes its state beforehand: it is refused, by name


def build(model: nn.Module, optimizer: Any = None, **options: Any) -> TrainStep:
    optimizer = OPTIMIZERS["adam"](model.parameters()) if optimizer is None else optimizer
    return test_blocks.build(model, optimizer, **IN_BACKWARD | options)


def test_in_backward_each_optimizer_of_torch_makes_the_large_batchs_update() -> None:
    for index, name in enumerate(NAMES):
        kind = getattr(torch.optim, name)
        for foreach in (False, True) if name in ("Adam", "SGD") else (index % 2 == 0,):

            def make(parameters: Any, kind: Any = kind, name: str = name, foreach: bool = foreach) -> Any:
                return kind(parameters, **{"lr": 1e-2, **OPTIONS.get(name, {})}, foreach=foreach)

            assert_same_updates(network(), batches(count=2), loss_of, make, 3, verify=False, **IN_BACKWARD)


def test_in_backward_fused_optimizers_and_several_of_them_with_groups() -> None:
    def fused(parameters: Any) -> torch.optim.Optimizer:
        listed = list(parameters)
        groups = [{"params": listed[:4], "lr": 0.1}, {"params": listed[4:]}]
        return torch.optim.AdamW(groups, lr=1e-2, fused=True)

    assert_same_updates(network(), batches(), loss_of, fused, 3, **IN_BACKWARD)

    model, reference = network(), network()
    for either, update in ((model, True), (reference, False)):
        listed = list(either.parameters())
        both = [torch.optim.SGD(listed[::2], lr=0.1), torch.optim.Adam(listed[1::2], lr=0.01)]
        if update:
            step = build(either, both)
            for batch in batches():
                step(*batch)
        else:
            for batch in batches():
                loss_of(either, *batch).backward()
                for optimizer in both:
                    optimizer.step()
                    optimizer.zero_grad()
    assert relative_error(model.parameters(), reference.parameters()) <= FLOAT64


def test_in_backward_weights_in_common_wait_for_their_last_use() -> None:
    model = network()
    model.layers[2].inner.weight = model.layers[0].inner.weight
    model.layers[1].outer.bias = model.norm.weight
    assert_same_updates(model, batches(), loss_of, OPTIMIZERS["adam"], 3, **IN_BACKWARD)

    def penalised(model: Any, ids: Tensor, labels: Tensor) -> Tensor:  # block 2's weight stands before block 1, too
        ids = ids.clone()
        return loss_of(model, ids, labels) + model.layers[2].inner.weight.square().sum()

    assert_same_updates(network(), batches(), penalised, OPTIMIZERS["adam"], 3, **IN_BACKWARD)

    model = network()
    position = model.position.forward
    model.position.forward = lambda x: position(x) * model.layers[2].inner.bias  # type: ignore[method-assign]
    reference = copy.deepcopy(model)
    own = reference.position
    plain = type(own).forward
    reference.position.forward = lambda x: plain(own, x) * reference.layers[2].inner.bias  # type: ignore[method-assign]
    torch_updates(reference, OPTIMIZERS["adam"](reference.parameters()), batches(), loss_of)
    step = build(model)
    for batch in batches():
        step(*batch)
    assert relative_error(model.parameters(), reference.parameters()) <= FLOAT64


def test_in_backward_wide_sums_of_narrow_gradients() -> None:
    updates = ("after_backward", "in_backward")
    models = [network().bfloat16() for _ in updates]
    options: dict[str, Any] = {"accumulate_dtype": torch.float32, "verify": False}
    updated = [trained(model, update=update, **options) for model, update in zip(models, updates, strict=True)]
    assert relative_error(*updated) == 0.0
    assert all(p.grad is None or p.grad.dtype == torch.bfloat16 for model in models for p in model.parameters())


def test_in_backward_no_room_for_the_optimizers_state_is_an_error_before_the_first_block() -> None:
    model = network()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    step = build(model, optimizer, verify=False, memory_limit=1)
    no_room = r"optimizers' state needs .* are free. Nothing has been updated"
    with unchanged(model), pytest.raises(torch.OutOfMemoryError, match=no_room):
        step(*batches()[0])
    assert not optimizer.state


def test_in_backward_schedulers_hooks_and_counters_see_one_update() -> None:
    model = network()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step, seen = build(model, optimizer), []
    optimizer.register_step_post_hook(
        lambda optimizer, args, kwargs: seen.append(len(optimizer.param_groups[0]["params"]))
    )
    groups = [*optimizer.param_groups]
    for batch in batches():
        step(*batch)
        scheduler.step()
    assert seen == [len(list(model.parameters()))] * 3
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}
    assert all(one is other for one, other in zip(groups, optimizer.param_groups, strict=True))
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
    assert all(p.grad is None for p in model.parameters())


def test_in_backward_no_more_gradients_are_alive_than_one_blocks_and_those_outside() -> None:
    model = network(depth=5)
    most, outside = 0, {id(p) for p in model.parameters()} - {id(p) for p in model.layers.parameters()}

    def count(_: Tensor) -> None:
        nonlocal most
        most = max(most, sum(p.numel() for p in model.parameters() if p.grad is not None))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    build(model, verify=False)(*batches()[0])
    block = sum(p.numel() for p in model.layers[0].parameters())
    assert most <= block + sum(p.numel() for p in model.parameters() if id(p) in outside)


class ByGlobalNorm(torch.optim.SGD):
    """Normalises by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        listed = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_div_(listed, float(torch.nn.utils.get_total_norm(listed)))
        return super().step(closure)


class CountsSteps(torch.optim.SGD):
    """Counts its steps in its groups."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


class JointlyAbove(torch.optim.SGD):
    """Normalises the large parameters by their joint norm."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        large = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None and p.dim() > 1]
        large = [grad for grad in large if grad.numel() > 9]
        if len(large) > 1:
            torch._foreach_div_(large, float(torch.nn.utils.get_total_norm(large)))
        return super().step(closure)


class Averages(torch.optim.SGD):
    """Keeps an average of the model's weights, which it finds outside of its groups."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model.parameters(), **options)
        self.average = torch.optim.swa_utils.AveragedModel(model)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        found = super().step(closure)
        for p in self.average.module.parameters():
            p.data.mul_(0.9)
        return found


class CountsInItself(torch.optim.SGD):
    """Counts its steps in an attribute."""

    count = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.count += 1
        return super().step(closure)


def hooked(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


ACROSS = "makes a different update when it steps parameters one by one"
STEPS: list[tuple[Any, str]] = [
    (lambda model: ByGlobalNorm(model.parameters(), lr=0.1), f"ByGlobalNorm {ACROSS}"),
    (lambda model: CountsSteps(model.parameters(), lr=0.1), f"CountsSteps {ACROSS}"),
    (lambda model: JointlyAbove(model.parameters(), lr=0.1), f"JointlyAbove {ACROSS}"),
    (lambda model: CountsInItself(model.parameters(), lr=0.1), f"CountsInItself {ACROSS}"),
    (lambda model: Averages(model, lr=0.1), r"Averages.step\(\) does more than update its parameters: it calls aten"),
    (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS evaluates a closure"),
    (hooked, "SGD has hooks of register_step_pre_hook"),
]


@pytest.mark.parametrize(("make", "words"), STEPS)
def test_in_backward_refuses_optimizers_whose_steps_are_more_than_each_parameters_update(make: Any, words: str) -> None:
    model = network()
    with pytest.raises(ValueError, match=words):
        build(model, make(model))


def test_in_backward_refuses_a_step_that_was_replaced() -> None:
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step, inner = build(model, optimizer), optimizer.step
    optimizer.step = functools.wraps(inner)(lambda closure=None: inner(closure))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="SGD's step was replaced by step, and update='in_backward' calls it several"):
        step(*batches()[0])
    with pytest.raises(WindowError, match=r"step.backward\(\) leaves"):
        step.backward(*batches()[0])


def test_in_backward_a_loss_that_is_not_finite_stops_before_the_first_block() -> None:
    model = network()
    step = build(model, verify=False, compute_loss=lambda model, *batch: loss_of(model, *batch) / 0)
    with unchanged(model), pytest.raises(ValueError, match="The loss of this batch is inf"):
        step(*batches()[0])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_in_backward_an_error_in_the_middle_says_what_has_been_updated(error: type[Exception]) -> None:
    model = network()
    step, before = build(model, verify=False), copy.deepcopy(model)

    def fail(layer: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            raise error("on purpose")

    model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises((torch.OutOfMemoryError, WindowError)) as raised:
        step(*batches()[0])
    assert "6 of 23 parameters have been updated with this batch" in str(raised.value)
    assert "those of the blocks 'layers.2'" in str(raised.value)
    assert isinstance(raised.value, torch.OutOfMemoryError) == (error is torch.OutOfMemoryError)
    for layer, changed in (("layers.0", False), ("layers.1", False), ("layers.2", True), ("norm", False)):
        found = relative_error(model.get_submodule(layer).parameters(), before.get_submodule(layer).parameters())
        assert (found > 0) == changed, layer
    assert step.updates == 0
    assert all(p.grad is None for p in model.parameters())


def token_mean(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=0)


def told(ids: Tensor, labels: Tensor) -> Tensor:
    return (labels != 0).sum()


REFUSED: dict[str, tuple[Any, str]] = {
    "batch_norm": ("exact", 'batch_norm="exact"'),
    "noise_scale": (True, "noise_scale=True"),
    "clip_grad_norm": (0.1, "`clip_grad_norm` needs the norm of all of them. Use update='after_backward'"),
    "scaler": (torch.amp.GradScaler("cpu"), "a GradScaler makes an update only where all of them are finite"),
    "micro_batch_size": ("auto", "give a `micro_batch_size` in rows"),
    "update": ("sometimes", "`update` must be one of 'after_backward', 'in_backward'"),
}
EXACT: dict[str, dict[str, Any]] = {
    "clip_grad_value": {"clip_grad_value": 0.01},
    "loss_fn": {"loss_fn": lambda outputs, y: nn.functional.cross_entropy(outputs.flatten(0, 1), y.flatten())},
    "compute_loss": {"compute_loss": lambda *batch: dict.fromkeys("ab", (loss_of(*batch), len(batch[1])))},
    "weight": {"compute_loss": token_mean, "weight": told},
    "weight returned": {"compute_loss": lambda *batch: (token_mean(*batch), told(*batch[1:]))},
    "reduction": {"compute_loss": lambda *batch: token_mean(*batch) * told(*batch[1:]), "reduction": "sum"},
    "batch_dims": {"compute_loss": lambda model, ids, y: loss_of(model, ids, y.T), "batch_dims": (0, 1)},
    "groups": {"groups": 2},
    "head": {"head": "head"},
    "autocast": {"autocast": torch.bfloat16},
    "accumulate_dtype": {"accumulate_dtype": torch.float64},
    "batch_norm": {"batch_norm": "pooled"},
    "offload": {"offload": True},
    "memory_limit": {"memory_limit": "64GiB"},
    "verify": {"verify": True},
    "sync": {"sync": "micro_batch"},
}
TESTED_ELSEWHERE = {"blocks", "max_tokens", "pack"}  # the last two below


def test_in_backward_each_option_is_exact_or_refused_by_name_when_the_step_is_built() -> None:
    options = set(inspect.signature(TrainStep).parameters) - {"model", "optimizer"}
    assert {*options, "update", "weight returned"} == {*REFUSED, *EXACT, *TESTED_ELSEWHERE}
    for name, (value, words) in REFUSED.items():
        with pytest.raises(ValueError) as raised:
            build(network(), **{name: value})
        assert words in str(raised.value)
    for name, keywords in EXACT.items():
        updated = []
        for update in ("after_backward", "in_backward"):
            model = network()
            given = {"compute_loss": None if name == "loss_fn" else loss_of, "micro_batch_size": 4, "verify": False}
            data = [(ids, y.T if name == "batch_dims" else y) for ids, y in batches(rows=8, count=2)]
            updated.append(trained(model, data, update=update, **given | keywords))
        assert relative_error(*updated) <= FLOAT64, name


@pytest.mark.slow
def test_in_backward_rows_by_tokens_and_packed_ones() -> None:
    pytest.importorskip("transformers")
    from gradaccum.torch.packing import causal_lm
    from tests.torch.train_step.test_padding import data, next_token_mean, shifted, tiny

    for pack in (None, causal_lm):
        updated = []
        for update in ("after_backward", "in_backward"):
            keywords = {"weight": shifted, "max_tokens": 24, "pack": pack, "micro_batch_size": "auto", "update": update}
            options = {"compute_loss": next_token_mean, "blocks": "model.layers", "verify": False, **keywords}
            updated.append(trained(tiny("llama"), data("right", 1), **options))
        assert relative_error(*updated) <= FLOAT64


def test_a_gradient_that_has_been_used_is_gone_before_the_next_block_runs() -> None:
    model, gradients, alive = network(), list[weakref.ref[Tensor]](), list[bool]()
    weight: Any = model.layers[2].inner.weight

    def arrived(parameter: Tensor) -> None:
        gradients[:] = [] if parameter.grad is None else [weakref.ref(parameter.grad)]

    def runs(*_: Any) -> None:
        if torch.is_grad_enabled():
            alive.append(gradients[0]() is not None)

    weight.register_post_accumulate_grad_hook(arrived)
    model.layers[1].inner.register_forward_hook(runs)
    step = build(model, verify=False)
    step(*batches()[0])
    assert alive == [False] * 3
