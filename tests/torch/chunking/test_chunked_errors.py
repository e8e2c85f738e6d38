"""What `chunked` can't do, it says: at once, and by name."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from gradaccum.torch import chunked


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
