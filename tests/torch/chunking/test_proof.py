"""The first call proves itself: what isn't the large batch's, or can't be chunked, is an error or is said, by name."""

import copy
import logging
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from gradaccum.torch import chunked
from tests.reference import FLOAT64, relative_error

ROWS, SIZE = 11, 4


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)  # which conftest sets back


def encoder():
    return nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.3), nn.Sequential(nn.Tanh(), nn.Linear(6, 3)))


class Does(nn.Module):
    """A function between two layers, with what a module may keep for itself."""

    def __init__(self, function):
        super().__init__()
        self.before, self.after, self.function = nn.Linear(5, 6), nn.Linear(6, 3), function
        self.kept, self.calls, self.last = [], 0, None
        self.register_buffer("moving", torch.zeros(6))

    def forward(self, x):
        return self.after(self.function(self, self.before(x).tanh()))


def loss_of(outputs):
    return outputs.logsumexp((0, 1)) + outputs.std()


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
}


@pytest.mark.parametrize("name", ACROSS_ROWS)
def test_what_looks_across_rows_is_an_error_at_the_first_call(name):
    module = Does(ACROSS_ROWS[name])
    with pytest.raises(NotEquivalentError, match=r"(?s)Does is not per-row.*verify=False leaves this proof out"):
        chunked(module, SIZE)(torch.randn(ROWS, 5))


@pytest.mark.parametrize("first", [nn.Tanh, lambda: nn.BatchNorm1d(6)])
def test_the_layer_that_looks_across_rows_is_named(first):
    class Centres(nn.Module):
        def forward(self, h):
            return h - h.mean(0)

    module = nn.Sequential(nn.Linear(5, 6), nn.Sequential(first(), Centres()), nn.Linear(6, 3))
    with pytest.raises(NotEquivalentError, match=r"(?s)gradient of 2.weight.*'1.1' is the first layer.*a Centres"):
        chunked(module, SIZE, batch_norm="exact")(torch.randn(ROWS, 5))


def auxiliary_loss(module, h):
    module.last = h.square().mean()
    return h


def auxiliary_losses(module, h):
    module.kept.append(h.square().mean())
    return h


def in_a_dict(module, h):
    module.last = {"losses": [h.square().mean()]}
    return h


SIDEWAYS = {"attribute": auxiliary_loss, "list": auxiliary_losses, "in containers": in_a_dict}


@pytest.mark.parametrize("verify", ["the first call", "verify()"])
@pytest.mark.parametrize("name", SIDEWAYS)
def test_a_loss_that_leaves_by_the_side_is_an_error(name, verify):
    module = Does(SIDEWAYS[name])
    small, x = chunked(module, SIZE), torch.randn(ROWS, 5)
    with pytest.raises(NotEquivalentError, match=r"Does keeps a tensor.*with a graph.*Return it from forward"):
        small(x) if verify == "the first call" else small.verify(x)
    assert (module.kept, module.last) == ([], None)


@pytest.mark.parametrize("verify", ["the first call", "verify()"])
def test_activations_caught_by_a_hook_are_an_error_that_names_the_layer(verify):
    module, caught = encoder(), {}
    module[2].register_forward_hook(lambda layer, args, output: caught.update(features=output))
    small, x = chunked(module, SIZE), torch.randn(ROWS, 5)
    with pytest.raises(NotEquivalentError, match=r"keeps a tensor of shape \(8, 3\).*made in '2(\.1)?' .*in a hook"):
        small(x) if verify == "the first call" else small.verify(x)


def test_activations_collected_in_a_list_that_is_passed_are_an_error():
    module = Does(lambda m, h: h)
    module.forward = lambda x, found: (found.append(module.before(x)), module.after(module.before(x)))[1]
    with pytest.raises(NotEquivalentError, match=r"made in 'before' \(Linear\), in a hook, a container"):
        chunked(module, SIZE)(torch.randn(ROWS, 5), [])


