"""What is done to an open window behind the wrapper's back is seen wherever gradients really arrive, or named."""

import itertools
import logging
import re

import pytest
import torch
from torch import nn

from gradaccum import WindowError
from tests.reference import windows_of
from tests.torch.optimizer.loops import assert_same, heads, large, parts, refused, step, train, warned, wrapped
from tests.torch.problems import Does, mse, network, regression, sgd

pytestmark = pytest.mark.usefixtures("float64")

BATCHES = parts([3, 1, 4, 2, 2, 5])


# Gradients that are written inside an open window, by operations that show or that don't.


def of_each(edit):
    def edits(model):
        for parameter in model.parameters():
            if parameter.grad is not None:
                edit(parameter)

    return edits


def assign(parameter):
    parameter.grad = torch.ones_like(parameter)


CLIP = "clip_grad_norm_"
EDITS = {
    CLIP: lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.1),
    "clip_grad_norm_(inf), to read the norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), float("inf")),
    "mul_": of_each(lambda p: p.grad.mul_(2)),
    "_foreach_mul_": lambda model: torch._foreach_mul_([p.grad for p in model.parameters()], 0.5),
    "filled with zero": lambda model: model.zero_grad(set_to_none=False),
    "zero_grad()": lambda model: model.zero_grad(),
    "assigned": of_each(assign),
}
NO_VERSION = {  # which is seen in the first window
    "data.mul_": of_each(lambda p: p.grad.data.mul_(0.5)),
    "data.clamp_": of_each(lambda p: p.grad.data.clamp_(-1e-3, 1e-3)),
    "data.neg_": of_each(lambda p: p.grad.data.neg_()),
    "data.zero_": of_each(lambda p: p.grad.data.zero_()),
    "a mask": of_each(lambda p: p.grad.data[:1].zero_()),
    "numpy": of_each(lambda p: p.grad.numpy().__imul__(0.5)),
    "one gradient alone": lambda model: model[0].bias.grad.data.mul_(0.5),
}
PLACES = [(0, "before"), (0, "after"), (1, "before"), (1, "after"), (2, "before")]
EDITED = r"edited inside an open window.*clip_grad_norm=(.|\n)*get_total_norm"


def assert_refused(edit, index, when, windows=1, steps=3, model=None, says=EDITED):
    """An error in the last window, whose gradients are edited in this micro-batch; no update is made with them."""
    model, optimizer = wrapped(model=model, steps=steps)
    train(model, optimizer, [regression(2)] * ((windows - 1) * steps))

    def edits(here):
        return lambda: edit(model) if optimizer.micro_batches == here else None

    # Before its step a micro-batch is not counted yet.
    how = {"before_step": edits(index)} if when == "before" else {"after": edits(index + 1)}
    with refused(says, model):
        train(model, optimizer, [regression(2)] * steps, **how)
    optimizer.discard()
    train(model, optimizer, [regression(2)] * steps)
    assert optimizer.updates == windows


@pytest.mark.parametrize(("index", "when"), PLACES)
@pytest.mark.parametrize(
    ("windows", "edit"), [*itertools.product([1, 2, 3, 6], EDITS), *((1, edit) for edit in NO_VERSION)]
)
def test_an_edit_inside_any_window_is_refused(edit, windows, index, when):
    """Also in windows that compare three parameters at their end, where another micro-batch has followed by then."""
    cleared = "" if edit in NO_VERSION else "|cleared or replaced inside an open window|were assigned"
    assert_refused((EDITS | NO_VERSION)[edit], index, when, windows, says=EDITED + cleared)


def test_an_edit_that_raises_no_version_is_seen_before_a_windows_last_step_however_long_it_is():
    assert_refused(NO_VERSION["data.clamp_"], 8, "before", steps=9)


ENDS = {"unused": [], "frozen": ["pooler", "front", "network.0"], "frozen at first": ["pooler", "front", "network"]}


