"""Losses that come by name: the window's update is that of the sum of their means, each over its own weights."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradaccum import WindowError
from gradaccum.torch.optim import Optimizer
from tests.reference import FLOAT64, relative_error
from tests.torch.optimizer.loops import assert_same

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
}


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(5, 7, dtype=torch.float64)
        self.a, self.b = (nn.Linear(7, 3, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).tanh()
        return self.a(hidden), self.b(hidden)


def micro_batches(sizes: tuple[int, ...] = (4, 7, 2, 5, 6)) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    data = [(torch.randn(n, 5, dtype=torch.float64), torch.randint(0, 3, (n,))) for n in sizes]
    data[1][1].fill_(1)  # the first loss ignores all of it
    return data


def losses(model: Any, x: Tensor, y: Tensor) -> dict[str, tuple[Tensor, Any]]:
    a, b = model(x)
    return {
        "ignores 1": (F.cross_entropy(a, y, ignore_index=1), (y != 1).sum()),
        "rows": (b.square().mean(), len(x)),
        "rare": (3 * F.cross_entropy(b, y, ignore_index=0), int((y != 0).sum())),
    }


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, window: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """An ordinary step on the window's rows."""
    x, y = (torch.cat(parts) for parts in zip(*window, strict=True))
    optimizer.zero_grad()
    found = {name: loss for name, (loss, weight) in losses(model, x, y).items() if weight > 0}
    (sum(found.values()) + 0 * sum(outputs.sum() for outputs in model(x))).backward()  # what weighs nothing is 0
    optimizer.step()
    return {name: loss.detach() for name, loss in found.items()}


def windows(steps: int, epochs: int = 2) -> Iterator[list[tuple[Tensor, Tensor]]]:
    for _ in range(epochs):
        data = micro_batches()
        yield from (data[start : start + steps] for start in range(0, len(data), steps))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("way", ["batches", "flush"])
def test_a_window_is_the_step_of_the_sum_of_its_means(way: str, steps: int, name: str) -> None:
    model = Heads()
    reference = copy.deepcopy(model)
    optimizer, inner = (
        Optimizer(OPTIMIZERS[name](model.parameters()), steps=steps),
        OPTIMIZERS[name](reference.parameters()),
    )
    expected = [plain(reference, inner, window) for window in windows(steps)]
    found = []
    for _ in range(2):
        for x, y in optimizer.batches(micro_batches()) if way == "batches" else micro_batches():
            optimizer.zero_grad()
            optimizer.backward(losses(model, x, y))
            optimizer.step()
            if optimizer.updated:
                found.append((optimizer.loss, optimizer.losses))
        if optimizer.flush():
            found.append((optimizer.loss, optimizer.losses))
    assert_same(model, reference)
    assert len(found) == len(expected) == optimizer.updates
    for (loss, means), window in zip(found, expected, strict=True):
        assert means.keys() == window.keys()
        assert relative_error(means.values(), [window[term] for term in means]) <= FLOAT64
        assert relative_error([loss], [sum(window.values())]) <= FLOAT64


def test_a_list_of_pairs_and_sums() -> None:
    for reduction in ("mean", "sum"):
        model = Heads()
        reference = copy.deepcopy(model)
        optimizer, inner = (
            Optimizer(OPTIMIZERS["sgd"](model.parameters()), 5, reduction=reduction),
            OPTIMIZERS["sgd"](reference.parameters()),
        )
        plain(reference, inner, micro_batches())
        for x, y in micro_batches():
            found = [(loss if weight else loss.nan_to_num(), weight) for loss, weight in losses(model, x, y).values()]
            if reduction == "sum":
                found = [(loss * weight, weight) for loss, weight in found]
            optimizer.backward(found)
            optimizer.step()
        assert_same(model, reference)
        assert list(optimizer.losses) == [1, 2, 0] or set(optimizer.losses) == {0, 1, 2}