def test_a_tensor_that_gets_gradients_and_is_no_parameter_is_said_and_gets_them(caplog):
    outside, x = nn.Parameter(torch.randn(6, 6)), torch.randn(ROWS, 5)
    module = Does(lambda m, h: h @ outside)
    outside.grad = torch.ones(6, 6)
    found = []
    for m in (module, chunked(module, SIZE)):
        loss_of(m(x)).backward()
        found.append(outside.grad - 1)
        outside.grad = torch.ones(6, 6)
    assert relative_error(found[1:], found[:1]) <= 10 * FLOAT64
    (record,) = caplog.records
    assert "passes gradients to tensors that are neither its parameters nor its inputs, of shape (6, 6)" in (
        record.getMessage()
    )


@pytest.mark.parametrize(
    "asks", [lambda m, h: h * (2 if torch.is_grad_enabled() else 1), lambda m, h: h * (2 if h.requires_grad else 1)]
)
def test_what_asks_whether_gradients_are_enabled_is_an_error(asks):
    with pytest.raises(NotEquivalentError, match="other outputs when backward runs it again.*gradients are enabled"):
        chunked(Does(asks), SIZE)(torch.randn(ROWS, 5))


def test_attributes_and_buffers_that_micro_batches_leave_otherwise_are_said_once(caplog):
    def moves(module, h):
        module.calls += 1
        module.last = h.detach().mean()
        module.moving.copy_(torch.maximum(module.moving, h.detach().abs().amax(0)))
        return h

    small, x = chunked(Does(moves), SIZE), torch.randn(ROWS, 5)
    with caplog.at_level(logging.WARNING):
        loss_of(small(x)).backward()
        loss_of(small(x)).backward()
    buffers, attributes = (record.getMessage() for record in caplog.records)
    assert "These buffers of a chunked Does move to the mean" in buffers
    assert "'moving'" in buffers
    assert "These attributes of a chunked Does are what its micro-batches make of them" in attributes
    assert "'calls', 'last'" in attributes
    assert small.calls == 2 * 3  # one for each micro-batch, none for what is run again


@pytest.mark.parametrize(
    "harmless",
    [
        lambda m, h: F.dropout(h, 0.4) * torch.rand_like(h) + torch.randn(6),
        lambda m, h: h * m.before.weight.sum(),
        lambda m, h: setattr(m, "last", torch.arange(6.0)) or h + m.last,
        lambda m, h: m.moving.copy_(m.moving * 0.9 + 0.1 * h.detach().mean(0)) is None or h,
        lambda m, h: m.moving.add_(0.1 * F.layer_norm(h.detach(), (6,)).mean()) is None or h,
        lambda m, h: h * torch.from_numpy(np.ones(6)) if np.random.rand() >= 0 else h,  # noqa: NPY002
        lambda m, h: torch.utils.checkpoint.checkpoint(torch.tanh, h, use_reentrant=False),
    ],
    ids=["noise", "parameters", "cached table", "moving average", "average of zero", "NumPy", "checkpoint"],
)
def test_what_is_exact_is_silent_and_moves_nothing(harmless, caplog):
    module, x = Does(harmless), torch.randn(ROWS, 5)
    small = chunked(module, SIZE)
    state, numbers = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    with caplog.at_level(logging.WARNING), warnings.catch_warnings():
        warnings.simplefilter("error")
        small.verify(x)
    assert not caplog.records
    assert torch.equal(numbers, torch.get_rng_state())
    assert relative_error(module.state_dict().values(), state.values()) == 0
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_running_mean_that_is_zero_but_for_rounding_is_silent(dtype, caplog):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5, bias=False), nn.BatchNorm1d(5)]
    model, x = nn.Sequential(*layers).to(dtype), torch.randn(40, 4, dtype=dtype)
    with caplog.at_level(logging.WARNING):
        chunked(model, 8, batch_norm="exact").verify(x)
    assert model[3].running_mean.abs().max() == 0  # nothing moved
    assert not caplog.records


