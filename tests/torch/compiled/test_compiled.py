"""Windows as compiled programs: their updates are the large batch's, and what can't be compiled is refused or told.

Most of these trace the passes and generate no code, which is as exact and takes a tenth of the time.
"""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradaccum import NotEquivalentError
from gradaccum.torch import TrainStep
from gradaccum.torch.compiled import program, programs
from tests.reference import FLOAT64, relative_error

# Inductor's own, when it is loaded.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

TRACED = {"backend": "aot_eager"}
LOSS = nn.CrossEntropyLoss(ignore_index=0)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-2)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(rows=12):
    return torch.randn(rows, 5, dtype=torch.float64), torch.randint(3, (rows,))


def step_of(model, make=sgd, **keywords):
    loss = {} if "compute_loss" in keywords else {"loss_fn": LOSS}
    keywords = {**loss, "micro_batch_size": 4, "compile": TRACED, **keywords}
    return TrainStep(model, make(model.parameters()), **keywords)


def token_mean(model, x, y):
    counts = (y != 0).sum()
    return F.cross_entropy(model(x), y, ignore_index=0, reduction="sum") / counts, counts


def several(model, x, y):
    loss, counts = token_mean(model, x, y)
    return {"ce": (loss, counts), "z": (model(x).square().mean(), len(x))}


def without_weights(model, x, y):
    return {name: loss for name, (loss, _) in several(model, x, y).items()}


def added(model, *arrays):
    return sum(loss for loss, _ in several(model, *arrays).values())


def columns(model, rows, scale):
    return F.cross_entropy(model(rows["x"].T), rows["y"]) * scale