@pytest.mark.parametrize("windows", [1, 4])
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize(("edit", "says"), [("zero_grad()", "cleared or replaced"), (CLIP, "edited inside")])
def test_an_edit_is_seen_where_the_last_parameter_gets_no_gradient(windows, ends, edit, says):
    spares = {"front": nn.Linear(3, 3), "network": network(), "pooler": nn.Linear(3, 3)}
    model = Does(lambda model, x: model.network(x), **spares)
    for name in ENDS[ends]:
        model.get_submodule(name).requires_grad_(False)
    _, optimizer = wrapped(model=model, steps=3)
    if ends == "frozen at first":
        model.network.requires_grad_(True)
    train(model, optimizer, [regression(2)] * (3 * windows - 3))
    with refused(says, model):
        train(model, optimizer, [regression(2)] * 3, before_step=lambda: EDITS[edit](model))


class Passed(torch.autograd.Function):
    """The same tensors; what a pass doesn't reach has no gradient at all, where zeros are usual."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.set_materialize_grads(False)
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients


def two_heads():
    return Does(
        lambda model, x: Passed.apply(*(head(model.trunk(x)) for head in model.heads)),
        trunk=network()[:2],
        heads=nn.ModuleList(nn.Linear(7, 3) for _ in range(2)),
    )


def second_loss(model, x, y):
    """The first head's has had its pass by then."""
    first, second = (nn.functional.mse_loss(output, y) for output in model(x))
    first.backward(retain_graph=True)
    return second


@pytest.mark.parametrize("steps", [1, 2])
def test_passes_that_bring_some_parameters_no_gradient_are_right_and_edits_beside_them_are_seen(steps):
    model, optimizer = wrapped(model=two_heads(), steps=steps)
    batches = parts([2] * 5 * steps)
    train(model, optimizer, batches, loss=second_loss)
    both = lambda model, x, y: sum(nn.functional.mse_loss(output, y) for output in model(x))  # noqa: E731
    assert_same(model, large(windows_of(batches, steps), loss=both, model=two_heads()))
    if steps == 2:
        train(model, optimizer, batches[:1], loss=second_loss)
        with refused("edited inside", model):
            train(model, optimizer, batches[:1], loss=second_loss, before_step=lambda: EDITS["mul_"](model))


def test_a_window_whose_gradients_arrive_at_other_parameters_is_watched_there():
    model, optimizer = wrapped(model=heads(), steps=2)
    for number in (0, 0, 0, 0, 4):
        train(model[number], optimizer, [regression(2)] * 2)
    train(model[3], optimizer, [regression(2)])
    model.zero_grad()
    with refused("cleared", model):
        train(model[3], optimizer, [regression(2)])


def test_clearing_is_called_clearing_even_if_the_new_gradient_has_the_old_ones_address():
    model, optimizer = wrapped(steps=20)
    for _ in range(10):
        train(model, optimizer, [regression(2)])
        model.zero_grad()
        with refused("cleared or replaced", model):
            train(model, optimizer, [regression(2)])
        optimizer.discard()


def test_gradients_that_are_not_finite_or_complex_are_compared_too():
    numbers = nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex128))])
    _, optimizer = wrapped(lambda p: torch.optim.SGD(p, lr=0.1), numbers, steps=3)
    for factor in (float("nan"), 1.0):
        (numbers[0].abs().sum() * factor).backward()
        optimizer.step()
    optimizer.discard()
    numbers[0].abs().sum().backward()
    numbers[0].grad.data.neg_()
    with pytest.raises(WindowError, match="edited"):
        optimizer.step()


def put(model, batch, put_into):
    for parameter, gradient in zip(model.parameters(), torch.autograd.grad(mse(model, *batch), [*model.parameters()])):
        if put_into and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad = parameter.grad.copy_(gradient) if put_into else gradient


