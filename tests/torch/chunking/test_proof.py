"""The first call proves itself: what isn't the large batch's, or can't be chunked, is an error or a warning by name."""

import copy
import functools
import re
import warnings
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from gradaccum.torch import chunked
from gradaccum.torch.losses import info_nce, sigmoid_loss
from tests.reference import FLOAT64, relative_error
from tests.torch.chunking.problems import assert_same, encoder, frozen, gradients, loss_of
from tests.torch.problems import GENERATORS, MIXING, Does, drawn

ROWS, SIZE = 11, 4


def nested_encoder():
    return nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.3), nn.Sequential(nn.Tanh(), nn.Linear(6, 3)))


def does(function, norm=None):
    """A function between two layers, with what a module may keep for itself."""
    layers = {"before": nn.Linear(5, 6), "norm": norm or nn.Tanh(), "after": nn.Linear(6, 3)}
    own = {"kept": [], "calls": 0, "last": None, "moving": torch.zeros(6)}
    return Does(lambda m, x: m.after(function(m, m.norm(m.before(x)))), **layers, **own)


CHOICES = ("warn", "micro", "pooled", "frozen", "exact")
OUTSIDE = "(?s)Does is not per-row.*outside its layers.*torch.nn.functional.batch_norm.*verify=False leaves this proof"


@pytest.mark.parametrize(
    ("name", "choice"), [p for p in product(MIXING, CHOICES) if p != ("normalised by a function", "exact")]
)
def test_what_looks_across_rows_is_an_error_at_the_first_call(name, choice):
    exact = choice == "exact"
    module = does(lambda m, h: MIXING[name](h), nn.BatchNorm1d(6) if exact else None)
    errors, message = (NotEquivalentError, *[ValueError] * exact), "not per-row|can't be cut" if exact else OUTSIDE
    with pytest.raises(errors, match=message):
        chunked(module, SIZE, batch_norm=choice)(torch.randn(ROWS, 5))


@pytest.mark.parametrize("first", [nn.Tanh, lambda: nn.BatchNorm1d(6)])
def test_the_layer_that_looks_across_rows_is_named(first):
    class Centres(nn.Module):
        def forward(self, h):
            return h - h.mean(0)

    module = nn.Sequential(nn.Linear(5, 6), nn.Sequential(first(), Centres()), nn.Linear(6, 3))
    with pytest.raises(NotEquivalentError, match=r"(?s)gradient of 2.weight.*'1.1' is the first layer.*a Centres"):
        chunked(module, SIZE, batch_norm="exact")(torch.randn(ROWS, 5))


def test_verify_finds_a_batch_norm_in_train_mode_and_moves_nothing():
    inner = nn.Sequential(nn.Tanh(), nn.BatchNorm1d(4))
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), inner, nn.Linear(4, 2)), torch.randn(50, 3)
    before, state = [buffer.clone() for buffer in model.buffers()], torch.get_rng_state()
    with pytest.raises(NotEquivalentError, match=r"(?s)not per-row.*relative error.*'2.1' is the first.*BatchNorm1d"):
        chunked(model, 8).verify(x)
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, before, model.buffers()))
    assert all(layer.training for layer in model.modules())
    chunked(model, 8, batch_norm="exact").verify(x)
    chunked(model.eval(), 8).verify(x)


# What leaves a module besides its outputs.


def leaving(leave):
    return lambda: (does(lambda m, h: (leave(m, h.square().mean()), h)[1]), ())


def caught_by_a_hook():
    module, caught = nested_encoder(), {}
    module[2].register_forward_hook(lambda layer, args, output: caught.update(features=output))
    return module, ()


def in_a_list_that_is_passed():
    run = lambda m, x, found: (found.append(m.before(x)), m.after(m.before(x)))[1]  # noqa: E731
    return Does(run, before=nn.Linear(5, 6), after=nn.Linear(6, 3)), ([],)


SIDEWAYS = {  # the module and its other arguments; where the tensor is said to be
    "attribute": (leaving(lambda m, t: setattr(m, "last", t)), "with a graph as its attribute 'last'"),
    "list": (leaving(lambda m, t: m.kept.append(t)), "with a graph.*in a hook, a container"),
    "in containers": (leaving(lambda m, t: setattr(m, "last", {"losses": [t]})), "a graph as its attribute 'last'"),
    "a hook": (caught_by_a_hook, r"of shape \(8, 3\).*made in '2(\.1)?' .*in a hook"),
    "an argument": (in_a_list_that_is_passed, r"made in 'before' \(Linear\), in a hook, a container"),
}


