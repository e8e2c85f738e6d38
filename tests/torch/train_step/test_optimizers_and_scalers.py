"""What surrounds a training step works as in the three lines that it replaces."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradaccum.torch
from tests.reference import FLOAT64, relative_error, torch_updates
from tests.torch.train_step.test_train_step import (
    OPTIMIZERS,
    assert_same_updates,
    batches,
    by_hand,
    network,
    plain_loss,
    step_of,
)

LOSS = nn.CrossEntropyLoss()


def make_step(model, optimizer="sgd", **keywords):
    return step_of(model, optimizer, **{"micro_batch_size": 4, "verify": True, **keywords})


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_evaluates_the_whole_window_each_time(search):
    make = functools.partial(torch.optim.LBFGS, lr=0.5, max_iter=5, line_search_fn=search)
    keywords = {"loss_fn": LOSS, "micro_batch_size": 4}
    assert_same_updates(network(), batches(), make=make, tolerance=1e-9, **keywords)  # iterations amplify the rounding


class Twice(torch.optim.SGD):
    """Moves by the gradient that it finds one step ahead."""

    def step(self, closure):
        loss = closure()
        with torch.no_grad():
            before = [p.clone() for p in self.param_groups[0]["params"]]
            super().step()
        closure()
        with torch.no_grad():
            for p, old in zip(self.param_groups[0]["params"], before, strict=True):
                p.copy_(old - 0.1 * p.grad)
        return loss


class TwiceIfItCan(Twice):
    def step(self, closure=None):
        return torch.optim.SGD.step(self) if closure is None else super().step(closure)


class SharpnessAware(torch.optim.SGD):
    """Moves before it evaluates: the gradients that are there say whereto."""

    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        before = [p.detach().clone() for p in parameters]
        for p in parameters:
            p.data.add_(p.grad.sign(), alpha=0.1)
        loss = closure()
        for p, old in zip(parameters, before, strict=True):
            p.data.copy_(old)
        super().step()
        return loss


class Once(torch.optim.SGD):
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        super().step()
        return loss


@pytest.mark.parametrize("kind", [Twice, TwiceIfItCan, SharpnessAware])
def test_other_optimizers_that_evaluate_a_closure_get_the_whole_window(kind):
    model, reference = network(), network()
    by_hand(reference, batches(count=3), make=functools.partial(kind, lr=0.1), evaluated=True)
    step = make_step(model, kind(model.parameters(), lr=0.1))
    for batch in batches(count=3):
        step(*batch)
    assert relative_error(model.parameters(), reference.parameters()) <= FLOAT64


def test_an_optimizer_that_evaluates_its_closure_once_costs_no_second_window():
    model, passes = network(), []
    model.register_forward_hook(lambda *_: passes.append(1))
    step = make_step(model, Once(model.parameters(), lr=0.1), micro_batch_size=5, verify=False)
    for batch in batches(count=2):
        step(*batch)
    assert len(passes) == 2 * 3


@pytest.mark.parametrize("size", [4, 13])
def test_clipping_sees_the_finished_gradient_once(size):
    model, reference = network(), network()
    optimizer = OPTIMIZERS["sgd"](reference.parameters())
    step = make_step(model, micro_batch_size=size, clip_grad_norm=0.1)
    for batch in batches():
        optimizer.zero_grad()
        plain_loss(reference, *batch).backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        optimizer.step()
        step(*batch)
        assert relative_error([step.grad_norm], [norm]) <= FLOAT64
    assert relative_error(model.parameters(), reference.parameters()) <= FLOAT64


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_grad_scaler_scales_unscales_and_skips_an_overflow(clip):
    model, reference = network(), network()
    torch_updates(reference, OPTIMIZERS["sgd"](reference.parameters()), batches(), plain_loss, clip_grad_norm=clip)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    step = make_step(model, scaler=scaler, clip_grad_norm=clip)
    for x, y in batches():
        assert relative_error([step(x, y)], [plain_loss(model, x, y)]) < 1  # the loss is not scaled
    assert relative_error(model.parameters(), reference.parameters()) <= FLOAT64
    before = copy.deepcopy(model.state_dict())
    x, y = batches()[0]
    step(x * float("inf"), y)
    assert step.updates == 3
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_autocast_runs_the_forward_pass_in_its_dtype():
    seen = []
    model = network(torch.float32)
    model[2].register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    step = make_step(model, autocast=torch.bfloat16, verify=False)  # the proof looks without it, too
    loss = step(*batches(dtype=torch.float32)[0])
    assert set(seen) == {torch.bfloat16}
    assert loss.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_half_precision_gradients_may_be_summed_in_float32():
    torch.manual_seed(0)
    x, y = torch.randn(256, 8), torch.randn(256, 1)
    errors = []
    for dtype in (None, torch.float32):
        model = nn.Linear(8, 1, dtype=torch.bfloat16)
        nn.init.constant_(model.weight, 0.1)
        nn.init.zeros_(model.bias)
        exact = copy.deepcopy(model).float()
        F.mse_loss(exact(x), y).backward()
        sums = []
        keywords = {"loss_fn": nn.MSELoss(), "micro_batch_size": 1, "accumulate_dtype": dtype, "verify": False}
        step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.0), **keywords)
        finish = step.update.buffer.cast
        step.update.buffer.cast = lambda sums=sums, model=model, finish=finish: (
            sums.extend(p.grad.clone() for p in model.parameters()),
            finish(),
        )
        step(x.bfloat16(), y.bfloat16())
        assert all(p.grad.dtype == torch.bfloat16 for p in model.parameters())
        found = sums or [p.grad for p in model.parameters()]
        errors.append(relative_error(found, [p.grad for p in exact.parameters()]))
    assert errors[1] < 0.01
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")  # torch, of that Python alone
def test_a_compiled_model_is_compiled_at_most_twice():
    compiled = 0

    def backend(graph, inputs):
        nonlocal compiled
        compiled += 1
        return graph.forward

    torch._dynamo.reset()
    model = torch.compile(network(), backend=backend, dynamic=False)
    assert_same_updates(model, batches(), reference=network(), loss_fn=LOSS, micro_batch_size=4)
    assert compiled == 2


def test_parameters_that_only_some_rows_use():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.experts = nn.ModuleList(nn.Linear(5, 3, dtype=torch.float64) for _ in range(4))

        def forward(self, x):
            chosen = (x[:, 0] > 0).long()
            outputs = x.new_zeros(len(x), 3)
            for index in chosen.unique().tolist():  # the last two are never used
                outputs[chosen == index] = self.experts[index](x[chosen == index])
            return outputs

    assert_same_updates(Experts(), batches(), plain_loss, loss_fn=LOSS, micro_batch_size=1)


def test_losses_with_gradients_of_their_own():
    def penalised(model, x, y):
        x = x.detach().requires_grad_()
        outputs = model(x)
        (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        return LOSS(outputs, y) + (slope.norm(dim=1) - 1).square().mean()

    assert_same_updates(network(), batches(), penalised, micro_batch_size=4)


def test_the_state_of_a_step_is_its_counter_and_the_sizes_it_found(tmp_path):
    model = network()
    step = make_step(model, micro_batch_size="auto")
    for batch in batches(32, count=3):
        step(*batch)
    torch.save(step.state_dict(), tmp_path / "step.pt")
    again = make_step(network(), micro_batch_size="auto")
    again.load_state_dict(torch.load(tmp_path / "step.pt", weights_only=True))
    assert again.updates == 3
    assert again.micro_batch_size == step.micro_batch_size
    again(*batches(32)[0])
    assert again.updates == 4
    assert again.micro_batch_size == step.micro_batch_size


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"loss_fn": None}, "exactly one"),
        ({"loss_fn": LOSS, "compute_loss": plain_loss}, "exactly one"),
        ({"micro_batch_size": 0}, "micro_batch_size"),
        ({"micro_batch_size": 2.5}, "micro_batch_size"),
        ({"micro_batch_size": True}, "micro_batch_size"),
        ({"micro_batch_size": "big"}, "auto"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"reduction": "none"}, "reduction"),
        ({"weight": 3}, "weight"),
        ({"clip_grad_norm": -1}, "clip_grad_norm"),
        ({"autocast": "bfloat16"}, "autocast"),
        ({"accumulate_dtype": torch.int8}, "accumulate_dtype"),
        ({"batch_norm": "off"}, "batch_norm"),
        ({"memory_limit": "lots"}, "memory_limit"),
        ({"memory_limit": -5}, "memory_limit"),
        ({"sync": "never"}, "sync"),
        ({"scaler": 3}, "`scaler` must be a torch.amp.GradScaler. Received: scaler=3"),
        ({"offload": True}, "exact"),
    ],
)
def test_wrong_arguments_are_told(keywords, message):
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        make_step(network(), **keywords)
    assert "Received" in str(raised.value)


def test_wrong_optimizers_are_told():
    model = network()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        make_step(model, model.parameters())
    with pytest.raises(TypeError, match=r"torch\.optim\.Optimizer"):
        make_step(model, [sgd, None])
    with pytest.raises(ValueError, match="inner optimizer"):
        make_step(model, gradaccum.torch.optim.Optimizer(sgd, steps=2))
    with pytest.raises(ValueError, match="closure"):
        make_step(model, torch.optim.LBFGS(model.parameters()), scaler=torch.amp.GradScaler("cpu"))