@pytest.mark.parametrize("put_into", [False, True])
def test_gradients_that_are_assigned_are_an_error_in_the_first_window(put_into):
    model, optimizer = wrapped(steps=3)
    with refused(r"optimizer.add_gradients\(", model):
        for batch in BATCHES:
            optimizer.zero_grad()
            put(model, batch, put_into)
            optimizer.step()


@pytest.mark.parametrize("how", ["clipped by hand", "assigned", "never cleared"])
def test_in_a_window_of_one_micro_batch_gradients_are_the_users_as_in_the_plain_loop(how):
    (model, optimizer), alone = wrapped(steps=1), network()
    for network_, each in ((model, optimizer), (alone, sgd(alone.parameters()))):
        for batch in BATCHES:
            if how != "never cleared":
                each.zero_grad()
            put(network_, batch, False) if how == "assigned" else mse(network_, *batch).backward()
            if how == "clipped by hand":
                nn.utils.clip_grad_norm_(network_.parameters(), 0.1)
            each.step()
    assert optimizer.updates == len(BATCHES)
    assert_same(model, alone, 0)


def test_in_a_window_of_one_sum_that_is_to_be_divided_by_its_weight_gradients_are_not_the_users():
    model, optimizer = wrapped(steps=1, reduction="sum")
    optimizer.backward(3 * mse(model, *BATCHES[0]), weight=3)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with pytest.raises(WindowError, match="edited inside"):
        optimizer.step()


@pytest.mark.parametrize(
    ("steps", "loop", "cleared"),
    [(3, False, False), (5, True, False), (5, True, True)],
    ids=["a plain loop", "the window of an epoch's last micro-batch", "at each epoch's start"],
)
def test_a_loop_without_zero_grad_is_refused_where_the_next_window_would_add_to_the_finished_gradient(
    steps, loop, cleared
):
    model, optimizer = wrapped(steps=steps)
    with pytest.raises(WindowError, match="left from the last window"):
        for _ in range(2):
            assert not cleared or optimizer.zero_grad() is None
            train(model, optimizer, optimizer.batches(BATCHES) if loop else BATCHES, clear="never")
    assert (optimizer.updates, optimizer.micro_batches) == (1, 0)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_model_may_clear_its_gradients_between_windows(set_to_none):
    (model, optimizer), alike = wrapped(steps=2), parts([2] * 6)
    clears = lambda: optimizer.updated and model.zero_grad(set_to_none)  # noqa: E731
    train(model, optimizer, alike, clear="never", after=clears)
    assert_same(model, large(windows_of(alike, 2)))


def test_sparse_zeros_from_before_a_window_are_no_gradient_that_was_assigned():
    """In each window the second micro-batch is the first that reaches the rows."""
    model = nn.ModuleList([nn.Embedding(3, 2, sparse=True), nn.Linear(2, 1)])
    _, optimizer = wrapped(lambda parameters: torch.optim.SGD(parameters, lr=0.1), model, steps=2)
    expected = model[0].weight.detach() - 0.05 * torch.tensor([[1.0], [2.0], [1.0]])
    for i in range(8):
        optimizer.zero_grad(set_to_none=False)
        (model[0](torch.tensor([i % 3])) if i % 2 else model[1](torch.ones(1, 2))).sum().backward()
        optimizer.step()
    assert optimizer.updates == 4
    torch.testing.assert_close(model[0].weight.detach(), expected)


@pytest.mark.parametrize("end", ["flush", "discard"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_zeros_stay_zeros_after_flush_and_discard(end, dtype):
    """Weight decay and momentum move what has a gradient of zero, and pass over what has none."""
    options = {} if dtype == torch.float64 else {"accumulate_dtype": torch.float32}
    model, optimizer = wrapped(model=network(dtype=dtype), steps=3, **options)
    optimizer.zero_grad(set_to_none=False)
    train(model, optimizer, [(x.to(dtype), y.to(dtype)) for x, y in BATCHES[:2]], clear="never")
    getattr(optimizer, end)()
    assert all(p.grad is not None and not p.grad.count_nonzero() for p in model.parameters())


# What is no error, and may be wrong, is named once.


CHANGES = {
    "clamped": torch.no_grad()(lambda model: model[0].weight.clamp_(-0.3, 0.3)),
    "another optimizer's step": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
    "loaded": lambda model: model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}),
    "clamped through data": lambda model: [p.data.clamp_(-0.1, 0.1) for p in model.parameters()],
}