@pytest.mark.parametrize("verify", ["the first call", "verify()"])
@pytest.mark.parametrize("name", SIDEWAYS)
def test_a_tensor_that_leaves_by_the_side_is_an_error(name, verify):
    make, where = SIDEWAYS[name]
    module, others = make()
    small, x = chunked(module, SIZE), torch.randn(ROWS, 5)
    with pytest.raises(NotEquivalentError, match=rf"keeps a tensor.*{where}.*Return it from forward"):
        small(x, *others) if verify == "the first call" else small.verify(x, *others)
    assert (getattr(module, "kept", []), getattr(module, "last", None)) == ([], None)


def test_a_tensor_that_gets_gradients_and_is_no_parameter_is_named_and_gets_them(caplog):
    outside, x, found = nn.Parameter(torch.randn(6, 6)), torch.randn(ROWS, 5), []
    module = does(lambda m, h: h @ outside)
    for m in (module, chunked(module, SIZE)):
        outside.grad = torch.ones(6, 6)
        loss_of(m(x)).backward()
        found.append(outside.grad - 1)
    assert relative_error(found[1:], found[:1]) <= 10 * FLOAT64
    (message,) = caplog.messages
    assert "passes gradients to tensors that are neither its parameters nor its inputs, of shape (6, 6)" in message


def test_attributes_and_buffers_that_micro_batches_leave_otherwise_are_named_once(caplog):
    def moves(module, h):
        module.calls += 1
        module.last = h.detach().mean()
        module.moving.copy_(torch.maximum(module.moving, h.detach().abs().amax(0)))
        return h

    small, x = chunked(does(moves), SIZE), torch.randn(ROWS, 5)
    for _ in range(2):
        loss_of(small(x)).backward()
    buffers, attributes = caplog.messages
    assert re.match("These buffers of a chunked Does move to the mean.*'moving'", buffers)
    assert re.match("These attributes of a chunked Does are changed by every micro-batch.*'calls', 'last'", attributes)
    assert small.calls == 2 * 3  # one for each micro-batch, none for what is run again


def test_a_buffer_that_differs_by_little_beside_large_inputs_is_named(caplog):
    module = does(lambda m, h: m.moving.add_(len(h) ** 2) is None or h)
    chunked(module, SIZE).verify(1e6 * torch.randn(ROWS, 5))
    assert "'moving'" in caplog.text


# What is exact is silent.

