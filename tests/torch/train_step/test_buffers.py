"""State that moves in the forward pass: every micro-batch finds the window's buffers, and they move once."""

import copy
import functools
import io
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm

from gradaccum.torch import BlockStep, TrainStep, chunked, combine_buffers
from gradaccum.torch.buffers import rules_of
from tests.fuzz.problem import Faulty
from tests.torch.problems import Empties as Of
from tests.torch.train_step.problems import batches, centred, zeros
from tests.torch.train_step.steps import assert_same_state, assert_same_updates, by_hand, left_as_it_was, step_of


def quantised(module, x):
    """As in VQ-VAE: counts and sums over rows in moving averages, and codes that are their quotient."""
    nearest = F.one_hot(torch.cdist(x, module.codes).argmin(1), 4).double()
    found = nearest @ module.codes
    with torch.no_grad():
        module.count.copy_(0.9 * module.count + 0.1 * nearest.sum(0))
        module.total.copy_(0.9 * module.total + 0.1 * nearest.T @ x)
        module.codes.copy_(module.total / module.count[:, None])
    return x + (found - x).detach() + 0.1 * (x - found.detach()).square()


class Codebook(Of):
    def __init__(self):
        codes = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
        super().__init__(quantised, codes=codes, total=codes.clone(), count=zeros(4) + 1)


class SumsExactly(Codebook):
    """The same, of which the rules are known."""


def sum_of_moving_averages(module, start, ends):
    return torch.stack(ends).sum(0) - (len(ends) - 1) * 0.9 * start


combine_buffers(
    SumsExactly,
    count=sum_of_moving_averages,
    total=sum_of_moving_averages,
    codes=lambda module, start, ends: module.total / module.count[:, None],
)


def scales_by_the_largest(module, x):
    """Of the passes before, as FP8 does; counts rows and passes; averages rows."""
    scale = module.history.max()
    with torch.no_grad():
        module.history.copy_(module.history.roll(1))
        module.history[0] = x.abs().max()
        module.rows += len(x)
        module.passes += 1
        module.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return x / scale


def scaled(x, by):
    return x * (1 + 0.1 * by.double().sum().cos())


def counts_in_what_was_none(module, x):
    module.passes = zeros(()) if module.passes is None else module.passes
    module.passes = module.passes + 1
    return scaled(x, module.passes)


def counts_in_what_was_not_there(module, x):
    if not hasattr(module, "passes"):
        module.register_buffer("passes", zeros(()))
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


def empties_what_it_starts_from(module, x):
    if module.once is None:
        return x
    outputs = x * (1 + module.once)
    module.once = None
    return outputs


def moves_by(how, start=lambda: zeros(2)):
    def function(module, x):
        outputs = scaled(x, module.passes)
        if how == "assigned":
            module.passes = module.passes + 1
        else:  # which no version tells of
            (module.passes.data if how == "data" else module.passes.numpy())[...] += 1
        return outputs

    return lambda: Of(function, passes=start())


def keeps_the_largest_in_float8(module, x):
    """Which has no arithmetic."""
    outputs = scaled(x, module.largest)
    module.largest.copy_(torch.maximum(module.largest.double(), x.detach().abs().amax(0)))
    return outputs


def shared(views):
    """One tensor is the buffer of two modules, or two buffers are views of one."""

    def function(module, x):
        outputs = scaled(x, module.one.passes)
        module.one.passes.add_(1)
        module.two.passes.mul_(0.5)
        return outputs

    def make():
        memory = zeros(6)
        one, two = (Of(None, passes=own) for own in ((memory[:4], memory[2:]) if views else (memory, memory)))
        return Of(function, one=one, two=two)

    return make


def instance_norm():
    return nn.Sequential(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten())


def largest_values():
    rows, passes = (torch.zeros((), dtype=torch.long) for _ in range(2))
    module = Of(scales_by_the_largest, history=zeros(3) + 1, rows=rows, passes=passes, average=zeros(6))
    combine_buffers(module, history="max", rows="sum", passes="once", average="mean")
    return module


def counts_rows(module, x):
    module.rows[1] += len(x)
    return x


def float8():
    module = Of(keeps_the_largest_in_float8, largest=torch.ones(6).to(torch.float8_e4m3fn))
    combine_buffers(module, largest="max")
    return module


