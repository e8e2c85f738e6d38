"""Misuse of an open window, and bad arguments: a clear error, parameters and optimizer state untouched."""

import copy
import gc
import os
import pickle
from contextlib import nullcontext
from types import FunctionType

import pytest
import torch
from torch import nn

import gradaccum.torch
from gradaccum import WindowError
from tests.fuzz.problem import Checkpointed, Faulty
from tests.reference import FLOAT64, relative_error, torch_updates
from tests.torch.optimizer.loops import assert_same, backward, by_rows, heads, large, parts, refused, train, wrapped
from tests.torch.problems import adam, join, mse, network, regression, sgd

pytestmark = pytest.mark.usefixtures("float64")

RAGGED = parts([3, 1, 4, 2, 2, 5])


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        *(({"steps": steps}, ValueError, "Received: steps=") for steps in (0, -1, {}, {2: 4}, {0: 0}, {0: 4, -1: 2})),
        *(({"steps": s}, TypeError, "Received: steps=") for s in (2.5, True, "4", None, {0: 2.5}, {"0": 4}, {0: True})),
        ({"reduction": "none"}, ValueError, "reduction"),
        ({"clip_grad_norm": 0}, ValueError, "clip_grad_norm"),
        ({"clip_grad_norm": float("nan")}, ValueError, "clip_grad_norm"),
        ({"clip_grad_norm": "1"}, TypeError, "clip_grad_norm"),
        ({"clip_grad_value": -1.0}, ValueError, "clip_grad_value"),
        ({"accumulate_dtype": torch.int32}, TypeError, "accumulate_dtype"),
        ({"accumulate_dtype": "float32"}, TypeError, "accumulate_dtype"),
        ({"nonfinite": "ignore"}, ValueError, "skip_window.*Received: nonfinite='ignore'"),
        ({"sync": "never"}, ValueError, "sync"),
        ({"model": torch.optim}, TypeError, "model"),
        ({"make": network}, TypeError, "must be a torch.optim.Optimizer. Received: Sequential"),
        ({"make": lambda: torch.optim.Adam}, TypeError, "Received: type"),
        ({"make": lambda: wrapped(steps=4)[1]}, ValueError, "wrapped already"),
    ],
)
def test_a_wrong_argument_is_refused(options, error, says):
    options = {"steps": 2} | options
    make = options.pop("make", lambda: sgd(network().parameters()))
    with pytest.raises(error, match=says):
        gradaccum.torch.optim.Optimizer(make(), **options)


def test_an_optimizer_by_name_without_steps_is_refused():
    with pytest.raises(TypeError, match="`steps` is missing: Adam"):
        gradaccum.torch.optim.Adam(network().parameters())


(TWO,) = parts([2])
MISUSE = {  # of a model and its optimizer, in a window's first micro-batch of three
    "steps": (lambda m, o: setattr(o, "steps", 5), r"holds 1 of its 3 micro-batches.*steps=5"),
    "no step": (lambda m, o: (backward(m, o, TWO), o.flush()), r"Call step\(\)"),
    "an edit before a group joins": (
        lambda m, o: (edit(m), o.add_param_group({"params": network()[0].weight}), train(m, o, [TWO] * 2)),
        "edited inside",
    ),
    "an edit before it is saved": (lambda m, o: (edit(m), o.state_dict()), "edited inside"),
    "an edit before it is copied": (lambda m, o: (edit(m), copy.deepcopy(o)), "edited inside"),
    "an edit before it is pickled": (lambda m, o: (edit(m), pickle.dumps(o)), "edited inside"),
    "an edit before it is flushed": (lambda m, o: (edit(m), o.flush()), "edited inside"),
}


def edit(model):
    model[0].weight.grad.mul_(2)


@pytest.mark.parametrize("windows", [1, 3])
@pytest.mark.parametrize(("misuse", "says"), MISUSE.values(), ids=MISUSE)
def test_misuse_of_an_open_window_is_an_error_that_changes_nothing(misuse, says, windows):
    model, optimizer = wrapped(adam, steps=3)
    train(model, optimizer, [TWO] * (3 * windows - 2))
    with refused(says, model):
        misuse(model, optimizer)
    assert (optimizer.steps, optimizer.updates) == (3, windows - 1)
    assert all(state["step"] == windows - 1 for state in optimizer.inner.state.values())


