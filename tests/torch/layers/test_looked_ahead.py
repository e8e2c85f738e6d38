"""Updates in backward that need to know of all gradients first: backward runs twice, and the update is the large
batch's."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradaccum.errors import NotEquivalentError
from gradaccum.torch import TrainStep
from tests.reference import FLOAT64, relative_error
from tests.torch.layers.test_blocks import OPTIMIZERS, Layer, Network, assert_same_updates, batches, loss_of, network

CLIPPED: dict[str, Any] = {"blocks": "layers", "update": "in_backward", "clip_grad_norm": 0.05, "size": 3}


def penalised(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """A block's weight gets a part of its gradient from the loss, before the blocks' turns."""
    return loss_of(model, ids, labels) + model.layers[2].inner.weight.square().sum()


def tied() -> Network:
    model = network()
    model.layers[2].inner.weight = model.layers[0].inner.weight
    model.layers[1].outer.bias = model.norm.weight
    return model


def partly_frozen() -> Network:
    model = network()
    model.layers[1].requires_grad_(False)
    model.layers[0].norm.requires_grad_(False)
    model.embedding.requires_grad_(False)
    return model


class Reading(Layer):
    """Has a weight of the layer behind it among its parameters."""

    other: nn.Parameter

    def forward(self, x: Tensor, shared: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return super().forward(x * self.other[: x.shape[-1]], shared, scale=scale)


class Caching(Layer):
    """Writes to a cache that all blocks are called with, and goes by how many have."""

    def forward(self, x: Tensor, cache: Any) -> Any:  # type: ignore[override]
        cache.keys.append(x)
        return super().forward(x * len(cache.keys), torch.zeros((), dtype=x.dtype))[0], cache


class Cache:
    """A list of tensors."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


class Cached(Network):
    """Blocks with a cache."""

    def forward(self, ids: Tensor) -> Tensor:
        x, cache = self.embedding(ids), Cache()
        for layer in self.layers:
            x, cache = layer(x, cache)
        return self.head(self.norm(x))


def test_the_clipped_update_is_the_large_batchs_whatever_the_weights_are_read_by(tmp_path: Path) -> None:
    reading = network()
    first = Reading(6).double()
    reading.layers[0], first.other = first, reading.layers[2].inner.bias
    cached = Cached().double()
    cached.layers = nn.ModuleList([Caching(6) for _ in range(3)]).double()
    for model, loss, options in (
        (network(), loss_of, {"verify": False}),
        (network(), loss_of, {"offload": tmp_path}),
        (network(), penalised, {}),
        (tied(), penalised, {}),
        (partly_frozen(), loss_of, {}),
        (reading, loss_of, {}),
        (cached, loss_of, {}),
    ):
        before = copy.deepcopy(model)
        step = assert_same_updates(model, batches(count=2), loss, **CLIPPED, **options)
        loss(before, *batches(count=2)[0]).backward()
        assert step.grad_norm is not None
        assert step.grad_norm > 2 * CLIPPED["clip_grad_norm"]
        step = assert_same_updates(before, batches(count=1), loss, **{**CLIPPED, "clip_grad_norm": 1e3}, verify=False)
        assert step.grad_norm is not None  # of a gradient that need not be clipped


def both(
    make_model: Any = network, make: Any = OPTIMIZERS["sgd"], data: Any = None, **options: Any
) -> tuple[list[Any], list[Any]]:
    """What after_backward and in_backward leave: parameters, losses, norms, gradients outside of the optimizer."""
    left = []
    for update in ("after_backward", "in_backward"):
        model = make_model()
        given = {key: value() if key == "scaler" else value for key, value in options.items()}
        given = {"compute_loss": loss_of, "micro_batch_size": 3, "blocks": "auto", "verify": False, **given}
        step = TrainStep(model, make(model.parameters()), update=update, **given)  # type: ignore[arg-type]
        torch.manual_seed(5)
        found: list[Any] = []
        for batch in batches() if data is None else data:
            found += [step(*batch), *([] if step.grad_norm is None else [step.grad_norm])]
        found += [torch.get_rng_state(), torch.tensor(float(step.updates))]
        found += [given["scaler"].get_scale()] if "scaler" in given else []
        left.append([torch.as_tensor(one) for one in [*model.parameters(), *found]])
    return left[0], left[1]