@pytest.mark.parametrize("only_after_updates", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_parameters_that_change_inside_an_open_window_are_named_once_and_between_windows_they_may(
    change, only_after_updates, caplog
):
    model, optimizer = wrapped(steps=3)
    changes = lambda: change(model) if optimizer.updated or not only_after_updates else None  # noqa: E731
    train(model, optimizer, optimizer.batches(BATCHES), after=changes)
    assert caplog.text.count("Parameters were changed inside an open window") == (not only_after_updates)


@pytest.mark.parametrize("began", [0, 1, 4])
def test_hooks_on_gradients_are_named_once_in_the_next_watched_window(began):
    model, optimizer = wrapped(steps=2)
    with warned() as caught:
        train(model, optimizer, BATCHES[:began])
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        train(model, optimizer, [*BATCHES[began:], *BATCHES])
    (said,) = caught
    assert said.filename == step.__code__.co_filename
    assert re.match("4 parameters have hooks on their gradients.*not for those that clip", str(said.message))


@pytest.mark.parametrize("in_batches", [False, True])
def test_a_step_without_a_gradient_is_named_once(in_batches, caplog):
    model, optimizer = wrapped(steps=3)
    for number, batch in enumerate(optimizer.batches(BATCHES) if in_batches else BATCHES):
        optimizer.zero_grad()
        if number != 1:
            mse(model, *batch).backward()
        optimizer.step()
    assert caplog.text.count("whose loss reached none of the parameters") == 1


# Several backward passes to one step: a loop that still accumulates by hand, or several losses.


@pytest.mark.parametrize(
    ("steps", "stepped", "said"),
    [
        (2, [1], ["2 forward and backward passes reached one step()"]),
        (3, [2], ["3 forward and backward passes reached one step()"]),
        # `if i and i % 2 == 0:`, of three passes, then two.
        (2, [2, 4], ["3 backward passes reached one step()", "2 forward and backward passes reached one step()"]),
    ],
)
def test_a_loop_that_still_accumulates_by_hand_is_named(steps, stepped, said, caplog):
    caplog.set_level(logging.INFO)
    model, optimizer = wrapped(steps=steps)
    for i, batch in enumerate(BATCHES[: stepped[-1] + 1]):
        (mse(model, *batch) / steps).backward()
        if i in stepped:
            optimizer.step()
            optimizer.zero_grad()
    assert all(caplog.text.count(line) == 1 for line in said)
    assert "if (i + 1) % steps == 0:" in caplog.text


def losses_of_two_domains(model, x, y):
    yield mse(model, x, y)
    yield model(x + 1).square().mean() * 0.1


LOSSES = {
    "of one pass": lambda model, x, y: [(apart := model(x) - y).square().mean(), apart.abs().mean()],
    "at once": lambda model, x, y: [mse(model, x, y), mse(model, x + 1, y)],
    "of two domains": losses_of_two_domains,
}


@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("steps", [2, 3])
def test_several_losses_in_several_passes_are_at_most_one_line_at_info(losses, steps, caplog):
    caplog.set_level(logging.INFO)
    model, optimizer = wrapped(steps=steps)
    for batch in BATCHES:
        optimizer.zero_grad()
        for loss in losses(model, *batch):
            loss.backward(retain_graph=True)
        optimizer.step()
    lines = [record for record in caplog.records if "passes reached one step()" in record.getMessage()]
    assert len(lines) <= 1
    assert all(record.levelno == logging.INFO for record in lines)