MIXED = [(7, "plain"), (7, None), ("plain", 7), (None, 7)]
AS_ONE = [(1, "plain"), ("plain", 0), (0, "plain"), (7, 0)]  # a plain loss weighs 1, and what weighs 0 is left out


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize(("first", "second"), [*MIXED, *AS_ONE])
def test_losses_with_and_without_a_weight_are_refused_unless_all_count_as_one(first, second, window, reduction):
    model, optimizer = wrapped(steps=2, reduction=reduction)

    def micro_batch(weight):
        train(model, optimizer, [regression(3)], weigh=None if weight == "plain" else lambda *batch: weight)

    for weight in [1] * (2 * window - 2) + [first]:
        micro_batch(weight)
    with nullcontext() if (first, second) in AS_ONE else refused("Use one of the two", model):
        micro_batch(second)
    assert optimizer.updates == window - ((first, second) in MIXED)
    optimizer.discard()
    micro_batch(first)


@pytest.mark.parametrize("plain", range(1, 6))
def test_a_loss_without_a_weight_beside_one_with_a_weight_is_seen_on_any_head(plain):
    model, optimizer = wrapped(model=heads(), steps=2)
    with refused(r"backward\(loss, weight=\.\.\.\)", model):
        for rows in (4, 2):
            beside = lambda rows=rows: backward(model[plain], optimizer, regression(rows))  # noqa: E731
            train(model[0], optimizer, [regression(rows)], weigh=by_rows, before_step=beside)


@pytest.mark.parametrize("head", range(6))
def test_a_micro_batch_that_is_cleared_in_place_of_its_step_is_seen_on_any_head(head):
    model, optimizer = wrapped(model=heads(), steps=2)
    every = lambda model, *batch: sum(mse(one, *batch) for one in model)  # noqa: E731
    train(model, optimizer, map(regression, range(1, 6)), loss=every, weigh=by_rows)  # the third window isn't watched
    backward(model[head], optimizer, TWO, weigh=by_rows)
    with refused("no step", model):
        optimizer.zero_grad()


# Gradients that no backward pass brings: the random programs add them, and compare with the large batch.


@pytest.mark.parametrize("weights", [(2, 6), (0, 5)])
def test_added_gradients_are_left_alone_and_may_be_missing_or_weigh_nothing(weights):
    model, optimizer = wrapped(steps=3)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    reached, other = model[0].bias, model[2].bias
    given = [{p: torch.full_like(p, 1.0 if weight else float("nan")) for p in matrices} for weight in weights]
    for gradients, weight in zip([*given, {reached: torch.full_like(reached, float("nan"))}], [*weights, 0]):
        optimizer.zero_grad()
        optimizer.add_gradients(gradients if weight else [gradients.get(p) for p in model.parameters()], weight)
        optimizer.step()
    assert all(bool((g == 1).all()) for g in given[1].values())
    assert all(bool((p.grad == 1).all()) for p in matrices)
    assert other.grad is reached.grad is None