MIDDLES = {
    "spectral norm (parametrization)": lambda: parametrizations.spectral_norm(nn.Linear(6, 6)),
    "spectral norm (hook)": lambda: spectral_norm(nn.Linear(6, 6)),
    "largest values": largest_values,
    "codebook": SumsExactly,
    "instance norm": instance_norm,
    "made": lambda: Of(counts_in_what_was_none, passes=None),
    "registered": lambda: Of(counts_in_what_was_not_there),
    "assigned in another size": lambda: Of(appends_a_mean_by_assigning, means=zeros(0)),
    "resized in place": lambda: Of(appends_a_mean_in_place, means=zeros(0)),
    "deleted": lambda: Of(deletes_what_it_starts_from, once=zeros(6) + 1),
    "emptied": lambda: Of(empties_what_it_starts_from, once=zeros(6) + 1),
    "one tensor twice": shared(False),
    "views of one tensor": shared(True),
    "assigned": moves_by("assigned"),
    "assigned, where one was expanded": moves_by("assigned", lambda: zeros(1).expand(2)),
    "through .data": moves_by("data"),
    "through NumPy": moves_by("numpy"),
    "float8": float8,
}


def network(middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), middle(), nn.Linear(6, 3)).double()


LOSS = {"loss_fn": nn.CrossEntropyLoss()}


@pytest.mark.parametrize(
    "way", ["sgd", "adam", "auto", "proven", "out of memory", "out of memory in backward", "chunked"]
)
@pytest.mark.parametrize("name", MIDDLES)
def test_buffers_move_once_and_to_where_the_large_batch_moves_them(name, way):
    reference, model, passes = network(MIDDLES[name]), network(MIDDLES[name]), []

    def limited(module, args, outputs):
        passes.append(len(outputs))
        fault = Faulty()
        if len(passes) in (2, 8):  # as a later one does, too, by the time of the third batch
            fault.prepare("oom" if way == "out of memory" else "backward oom", 0)
        return fault(outputs)

    if way == "chunked":
        for one in (chunked(model, 5, verify=False), reference):
            by_hand(one, batches())
        assert_same_state(model, reference)
        return
    handle = model.register_forward_hook(limited) if "memory" in way else None
    size, make = {"adam": 13, "auto": "auto"}.get(way, 5), "adam" if way == "adam" else "sgd"
    keywords = {"reference": reference, "micro_batch_size": size, "verify": way == "proven", **LOSS}
    assert_same_updates(model, make=make, **keywords)
    assert handle is None or len(passes) > 9


def test_an_infinity_stays_where_other_numbers_of_its_buffer_are_summed():
    model = network(lambda: Of(counts_rows, rows=torch.tensor([torch.inf, 0.0])))
    combine_buffers(model[2], rows="sum")
    step_of(model, "sgd", micro_batch_size=5)(*batches(13)[0])
    assert model[2].rows.tolist() == [torch.inf, 13.0]


def test_each_evaluation_of_a_closure_is_a_window():
    model, reference = (network(MIDDLES["spectral norm (hook)"]) for _ in range(2))
    lbfgs = lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)  # noqa: E731
    assert_same_updates(model, batches(count=2), make=lbfgs, reference=reference, **LOSS)


@pytest.mark.parametrize(("place", "size"), [*((place, 4) for place in ("before", "inside", "behind")), ("inside", 13)])
@pytest.mark.parametrize("name", ["spectral norm (hook)", "codebook", "made", "registered"])
def test_layer_by_layer_buffers_move_once_too(name, place, size):
    def layered():
        torch.manual_seed(0)
        moving, block = MIDDLES[name](), nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        blocks = nn.Sequential(nn.Sequential(block, moving) if place == "inside" else block, nn.Tanh())
        parts = [moving, blocks] if place == "before" else [blocks, moving] if place == "behind" else [blocks]
        return nn.Sequential(nn.Linear(5, 6), *parts, nn.Linear(6, 3)).double()

    options = {"kind": BlockStep, "blocks": "2" if place == "before" else "1", "micro_batch_size": size, **LOSS}
    assert_same_updates(layered(), reference=layered(), **options)


# Between updates.


def late(module, x):
    """Multiplies by a buffer, which it makes where there is none and is told to."""
    factor = module._buffers.get("factor")
    if factor is None and module.makes:
        module.register_buffer("factor", factor := zeros(6) + 2)
    if factor is None:
        return x
    module.factor = factor * 0.9 if module.moves else factor
    return x * factor


