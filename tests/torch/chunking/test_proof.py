"""The first call proves itself: what isn't the large batch's, or can't be chunked, is an error or a warning by name."""

import copy
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from gradaccum.torch import chunked
from tests.reference import FLOAT64, relative_error
from tests.torch.chunking.problems import loss_of

ROWS, SIZE = 11, 4


def encoder():
    return nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.3), nn.Sequential(nn.Tanh(), nn.Linear(6, 3)))


class Does(nn.Module):
    """A function between two layers, with what a module may keep for itself."""

    def __init__(self, function, norm=None):
        super().__init__()
        self.before, self.norm, self.after = nn.Linear(5, 6), norm or nn.Tanh(), nn.Linear(6, 3)
        self.function, self.kept, self.calls, self.last = function, [], 0, None
        self.register_buffer("moving", torch.zeros(6))

    def forward(self, x):
        return self.after(self.function(self, self.norm(self.before(x))))


ACROSS_ROWS = {
    "centred": lambda m, h: h - h.mean(0),
    "softmax": lambda m, h: h.softmax(0),
    "the first row": lambda m, h: h + h[0],
    "the number of rows": lambda m, h: h * h.shape[0],
    "cumsum": lambda m, h: h.cumsum(0),
    "roll": lambda m, h: h + h.roll(1, 0),
    "normalised": lambda m, h: F.normalize(h, dim=0),
    "similarities": lambda m, h: h + (h @ h.T).softmax(1) @ h,
    "the largest": lambda m, h: h / h.abs().amax(),
    "no gradient of the others": lambda m, h: h - h.detach().mean(0),
    "a gradient across rows": lambda m, h: h + (h.mean(0) - h.detach().mean(0)),
    "batch_norm": lambda m, h: F.batch_norm(h, None, None, training=True),
}


@pytest.mark.parametrize("choice", ["warn", "micro", "pooled", "frozen"])
@pytest.mark.parametrize("name", ACROSS_ROWS)
def test_what_looks_across_rows_is_an_error_at_the_first_call(name, choice):
    found = (
        r"(?s)Does is not per-row.*outside its layers.*torch.nn.functional.batch_norm.*verify=False leaves this proof"
    )
    with pytest.raises(NotEquivalentError, match=found):
        chunked(Does(ACROSS_ROWS[name]), SIZE, batch_norm=choice)(torch.randn(ROWS, 5))


@pytest.mark.parametrize("name", [name for name in ACROSS_ROWS if name != "batch_norm"])
def test_code_behind_an_exact_batch_norm_that_looks_across_rows_is_an_error(name):
    module = Does(ACROSS_ROWS[name], nn.BatchNorm1d(6))
    with pytest.raises((NotEquivalentError, ValueError), match=r"not per-row|can't be cut"):
        chunked(module, SIZE, batch_norm="exact")(torch.randn(ROWS, 5))


class Centres(nn.Module):
    def forward(self, h):
        return h - h.mean(0)


@pytest.mark.parametrize("first", [nn.Tanh, lambda: nn.BatchNorm1d(6)])
def test_the_layer_that_looks_across_rows_is_named(first):
    module = nn.Sequential(nn.Linear(5, 6), nn.Sequential(first(), Centres()), nn.Linear(6, 3))
    with pytest.raises(NotEquivalentError, match=r"(?s)gradient of 2.weight.*'1.1' is the first layer.*a Centres"):
        chunked(module, SIZE, batch_norm="exact")(torch.randn(ROWS, 5))


def test_verify_finds_a_batch_norm_in_train_mode_and_moves_nothing():
    model = nn.Sequential(
        nn.Linear(3, 4), nn.Dropout(0.5), nn.Sequential(nn.Tanh(), nn.BatchNorm1d(4)), nn.Linear(4, 2)
    )
    before, x = [buffer.clone() for buffer in model.buffers()], torch.randn(50, 3)
    state = torch.get_rng_state()
    with pytest.raises(NotEquivalentError, match=r"(?s)not per-row.*relative error.*'2.1' is the first.*BatchNorm1d"):
        chunked(model, 8).verify(x)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    assert all(layer.training for layer in model.modules())
    chunked(model, 8, batch_norm="exact").verify(x)
    chunked(model.eval(), 8).verify(x)


# What leaves a module besides its outputs.


def auxiliary_loss(module, h):
    module.last = h.square().mean()
    return h


def auxiliary_losses(module, h):
    module.kept.append(h.square().mean())
    return h


def in_a_dict(module, h):
    module.last = {"losses": [h.square().mean()]}
    return h


def caught_by_a_hook():
    module, caught = encoder(), {}
    module[2].register_forward_hook(lambda layer, args, output: caught.update(features=output))
    return module, ()


def in_a_list_that_is_passed():
    module = Does(lambda m, h: h)
    module.forward = lambda x, found: (found.append(module.before(x)), module.after(module.before(x)))[1]
    return module, ([],)