HARMLESS = {
    "slopes that are drawn": lambda m, h: F.rrelu(h, training=True),
    "noise": lambda m, h: F.dropout(h, 0.4) * torch.rand_like(h) + torch.randn(6),
    "parameters": lambda m, h: h * m.before.weight.sum(),
    "a cached table": lambda m, h: setattr(m, "last", torch.arange(6.0)) or h + m.last,
    "a moving average": lambda m, h: m.moving.copy_(m.moving * 0.9 + 0.1 * h.detach().mean(0)) is None or h,
    "an average of zero": lambda m, h: m.moving.add_(0.1 * F.layer_norm(h.detach(), (6,)).mean()) is None or h,
    "NumPy": lambda m, h: h * torch.from_numpy(np.ones(6)) if np.random.rand() >= 0 else h,  # noqa: NPY002
    "a checkpoint": lambda m, h: torch.utils.checkpoint.checkpoint(torch.tanh, h, use_reentrant=False),
    "standardised weights": lambda m, h: h * F.batch_norm(m.before.weight.T, None, None, training=True)[0],
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_exact_is_silent_and_moves_nothing(name, caplog):
    module, x = does(HARMLESS[name]), torch.randn(ROWS, 5)
    small = chunked(module, SIZE)
    state, numbers = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small.verify(x)
    assert not caplog.records
    assert torch.equal(numbers, torch.get_rng_state())
    assert relative_error(module.state_dict().values(), state.values()) == 0
    assert all(p.grad is None for p in module.parameters())


def test_a_sign_that_rounding_decides_is_no_difference_where_it_decides_at_these_numbers_alone():
    def edge(gap):  # in which kernels of other sizes may differ by rounding
        module = does(lambda m, h: F.relu(h - 1.0 + (gap if len(h) > 6 else -gap)), nn.Identity())
        with torch.no_grad():
            module.before.weight[3], module.before.bias[3] = 0.0, 1.0
        return chunked(module, SIZE)

    edge(1e-12).verify(torch.randn(ROWS, 5))
    with pytest.raises(NotEquivalentError, match="not per-row"):
        edge(1e-1).verify(torch.randn(ROWS, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_running_mean_that_is_zero_but_for_rounding_is_silent(dtype, caplog):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5)]
    model, x = nn.Sequential(*layers).to(dtype), torch.randn(40, 4, dtype=dtype)
    chunked(model, 8, batch_norm="exact").verify(x)
    assert model[3].running_mean.abs().max() == 0  # nothing moved
    assert not caplog.records


def test_a_warning_of_the_users_own_is_shown_once_and_not_at_every_call():
    small = chunked(does(lambda m, h: warnings.warn("the user's own", stacklevel=1) or h), SIZE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(4):
            loss_of(small(torch.randn(ROWS, 5))).backward()
    assert len(caught) == 1


# When it is proven, and on what.


def test_it_is_proven_once_in_each_mode_and_only_for_gradients():
    calls, module, counts = [], nested_encoder(), []
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    small, x = chunked(module, SIZE), torch.randn(ROWS, 5)
    for training, grad in [(True, False), (True, True), (True, True), (False, True), (False, True), (None, True)]:
        calls.clear()
        small.train(training is not False)
        if training is None:
            module[1].eval()  # one layer alone
        with torch.set_grad_enabled(grad):
            small(x)
        counts.append(len(calls))
    plain, proven = 3, 3 + 1 + 2 + 2
    assert counts == [plain, proven, plain, proven, plain, proven]


def test_it_looks_at_fewer_rows_where_memory_runs_out():
    def runs_out(module, h):
        if len(h) > SIZE and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("for the test")
        return h - h.mean(0)

    fewer = "4 rows at once differ from the same rows in micro-batches of 3 and 1"
    with pytest.raises(NotEquivalentError, match=fewer):
        chunked(does(runs_out), SIZE)(torch.randn(ROWS, 5))


def test_what_cannot_be_evaluated_on_a_few_rows_is_a_warning_and_no_error(caplog):
    module, x = does(lambda m, h: h.view(-1, SIZE, 6).flatten(0, 1)), torch.randn(3 * SIZE, 5)
    loss_of(chunked(module, SIZE)(x)).backward()
    (message,) = caplog.messages
    assert "Whether a chunked Does gives the outputs and gradients of all rows at once could not be proven" in message


def test_random_numbers_of_numpys_cannot_be_given_to_their_rows():
    small = chunked(does(lambda m, h: h * torch.from_numpy(np.random.rand(*h.shape))), 8)  # noqa: NPY002
    with pytest.raises(ValueError, match="draws random numbers of NumPy's, which can't be assigned to rows"):
        small.verify(torch.randn(50, 5))


HIDDEN, NUMBERS = torch.Generator().manual_seed(0), np.random.default_rng(0)
OTHERWISE = {
    "grad mode": (lambda m, h: h * (2 if torch.is_grad_enabled() else 1), "gradients are enabled"),
    "requires_grad": (lambda m, h: h * (2 if h.requires_grad else 1), "gradients are enabled"),
    "a generator out of sight": (lambda m, h: h * torch.rand(6, generator=HIDDEN), "generator"),
    "another": (lambda m, h: h * torch.from_numpy(NUMBERS.random(6)), "generator"),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_does_otherwise_in_the_second_pass_is_an_error_by_the_first_backward(name):
    function, why = OTHERWISE[name]
    with pytest.raises(NotEquivalentError, match=f"other outputs when backward runs it again.*{why}"):
        loss_of(chunked(does(function), SIZE)(torch.randn(ROWS, 5))).backward()


def test_parametrizations_that_are_cached_are_refused_by_name():
    small, x = chunked(nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)), SIZE), torch.randn(ROWS, 5)
    with nn.utils.parametrize.cached(), pytest.raises(ValueError, match="keeps weights from a first pass"):
        small(x)
    loss = loss_of(small(x))
    with nn.utils.parametrize.cached(), pytest.raises(ValueError, match="and their backward pass"):
        loss.backward()


class Powered(nn.BatchNorm1d):
    """A formula of its own on top of BatchNorm's."""

    def forward(self, x):
        return super().forward(x) * x.std(0)


OF_ITS_OWN = {  # what is done to a BatchNorm, and what is named
    "a hook": (lambda bn: bn.register_forward_hook(lambda layer, args, output: output * 2), "hooks"),
    "a pre-hook": (lambda bn: bn.register_forward_pre_hook(lambda layer, args: (args[0] * 2 + 1,)), "hooks"),
    "a parametrization": (
        lambda bn: nn.utils.parametrize.register_parametrization(bn, "weight", nn.Softplus()), "parametrizations",
    ),
    "a forward": (lambda bn: setattr(bn, "__class__", Powered), ""),
}  # fmt: skip


@pytest.mark.parametrize("kind", OF_ITS_OWN)
def test_a_batch_norm_with_something_of_its_own_is_an_error_that_names_it(kind):
    change, what = OF_ITS_OWN[kind]
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    change(module[1])
    with pytest.raises(ValueError, match=rf"'1' \(.*BatchNorm1d\) has {what}" if what else "test_proof.py"):
        chunked(module, SIZE, batch_norm="exact")(torch.randn(ROWS, 5))


# What is refused.


def of_weight(function):
    return lambda: Does(lambda m, *inputs: function(m.weight, *inputs), weight=nn.Parameter(torch.ones(3)))


def script():
    return nn.Sequential(nn.Tanh(), torch.jit.script(nn.Linear(3, 2)))


def linear():
    return nn.Linear(3, 2)


INT, SUMS = "`micro_batch_size` must be an int >= 1", "`max_tokens` cuts off padding, which the statistics"
WRONG = [  # what is chunked, in which size, the options, the error
    *[(linear, n, {}, ValueError, f"{INT}. Received: .*={n}") for n in (0, -1)],
    *[(linear, n, {}, TypeError, INT) for n in (2.5, True, "4", None)],
    *[(linear, 4, {"keep": n}, (TypeError, ValueError), "`keep` must be an int >= 0") for n in (-1, 1.5, True, False)],
    (lambda: torch.relu, 4, {}, TypeError, "must be a torch"),
    (script, 4, {}, ValueError, "'1' is a TorchScript module"),
    (linear, 4, {"offload": True}, ValueError, "`offload` moves what crosses BatchNorm .*offload=True, batch_no"),
    (linear, 4, {"batch_norm": "none"}, ValueError, "`batch_norm` must be one of 'warn', 'micro'"),
    (linear, 4, {"max_tokens": 0}, ValueError, "`max_tokens` must be an int >= 1"),
    (linear, 4, {"max_tokens": 8, "batch_norm": "exact"}, ValueError, SUMS),
]


@pytest.mark.parametrize(("make", "size", "options", "error", "message"), WRONG)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning", "ignore:.*torch.jit.script:FutureWarning")
def test_what_cannot_be_chunked_is_refused_by_name(make, size, options, error, message):
    module = make()
    with pytest.raises(error, match=message):
        chunked(module, size, **options)


def nested(x):
    return torch.nested.nested_tensor(list(x), layout=torch.jagged)


X = torch.arange(30, dtype=torch.float64).reshape(10, 3) / 10
NO_ROW = "Received: output.* of shape {} for . rows, looked for in "
CALLS = {  # what is chunked, the options, its inputs, the error
    "a scalar": (of_weight(lambda w, x: (x * w).sum()), {}, [X], NO_ROW.format(r"\(\)")),
    "a mean over rows": (of_weight(lambda w, x: (x * w).mean(0)), {}, [X], NO_ROW.format(r"\(3,\)")),
    "the first row": (of_weight(lambda w, x: {"loss": (x * w)[:1]}), {}, [X], NO_ROW.format(r"\(1, 3\)")),
    "rows of different shapes": (
        of_weight(lambda w, x: x.new_ones(len(x), int(x[0, 0] * 10) + 1) * w[0]), {}, [X],
        "rows of different shapes in different micro-batches",
    ),
    "different values": (
        of_weight(lambda w, x: {"y": x * w, "first": x[0, 0].item()}), {}, [X],
        r"\['first'\] carries no rows, so it must be the same for every micro-batch",
    ),
    "an input that is edited": (
        lambda: nn.Sequential(nn.ReLU(inplace=True), linear()), {}, [X], r"edits its input args\[0\] in place",
    ),
    "inputs of different rows": (
        of_weight(lambda w, x, table: x * w), {}, [X, X[:5, 0]],
        r"(?s)args\[0\]  shape \(10, 3\).*args\[1\]  shape \(5,\).*batch_dims",
    ),
    "a nested tensor": (linear, {}, [nested(X)], r"args\[0\] is a nested tensor, which can't be"),
    "a sparse tensor": (linear, {}, [X.to_sparse()], r"args\[0\] is of layout torch.sparse_coo, which can't be"),
    "a name it doesn't have": (
        linear, {"batch_dims": {"table": None}}, [X], r"`batch_dims` names \['table'\], which Linear.forward",
    ),
    "a number": (linear, {}, [3], "has no tensor with rows"),
    "lazy parameters": (lambda: nn.LazyLinear(2), {}, [X], "call it on a few rows first"),
    "no mask": (linear, {"max_tokens": 8}, [X], "(?s)needs an attention mask of shape .*shape .10, 3."),
}  # fmt: skip


@pytest.mark.parametrize("keep", [0, 9])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_cannot_be_made_in_micro_batches_is_refused_by_name(name, keep, grad):
    make, options, inputs, message = CALLS[name]
    small = chunked(make(), 4, keep=keep, **options)
    with pytest.raises(ValueError, match=message), torch.set_grad_enabled(grad):
        small(*[x.clone() if isinstance(x, torch.Tensor) else x for x in inputs])


OF_ROWS = {
    "chunked Linear": lambda: chunked(linear(), 2),
    "info_nce": lambda: lambda x: info_nce(x, x),
    "sigmoid_loss": lambda: lambda x: sigmoid_loss(x, x),
}


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_of_torch_func_around_what_runs_twice_are_refused(transform, name):
    of, x = OF_ROWS[name](), torch.randn(6, 3) if transform is torch.func.grad else torch.randn(4, 6, 3)
    with pytest.raises(NotImplementedError, match=f"{name} is called inside of a transform of torch.func"):
        transform(lambda x: of(x).sum())(x)


# The second pass is the first one again, whatever has happened in between.


def adapted(m, x):
    """A layer whose attributes say what it does, as adapters and schedules have it."""
    y = m.layer(x) + F.linear(x, m.adapters[m.active])
    return y * m.scale + (0.0 if m.training else x.sum(1, keepdim=True))


def doubled(layer, args, output):
    return output * 2


CHANGES = {  # what happens before a forward pass, and what between that and backward
    "another mode": (lambda m: None, lambda m, _: m.eval()),
    "another adapter": (lambda m: None, lambda m, _: vars(m).update(active="b", scale=3.0)),
    "another method": (lambda m: None, lambda m, _: vars(m).update(forward=lambda x: x[:, :3])),
    "a hook that comes": (lambda m: None, lambda m, _: m.register_forward_hook(doubled)),
    "a hook that goes": (lambda m: m.register_forward_hook(doubled), lambda m, hook: hook.remove()),
}


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_module_between_forward_and_backward_does_not_reach_the_second_pass(change, keep):
    adapters = nn.ParameterDict({name: nn.Parameter(torch.randn(3, 5)) for name in "ab"})
    whole = Does(adapted, layer=nn.Linear(5, 3), adapters=adapters, active="a", scale=1.0)
    module, x, (before, between) = copy.deepcopy(whole), torch.randn(ROWS, 5), CHANGES[change]
    for m, inside in ((whole, whole), (chunked(module, SIZE, keep=keep), module)):
        handle = before(inside)
        loss = loss_of(m(x))
        between(inside, handle)
        later = dict(vars(inside))
        loss.backward()
        assert vars(inside) == later
    assert_same(gradients(module), gradients(whole))


def test_layers_that_are_replaced_or_unfrozen_between_forward_and_backward():
    whole, x, old = encoder(), torch.randn(ROWS, 5), []
    module = copy.deepcopy(frozen(whole, whole[0]))
    for m, inside in ((whole, whole), (chunked(module, SIZE), module)):
        loss = loss_of(m(x))
        inside.requires_grad_(True)
        old.append(inside[3])
        inside[3] = nn.Linear(8, 4)
        loss.backward()
        assert all(p.grad is None for p in [*inside[0].parameters(), *inside[3].parameters()])
    assert_same(gradients(old[1]), gradients(old[0]))


EDITED = {
    "an input": "modified by an inplace operation",
    "a parameter": "modified by an inplace operation",
    "a frozen parameter": r"frozen parameter of shape \(8, 5\).*edited in place between forward and",
}


@pytest.mark.parametrize("what", EDITED)
def test_what_is_edited_between_forward_and_backward_is_an_error(what):
    module, x = encoder(), torch.randn(ROWS, 5)
    if what == "a frozen parameter":
        frozen(module, module[0])
    loss = loss_of(chunked(module, SIZE)(x))
    with torch.no_grad():
        (x if what == "an input" else module[0].weight).mul_(2)
    with pytest.raises(RuntimeError, match=EDITED[what]):
        loss.backward()


@pytest.mark.parametrize("where", ["an attribute", "an attribute of a chunked one inside", "an input"])
@pytest.mark.parametrize("make", GENERATORS)
def test_a_generator_of_the_users_draws_the_same_again(make, where):
    generators, nested = [GENERATORS[make]() for _ in range(2)], "inside" in where
    kept, given = ([None] * 2, generators) if where == "an input" else (generators, [None] * 2)

    def run(m, x, one):
        return m.linear(x) * drawn(one or m.generator, len(x), 3)

    whole, module = (Does(run, linear=nn.Linear(5, 3), generator=one) for one in kept)
    module.load_state_dict(whole.state_dict())
    small, x = chunked(chunked(module, 2) if nested else module, SIZE), torch.randn(ROWS, 5)
    parts = x.split([2, 2, 2, 2, 2, 1] if nested else [4, 4, 3])
    loss_of(torch.cat([whole(rows, given[0]) for rows in parts])).backward()
    loss_of(small(x, given[1])).backward()
    assert_same(gradients(module), gradients(whole))
    assert torch.equal(*(drawn(one, 2) for one in generators))


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("keep", [0, 1])
def test_hooks_see_the_finished_gradient_once_under_create_graph(keep, calls):
    whole = encoder()
    module, x, found = copy.deepcopy(whole), torch.randn(ROWS, 5), []
    for call, inside in ((whole, whole), (chunked(module, SIZE, keep=keep), module)):
        leaf, seen = x.clone().requires_grad_(), []
        rows = leaf * 1.0  # not a leaf, with a hook of its own
        wanted = [leaf, *inside.parameters()]
        for tensor in (rows, *wanted):
            tensor.register_hook(lambda g, seen=seen: seen.append(g.detach()) or g.clamp(-0.02, 0.05))
        loss = sum(loss_of(call(rows)) for _ in range(calls))
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        assert len(seen) == 1 + len(wanted)
        (loss + sum(g.square().sum() for g in first)).backward()
        assert len(seen) == 2 * (1 + len(wanted))
        found.append([*first, *(t.grad for t in wanted)])
    assert relative_error(found[1], found[0]) <= FLOAT64


# What comes after the first call.


def normalised(gradient):
    return gradient / gradient.norm()


def centred(h):
    return h - h.mean(0)


def on_activations(layer, args, output):
    return output.register_hook(normalised) and None if output.requires_grad else None


def collecting(module):
    held = []
    module[0].register_forward_hook(lambda layer, args, output: held.append(output))


def of_all_modules(module):
    return nn.modules.module.register_module_forward_hook(
        lambda layer, args, output: centred(output) if layer is module[1] else None
    )


PRE_HOOK = functools.partial(lambda function, layer, args: (function(args[0]),), centred)
MIXES, KEEPS = "Sequential is not per-row", r"keeps a tensor of shape \(8, 8\) with a graph, made in '0'"
LATE = {
    "on activations": (lambda m: m[1].register_forward_hook(on_activations), MIXES),
    "a backward hook": (
        lambda m: m[1].register_full_backward_hook(lambda layer, given, received: tuple(map(normalised, given))),
        MIXES,
    ),
    "an object as a hook": (lambda m: m[2].register_forward_pre_hook(PRE_HOOK), MIXES),
    "a hook of all modules": (of_all_modules, MIXES),
    "another layer": (lambda m: m.__setitem__(1, Does(lambda m, h: centred(h))), MIXES),
    "another forward": (lambda m: setattr(m[1], "forward", centred), MIXES),
    "a hook that collects": (collecting, KEEPS),
}


@pytest.mark.parametrize("late", LATE)
def test_what_is_added_after_the_first_call_is_proven_too(late):
    module, x, (add, message) = encoder(), torch.randn(ROWS, 5), LATE[late]
    small = chunked(module, SIZE)
    loss_of(small(x)).backward()
    handle = add(module)
    try:
        with pytest.raises(NotEquivalentError, match=message):
            small(x)
    finally:
        if handle is not None:
            handle.remove()


def test_a_hook_that_comes_and_goes_is_proven_once():
    module, x, rows = encoder(), torch.randn(ROWS, 5), []
    small = chunked(module, SIZE)
    for step in range(4):
        rows.clear()
        handle = module[0].register_forward_hook(lambda m, args, output: rows.append(len(output)))
        loss_of(small(x)).backward()
        handle.remove()
        assert (8 in rows) == (step == 0)


def test_hooks_on_activations_without_a_graph_are_explained():
    module, x = encoder(), torch.randn(ROWS, 5)
    module[1].register_forward_hook(lambda m, args, output: output.register_hook(lambda g: g) and None)
    with pytest.raises(RuntimeError, match="runs twice, at first without gradients. Register hooks on"):
        chunked(module, SIZE)(x)


BY_NUMPY, BY_DATA = lambda x: x.numpy().fill(0.3), lambda x: x.data.mul_(2)
BEHIND = [
    *product(["micro", "exact"], ["plain", "not contiguous", "shared"], [BY_NUMPY, BY_DATA]),
    ("micro", "an array with a NaN", lambda x: x.fill(1.0)),
]


@pytest.mark.parametrize(("batch_norm", "shape", "edit"), BEHIND)
def test_inputs_edited_behind_autograds_back_are_an_error_in_calls_1_2_4(batch_norm, shape, edit):
    def run(m, x, by):
        x = x if isinstance(x, torch.Tensor) else torch.from_numpy(np.nan_to_num(x))
        return m.linear(x).tanh() + by

    norm, shifts = nn.BatchNorm1d(3) if batch_norm == "exact" else nn.Identity(), Does(run, linear=nn.Linear(5, 3))
    module = Does(lambda m, x, by: m.norm(m.shifts(x, by)), shifts=shifts, norm=norm)
    small = chunked(module, SIZE, batch_dims=(0, None), batch_norm=batch_norm)
    x, by = torch.randn(5, ROWS).T if shape == "not contiguous" else torch.randn(ROWS, 5), torch.randn(3)
    if shape == "an array with a NaN":
        x = x.numpy()
        x[0] = np.nan
    for _ in range(3):
        loss_of(small(x, by)).backward()
    loss = loss_of(small(x, by))
    edit(by if shape == "shared" else x)
    with pytest.raises(NotEquivalentError, match="other outputs when backward runs it again.*an input was refilled"):
        loss.backward()


def test_a_modules_backward_hook_is_refused_under_create_graph_alone():
    whole, x = encoder(), torch.randn(ROWS, 5)
    module = copy.deepcopy(whole)
    for inside in (whole, module):
        inside[3].register_full_backward_hook(lambda m, given, received: tuple(2 * g for g in given))
    small = chunked(module, SIZE)
    with pytest.raises(NotImplementedError, match=r"'3' \(Linear\) in a chunked module has a backward hook"):
        torch.autograd.grad(loss_of(small(x)), list(module.parameters()), create_graph=True)
    for m in (whole, small):
        loss_of(m(x)).backward()
    assert relative_error(gradients(module), gradients(whole)) <= FLOAT64