def test_a_buffer_that_differs_by_little_beside_large_inputs_is_said(caplog):
    module = Does(lambda m, h: m.moving.add_(len(h) ** 2) is None or h)
    with caplog.at_level(logging.WARNING):
        chunked(module, SIZE).verify(1e6 * torch.randn(ROWS, 5))
    assert "'moving'" in caplog.text


def test_a_generator_out_of_sight_is_an_error_by_the_first_backward():
    hidden, numbers = torch.Generator().manual_seed(0), np.random.default_rng(0)
    draws = [lambda m, h: h * torch.rand(6, generator=hidden), lambda m, h: h * torch.from_numpy(numbers.random(6))]
    for draw in draws:
        with pytest.raises(NotEquivalentError, match="other outputs when backward runs it again.*generator"):
            loss_of(chunked(Does(draw), SIZE)(torch.randn(ROWS, 5))).backward()


def test_parametrizations_that_are_cached_are_refused_by_name():
    small = chunked(nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)), SIZE)
    with nn.utils.parametrize.cached(), pytest.raises(ValueError, match="keeps weights from a first pass"):
        small(torch.randn(ROWS, 5))
    loss = loss_of(small(torch.randn(ROWS, 5)))
    with nn.utils.parametrize.cached(), pytest.raises(ValueError, match="and their backward pass"):
        loss.backward()


def test_it_is_proven_once_in_each_mode_and_only_for_gradients():
    calls, module = [], encoder()
    module.register_forward_pre_hook(lambda *_: calls.append(1))
    small, x = chunked(module, SIZE), torch.randn(ROWS, 5)
    counts = []
    for training, grad in [(True, False), (True, True), (True, True), (False, True), (False, True)]:
        calls.clear()
        small.train(training)
        with torch.set_grad_enabled(grad):
            small(x)
        counts.append(len(calls))
    plain, proven = 3, 3 + 1 + 2 + 2
    assert counts == [plain, proven, plain, proven, plain]
    calls.clear()
    small.train()
    module[1].eval()  # one layer alone
    small(x)
    assert len(calls) == proven


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


def test_it_looks_at_fewer_rows_where_memory_runs_out(caplog):
    def runs_out(module, h):
        if len(h) > SIZE and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("for the test")
        return h - h.mean(0)

    with pytest.raises(NotEquivalentError, match="4 rows at once differ from the same in micro-batches of 3 and 1"):
        chunked(Does(runs_out), SIZE)(torch.randn(ROWS, 5))


def test_what_cannot_be_evaluated_on_a_few_rows_is_said_and_no_error(caplog):
    module, x = Does(lambda m, h: h.view(-1, SIZE, 6).flatten(0, 1)), torch.randn(3 * SIZE, 5)
    small = chunked(module, SIZE)
    with caplog.at_level(logging.WARNING):
        loss_of(small(x)).backward()
    (record,) = caplog.records
    assert "Whether a chunked Does gives the outputs and gradients of all rows at once could not be proven" in (
        record.getMessage()
    )


@pytest.mark.parametrize("choice", ["warn", "micro", "pooled", "frozen", "exact"])
def test_batch_norm_without_a_module_is_an_error(choice):
    module = Does(lambda m, h: F.batch_norm(h, None, None, training=True))
    with pytest.raises(NotEquivalentError, match=r"(?s)not per-row.*in place of torch.nn.functional.batch_norm use"):
        chunked(module, SIZE, batch_norm=choice)(torch.randn(ROWS, 5))


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
    module = weird(kind)
    named = "test_proof.py" if kind == "subclass" else r"'1' \(.*BatchNorm1d\) has (hooks|parametrizations)"
    with pytest.raises(ValueError, match=named):
        chunked(module, SIZE, batch_norm="exact")(torch.randn(ROWS, 5))