SIDEWAYS = {  # the module and its other arguments; where the tensor is said to be
    "attribute": (lambda: (Does(auxiliary_loss), ()), "with a graph as its attribute 'last'"),
    "list": (lambda: (Does(auxiliary_losses), ()), "with a graph.*in a hook, a container"),
    "in containers": (lambda: (Does(in_a_dict), ()), "with a graph as its attribute 'last'"),
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
    outside, x = nn.Parameter(torch.randn(6, 6)), torch.randn(ROWS, 5)
    module = Does(lambda m, h: h @ outside)
    outside.grad = torch.ones(6, 6)
    found = []
    for m in (module, chunked(module, SIZE)):
        loss_of(m(x)).backward()
        found.append(outside.grad - 1)
        outside.grad = torch.ones(6, 6)
    assert relative_error(found[1:], found[:1]) <= 10 * FLOAT64
    (message,) = caplog.messages
    assert "passes gradients to tensors that are neither its parameters nor its inputs, of shape (6, 6)" in message


def test_attributes_and_buffers_that_micro_batches_leave_otherwise_are_named_once(caplog):
    def moves(module, h):
        module.calls += 1
        module.last = h.detach().mean()
        module.moving.copy_(torch.maximum(module.moving, h.detach().abs().amax(0)))
        return h

    small, x = chunked(Does(moves), SIZE), torch.randn(ROWS, 5)
    for _ in range(2):
        loss_of(small(x)).backward()
    buffers, attributes = caplog.messages
    assert re.match("These buffers of a chunked Does move to the mean.*'moving'", buffers)
    assert re.match("These attributes of a chunked Does are changed by every micro-batch.*'calls', 'last'", attributes)
    assert small.calls == 2 * 3  # one for each micro-batch, none for what is run again


def test_a_buffer_that_differs_by_little_beside_large_inputs_is_named(caplog):
    module = Does(lambda m, h: m.moving.add_(len(h) ** 2) is None or h)
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
    "standardised weights": lambda m, h: (
        h @ F.batch_norm(m.before.weight[:6, :6].T, None, None, training=True).T[:6, :1]
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_exact_is_silent_and_moves_nothing(name, caplog):
    module, x = Does(HARMLESS[name]), torch.randn(ROWS, 5)
    if name == "standardised weights":
        module.after = nn.Linear(1, 3)
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
        module = Does(lambda m, h: F.relu(h - 1.0 + (gap if len(h) > 6 else -gap)))
        module.norm = nn.Identity()
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
    class Warns(nn.Module):
        def forward(self, x):
            warnings.warn("the user's own", stacklevel=1)
            return x

    small = chunked(nn.Sequential(nn.Linear(5, 3), Warns()), SIZE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(4):
            loss_of(small(torch.randn(ROWS, 5))).backward()
    assert len(caught) == 1


# When it is proven, and on what.


def test_it_is_proven_once_in_each_mode_and_only_for_gradients():
    calls, module = [], encoder()
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    small, x = chunked(module, SIZE), torch.randn(ROWS, 5)
    counts = []
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

    with pytest.raises(
        NotEquivalentError, match="4 rows at once differ from the same rows in micro-batches of 3 and 1"
    ):
        chunked(Does(runs_out), SIZE)(torch.randn(ROWS, 5))


def test_what_cannot_be_evaluated_on_a_few_rows_is_a_warning_and_no_error(caplog):
    module, x = Does(lambda m, h: h.view(-1, SIZE, 6).flatten(0, 1)), torch.randn(3 * SIZE, 5)
    loss_of(chunked(module, SIZE)(x)).backward()
    (message,) = caplog.messages
    assert "Whether a chunked Does gives the outputs and gradients of all rows at once could not be proven" in message


def test_random_numbers_of_numpys_cannot_be_given_to_their_rows():
    small = chunked(Does(lambda m, h: h * torch.from_numpy(np.random.rand(*h.shape))), 8)  # noqa: NPY002
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
    does, why = OTHERWISE[name]
    with pytest.raises(NotEquivalentError, match=f"other outputs when backward runs it again.*{why}"):
        loss_of(chunked(Does(does), SIZE)(torch.randn(ROWS, 5))).backward()


def test_parametrizations_that_are_cached_are_refused_by_name():
    small = chunked(nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)), SIZE)
    with nn.utils.parametrize.cached(), pytest.raises(ValueError, match="keeps weights from a first pass"):
        small(torch.randn(ROWS, 5))
    loss = loss_of(small(torch.randn(ROWS, 5)))
    with nn.utils.parametrize.cached(), pytest.raises(ValueError, match="and their backward pass"):
        loss.backward()


class Powered(nn.BatchNorm1d):
    """A formula of its own on top of BatchNorm's."""

    def forward(self, x):
        return super().forward(x) * x.std(0)


def weird(kind):
    bn = Powered(6) if kind == "subclass" else nn.BatchNorm1d(6)
    if kind == "hook":
        bn.register_forward_hook(lambda layer, args, output: output * 2)
    elif kind == "pre-hook":
        bn.register_forward_pre_hook(lambda layer, args: (args[0] * 2 + 1,))
    elif kind == "parametrized":
        nn.utils.parametrize.register_parametrization(bn, "weight", nn.Softplus())
    return nn.Sequential(nn.Linear(5, 6), bn, nn.Tanh(), nn.Linear(6, 3))


@pytest.mark.parametrize("kind", ["hook", "pre-hook", "parametrized", "subclass"])
def test_a_batch_norm_with_something_of_its_own_is_an_error_that_names_it(kind):
    named = "test_proof.py" if kind == "subclass" else r"'1' \(.*BatchNorm1d\) has (hooks|parametrizations)"
    with pytest.raises(ValueError, match=named):
        chunked(weird(kind), SIZE, batch_norm="exact")(torch.randn(ROWS, 5))


# What is refused.


class Calls(nn.Module):
    """A module made of a function of its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(3))

    def forward(self, *args, **kwargs):
        return self.function(self.weight, *args, **kwargs)


def script():
    return nn.Sequential(nn.Tanh(), torch.jit.script(nn.Linear(3, 2)))


def linear():
    return nn.Linear(3, 2)


WRONG = [  # what is chunked, in which size, the options, the error
    *[(linear, n, {}, ValueError, f"`micro_batch_size` must be an int >= 1. Received: .*={n}") for n in (0, -1)],
    *[(linear, n, {}, TypeError, "`micro_batch_size` must be an int >= 1") for n in (2.5, True, "4", None)],
    *[(linear, 4, {"keep": n}, (TypeError, ValueError), "`keep` must be an int >= 0") for n in (-1, 1.5, True, False)],
    (lambda: torch.relu, 4, {}, TypeError, "must be a torch"),
    (script, 4, {}, ValueError, "'1' is a TorchScript module"),
    (linear, 4, {"offload": True}, ValueError, "`offload` moves what crosses BatchNorm .*offload=True, batch_no"),
    (linear, 4, {"batch_norm": "none"}, ValueError, "`batch_norm` must be one of 'warn', 'micro'"),
    (linear, 4, {"max_tokens": 0}, ValueError, "`max_tokens` must be an int >= 1"),
    (
        linear,
        4,
        {"max_tokens": 8, "batch_norm": "exact"},
        ValueError,
        "`max_tokens` cuts off padding, which the statistics",
    ),
]


@pytest.mark.parametrize(("make", "size", "options", "error", "message"), WRONG)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning", "ignore:.*torch.jit.script:FutureWarning")
def test_what_cannot_be_chunked_is_refused_by_name(make, size, options, error, message):
    module = make()
    with pytest.raises(error, match=message):
        chunked(module, size, **options)


def nested(x):
    return torch.nested.nested_tensor(list(x), layout=torch.jagged)


X, NO_ROW = (
    torch.arange(30, dtype=torch.float64).reshape(10, 3) / 10,
    "Received: output.* of shape {} for . rows, looked for in ",
)
CALLS = {  # what is chunked, the options, its inputs, the error
    "a scalar": (lambda: Calls(lambda w, x: (x * w).sum()), {}, [X], NO_ROW.format(r"\(\)")),
    "a mean over rows": (lambda: Calls(lambda w, x: (x * w).mean(0)), {}, [X], NO_ROW.format(r"\(3,\)")),
    "the first row": (lambda: Calls(lambda w, x: {"loss": (x * w)[:1]}), {}, [X], NO_ROW.format(r"\(1, 3\)")),
    "rows of different shapes": (
        lambda: Calls(lambda w, x: x.new_ones(len(x), int(x[0, 0] * 10) + 1) * w[0]), {}, [X],
        "rows of different shapes in different micro-batches",
    ),
    "different values": (
        lambda: Calls(lambda w, x: {"y": x * w, "first": x[0, 0].item()}), {}, [X],
        r"\['first'\] carries no rows, so it must be the same for every micro-batch",
    ),
    "an input that is edited": (
        lambda: nn.Sequential(nn.ReLU(inplace=True), linear()), {}, [X], r"edits its input args\[0\] in place",
    ),
    "inputs of different rows": (
        lambda: Calls(lambda w, x, table: x * w), {}, [X, X[:5, 0]],
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


@pytest.mark.parametrize("what", ["an input", "a parameter"])
def test_what_is_edited_between_forward_and_backward_is_an_error_as_always(what):
    module, x = linear(), torch.randn(6, 3)
    loss = chunked(module, 2)(x).sum()
    with torch.no_grad():
        (x if what == "an input" else module.weight).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_of_torch_func_around_it_are_refused(transform):
    small = chunked(linear(), 2)
    with pytest.raises(NotImplementedError, match="chunked Linear is called inside of a transform of torch.func"):
        transform(lambda x: small(x).sum())(torch.randn(4, 6, 3))