def change(module, factor="as it is", makes=False, moves=True):
    module.makes, module.moves = module.makes or makes, module.moves and moves
    if factor == "gone":
        module._buffers.pop("factor", None)
    elif factor != "as it is":
        module.factor = factor if factor is None else zeros(6) + factor


GIVEN, MADE, STAYS = {"factor": 3}, {"makes": True}, {"factor": 3, "moves": False}
EMPTY, GONE = {"makes": True, "factor": None}, {"makes": True, "factor": "gone"}
CHANGES = {
    "given": [GIVEN],
    "given, and stays": [STAYS],
    "made": [MADE],
    "made, then emptied": [MADE, EMPTY],
    "given, then deleted": [GIVEN, GONE],
    "given, and stays, then emptied": [STAYS, EMPTY],
}


@pytest.mark.parametrize(("at", "blocks"), [*((at, False) for at in range(6)), (1, True), (2, True)])
@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_buffers_that_come_and_go_between_updates(changes, at, blocks):
    """Made by the user or by a pass, emptied and deleted, in updates that look at every buffer and in others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), Of(late, factor=None), nn.Linear(6, 3)).double()
    model[1].makes, model[1].moves = False, True
    large = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, large))
    kind = functools.partial(BlockStep, blocks=[model[0], model[1]]) if blocks else TrainStep
    step = kind(model, ours, micro_batch_size=3, **LOSS)
    after = dict(zip(range(at, 9, 2), changes))
    for number, batch in enumerate(batches(10, count=9)):
        for m in (model, large) if number in after else ():
            change(m[1], **after[number])
        step(*batch)
        by_hand(large, [batch], make=lambda _: theirs)
        assert_same_state(model, large)


def made_and_used_up(module, x):
    """Makes a factor where there is none, for the next pass, which takes it away again."""
    factor = module._buffers.get("factor")
    if factor is None:
        module.register_buffer("factor", zeros(6) + 2)
        return x
    if module.named:
        module.factor = None
    else:
        del module.factor
    return x * factor


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("start", [None, 2.0])
def test_what_every_other_pass_makes_and_uses_up_is_made_once_per_update(start, named, beside):
    """In an even number of micro-batches, after which it is there no more than before."""
    moving = Of(made_and_used_up, factor=None if start is None else zeros(6) + start)
    moving.named = named
    if beside:
        moving.register_buffer("other", zeros(3))
    if start is None and not named:
        del moving.factor
    model = nn.Sequential(nn.Linear(5, 6), moving, nn.Linear(6, 3)).double()
    large = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, large))
    step = step_of(model, ours, micro_batch_size=3)
    for batch in batches(10, count=9):
        step(*batch)
        by_hand(large, [batch], make=lambda _: theirs)
        assert_same_state(model, large)


def less_its_average(module, x):
    outputs = x - module.average
    with torch.no_grad():
        module.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return outputs


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("place", [lambda model: model, lambda model: model[1]], ids=["in the model", "deeper"])
def test_buffers_of_modules_that_are_replaced_between_updates(place, at):
    model = nn.Sequential(nn.Linear(5, 6), nn.Sequential(nn.Tanh(), nn.Tanh()), nn.Linear(6, 3)).double()
    large = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, large))
    step = step_of(model, ours, micro_batch_size=3)
    for number, batch in enumerate(batches(10, count=8)):
        for m in (model, large) if number == at else ():
            place(m)[1] = Of(less_its_average, average=zeros(6))
        step(*batch)
        by_hand(large, [batch], make=lambda _: theirs)
        assert_same_state(model, large)


def test_a_failed_update_leaves_nothing_that_a_pass_has_made():
    model, batch = network(MIDDLES["made"]), batches()[0]

    def fails(module, args, outputs):
        raise RuntimeError("an error of the user's own")

    model[3].register_forward_hook(fails)
    with left_as_it_was(model, RuntimeError, "user's own"):
        step_of(model, micro_batch_size=5, verify=True)(*batch)
    assert model[2].passes is None


def centred_loss(module, outputs, y):
    return F.cross_entropy(centred(module, outputs), y)


@pytest.mark.parametrize("where", ["closure", "list", "helper", "object"])
def test_modules_that_compute_loss_refers_to_move_once_too(where):
    ours, theirs = (Of(centred_loss, mean=zeros(3)) for _ in range(2))

    def helper(outputs, y):
        return ours(outputs, y)

    class Computes:
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
    assert_same_updates(network(nn.Tanh), None, lambda m, x, y: theirs(m(x), y), compute_loss=compute_loss)
    assert_same_state(ours, theirs)


# What is said of buffers.


def counted(module, x):
    outputs = scaled(x, module.rows) + 0.1 * module.largest
    with torch.no_grad():
        module.rows += len(x)
        module.largest.copy_(torch.maximum(module.largest, x.abs().amax(0)))
        module.seen |= (x > 0.5).any(0)
    return outputs


class Counts(Of):
    """Rows and largest values, of which nothing is said; averages of sums, which no rule fits."""

    def __init__(self):
        rows, seen = torch.zeros((), dtype=torch.long), torch.zeros(6, dtype=torch.bool)
        super().__init__(counted, rows=rows, largest=zeros(6), seen=seen)


@pytest.mark.parametrize(("kind", "names"), [(Codebook, ("codes", "total", "count")), (Counts, ("rows", "largest"))])
def test_what_is_no_mean_is_named_once_no_rule_is_guessed_and_the_update_is_exact(kind, names, caplog):
    model, (first, *others) = network(kind), batches(count=5)
    with caplog.at_level(logging.WARNING, "gradaccum"):
        step = assert_same_updates(model, [first], buffers=False, **LOSS)
        for batch in others:
            step(*batch)
    (record,) = caplog.records
    assert ", ".join(f"{name!r} of '2' ({kind.__name__})" for name in names) in record.message
    assert f"combine_buffers({kind.__name__}, " in record.message
    assert rules_of(model[2]) == {}


def test_what_is_said_of_a_module_goes_with_its_copies_and_files():
    module, file = Counts(), io.BytesIO()
    combine_buffers(module, rows="sum", largest=lambda module, start, ends: torch.stack(ends).amax(0))
    torch.save(copy.deepcopy(module), file)
    file.seek(0)
    assert rules_of(torch.load(file, weights_only=False)) == {"rows": "sum"}
    assert list(rules_of(module)) == ["rows", "largest"]
    combine_buffers(module, largest="max")
    assert rules_of(module) == {"rows": "sum", "largest": "max"}


def test_a_rule_of_a_module_holds_inside_of_a_chunked_one():
    reference, model = network(Counts), network(Counts)
    combine_buffers(model[2], rows="sum", largest="max", seen="max")
    model[2] = chunked(model[2], 2)
    assert_same_updates(model, batches(count=1), reference=reference, micro_batch_size=5, buffers=False, **LOSS)
    for name, buffer in reference[2].named_buffers():
        assert torch.equal(getattr(model[2], name), buffer), name


@pytest.mark.parametrize(
    ("module", "rules", "error", "message"),
    [
        (nn.Linear(2, 2), {"mean": "mean"}, ValueError, r"no buffer of its own of this name\. Received: mean='mean'"),
        (nn.BatchNorm1d, {"running_mean": "average"}, ValueError, "Received: running_mean='average'"),
        ("Codebook", {}, TypeError, "Received: module='Codebook' of type str"),
        (dict, {}, TypeError, "a class of them"),
        (Codebook, {"codes": lambda start, ends: 0}, TypeError, r"rule\(module, start, ends\). Received: codes="),
    ],
)
def test_what_is_no_rule_is_refused(module, rules, error, message):
    with pytest.raises(error, match=message):
        combine_buffers(module, **rules)


@pytest.mark.parametrize(
    ("rule", "error", "message"),
    [
        (lambda module, start, ends: 3.0, TypeError, "must return a tensor like the buffer's ends. Received: 3.0"),
        (lambda module, start, ends: start[None], ValueError, r"Received: shape \(1,\), torch.int64"),
        (lambda module, start, ends: start.double(), ValueError, r"Received: shape \(\), torch.float64"),
    ],
)
def test_what_a_rule_returns_is_checked(rule, error, message):
    model, batch = network(Counts), batches()[0]
    combine_buffers(model[2], rows=rule)
    with left_as_it_was(model, error, f"The rule for 'rows' of Counts .*{message}"):
        step_of(model, micro_batch_size=5)(*batch)