@pytest.mark.parametrize("name", ACROSS_ROWS)
def test_code_behind_an_exact_batch_norm_that_looks_across_rows_is_an_error(name):
    class Behind(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.bn, self.last = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

        def forward(self, x):
            return self.last(ACROSS_ROWS[name](self, self.bn(self.linear(x))))

    with pytest.raises((NotEquivalentError, ValueError)):
        chunked(Behind(), SIZE, batch_norm="exact")(torch.randn(ROWS, 5))


class Calls(nn.Module):
    """A module made of a function of its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(3))

    def forward(self, *args, **kwargs):
        return self.function(self.weight, *args, **kwargs)


def script():
    return nn.Sequential(nn.Tanh(), torch.jit.script(nn.Linear(3, 2)))


WRONG = [  # what is chunked, in which size, the options, the error
    *[(nn.Linear, n, {}, ValueError, f"`micro_batch_size` must be an int >= 1. Received: .*={n}") for n in (0, -1)],
    *[(nn.Linear, n, {}, TypeError, "`micro_batch_size` must be an int >= 1") for n in (2.5, True, "4", None)],
    *[
        (nn.Linear, 4, {"keep": n}, (TypeError, ValueError), "`keep` must be an int >= 0")
        for n in (-1, 1.5, True, False)
    ],
    (lambda *_: torch.relu, 4, {}, TypeError, "must be a torch"),
    (lambda *_: script(), 4, {}, ValueError, "'1' is a TorchScript module"),
    (
        nn.Linear,
        4,
        {"offload": True},
        ValueError,
        "`offload` keeps what crosses BatchNorm .*Received: offload=True, batch_no",
    ),
    (nn.Linear, 4, {"batch_norm": "none"}, ValueError, "`batch_norm` must be one of 'warn', 'micro'"),
    (nn.Linear, 4, {"batch_norm": "exact", "keep": 1}, ValueError, "recomputes every micro-batch"),
    (nn.Linear, 4, {"max_tokens": 0}, ValueError, "`max_tokens` must be an int >= 1"),
    (nn.Linear, 4, {"max_tokens": 8, "batch_norm": "exact"}, ValueError, "needs the whole batch as it is padded"),
]


@pytest.mark.parametrize(("make", "size", "options", "error", "message"), WRONG)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning", "ignore:.*torch.jit.script:FutureWarning")
def test_what_cannot_be_chunked_is_refused_by_name(make, size, options, error, message):
    module = make(3, 2)
    with pytest.raises(error, match=message):
        chunked(module, size, **options)


@pytest.mark.parametrize("keep", [0, 9])
@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda w, x: (x * w).sum(), r"\(\)"),
        (lambda w, x: (x * w).mean(0), r"\(3,\)"),
        (lambda w, x: {"loss": (x * w)[:1]}, r"\(1, 3\)"),
    ],
    ids=["scalar", "mean over rows", "first row"],
)
def test_outputs_without_a_row_per_row_are_named(function, shape, keep):
    small = chunked(Calls(function), 4, keep=keep)
    with pytest.raises(ValueError, match=rf"Received: output.* of shape {shape} for \d rows, looked for in "):
        small(torch.randn(10, 3))


def test_outputs_whose_rows_differ_in_shape_are_named():
    small = chunked(Calls(lambda w, x: x.new_ones(len(x), int(x[0, 0])) * w[0]), 2)
    with pytest.raises(ValueError, match="rows of different shapes in different micro-batches"):
        small(torch.arange(12.0).reshape(4, 3) + 1)


def test_outputs_that_are_no_tensors_must_agree():
    small = chunked(Calls(lambda w, x: {"y": x * w, "first": x[0, 0].item()}), 2)
    with pytest.raises(ValueError, match=r"\['first'\] carries no rows, so it must be the same for every micro-batch"):
        small(torch.randn(4, 3))


@pytest.mark.parametrize("keep", [0, 9])
@pytest.mark.parametrize("grad", [True, False])
def test_inputs_edited_in_place_are_named(keep, grad):
    small = chunked(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 2)), 2, keep=keep)
    with pytest.raises(ValueError, match=r"edits its input args\[0\] in place"), torch.set_grad_enabled(grad):
        small(torch.randn(6, 3))


def test_inputs_edited_between_forward_and_backward_are_an_error_as_always():
    x = torch.randn(6, 3)
    loss = chunked(nn.Linear(3, 2), 2)(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_updated_between_forward_and_backward_are_an_error_as_always():
    module = nn.Linear(3, 2)
    loss = chunked(module, 2)(torch.randn(6, 3)).sum()
    with torch.no_grad():
        module.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_inputs_whose_rows_differ_are_listed():
    small = chunked(Calls(lambda w, x, table: x * w), 2)
    with pytest.raises(ValueError, match=r"(?s)args\[0\]  shape \(6, 3\).*kwargs\['table'\]  shape \(5,\).*batch_dims"):
        small(torch.randn(6, 3), table=torch.randn(5))


@pytest.mark.parametrize(
    "make", [lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged), torch.Tensor.to_sparse]
)
def test_tensors_without_rows_to_slice_are_named(make):
    with pytest.raises(ValueError, match=r"args\[0\] is (a nested tensor|of layout torch.sparse_coo), which can't be"):
        chunked(nn.Linear(3, 2), 2)(make(torch.randn(6, 3)))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_of_torch_func_around_it_are_refused(transform):
    small = chunked(nn.Linear(3, 2), 2)
    with pytest.raises(NotImplementedError, match="chunked Linear is called inside of a transform of torch.func"):
        transform(lambda x: small(x).sum())(torch.randn(4, 6, 3))


CALLS = [  # what is chunked, the options, its inputs, the error
    (
        nn.Linear,
        {"batch_dims": {"table": None}},
        torch.ones(6, 3),
        r"`batch_dims` names \['table'\], which Linear.forward",
    ),
    (nn.Linear, {}, 3, "No tensor with rows"),
    (lambda rows, columns: nn.LazyLinear(columns), {}, torch.ones(6, 3), "call it on a few rows first"),
    (nn.Linear, {"max_tokens": 8}, torch.ones(6, 3), "(?s)needs an attention mask of shape .*shape .6, 3."),
]


@pytest.mark.parametrize(("make", "options", "x", "message"), CALLS)
def test_a_call_that_cannot_be_cut_is_refused_by_name(make, options, x, message):
    small = chunked(make(3, 2), 2, **options)
    with pytest.raises(ValueError, match=message):
        small(x)


def test_a_module_that_looks_across_rows_is_found_on_request_and_the_layer_named():
    model = nn.Sequential(
        nn.Linear(3, 4), nn.Dropout(0.5), nn.Sequential(nn.Tanh(), nn.BatchNorm1d(4)), nn.Linear(4, 2)
    )
    before = [buffer.clone() for buffer in model.buffers()]
    x, state = torch.randn(50, 3), torch.get_rng_state()
    with pytest.raises(NotEquivalentError, match=r"(?s)not per-row.*relative error.*'2.1' is the first.*BatchNorm1d"):
        chunked(model, 8).verify(x)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
    assert model[1].training
    assert model[2][1].training
    chunked(model, 8, batch_norm="exact").verify(torch.randn(50, 3))
    chunked(model.eval(), 8).verify(torch.randn(50, 3))


def test_looking_across_rows_outside_the_layers_is_found_too():
    with pytest.raises(NotEquivalentError, match="outside its layers"):
        chunked(Calls(lambda w, x: (x - x.mean(0)) * w), 8).verify(torch.randn(50, 3))


def test_random_numbers_that_follow_their_rows_are_verified_and_others_cannot_be():
    chunked(Calls(lambda w, x: F.dropout(x * w * torch.rand_like(x), 0.3)), 8).verify(torch.randn(50, 3))
    small = chunked(Calls(lambda w, x: x * w * torch.from_numpy(np.random.rand(*x.shape)).float()), 8)  # noqa: NPY002
    with pytest.raises(ValueError, match="draws random numbers of NumPy's, which can't be given to their rows"):
        small.verify(torch.randn(50, 3))