@pytest.mark.parametrize(
    ("gradients", "says"),
    [
        (lambda model: dict(model.named_parameters()), r"in the order.*Received: a dict with keys \['0.weight'"),
        (lambda model: [], "one for each of the 4 parameters"),
        (lambda model: [torch.zeros(2)] * 4, r"The gradient of parameter 0 has the shape \(2,\)"),
        (lambda model: {nn.Parameter(torch.zeros(2)): torch.zeros(2)}, "1 parameters that are not the optimizer's"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(gradients, says):
    model, optimizer = wrapped(steps=3)
    with pytest.raises((TypeError, ValueError), match=says):
        optimizer.add_gradients(gradients(model))
    assert all(p.grad is None for p in model.parameters())


# Parameters that come and go: between windows as in a plain loop, inside of an open one by add_param_group alone.


def replace(model, groups):
    model[0].weight = groups[0]["params"][0] = nn.Parameter(model[0].weight.detach().clone())


def append(model, groups):
    groups.append({**groups[0], "params": [nn.Parameter(torch.zeros(2))]})


EDITS = {
    "cleared": (lambda model, groups: groups.clear(), "4 of 4 were removed"),
    "a group removed": (lambda model, groups: groups.pop(0), "2 of 4 were removed, 0 came"),
    "a parameter removed": (lambda model, groups: groups[0]["params"].pop(), "1 of 4 were removed, 0 came"),
    "emptied": (lambda model, groups: groups[1].update(params=[]), "2 of 4 were removed, 0 came"),
    "a group appended": (append, "0 of 4 were removed, 1 came"),
    "groups reordered": (lambda model, groups: groups.reverse(), "their order"),
    "parameters reordered": (lambda model, groups: groups[0]["params"].reverse(), "their order"),
    "a parameter replaced": (replace, "1 of 4 were removed, 1 came"),
}


@pytest.mark.parametrize(("edit", "how"), EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("then", ["step", "flush", "state_dict"])
def test_parameters_that_come_or_go_inside_an_open_window_are_an_error_that_updates_nothing(edit, how, then):
    model = network()
    groups = [{"params": [*model[0].parameters()]}, {"params": [*model[2].parameters()], "lr": 0.05}]
    _, optimizer = wrapped(lambda _: sgd(groups), model, steps=3)
    every = nn.ParameterList(model.parameters())
    train(model, optimizer, RAGGED[:2], weigh=by_rows)
    edit(model, optimizer.param_groups)
    with refused(f"parameters changed inside an open window: {how}", every):
        getattr(optimizer, then)() if then != "step" else train(model, optimizer, RAGGED[2:], weigh=by_rows)
    assert optimizer.updates == 0
    optimizer.discard()
    assert optimizer.micro_batches == 0


@pytest.mark.parametrize("windows", [1, 3])
@pytest.mark.parametrize("restored", [False, True])
def test_a_group_that_joins_an_open_window_has_its_part_of_it_from_there_on_and_must_not_bring_gradients(
    restored, windows
):
    """After a checkpoint was loaded, too, whose sum is kept in the parameters' order."""
    model, plain, micro_batches = network(), network(), parts([3, 1, 4])
    _, optimizer = wrapped(model=model[0], steps=3)
    inner = sgd(plain[0].parameters())

    train(model, optimizer, micro_batches * (windows - 1) + micro_batches[:2], weigh=by_rows)
    torch_updates(plain, inner, [join(micro_batches)] * (windows - 1), mse)
    if restored:
        optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(WindowError, match="have gradients already"):
        optimizer.add_param_group({"params": [*model[2].parameters()]})
    assert len(optimizer.param_groups) == 1
    model[2].zero_grad()
    optimizer.add_param_group({"params": [*model[2].parameters()]})
    train(model, optimizer, micro_batches[2:], weigh=by_rows)
    plain.zero_grad()
    (mse(plain, *micro_batches[2]) * 4 / 8).backward()
    inner.add_param_group({"params": [*plain[2].parameters()]})
    gradients = torch.autograd.grad(mse(plain, *join(micro_batches)), [*plain[0].parameters()])
    for p, gradient in zip(plain[0].parameters(), gradients, strict=True):
        p.grad = gradient
    inner.step()
    assert_same(model, plain)


def test_a_group_that_joins_in_a_batch_that_weighs_nothing_gets_nothing_from_it():
    model, plain, micro_batches = network(), network(), parts([2, 2, 2])
    _, optimizer = wrapped(model=model[0], steps=3)
    weights = {id(batch): weight for batch, weight in zip(micro_batches, (2, 0, 2))}
    for i, batch in enumerate(optimizer.batches(micro_batches, weight=lambda batch: weights[id(batch)])):
        if i == 1:
            model[2].zero_grad()
            optimizer.add_param_group({"params": [*model[2].parameters()]})
        train(model, optimizer, [batch])
    mse(plain, *micro_batches[0]).backward()
    plain[2].zero_grad()
    mse(plain, *micro_batches[2]).backward()
    for parameter in plain.parameters():
        parameter.grad /= 2
    sgd(plain.parameters()).step()
    assert_same(model, plain)


@pytest.mark.parametrize("cleared", [True, False])
@pytest.mark.parametrize("windows", [0, 1, 2, 3])
@pytest.mark.parametrize("joins", ["a group", "all"])
def test_gradients_that_parameters_bring_along_are_no_part_of_a_window(joins, windows, cleared):
    """The loop clears them, by the model's own zero_grad(), or that is an error."""
    model = network()
    _, optimizer = wrapped(model=model if joins == "all" else model[0], steps=2)
    train(model, optimizer, RAGGED[:2] * windows, weigh=by_rows)
    model.zero_grad()
    plain = copy.deepcopy(model)
    if joins == "all":
        mse(model, *RAGGED[2]).backward()
        optimizer = gradaccum.torch.optim.Optimizer(optimizer.inner, steps=2)
    else:
        mse(model[2], torch.ones(3, 7), RAGGED[2][1][:3]).backward()
        optimizer.add_param_group({"params": [*model[2].parameters()]})
    if cleared:
        model.zero_grad()
    with nullcontext() if cleared else refused("left from the last window", model):
        train(model, optimizer, RAGGED[:2], weigh=by_rows, clear="never")
    if cleared:
        mse(plain, *join(RAGGED[:2])).backward()
        assert relative_error([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()]) <= FLOAT64


BETWEEN = {  # of a model, and an optimizer of all of its parameters but the last
    "a group": lambda model, optimizer: optimizer.add_param_group({"params": model[2].bias, "lr": 0.05}),
    "appended in place": lambda model, optimizer: optimizer.param_groups[0]["params"].append(model[2].bias),
    "removed in place": lambda model, optimizer: optimizer.param_groups[0]["params"].pop(0),
}


@pytest.mark.parametrize("change", BETWEEN.values(), ids=BETWEEN)
@pytest.mark.parametrize("windows", [1, 2, 4, 5])
def test_parameters_that_join_or_leave_between_windows_do_so_as_in_a_plain_loop(change, windows):
    """Also where windows aren't watched."""
    make, plain = lambda parameters: sgd([*parameters][:3]), network()
    (model, optimizer), inner = wrapped(make, steps=2), make(plain.parameters())
    for first, window, times in ((True, RAGGED[:2], windows), (False, RAGGED[2:4], 2)):
        train(model, optimizer, window * times, weigh=by_rows)
        torch_updates(plain, inner, [join(window)] * times, mse)
        for each, its in ((model, optimizer.inner), (plain, inner)):
            if first:
                change(each, its)
            each.zero_grad()
    assert_same(model, plain)


def test_a_group_that_joins_the_inner_optimizer_between_windows_follows_the_loss_scale():
    """The parameters that were there are frozen by then: no gradient of theirs says that a backward pass starts."""
    model, plain, scaler = network(), network(), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    inner, plain_inner = sgd(model[0].parameters()), sgd(plain[0].parameters())
    optimizer = gradaccum.torch.optim.Optimizer(inner, steps=3)
    for window in (RAGGED[:3], RAGGED[3:]):
        train(model, optimizer, window, weigh=by_rows, scaler=scaler)
        torch_updates(plain, plain_inner, [join(window)], mse)
        for m, i in ((model, inner), (plain, plain_inner)):
            m.requires_grad_(False)
            m[2].requires_grad_(True)
            m.zero_grad()
            if len(i.param_groups) == 1:
                i.add_param_group({"params": [*m[2].parameters()]})
    assert optimizer.updates == 2
    assert_same(model, plain)


# Backward passes that fail halfway: the layers that had their gradient must not have it twice.


def fragile(reentrant=None):
    """Fails behind its last layers, when `fail` says so."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
    last = layer if reentrant is None else Checkpointed(layer, reentrant)
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), Faulty(), last, nn.Linear(5, 3))


def fail(model, optimizer, **how):
    model[2].prepare("backward oom", 3)
    with pytest.raises(torch.OutOfMemoryError):
        backward(model, optimizer, regression(4), **how)
    model[2].calm()


@pytest.mark.parametrize("through", ["loss.backward()", "optimizer.backward()"])
@pytest.mark.parametrize("reentrant", [None, True, False])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_backward_pass_that_failed_and_is_tried_again_is_named(reentrant, window, index, through):
    model, optimizer = wrapped(model=fragile(reentrant), steps=3)
    train(model, optimizer, [TWO] * (3 * (window - 1) + index))
    optimizer.zero_grad()
    how = {} if through == "loss.backward()" else {"weigh": lambda *batch: None}
    fail(model, optimizer, **how)
    if how:
        calls, failed = [lambda: backward(model, optimizer, TWO, **how), optimizer.step, optimizer.flush], "failed .Out"
    else:
        backward(model, optimizer, regression(4))
        calls, failed = [optimizer.state_dict, optimizer.step][not index :], "failed"
    for call in calls:
        with refused(rf"A backward pass of this window {failed}.*discard\(\)", model):
            call()
            train(model, optimizer, [TWO] * (2 - index), clear="never")
    optimizer.discard()
    assert optimizer.micro_batches == 0
    assert all(p.grad is None for p in model.parameters())
    backward(model, optimizer, TWO, weigh=by_rows)


@pytest.mark.parametrize("drop", ["discard", "zero_grad"])
def test_what_a_failed_pass_left_is_gone_after_discard_or_zero_grad_of_an_empty_window(drop):
    (model, optimizer), micro_batches = wrapped(model=fragile(), steps=2), parts([2, 3, 4])
    fail(model, optimizer)
    getattr(optimizer, drop)()
    train(model, optimizer, optimizer.batches(micro_batches))
    assert_same(model, large([micro_batches[:2], micro_batches[2:]], model=fragile()))


def test_passing_over_a_micro_batch_whose_pass_failed_is_named_where_it_left_a_part():
    model, optimizer = wrapped(model=fragile(), steps=3)
    with refused("A backward pass of this window failed", model):
        for index, batch in enumerate(optimizer.batches(RAGGED)):
            fail(model, optimizer) if index == 1 else train(model, optimizer, [batch])


def test_a_step_in_the_middle_of_a_backward_pass_is_no_failure():
    model, alike = fragile(), parts([4, 4])
    for parameter in model.parameters():
        optimizer = gradaccum.torch.optim.Optimizer(sgd([parameter]), steps=2)
        parameter.register_post_accumulate_grad_hook(lambda p, optimizer=optimizer: optimizer.step())
    for part in alike:
        mse(model, *part).backward()
    assert_same(model, large([alike], model=fragile()))


def traced():
    """The functions of this package that torch.compile has traced."""
    home = os.path.dirname(gradaccum.__file__)
    ours = [f for f in gc.get_objects() if type(f) is FunctionType and f.__code__.co_filename.startswith(home)]
    return {f.__qualname__ for f in ours if torch._dynamo.eval_frame._debug_get_cache_entry_list(f.__code__)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("way", "compiled_autograd"),
    [("plain", False), ("plain", True), ("weighted", False), ("backward alone", True), ("train step", False)],
)
@pytest.mark.skipif(torch.__version__ < "2.11", reason="its compiler fails on attributes that are set twice")
def test_a_compiled_loop_is_exact_and_nothing_of_this_package_is_traced(way, compiled_autograd, backend):
    torch._dynamo.reset()
    alike = parts([2] * 16)
    windows = [alike[i : i + 2] for i in range(0, 16, 2)]
    (model, optimizer), apart = wrapped(steps=2), network()
    step = gradaccum.torch.TrainStep(apart, sgd(apart.parameters()), loss_fn=nn.MSELoss(), micro_batch_size=2)

    def whole(x, y):
        optimizer.zero_grad()
        if way == "weighted":
            optimizer.backward(mse(model, x, y), weight=2)
        else:
            mse(model, x, y).backward()
        optimizer.step()

    def alone(x, y):
        mse(model, x, y).backward()

    compiled = torch.compile({"backward alone": alone, "train step": step}.get(way, whole), backend=backend)
    with torch._dynamo.config.patch(compiled_autograd=compiled_autograd):
        for batch in map(join, windows) if way == "train step" else alike:
            compiled(*batch)
            if way == "backward alone":
                optimizer.step()
                optimizer.zero_grad()
    assert (step if way == "train step" else optimizer).updates == 8
    assert_same(apart if way == "train step" else model, large(windows))
    assert traced() == set()
    torch._dynamo.reset()