def test_a_sum_for_each_loss_but_the_first_and_none_for_one() -> None:
    model = Heads()
    optimizer = Optimizer(OPTIMIZERS["sgd"](model.parameters()), 3)
    x, y = micro_batches()[0]
    for terms, copies in ((losses(model, x, y), 3), ({"rows": losses(model, x, y)["rows"]}, 1)):
        optimizer.backward(terms)
        everything = optimizer._windows.current.buffer.everything()
        assert sum(g.numel() for g in everything) <= copies * sum(p.numel() for p in model.parameters())
        optimizer.step()
        optimizer.discard()
        assert not optimizer._windows.current.buffer.everything()


@pytest.mark.parametrize("way", ["state_dict", "file", "pickle"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_window_goes_on_from_a_checkpoint_bit_for_bit(way: str, scaled: bool) -> None:
    def train(stop: int | None) -> list[Tensor]:
        model = Heads()
        optimizer = Optimizer(OPTIMIZERS["adam"](model.parameters()), steps=5)
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=2, enabled=scaled)
        for index, (x, y) in enumerate(micro_batches()):
            if index == stop:
                if way == "pickle":
                    model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
                else:
                    file = io.BytesIO()
                    torch.save(optimizer.state_dict(), file)
                    file.seek(0)
                    state = torch.load(file, weights_only=True) if way == "file" else optimizer.state_dict()
                    fresh = copy.deepcopy(model)
                    fresh.load_state_dict(model.state_dict())
                    model, optimizer = fresh, Optimizer(OPTIMIZERS["adam"](fresh.parameters()), steps=5)
                    optimizer.load_state_dict(state)
            optimizer.zero_grad()
            optimizer.backward({n: (scaler.scale(loss), w) for n, (loss, w) in losses(model, x, y).items()})
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.updated
        return [*model.parameters(), *optimizer.losses.values()]

    expected = train(None)
    for stop in (1, 3):
        assert all(torch.equal(a, b) for a, b in zip(train(stop), expected, strict=True))


def test_a_scaler_whose_scale_changes_inside_the_window() -> None:
    model = Heads()
    reference = copy.deepcopy(model)
    optimizer, inner = Optimizer(OPTIMIZERS["adam"](model.parameters()), 5), OPTIMIZERS["adam"](reference.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=1)
    for _ in range(2):
        plain(reference, inner, micro_batches())
        for x, y in micro_batches():
            optimizer.zero_grad()
            optimizer.backward(
                {name: (scaler.scale(loss), weight) for name, (loss, weight) in losses(model, x, y).items()}
            )
            scaler.step(optimizer)
            scaler.update()
    assert optimizer.updates == 2
    assert_same(model, reference)


@pytest.mark.parametrize("term", ["ignores 1", "rows", "rare"])
@pytest.mark.parametrize("where", [0, 2, 4])
def test_an_overflow_of_any_loss_costs_one_window_and_one_halving(term: str, where: int) -> None:
    model = Heads()
    before = copy.deepcopy(model)
    optimizer = Optimizer(OPTIMIZERS["sgd"](model.parameters()), 5)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    for index, (x, y) in enumerate(micro_batches()):
        found = losses(model, x, y)
        if index == where:
            found[term] = (found[term][0] * float("inf"), found[term][1])
        optimizer.backward({name: (scaler.scale(loss), weight) for name, (loss, weight) in found.items()})
        scaler.step(optimizer)
        scaler.update()
    assert not optimizer.updated
    assert scaler.get_scale() == 256.0
    assert relative_error(model.parameters(), before.parameters()) == 0


def test_clipping_and_wider_sums_see_the_finished_gradient() -> None:
    model = Heads()
    reference = copy.deepcopy(model)
    x, y = (torch.cat(parts) for parts in zip(*micro_batches(), strict=True))
    gradients = torch.autograd.grad(
        sum(loss for loss, _ in losses(reference, x, y).values()), list(reference.parameters())
    )  # type: ignore[arg-type]
    norm = torch.nn.utils.get_total_norm(gradients)
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), 5, clip_grad_norm=0.1)
    for a, b in micro_batches():
        optimizer.backward(losses(model, a, b))
        optimizer.step()
    assert optimizer.grad_norm is not None
    assert relative_error([optimizer.grad_norm], [norm]) <= FLOAT64
    assert (
        relative_error([p.grad for p in model.parameters()], [g * (0.1 / (norm + 1e-6)) for g in gradients]) <= FLOAT64
    )
    half = Heads().bfloat16()
    wide = Optimizer(torch.optim.SGD(half.parameters(), lr=0.1), 5, accumulate_dtype=torch.float32)
    for a, b in micro_batches():
        wide.backward(losses(half, a.bfloat16(), b))
        assert all(s.dtype == torch.float32 for s in wide._windows.current.buffer.everything())
        wide.step()
    assert relative_error([p.grad for p in half.parameters()], gradients) < 0.05


