"""Buffers that the forward pass makes, resizes, deletes, shares, or that no module of the model has."""

import copy
import io
import logging

import pytest
import torch
from torch import nn

from gradaccum.torch import chunked, combine_buffers
from gradaccum.torch.buffers import rules_of
from tests.reference import FLOAT64, relative_error
from tests.torch.train_step.test_memory import OUT
from tests.torch.train_step.test_train_step import assert_same_updates, batches, by_hand, step_of

LOSS = nn.CrossEntropyLoss()


def scaled(x, by):
    return x * (1 + 0.1 * by.double().sum().cos())


class Moving(nn.Module):
    """Scales by its buffers, which a function moves."""

    def __init__(self, forward, **buffers):
        super().__init__()
        self.function = forward
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x):
        return self.function(self, x)


def counts_in_what_was_none(module, x):
    module.passes = torch.zeros(()).double() if module.passes is None else module.passes
    module.passes = module.passes + 1
    return scaled(x, module.passes)


def counts_in_what_was_not_there(module, x):
    if not hasattr(module, "passes"):
        module.register_buffer("passes", torch.zeros(()).double())
    module.passes += 1
    return scaled(x, module.passes)


def appends_a_mean_by_assigning(module, x):
    outputs, module.means = scaled(x, module.means), torch.cat([module.means, x.detach().mean()[None]])
    return outputs


def appends_a_mean_in_place(module, x):
    outputs, module.means.data = scaled(x, module.means), torch.cat([module.means, x.detach().mean()[None]])
    return outputs


def deletes_what_it_starts_from(module, x):
    if "once" not in module._buffers:
        return x
    outputs = x * (1 + module.once)
    del module.once
    return outputs


def moves_through_numpy(module, x):
    """Which no version tells of."""
    outputs = scaled(x, module.passes)
    module.passes.numpy()[...] += 1
    return outputs


def keeps_the_largest_in_float8(module, x):
    """Which has no arithmetic."""
    outputs = scaled(x, module.largest)
    module.largest.copy_(torch.maximum(module.largest.double(), x.detach().abs().amax(0)))
    return outputs


class Shared(nn.Module):
    """One tensor is the buffer of two modules, or two buffers are views of one."""

    def __init__(self, views):
        super().__init__()
        memory = torch.zeros(6).double()
        self.one, self.two = nn.Module(), nn.Module()
        self.one.register_buffer("passes", memory[:4] if views else memory)
        self.two.register_buffer("passes", memory[2:] if views else memory)

    def forward(self, x):
        outputs = scaled(x, self.one.passes)
        self.one.passes.add_(1)
        self.two.passes.mul_(0.5)
        return outputs


class Narrow(Moving):
    """Whose rule is known."""


combine_buffers(Narrow, largest="max")

KINDS = {
    "made": lambda: Moving(counts_in_what_was_none, passes=None),
    "registered": lambda: Moving(counts_in_what_was_not_there),
    "assigned in another size": lambda: Moving(appends_a_mean_by_assigning, means=torch.zeros(0).double()),
    "resized in place": lambda: Moving(appends_a_mean_in_place, means=torch.zeros(0).double()),
    "deleted": lambda: Moving(deletes_what_it_starts_from, once=torch.ones(6).double()),
    "one tensor twice": lambda: Shared(False),
    "views of one tensor": lambda: Shared(True),
    "through NumPy": lambda: Moving(moves_through_numpy, passes=torch.zeros(2).double()),
    "float8": lambda: Narrow(keeps_the_largest_in_float8, largest=torch.ones(6).to(torch.float8_e4m3fn)),
}


def network(middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6).double(), middle, nn.Linear(6, 3).double())


def assert_same_state(model, reference):
    expected = dict(reference.named_buffers(remove_duplicate=False))
    found = dict(model.named_buffers(remove_duplicate=False))
    assert found.keys() == expected.keys()
    for name, buffer in expected.items():
        assert (found[name].shape, found[name].dtype) == (buffer.shape, buffer.dtype)
        assert relative_error([found[name].double()], [buffer.double()]) <= FLOAT64, name
    assert relative_error(model.parameters(), reference.parameters()) <= FLOAT64


@pytest.mark.parametrize("how", ["TrainStep", "out of memory", "chunked"])
@pytest.mark.parametrize("kind", KINDS)
def test_such_buffers_go_where_the_large_batch_takes_them(kind, how):
    reference, model = network(KINDS[kind]()), network(KINDS[kind]())
    passes = []

    def fails(module, args, outputs):
        passes.append(len(outputs))
        if how == "out of memory" and len(passes) in (2, 8):
            raise torch.OutOfMemoryError(OUT)

    model[1].register_forward_hook(fails)
    if how == "chunked":
        by_hand(chunked(model, 5), batches(count=3))
    else:
        step = step_of(model, micro_batch_size=5, verify=how == "TrainStep")
        for batch in batches(count=3):
            step(*batch)
    by_hand(reference, batches(count=3))
    assert_same_state(model, reference)