class Recomputed(nn.Module):
    """Two checkpoints, a shared weight, a frozen one, and layers that nothing reaches."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.unused = (nn.Linear(5, 5).double() for _ in range(3))
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        x = checkpoint(lambda x: self.first(x).tanh(), x, use_reentrant=False)
        return checkpoint(lambda x: self.second(x).tanh(), x, use_reentrant=False)


def by_loss(model, x, y):
    return LOSS(model(x), y)


def in_columns(x, y):
    return {"x": x.T.contiguous(), "y": y}, torch.tensor(2.0, dtype=torch.float64)


def two_optimizers(parameters):
    weights, *others = parameters
    return [sgd([weights]), adam(others)]


CASES = {
    "a loss of torch.nn": (network, {}, by_loss),
    "its weight from the batch": (
        network,
        {"compute_loss": lambda *a: token_mean(*a)[0], "weight": lambda x, y: (y != 0).sum()},
        by_loss,
    ),
    "its weight from the forward pass": (network, {"compute_loss": token_mean}, by_loss),
    "several losses": (network, {"compute_loss": several}, added),
    "several losses, weights from the batch": (
        network,
        {"compute_loss": without_weights, "weight": lambda x, y: {"ce": (y != 0).sum(), "z": len(x)}},
        added,
    ),
    "clipped": (network, {"clip_grad_norm": 0.1}, by_loss),
    "groups": (network, {"groups": 3, "micro_batch_size": 6}, by_loss),
    "checkpoints, tied, frozen and unused parameters": (Recomputed, {}, by_loss),
}


@pytest.mark.parametrize("case", CASES)
def test_compiled_updates_are_the_large_batchs(case):
    build, keywords, whole = CASES[case]
    model, make = build(), adam if case == "a loss of torch.nn" else sgd
    reference = copy.deepcopy(model)
    step, optimizer = step_of(model, make, **keywords), make(reference.parameters())
    for _ in range(3):
        data = batch()
        optimizer.zero_grad()
        expected = whole(reference, *data)
        expected.backward()
        if "clip_grad_norm" in keywords:
            nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        optimizer.step()
        loss = step(*data)
        assert step.compiled
        assert relative_error([loss], [expected]) < FLOAT64
        assert relative_error(model.parameters(), reference.parameters()) < FLOAT64
    assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in reference.parameters()]


def test_several_optimizers_and_rows_in_other_dimensions_run_compiled():
    model = network()
    reference = copy.deepcopy(model)
    step = step_of(model, two_optimizers, compute_loss=columns, batch_dims=({"x": 1, "y": 0}, None))
    optimizers, (x, y) = two_optimizers(reference.parameters()), batch()
    step(*in_columns(x, y))
    columns(reference, *in_columns(x, y)).backward()
    for optimizer in optimizers:
        optimizer.step()
    assert step.compiled
    assert relative_error(model.parameters(), reference.parameters()) < FLOAT64


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5, dtype=torch.float64))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return x


LAYERS = {
    "dropout": lambda: nn.Dropout(0.5),
    "BatchNorm": lambda: nn.BatchNorm1d(5).double(),
    "moving buffers": Counting,
}


@pytest.mark.parametrize("layer", LAYERS)
def test_compiled_windows_draw_and_move_what_eager_ones_do(layer):
    models = [nn.Sequential(LAYERS[layer](), network()) for _ in range(2)]
    steps = [step_of(model, compile=compile, batch_norm="micro") for model, compile in zip(models, (False, TRACED))]
    for _ in range(3):
        data = batch()
        for step in steps:
            torch.manual_seed(1)
            step(*data)
    assert steps[1].compiled
    assert relative_error(models[1].state_dict().values(), models[0].state_dict().values()) < FLOAT64


def test_micro_batches_of_other_sizes_are_compiled_once_they_come_often(monkeypatch, caplog):
    monkeypatch.setattr(programs, "OFTEN", 4)
    model = network()
    reference = copy.deepcopy(model)
    step, eager = step_of(model), step_of(reference, compile=False)
    compiled = []
    with caplog.at_level(logging.INFO, "gradaccum"):
        for rows in (12, 10, 9, 7, 6, 12):
            data = batch(rows)
            step(*data)
            eager(*data)
            compiled.append(step.compiled)
    assert compiled == [True, False, True, True, True, True]
    assert "micro-batches of other sizes than the first ones run eagerly" in caplog.text
    assert relative_error(model.parameters(), reference.parameters()) < FLOAT64


def in_training(model, x, y):
    terms = several(model, x, y)
    return terms if model.training else {"ce": terms["ce"]}


def test_a_loss_that_has_other_terms_later_is_compiled_again():
    model = network()
    reference, data = copy.deepcopy(model), batch()
    step, optimizer = step_of(model, compute_loss=in_training), sgd(reference.parameters())
    for whole in (added, by_loss):
        optimizer.zero_grad()
        whole(reference, *data).backward()
        optimizer.step()
        step(*data)
        assert step.compiled
        assert relative_error(model.parameters(), reference.parameters()) < FLOAT64
        model.eval()


def test_long_windows_are_a_program_per_micro_batch():
    model = network()
    step = step_of(model, micro_batch_size=1)
    step(*batch(18))
    assert step.compiled
    made = step._windows.programs
    assert made._window is None
    assert len(made._kinds) == 1


def test_a_micro_batch_that_weighs_nothing_has_its_window_run_eagerly(caplog):
    model = network()
    reference = copy.deepcopy(model)
    step = step_of(model, compute_loss=token_mean)
    (x, y), optimizer = batch(), sgd(reference.parameters())
    for targets in (y, y.index_fill(0, torch.arange(4, 8), 0), y):
        optimizer.zero_grad()
        by_loss(reference, x, targets).backward()
        optimizer.step()
        step(x, targets)
    assert step.compiled
    assert "weighs nothing" in caplog.text
    assert relative_error(model.parameters(), reference.parameters()) < FLOAT64


def test_backward_leaves_gradients_of_parameters_that_are_trained_now():
    model = network()
    reference, data = copy.deepcopy(model), batch()
    step = step_of(model)
    for _ in range(2):
        model.zero_grad()
        reference.zero_grad()
        step.backward(*data)
        by_loss(reference, *data).backward()
        pairs = list(zip(model.parameters(), reference.parameters()))
        assert (
            relative_error(
                [p.grad for p, r in pairs if r.grad is not None], [r.grad for _, r in pairs if r.grad is not None]
            )
            < FLOAT64
        )
        assert [p.grad is None for p, _ in pairs] == [r.grad is None for _, r in pairs]
        model[0].weight.requires_grad_(False)
        reference[0].weight.requires_grad_(False)
    assert step.compiled


def halving(graph, inputs):
    """A compiler that gets the last gradient wrong."""

    def run(*arguments):
        outputs = list(graph(*arguments))
        floating = [i for i, o in enumerate(outputs) if isinstance(o, torch.Tensor) and o.dim() == 2]
        outputs[floating[-1]] = outputs[floating[-1]] / 2
        return outputs

    return run


def test_a_program_that_computes_something_else_is_refused_before_an_update():
    model = network()
    before = copy.deepcopy(model)
    with pytest.raises(NotEquivalentError, match=r"The compiled window differs.*\n  gradient 2\.weight"):
        step_of(model, compile={"backend": halving})(*batch())
    assert relative_error(model.parameters(), before.parameters()) == 0.0


class Breaking(nn.Module):
    def forward(self, x):
        return x if x.isfinite().all() else x.nan_to_num()


def hooked():
    model = network()
    model[2].weight.register_hook(lambda gradient: gradient * 2)
    return model


def heard():
    model = network()
    model[2].register_full_backward_hook(lambda *_: None)
    return model


class Rare(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True).double()

    def forward(self, x):
        return self.table(x.argmax(1))


REFUSED = {
    "a graph break": (lambda: nn.Sequential(Breaking(), network()), "traces as a whole.*\n.*Data-dependent branching"),
    "a hook on a gradient": (hooked, "hook on the gradient of '2.weight'"),
    "a hook on a backward pass": (heard, "hook on the backward pass of '2'"),
    "sparse gradients": (Rare, "sparse gradients, as 'table.weight' has one"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_program_would_leave_out_is_refused_by_name(case):
    build, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        step_of(build())(*batch())


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"compile": "yes"}, "`compile` must be True, False, or a dict of torch.compile's keywords. Received"),
        ({"compile": {"dynamic": True}}, "`compile` takes the keywords backend, mode, options .* Received: 'dynamic'"),
        ({"noise_scale": True}, "compile= can't be combined with noise_scale"),
        ({"reproducible": True}, "`compile`, whose programs round sums in another order, isn't available"),
        ({"batch_norm": "exact"}, "compile= can't be combined with batch_norm='exact'"),
        ({"batch_norm": "pooled"}, "compile= can't be combined with batch_norm='pooled'"),
    ],
    ids=str,
)
def test_options_that_do_not_go_with_compile_are_refused(keywords, message):
    with pytest.raises((ValueError, TypeError), match=message):
        step_of(nn.Sequential(nn.BatchNorm1d(5), network()), **keywords)


def test_without_a_cpp_compiler_one_sentence_says_so(monkeypatch):
    from torch._inductor import config, cpp_builder, exc

    def nothing(*_):
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", nothing)
    with config.patch(force_disable_caches=True), pytest.raises(program.NotCompilable, match=r"needs a C\+\+ compiler"):
        step_of(network(), compile=True)(*batch())


def test_inductors_programs_make_the_large_batchs_update():
    model = network()
    reference, data = copy.deepcopy(model), batch()
    step, optimizer = step_of(model, compile=True), sgd(reference.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        by_loss(reference, *data).backward()
        optimizer.step()
        step(*data)
    assert step.compiled
    assert relative_error(model.parameters(), reference.parameters()) < FLOAT64


CHANGED = {
    "a loss's smoothing": lambda loss_fn, model: setattr(loss_fn, "label_smoothing", 0.3),
    "what a loss ignores": lambda loss_fn, model: setattr(loss_fn, "ignore_index", 1),
    "a forward hook": lambda loss_fn, model: model.register_forward_hook(lambda module, inputs, outputs: outputs * 2),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_what_changes_between_proofs_is_compiled_again(change):
    loss_fn, model = nn.CrossEntropyLoss(), nn.Linear(6, 3, dtype=torch.float64)
    large = copy.deepcopy(model)
    optimizer = torch.optim.SGD(large.parameters(), lr=0.1)
    step = TrainStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=loss_fn,
        micro_batch_size=4,
        compile={"backend": "aot_eager"},
    )
    for update in range(6):
        if update == 4:
            change(loss_fn, model)
            change(loss_fn, large)
        x, y = torch.randn(12, 6, dtype=torch.float64), torch.randint(3, (12,))
        step(x, y)
        optimizer.zero_grad()
        loss_fn(large(x), y).backward()
        optimizer.step()
        assert step.compiled
    assert relative_error([*model.parameters()], [*large.parameters()]) <= FLOAT64