def test_losses_that_weigh_nothing_and_windows_of_them() -> None:
    model = Heads()
    before = copy.deepcopy(model)
    optimizer = Optimizer(OPTIMIZERS["sgd"](model.parameters()), 2)
    for x, _ in micro_batches()[:2]:
        y = torch.ones(len(x), dtype=torch.long)
        optimizer.backward({"ignores 1": losses(model, x, y)["ignores 1"]})
        optimizer.step()
    assert not optimizer.updated
    assert relative_error(model.parameters(), before.parameters()) == 0
    data = micro_batches()[:2]
    plain(before, inner := OPTIMIZERS["sgd"](before.parameters()), data)
    del inner
    for x, y in data:
        found = losses(model, x, y)
        for name, term in found.items():  # one after the other over the same graph, as one micro-batch
            optimizer.backward({name: term}, retain_graph=True)
        optimizer.step()
    assert_same(model, before)


# What is refused.


def wrapped(**keywords: Any) -> tuple[nn.Module, Optimizer, dict[str, tuple[Tensor, Any]]]:
    model = Heads()
    return model, Optimizer(OPTIMIZERS["sgd"](model.parameters()), 3, **keywords), losses(model, *micro_batches()[0])


@pytest.mark.parametrize("first", ["terms", "single", "plain"])
@pytest.mark.parametrize("second", ["terms", "single", "plain"])
@pytest.mark.parametrize("stepped", [False, True])
def test_single_losses_and_losses_by_name_in_one_window_are_refused(first: str, second: str, stepped: bool) -> None:
    model, optimizer, _ = wrapped()

    def run(way: str) -> None:
        found = losses(model, *micro_batches()[0])
        if way == "terms":
            optimizer.backward(found)
        elif way == "single":
            optimizer.backward(found["rows"][0], weight=4)
        else:
            found["rows"][0].backward()

    def both() -> None:
        run(first)
        if stepped:
            optimizer.step()
        run(second)
        optimizer.step()

    if first == second == "terms" and not stepped:
        with pytest.raises(ValueError, match="came twice in one micro-batch"):
            both()
        return
    if (first == "terms") == (second == "terms"):
        if (first == "single") == (second == "single"):
            both()
        return
    with pytest.raises(WindowError, match="others as a single loss"):
        both()
    optimizer.discard()
    run(second)
    optimizer.step()