def test_a_failed_update_leaves_nothing_that_a_pass_has_made():
    model = network(KINDS["made"]())

    def fails(module, args, outputs):
        raise RuntimeError("an error of the user's own")

    model[2].register_forward_hook(fails)
    with pytest.raises(RuntimeError, match="user's own"):
        step_of(model, micro_batch_size=5, verify=True)(*batches(count=1)[0])
    assert model[1].passes is None


class Centred(nn.Module):
    """A loss with a moving centre, and one with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3).double())

    def forward(self, outputs, y):
        loss = LOSS(outputs - self.centre, y)
        self.centre.mul_(0.9).add_(0.1 * outputs.detach().mean(0))
        return loss


@pytest.mark.parametrize("where", ["closure", "list", "helper", "object"])
def test_modules_that_compute_loss_refers_to_move_once_too(where):
    ours, theirs = Centred(), Centred()

    def helper(outputs, y):
        return ours(outputs, y)

    class Computes:
        criterion = ours

        def __init__(self):
            self.criterion = ours

        def __call__(self, model, x, y):
            return self.criterion(model(x), y)

    held = [ours]
    compute_loss = {
        "closure": lambda model, x, y: ours(model(x), y),
        "list": lambda model, x, y: held[0](model(x), y),
        "helper": lambda model, x, y: helper(model(x), y),
        "object": Computes(),
    }[where]
    keywords = {"compute_loss": compute_loss, "micro_batch_size": 4}
    assert_same_updates(network(nn.Tanh()), batches(), lambda model, x, y: theirs(model(x), y), **keywords)
    assert_same_state(ours, theirs)


class Counts(nn.Module):
    """Rows and largest values, of which nothing is said; averages of sums, which no rule fits."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))
        self.register_buffer("largest", torch.zeros(6).double())
        self.register_buffer("seen", torch.zeros(6, dtype=torch.bool))

    def forward(self, x):
        outputs = scaled(x, self.rows) + 0.1 * self.largest
        with torch.no_grad():
            self.rows += len(x)
            self.largest.copy_(torch.maximum(self.largest, x.abs().amax(0)))
            self.seen |= (x > 1).any(0)
        return outputs


def test_what_is_no_mean_is_named_in_a_warning_and_no_rule_is_guessed(caplog):
    model = network(Counts())
    step = step_of(model, micro_batch_size=5, verify=True)
    for batch in batches(count=5):
        step(*batch)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "'rows' of '1' (Counts)" in record.message
    assert "combine_buffers(Counts, " in record.message
    assert rules_of(model[1]) == {}


def test_what_is_said_of_a_module_goes_with_its_copies_and_files():
    module = Counts()
    combine_buffers(module, rows="sum", largest=lambda module, start, ends: torch.stack(ends).amax(0))
    file = io.BytesIO()
    torch.save(copy.deepcopy(module), file)
    file.seek(0)
    assert rules_of(torch.load(file, weights_only=False)) == {"rows": "sum"}
    assert list(rules_of(module)) == ["rows", "largest"]
    combine_buffers(module, largest="max")
    assert rules_of(module) == {"rows": "sum", "largest": "max"}


def test_a_rule_of_a_module_holds_inside_of_a_chunked_one():
    reference, model = network(Counts()), network(Counts())
    combine_buffers(model[1], rows="sum", largest="max", seen="max")
    model[1] = chunked(model[1], 2)
    step_of(model, micro_batch_size=5, verify=True)(*batches(count=1)[0])
    by_hand(reference, batches(count=1))
    assert_same_state(model, reference)


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        (lambda module, start, ends: 3.0, TypeError, "must return a tensor like the buffer's ends. Received: 3.0"),
        (lambda module, start, ends: start[None], ValueError, r"Received: shape \(1,\), torch.int64"),
        (lambda module, start, ends: start.double(), ValueError, r"Received: shape \(\), torch.float64"),
    ],
)
def test_what_a_rule_returns_is_checked(rule, error, message):
    model = network(Counts())
    combine_buffers(model[1], rows=rule)
    with pytest.raises(error, match=f"The rule for 'rows' of Counts .*{message}"):
        step_of(model, micro_batch_size=5)(*batches(count=1)[0])
    assert model[1].rows == 0


def test_a_rule_with_other_arguments_is_refused_at_once():
    with pytest.raises(TypeError, match=r"called as rule\(module, start, ends\). Received: rows="):
        combine_buffers(Counts, rows=lambda start, ends: start)