def test_dropout_means_over_tokens_wide_sums_and_several_optimizers_are_clipped_as_after_backward() -> None:
    def tokens(model: nn.Module, ids: Tensor, labels: Tensor) -> Any:
        count = (labels != 0).sum()
        return nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), ignore_index=0), count

    def two(parameters: Any) -> Any:
        listed = list(parameters)
        groups = [{"params": listed[:3], "weight_decay": 0.1}, {"params": listed[3:6], "lr": 0.01}]
        return [torch.optim.SGD(groups, lr=0.1), torch.optim.Adam(listed[6:], lr=0.01)]

    clip = {"clip_grad_norm": 0.05}
    for make_model, make, options in (
        (lambda: network(dropout=0.3), OPTIMIZERS["sgd"], clip),
        (network, two, {**clip, "compute_loss": tokens}),
        (network, two, {**clip, "scaler": lambda: torch.amp.GradScaler("cpu", init_scale=2.0**8)}),
    ):
        assert relative_error(*both(make_model, make, **options)) <= FLOAT64
    half, wide = both(lambda: network().bfloat16(), accumulate_dtype=torch.float32, **clip)
    assert relative_error([p.float() for p in half], [p.float() for p in wide]) <= 1e-6


def test_gradients_of_parameters_that_no_optimizer_has_are_there_once() -> None:
    for update in ("after_backward", "in_backward"):
        model = network()
        free = [model.layers[1].inner.weight, model.position.weight]
        own = [p for p in model.parameters() if not any(p is one for one in free)]
        step = TrainStep(
            model, OPTIMIZERS["sgd"](own), compute_loss=loss_of, micro_batch_size=3, blocks="auto",
            update=update, clip_grad_norm=0.05,  # type: ignore[arg-type]
        )  # fmt: skip
        step(*batches()[0])
        found = [p.grad for p in free] if update == "after_backward" else found  # noqa: F821
        assert relative_error([p.grad for p in free], found) <= FLOAT64


def test_an_overflow_leaves_the_window_out_and_halves_the_scale_once() -> None:
    def overflowing(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        return loss_of(model, ids, labels) * (torch.inf if bool((ids[0] == 0).all()) else 1.0)

    data = batches()
    data[1][0][0] = 0
    for clip in ({}, {"clip_grad_norm": 0.05}):
        scaler = {"scaler": lambda: torch.amp.GradScaler("cpu", init_scale=2.0**8), "compute_loss": overflowing}
        after, within = both(data=data, **scaler, **clip)
        assert [t.isnan().tolist() for t in after] == [t.isnan().tolist() for t in within]
        finite = [[t.nan_to_num(0, 0, 0) for t in left] for left in (after, within)]
        assert relative_error(*finite) <= FLOAT64
        assert after[-1] == within[-1] == 2.0**7
        assert within[-2] == 2.0


def test_one_optimizers_overflow_leaves_the_other_one_stepping() -> None:
    def two(parameters: Any) -> Any:
        listed = list(parameters)
        return [torch.optim.SGD(listed[:-3], lr=0.1), torch.optim.SGD(listed[-3:], lr=0.1)]

    def exploding() -> Network:
        model = network()
        model.layers[0].norm.weight.register_hook(lambda gradient: gradient * torch.inf)
        return model

    after, within = both(exploding, two, data=batches(count=1), scaler=lambda: torch.amp.GradScaler("cpu"))
    assert relative_error(after, within) <= FLOAT64
    assert within[-2] == 1.0
    plain = list(network().parameters())
    assert [torch.equal(p, q) for p, q in zip(plain, within, strict=False)].count(True) == len(plain) - 3


@pytest.mark.parametrize("fused", [(True, False), (True, True), (False, False)], ids=str)
def test_a_fused_optimizer_has_its_hooks_called_in_an_overflow_as_by_a_grad_scaler(fused: tuple[bool, bool]) -> None:
    def overflowing(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
        return loss_of(model, ids, labels) * (torch.inf if bool((ids[0] == 0).all()) else 1.0)

    def run(update: Any) -> list[str]:
        model, seen = network(), list[str]()
        listed = list(model.parameters())
        halves = zip((listed[:5], listed[5:]), fused, strict=True)
        optimizers = [torch.optim.Adam(half, lr=1e-3, fused=one) for half, one in halves]
        schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for optimizer in optimizers]
        for number, optimizer in enumerate(optimizers):
            optimizer.register_step_post_hook(lambda *_, number=number: seen.append(f"step {number}"))
        step = TrainStep(
            model, optimizers, compute_loss=overflowing, micro_batch_size=3, blocks="auto", update=update,
            verify=False, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**8),
        )  # fmt: skip
        for i in (0, 1):
            step(*data[i])
            for number, schedule in enumerate(schedules):
                with warnings.catch_warnings(record=True) as told:
                    warnings.simplefilter("always")
                    schedule.step()
                seen += [f"schedule {number}: {len(told)}", repr(step.updates)]
        return seen

    data = batches()
    data[0][0][0] = 0
    assert run("in_backward") == run("after_backward")