def test_what_sums_by_name_do_not_go_with_is_refused() -> None:
    for keywords in ({"nonfinite": "skip_micro_batch"}, {"noise_scale": True}):
        _, optimizer, found = wrapped(**keywords)
        with pytest.raises(ValueError, match="it can't be combined with sharded models"):
            optimizer.backward(found)
    _, optimizer, found = wrapped()
    with pytest.raises(ValueError, match="pass no other weight to backward"):
        optimizer.backward(found, weight=4)
    with pytest.raises(ValueError, match="pass no other weight to backward"):
        for _ in optimizer.batches(micro_batches(), weight=lambda batch: 3):
            optimizer.backward(found)
    scaler = torch.amp.GradScaler("cpu")
    _, optimizer, found = wrapped()
    optimizer.steps = 1
    optimizer.backward({name: (scaler.scale(loss), weight) for name, (loss, weight) in found.items()})
    scaler.unscale_(optimizer)
    with pytest.raises(WindowError, match="Named losses have several sums of gradients"):
        scaler.step(optimizer)


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"a": torch.ones(())}, "loss term 'a' comes without its weight"),
        ([torch.ones(())], "loss term 0 comes without its weight"),
        ({"a": (torch.ones(()), -1)}, "loss term 'a': A weight must be"),
        ({"a": (torch.ones(()), float("nan"))}, "loss term 'a': A weight must be"),
        ({"a": (torch.ones(3), 1)}, "loss term 'a' must be a scalar"),
        ({"a": (1.0, 1)}, "loss term 'a' must be a tensor"),
        (
            {"a": (torch.ones((), requires_grad=True), torch.ones((), requires_grad=True))},
            "must not require a gradient",
        ),
        ({"a": (torch.ones((), requires_grad=True), torch.tensor(True))}, "loss term 'a': A weight must be"),
        ({}, "no terms.*a weight of 0"),
    ],
)
def test_what_is_no_loss_with_its_weight_is_an_error_that_names_the_term(terms: Any, message: str) -> None:
    _, optimizer, found = wrapped()
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer.backward(terms)
    optimizer.backward(found)  # nothing has happened
    optimizer.step()


def test_a_name_given_twice_in_one_micro_batch_is_refused() -> None:
    _, optimizer, found = wrapped()
    optimizer.backward({"rows": found["rows"]}, retain_graph=True)
    with pytest.raises(ValueError, match="'rows' came twice in one micro-batch"):
        optimizer.backward({"rows": found["rows"]})
    optimizer.backward({"rare": found["rare"]})
    optimizer.step()
    _, _, again = wrapped()
    optimizer.backward({"rows": again["rows"]})  # the next micro-batch has its own


@pytest.mark.parametrize("first", [True, False])
def test_detached_losses_are_averaged_beside_others(first: bool) -> None:
    """In a micro-batch in which the losses that train weigh nothing, too."""
    model, data = Heads(), micro_batches()
    reference = copy.deepcopy(model)

    def some(model: Any, x: Tensor, y: Tensor) -> dict[str, tuple[Tensor, Any]]:
        found = losses(model, x, y)
        loss, weight = found["rows"]
        metric = {"metric": (loss.detach(), weight)}
        return {**(metric if first else {}), "ignores 1": found["ignores 1"], **metric}

    inner = torch.optim.SGD(reference.parameters(), lr=0.1)
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    expected = some(reference, x, y)
    expected["ignores 1"][0].backward()
    inner.step()
    optimizer = Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), steps=len(data))
    for batch in [data[1], data[0], *data[2:]]:  # in the first one "ignores 1" weighs nothing
        optimizer.backward(some(model, *batch))
        optimizer.step()
    assert_same(model, reference)
    assert set(optimizer.losses) == set(expected)
    for name, mean in optimizer.losses.items():
        assert relative_error([mean], [expected[name][0]]) <= FLOAT64


def test_a_micro_batch_of_nothing_but_detached_losses_is_named(caplog: pytest.LogCaptureFixture) -> None:
    _, optimizer, found = wrapped()
    optimizer.backward({name: (loss.detach(), weight) for name, (loss, weight) in found.items()})
    optimizer.step()
    assert "whose loss reached none of the parameters" in caplog.text


def test_an_edit_of_the_open_sum_is_seen() -> None:
    model, optimizer, found = wrapped()
    optimizer.backward(found)
    optimizer.step()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.backward(losses(model, *micro_batches()[2]))
    with pytest.raises(WindowError, match="edited"):
        optimizer.step()