def test_no_more_gradients_are_alive_than_one_blocks_and_those_outside_and_each_block_runs_three_times() -> None:
    model, calls = network(depth=5), 0
    most, outside = 0, {id(p) for p in model.parameters()} - {id(p) for p in model.layers.parameters()}

    def look(_: Tensor) -> None:
        nonlocal most
        most = max(most, sum(p.numel() for p in model.parameters() if p.grad is not None))

    def called(*_: Any) -> None:
        nonlocal calls
        calls += 1

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    model.layers[2].register_forward_hook(called)
    step = TrainStep(
        model, OPTIMIZERS["sgd"](model.parameters()), compute_loss=loss_of, micro_batch_size=4, blocks="layers",
        update="in_backward", clip_grad_norm=0.05, verify=False,
    )  # fmt: skip
    step(*batches(rows=8)[0])
    block = sum(p.numel() for p in model.layers[0].parameters())
    assert most <= block + sum(p.numel() for p in model.parameters() if id(p) in outside)
    assert calls == 2 * 3
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("scaled", [False, True])
def test_memory_that_runs_out_in_the_first_run_costs_nothing_but_smaller_micro_batches(scaled: bool) -> None:
    options: dict[str, Any] = {"scaler": torch.amp.GradScaler("cpu", init_scale=2.0**8)} if scaled else {}
    model, reference = network(), network()
    failing = {"left": 1}

    def fail(layer: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and len(args[0]) > 2 and failing["left"]:
            failing["left"] -= 1
            raise torch.OutOfMemoryError("on purpose")

    model.layers[0].register_forward_pre_hook(fail)  # the last in the first run
    data = batches(rows=8)
    losses = []
    for trained, update in ((model, "in_backward"), (reference, "after_backward")):
        step = TrainStep(
            trained, OPTIMIZERS["sgd"](trained.parameters()), compute_loss=loss_of, micro_batch_size=4, blocks="layers",
            update=update, clip_grad_norm=0.05, verify=False, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        losses += [step(*data[0]), step(*data[1])]
    assert failing["left"] == 0
    assert relative_error([*model.parameters(), *losses[:2]], [*reference.parameters(), *losses[2:]]) <= FLOAT64


def test_an_error_in_the_first_run_leaves_everything_as_it_was() -> None:
    model, scaler = network(), torch.amp.GradScaler("cpu", init_scale=2.0**8)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step = TrainStep(
        model, optimizer, compute_loss=loss_of, micro_batch_size=3, blocks="layers",
        update="in_backward", clip_grad_norm=0.05, verify=False, scaler=scaler,
    )  # fmt: skip
    before = copy.deepcopy(model.state_dict())

    def fail(layer: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            raise RuntimeError("on purpose")

    hook = model.layers[0].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match=r"^on purpose"):
        step(*batches()[0])
    assert relative_error(model.state_dict().values(), before.values()) == 0.0
    assert not optimizer.state
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())
    assert scaler.get_scale() == 2.0**8
    hook.remove()
    step(*batches()[0])
    assert step.updates == 1


def test_a_gradient_that_is_not_finite_stops_a_clipped_update_before_the_first_block() -> None:
    model = network()
    step = TrainStep(
        model, OPTIMIZERS["sgd"](model.parameters()), compute_loss=loss_of, micro_batch_size=3, blocks="layers",
        update="in_backward", clip_grad_norm=1.0, verify=False,
    )  # fmt: skip
    model.layers[0].inner.weight.register_hook(lambda gradient: gradient / 0)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="norm of this batch's gradient is (inf|nan), and nothing has been updated"):
        step(*batches()[0])
    assert relative_error(model.state_dict().values(), before.values()) == 0.0


def test_the_proof_names_a_block_to_which_the_two_runs_give_different_gradients() -> None:
    model = network()
    step = TrainStep(
        model, OPTIMIZERS["sgd"](model.parameters()), compute_loss=loss_of, micro_batch_size=4, blocks="layers",
        update="in_backward", clip_grad_norm=1.0,
    )  # fmt: skip
    calls: list[int] = []

    def counting(gradient: Tensor) -> Tensor:
        calls.append(1)
        return gradient * (2 if len(calls) == 2 else 1)  # after the rows at once, the first micro-batch's

    model.layers[1].inner.weight.register_hook(counting)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(NotEquivalentError, match=r"runs the blocks twice, and .* other gradients to 'layers.1'\."):
        step(*batches()[0])
    assert relative_error(model.state_dict().values(), before.values()) == 0.0


class Adapted(Layer):
    """A frozen block with an adapter of low rank."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.requires_grad_(False)
        self.down, self.up = nn.Linear(size, 2, bias=False), nn.Linear(2, size, bias=False)

    def forward(self, x: Tensor, shared: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        y, shared = super().forward(x, shared, scale=scale)
        return y + self.up(self.down(x)), shared


def adapted() -> Network:
    model = network()
    torch.manual_seed(3)
    model.layers = nn.ModuleList([Adapted(6) for _ in range(3)]).double()
    model.embedding.requires_grad_(False)
    return model


@pytest.mark.parametrize("schedule", [pytest.param("StepLR", marks=pytest.mark.slow), "OneCycleLR"])
def test_adapters_of_frozen_blocks_and_schedules_make_the_clipped_updates_of_a_plain_loop(schedule: str) -> None:
    def train(model: Network, update: Any) -> list[Tensor]:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        scheduler: Any = (
            torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            if schedule == "StepLR"
            else torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, 4)
        )
        one = update(model, optimizer, trained)
        for batch in batches():
            one(*batch)
            scheduler.step()
        settings = [optimizer.param_groups[0][key] for key in ("lr", "momentum")]
        return [*trained, torch.tensor(settings), torch.tensor(float(scheduler.last_epoch))]

    def plain(model: Any, optimizer: Any, trained: Any) -> Any:
        def update(*batch: Tensor) -> None:
            loss_of(model, *batch).backward()
            torch.nn.utils.clip_grad_norm_(trained, 0.05)
            optimizer.step()
            optimizer.zero_grad()

        return update

    expected = train(adapted(), plain)
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**8)):

        def twice(model: Any, optimizer: Any, _: Any, scaler: Any = scaler) -> TrainStep:
            return TrainStep(
                model, optimizer, compute_loss=loss_of, micro_batch_size=3, blocks="layers", update="in_backward",
                clip_grad_norm=0.05, scaler=scaler,
            )  # fmt: skip

        found = train(adapted(), twice)
        assert relative_error(found, expected) <= FLOAT64
