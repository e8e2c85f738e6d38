"""The first update proves itself: what would make it wrong is refused by name, and nothing that is right is."""

import copy
import logging
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradaccum
from gradaccum.on_torch.adapter.kinds import BatchKinds
from gradaccum.on_torch.batch import Batch
from gradaccum.torch import TrainStep, check_equivalence
from gradaccum.torch.proof import proof
from tests.torch.equivalence.problems import Apply, Codebook
from tests.torch.train_step.test_train_step import step_of

CE = nn.CrossEntropyLoss()
ROWS = 24


def net(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), *middle, nn.Linear(8, 4))


def data(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, 6, generator=generator), torch.randint(4, (ROWS,), generator=generator)


X, Y = data()
TARGETS = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(2))
IGNORED = torch.where(torch.arange(ROWS) % 3 == 0, -100, Y)


def train_step(model, **keywords):
    return step_of(model, **{"micro_batch_size": 8, "verify": True, **keywords})


def update(model, batch=(X, Y), **keywords):
    train_step(model, **keywords)(*batch)


def refused(*arguments, **keywords):
    with pytest.raises(gradaccum.NotEquivalentError) as raised:
        update(*arguments, **keywords)
    return str(raised.value)


@pytest.fixture
def unnamed(monkeypatch):
    """Refused without a search for the cause, which takes twenty times as long."""

    def none(*_, **__):
        raise RuntimeError("not searched for")

    monkeypatch.setattr(proof, "certify", none)


# Losses.


def token_mean(model, x, y):
    return F.cross_entropy(model(x), y)


def test_a_mean_over_targets_that_are_not_ignored_is_refused_on_any_batch(unnamed):
    model = net()
    for seed in range(20):
        x, y = data(seed)
        generator = torch.Generator().manual_seed(seed)
        y[torch.rand(ROWS, generator=generator) < torch.rand((), generator=generator) * 0.9 + 0.05] = -100
        refused(model, (x, y), compute_loss=token_mean)


def test_the_weight_to_pass_is_in_the_message():
    message = refused(net(), (X, IGNORED), compute_loss=token_mean)
    assert "weight=lambda x, y: (y != -100).sum()" in message
    assert "verify=False leaves this proof out" in message
    update(net(), (X, IGNORED), compute_loss=token_mean, weight=lambda x, y: (y != -100).sum())


def summed(outputs, targets):
    return (outputs - targets).square().sum()


LOSSES = {
    "a sum": summed,
    "a sum of less than 1e-7": lambda o, t: 1e-11 * summed(o, t),
    "a loss divided by its own value": lambda o, t: (loss := F.mse_loss(o, t)) / loss.detach(),
    "a sum that draws random numbers": lambda o, t: summed(o + 0.1 * torch.randn_like(o), t),
    "the root of a mean": lambda o, t: F.mse_loss(o, t).sqrt(),
    "rows compared with each other": lambda o, t: (o @ o.T - t @ t.T).square().mean(),
    "a permutation of the rows": lambda o, t: F.mse_loss(o, t + t[torch.randperm(len(t))]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_refused_that_is(name, unnamed):
    refused(net().train("random" not in name), (X, TARGETS), loss_fn=LOSSES[name])


def test_rows_that_are_mixed_in_place_are_refused():
    def across(model, x, y):
        return CE(model(x), y.copy_(y.flip(0)))

    with pytest.raises(gradaccum.NotEquivalentError):
        update(net(), (X, Y.clone()), compute_loss=across)


def test_a_batch_that_is_edited_in_place_row_by_row_is_no_reason_to_refuse():
    update(net(), (X.clone(), Y), compute_loss=lambda model, x, y: CE(model(x.mul_(2)), y))


def test_a_part_that_is_not_finite_is_a_difference(unnamed):
    y = torch.where(torch.arange(ROWS) < 2, Y, -100)  # every part but one is 0 / 0, and that one is exact
    refused(net(), (X, y), compute_loss=token_mean)


def test_little_that_is_ignored_is_seen_under_autocast(unnamed):
    tokens = torch.randint(4, (ROWS, 40), generator=torch.Generator().manual_seed(3))
    tokens[::2, :1] = -100
    model = nn.Sequential(nn.Linear(6, 160), nn.Unflatten(1, (4, 40)))
    refused(model, (X, tokens), compute_loss=token_mean, autocast=torch.bfloat16)


# Models.

MIXING = {
    "centred": lambda h: h - h.mean(0),
    "softmax over rows": lambda h: h.softmax(0),
    "sorted": lambda h: h.sort(0).values,
    "summed up": lambda h: h.cumsum(0),
    "rolled": lambda h: h.roll(1, 0),
    "the first row": lambda h: h + h[0],
    "row by row": lambda h: h @ h.T @ h / 8,
    "the largest": lambda h: h - h.amax(0),
    "the largest kept": lambda h: h * (h >= h.topk(2, dim=0).values[-1]),
    "normalised over rows": lambda h: F.normalize(h, dim=0),
    "divided by the number of rows": lambda h: h / h.shape[0],
    "normalised by a function": lambda h: F.batch_norm(h, None, None, training=True),
}


OFTEN = ("centred", "summed up", "the largest kept", "normalised by a function")
SWEEP = [pytest.param(name, marks=[] if name in OFTEN else pytest.mark.slow) for name in MIXING]


@pytest.mark.parametrize("name", SWEEP)
@pytest.mark.parametrize("batch_norm", [pytest.param("micro", marks=pytest.mark.slow), "exact"])
def test_what_mixes_rows_behind_a_batch_norm_is_refused(name, batch_norm, unnamed):
    refused(net(nn.BatchNorm1d(8), Apply(MIXING[name])), batch_norm=batch_norm)


@pytest.mark.parametrize("batch_norm", ["warn", "exact"])
def test_a_batch_norm_that_is_no_module_is_named_by_where_it_is_called(batch_norm):
    message = refused(net(nn.GroupNorm(2, 8), Apply(MIXING["normalised by a function"])), batch_norm=batch_norm)
    assert "'3' (Apply) mixes rows" in message


def with_hook(layer):
    layer.register_forward_hook(lambda module, args, output: output * 2)
    return layer


def parametrized(layer):
    nn.utils.parametrize.register_parametrization(layer, "weight", Apply(torch.exp))
    return layer


@pytest.mark.parametrize("change", [with_hook, parametrized])
def test_a_batch_norm_that_does_more_is_refused_where_it_is_to_be_exact(change):
    with pytest.raises((gradaccum.NotEquivalentError, ValueError), match="'2'"):
        update(net(change(nn.BatchNorm1d(8))), batch_norm="exact")


@pytest.mark.parametrize("batch_norm", ["warn", "micro", "pooled", "frozen", "exact"])
@pytest.mark.filterwarnings("ignore:BatchNorm normalises")
def test_what_is_done_about_batch_norm_is_no_reason_to_refuse(batch_norm):
    model = net(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.BatchNorm1d(8))
    if batch_norm not in ("frozen", "exact"):
        model[4] = nn.BatchNorm1d(8, track_running_stats=False)
    before = [module.training for module in model.modules()]
    update(model, batch_norm=batch_norm)
    assert [module.training for module in model.modules()] == before
    assert batch_norm in ("frozen", "exact") or model[4].running_mean is None


def test_a_hook_that_clamps_the_gradient_of_a_parameter_is_named():
    model = net()
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    assert "Parameter '0.weight' has a hook" in refused(model)
    (cause,) = check_equivalence(model, (X, Y), loss_fn=CE).causes
    assert (cause.kind, cause.where) == ("hook", "0.weight")
    model = net()
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    update(model)
    assert check_equivalence(model, (X, Y), loss_fn=CE).ok


class Centre(nn.Module):
    def __init__(self):
        super().__init__()
        self.centre = torch.zeros(4)

    def forward(self, outputs, targets):
        self.centre = 0.9 * self.centre + 0.1 * outputs.detach().mean(0)
        return (outputs - self.centre - targets).square().mean()


def test_an_attribute_that_moves_and_decides_the_gradient_is_named():
    message = refused(net(), (X, TARGETS), loss_fn=Centre())
    assert "'loss' moves its buffers (centre)" in message
    assert "later micro-batches see other values" in message


def test_a_buffer_that_does_not_go_where_all_rows_take_it_is_named_with_what_to_say(caplog):
    update(net(Codebook()))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "these buffers get other values than from the large batch: 'code' of '2' (Codebook)." in record.message
    assert 'gradaccum.torch.combine_buffers(Codebook, code="sum")' in record.message


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x


def test_what_moves_and_decides_nothing_is_said_by_name(caplog):
    layers = nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten(), Counting()
    update(net(*layers))
    (record,) = [record for record in caplog.records if "once per micro-batch" in record.message]
    assert record.levelno == logging.WARNING
    assert "not once per update: '5.calls'. Where" in record.message  # InstanceNorm's are means over rows


# Nothing that is right is refused.


def converged():
    """A model in which the gradients of the rows cancel but for rounding."""
    model = nn.Sequential(nn.Linear(6, 1))
    solution = torch.linalg.lstsq(torch.cat([X[:16], torch.ones(16, 1)], 1), TARGETS[:16, :1]).solution
    model[0].weight.data, model[0].bias.data = solution[:6].T.clone(), solution[6].clone()
    return model


def critic(model, real, fake):
    return (model(fake) - model(real)).mean()


def nearly(scale, dtype):
    """A batch for a critic: fakes that are the real rows in another order, or the same, and a little."""
    real = X.to(dtype)
    return real, real.roll(5, 0) + scale * X.flip(0).to(dtype), real + scale * X.flip(0).to(dtype)


@pytest.mark.parametrize(
    ("scale", "dtype"),
    [
        (0.0, torch.float32),
        (1e-5, torch.float32),
        (1e-8, torch.float64),
        *(pytest.param(scale, torch.float32, marks=pytest.mark.slow) for scale in (1e-8, 1e-3)),
        *(pytest.param(scale, torch.float64, marks=pytest.mark.slow) for scale in (0.0, 1e-5, 1e-3)),
    ],
)
def test_terms_that_cancel_each_other_are_no_reason_to_refuse(scale, dtype):
    real, others, same = nearly(scale, dtype)
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)).to(dtype)
        for fake in (others, same) if scale else (others,):
            update(model, (real, fake), compute_loss=critic)
    assert check_equivalence(model, (real, others), compute_loss=critic).ok


RIGHT = {  # with what stands in the table of check_equivalence, through TrainStep as well
    "noise": (net, (X, TARGETS), {"loss_fn": lambda o, t: F.mse_loss(o + torch.randn_like(o), t)}),
    "losses of less than 1e-7": (net, (X, TARGETS), {"loss_fn": lambda o, t: 1e-10 * F.mse_loss(o, t)}),
    "losses that cancel": (net, (X, X + 1), {"compute_loss": lambda m, a, b: (m(a) - m(a + 1e-2 * b)).mean()}),
    "bfloat16": (lambda: net(nn.Tanh()).bfloat16(), (X.bfloat16(), Y), {}),
    "autocast": (lambda: net(nn.Dropout(0.2)), (X, Y), {"autocast": torch.bfloat16}),
    "gradients that cancel": (converged, (X[:16], TARGETS[:16, :1]), {"loss_fn": nn.MSELoss()}),
    "rows that are not split": (net, (X, TARGETS), {"loss_fn": LOSSES["the root of a mean"], "micro_batch_size": 24}),
    "clipping": (net, (X, Y), {"clip_grad_norm": 1e-3}),
    "a GradScaler": (net, (X, Y), {"scaler": torch.amp.GradScaler("cpu"), "clip_grad_norm": 1.0}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_there_is_no_false_alarm_for(name, caplog):
    model, batch, keywords = RIGHT[name]
    update(model(), batch, **keywords)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


SIGNS = torch.where(torch.arange(16) % 8 < 4, 1.0, -1.0)[:, None]


def in_float16(loss=lambda outputs, targets: (outputs * targets).mean()):
    """Rows whose scaled gradients cancel each other all together, and overflow in parts of the batch."""
    torch.manual_seed(0)
    model, scaler = nn.Linear(6, 1), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TrainStep(model, optimizer, loss_fn=loss, micro_batch_size=4, scaler=scaler, autocast=torch.float16)


def test_a_sign_that_rounding_decides_is_no_difference_where_it_decides_at_these_parameters_alone():
    model = net(Apply(lambda h: F.relu(h - 1.0 + (1e-5 if len(h) > 6 else -1e-5))))  # as kernels for other sizes may
    with torch.no_grad():
        model[0].weight[3], model[0].bias[3] = 0.0, 1.0
    update(model)
    refused(net(Apply(lambda h: F.relu(h - (0.5 if len(h) > 6 else 0.4)))))


def test_an_overflow_of_scaled_micro_batches_is_no_difference():
    step = in_float16()
    found = [(step(X[:16], 14 * SIGNS), step.updates, step.update.scaler.get_scale())[1:] for _ in range(4)]
    assert found == [(0, 2.0**15), (0, 2.0**14), (1, 2.0**14), (2, 2.0**14)]

    wrong = in_float16(lambda outputs, targets: (outputs * targets).mean().tanh())
    with pytest.raises(gradaccum.NotEquivalentError):
        wrong(X[:16], 14 * SIGNS)


def test_a_repeated_proof_of_a_batch_that_is_not_finite_is_put_off_to_the_next_batch():
    wrong = []

    def loss(outputs, targets):
        mean = (outputs * targets).mean()
        return mean.exp() if wrong else mean

    step = in_float16(loss)
    step(X[:16], SIGNS)
    step(X[:16] * float("inf"), SIGNS)
    assert step.updates == 1
    wrong.append(True)
    with pytest.raises(gradaccum.NotEquivalentError):
        step(X[:16], SIGNS)


def test_gradients_that_no_scale_makes_finite_in_micro_batches_are_a_difference_beside_a_grad_scaler():
    def loss(outputs, targets):  # without a negative target the root's derivative is infinite
        return (outputs * (targets < 0)).square().mean().sqrt()

    with pytest.raises(gradaccum.NotEquivalentError, match="relative error inf"):
        in_float16(loss)(X[:16], SIGNS)


def test_an_optimizer_that_evaluates_closures_and_several_optimizers_are_proven_as_any():
    for make in (
        lambda model: torch.optim.LBFGS(model.parameters(), max_iter=2),
        lambda model: [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.Adam(model[3].parameters())],
    ):
        model = net(nn.Tanh())
        TrainStep(model, make(model), loss_fn=CE, micro_batch_size=8)(X, Y)
        model = net(nn.Tanh())
        with pytest.raises(gradaccum.NotEquivalentError):
            TrainStep(model, make(model), loss_fn=lambda o, y: F.cross_entropy(o, y).sqrt(), micro_batch_size=8)(X, Y)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_models_raise_no_false_alarm_and_their_token_mean_is_named(dtype):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 50, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    gpt = {"vocab_size": 50, "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32}
    t5 = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    ids = torch.randint(1, 50, (ROWS, 12), generator=torch.Generator().manual_seed(4))
    mask = (torch.arange(12) < 4 + torch.arange(ROWS)[:, None] % 9).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask == 1, ids, -100)}

    def loss(model, batch):
        return model(**batch).loss

    def shifted(batch):
        return (batch["labels"][:, 1:] != -100).sum()

    bert = transformers.BertForSequenceClassification(
        transformers.BertConfig(**small, intermediate_size=24, num_labels=4)
    )
    rated = {**batch, "labels": Y}
    update(bert.to(dtype).train(), (rated,), compute_loss=loss)
    assert check_equivalence(bert, rated, compute_loss=loss).max_error < 1e-12
    for model, weight in (
        (transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, intermediate_size=24)), shifted),
        (transformers.GPT2LMHeadModel(transformers.GPT2Config(**gpt, bos_token_id=None, eos_token_id=None)), shifted),
        (
            transformers.T5ForConditionalGeneration(transformers.T5Config(**t5, decoder_start_token_id=0)),
            lambda batch: (batch["labels"] != -100).sum(),
        ),
    ):
        update(model.to(dtype).train(), (batch,), compute_loss=loss, weight=weight)
        assert "weight=lambda batch:" in refused(model, (batch,), compute_loss=loss)
        if weight is shifted:
            (cause,) = check_equivalence(model, batch, compute_loss=loss).causes
            assert cause.kind == "weight"
            assert check_equivalence(model, batch, compute_loss=loss, weight=weight).ok


# When, and at what price.


class Moving(nn.Module):
    """Moves whatever can be moved."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8), persistent=False)
        self.frozen = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.seen, self.calls, self.log = torch.zeros(8), 0, []
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, h):
        self.calls += 1
        self.log.append(len(h))
        self.seen = self.seen + h.detach().sum(0)
        with torch.no_grad():
            self.mean += h.mean(0)
            self.frozen += 1
        self.latest = h
        return h * torch.rand(h.shape, generator=self.generator)


def test_everything_is_left_as_found():
    model, loss = net(Moving(), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Dropout(0.5).eval()), copy.deepcopy(CE)
    modes = [module.training for module in model.modules()]
    other = nn.Parameter(torch.ones(3))
    other.grad = torch.ones(3)
    step = train_step(model, loss_fn=loss, batch_norm="micro")
    batch = step.objective.batch((X, Y))
    moving, gradient = model[2], torch.full((8, 6), 2.0)
    model[0].weight.grad = gradient

    def everything():
        tensors = [*model.parameters(), *model.buffers(), moving.seen, gradient, other.grad, torch.get_rng_state()]
        return copy.deepcopy([[t.detach() for t in tensors], moving.calls, moving.log, random.getstate()])

    before, state = everything(), moving.generator.get_state()
    assert step._proof.is_due(batch, modes)
    step._proof.run(batch)
    torch.testing.assert_close(everything(), before, rtol=0, atol=0)
    assert torch.equal(moving.generator.get_state(), state)
    assert model[0].weight.grad is gradient
    assert [module.training for module in model.modules()] == modes
    assert not hasattr(moving, "latest")


def counted(model):
    calls = []
    model.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    return calls


def sizes_of(model, step):
    """How many rows each pass of an update has."""
    calls = counted(model)

    def update_of(*batch):
        calls.clear()
        step(*batch)
        return list(calls)

    return update_of


def test_hooks_that_a_model_registers_in_its_first_pass_are_there_once():
    class Recording(nn.Module):  # as models of transformers do for output_hidden_states=True
        def __init__(self):
            super().__init__()
            self.inner, self.outer, self.installed = nn.Linear(6, 5), nn.Linear(5, 4), False
            self._handles, self.seen = [], []

        def forward(self, x):
            if not self.installed:
                self._handles.append(self.inner.register_forward_hook(lambda *call: self.seen.append(call[2])))
                self.installed = True
            self.seen = []
            outputs = self.outer(torch.tanh(self.inner(x)))
            assert len(self.seen) == 1
            return outputs

    model = Recording()
    update(model, compute_loss=lambda model, x, y: CE(model(x), y) + sum(x.abs().mean() for x in model.seen))
    assert len(model.inner._forward_hooks) == len(model._handles) == 1


def test_it_is_repeated_in_another_mode_and_for_another_structure_and_only_then():
    model = net()
    step = train_step(model, compute_loss=lambda model, x, *y: F.cross_entropy(model(x), y[0]))
    sizes = sizes_of(model, step)

    def passes(*batch):
        return sum(sizes(*batch)) - ROWS

    proven = passes(X, Y)
    assert proven > passes(X, Y) > 0  # the second batch is proven, too, with fewer rows
    step._proof.schedule.batches = 4
    assert passes(X * 2, Y.flip(0)) == 0
    assert passes(X, Y, torch.ones(ROWS)) == proven
    assert passes(X, Y, torch.ones(ROWS)) == 0
    step._proof.schedule.batches = 8
    assert passes(X, Y, torch.rand(ROWS)) == proven  # weights, perhaps, that were the same for all rows before
    model.eval()
    assert passes(X, Y) == proven
    model.train()
    assert passes(X, Y) == passes(X, Y, torch.rand(ROWS)) == 0
    model[2].eval()
    assert passes(X, Y) == proven
    assert passes(X, Y) == 0


def test_a_repetition_looks_at_fewer_rows_and_splits_them_in_the_other_way():
    model = net()
    sizes = sizes_of(model, train_step(model))
    seen = [sizes(X, Y)[:-3] for _ in range(4)]
    assert [sum(rows) for rows in seen] == [2 * 16, 2 * 8, 0, 2 * 8]
    assert seen[1:] == [[8, 4, 2, 2], [], [8, 2, 2, 4]]


def test_what_a_repetition_sees_is_compared_in_all_ways_before_anything_is_said(unnamed):
    model = net(switch := Apply(lambda h: h))
    calls = counted(model)
    step = train_step(model)
    step(X, Y)
    switch.function = lambda h: h - h.mean(0)
    calls.clear()
    with pytest.raises(gradaccum.NotEquivalentError, match="Found on 8 rows"):
        step(X, Y)
    assert calls[:4] == [8, 4, 2, 2]
    assert [2, 2, 4, 4, 2, 2] in [calls[place : place + 6] for place in range(len(calls))]


def test_it_is_repeated_at_batches_2_4_8_and_every_1024():
    model = net()
    step = train_step(model)
    sizes, repeated = sizes_of(model, step), []
    for count in (*range(1, 18), 1023, 1024, 1025, 2048, 3072):
        step._proof.schedule.batches = count - 1
        repeated += [count] if len(sizes(X, Y)) > 3 else []
    assert repeated == [1, 2, 4, 8, 16, 1024, 2048, 3072]


def _marked(row, value):
    targets = torch.rand(64, 3, generator=torch.Generator().manual_seed(4))
    targets[row, 1] = value
    return targets


def _masked(row, dtype):
    mask = torch.ones(64, 3, dtype=dtype)
    mask[row, 1:] = 0
    return mask


def distance(reduce):
    return lambda model, x, y: reduce((model(x) - 0.5).square(), y)


MANY = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
ONE_OF_MANY = {
    "a number below 0": lambda row: (_marked(row, -1.0), lambda error, y: error[y >= 0].mean()),
    "a zero": lambda row: (_marked(row, 0.0), lambda error, y: error[y != 0].mean()),
    "a large number": lambda row: (_marked(row, 9999.0), lambda error, y: error[y != 9999].mean()),
    "a small number": lambda row: (_marked(row, -7777.0), lambda error, y: error[y != -7777].mean()),
    "a mask": lambda row: (_masked(row, torch.bool), lambda error, y: error[y].mean()),
    "a mask of float32": lambda row: (_masked(row, torch.float32), lambda error, y: (error * y).sum() / y.sum()),
    "a mask of float64": lambda row: (_masked(row, torch.float64), lambda error, y: (error * y).sum() / y.sum()),
}


@pytest.mark.parametrize("row", [5, 20, 40])
@pytest.mark.parametrize("name", ONE_OF_MANY)
def test_one_row_of_many_in_which_something_is_left_out_is_among_those_that_are_proven(name, row, unnamed):
    target, reduce = ONE_OF_MANY[name](row)
    refused(nn.Linear(6, 3), (MANY, target), compute_loss=distance(reduce), micro_batch_size=16)


def padded(ids):
    ids = ids.clone()
    ids[12, 5:] = 255
    return ids


def known_mean(model, x, y):
    return (model(x) - y)[~y.isnan()].square().mean()


def ignoring(index):
    return lambda model, x, y: F.cross_entropy(model(x), y, ignore_index=index)


TOKENS = torch.randint(4, (ROWS, 10), generator=torch.Generator().manual_seed(3))
NUMBERED = torch.arange(ROWS)
LATER = {  # the loss, the targets of the first batches, and those of a later one
    "the usual index": (token_mean, Y, IGNORED),
    "an index below the classes": (ignoring(0), Y.clamp(min=1), Y),
    "an index above the classes": (ignoring(255), Y, torch.where(NUMBERED % 3 == 0, 255, Y)),
    "padding of one row": (ignoring(255), TOKENS, padded(TOKENS)),
    "missing numbers": (known_mean, TARGETS, torch.where(NUMBERED[:, None] == 12, float("nan"), TARGETS)),
    **{
        f"{name} in one row of many": (distance(reduce), torch.ones_like(target), target)
        for name, make in ONE_OF_MANY.items()
        for target, reduce in [make(5)]
        if name != "a large number"
    },
}


@pytest.mark.parametrize("name", LATER)
def test_it_is_repeated_where_targets_are_left_out_for_the_first_time_by(name, unnamed):
    loss, first, then = LATER[name]
    many, tokens = len(then) > ROWS, nn.Sequential(nn.Linear(6, 40), nn.Unflatten(1, (4, 10)))
    x, model = (MANY, nn.Linear(6, 3)) if many else (X, tokens if first is TOKENS else net())
    step = train_step(model, compute_loss=loss, micro_batch_size=16 if many else 8)
    for _ in range(3):
        step(x, first)
    step._proof.schedule.batches = 8
    for _ in range(2):
        with pytest.raises(gradaccum.NotEquivalentError):
            step(x, then)
        step(x, first)


class _OnADevice(torch.Tensor):
    """What an accelerator's tensor is to those who must not wait for it."""

    is_cpu = False


def test_on_accelerators_what_differs_among_rows_is_read_one_batch_later(monkeypatch):
    later = []

    class Event:
        def record(self):
            later.append(self)

        def query(self):
            return True

    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda like, device, pin_memory: empty_like(like, device=device))
    monkeypatch.setattr(torch.cuda, "Event", Event)

    def batch(*targets):
        return Batch((torch.zeros(8, 2).as_subclass(_OnADevice), torch.tensor([*targets]).as_subclass(_OnADevice)))

    kinds = BatchKinds()
    assert kinds.is_new(batch(0, 1, 2, 1, 0, 1, 2, 1), [True])
    kinds.add()
    later.clear()
    with torch.no_grad():
        found = [kinds.is_new(batch(0, 1, 2, 1, 0, 1, 2, last), [True]) for last in (1, 1, -100, -100)]
    assert found == [False, False, False, True]
    assert len(later) > 2


def test_pairs_of_rows_that_leave_their_margin_later_are_refused_when_they_do(unnamed):
    """A hinge over pairs is linear, and so a mean over rows, as long as all pairs are inside of its margin."""

    def pairwise(model, x, y):
        a, b = (0.2 * model(x)).split(2, 1)
        return F.relu(1 - a.sum(1)[:, None] + b.sum(1)[None]).mean()

    model = net()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.5), compute_loss=pairwise, micro_batch_size=8)
    updates = 0
    with pytest.raises(gradaccum.NotEquivalentError):
        for _ in range(65):
            step(X, Y)
            updates += 1
    assert updates in (1, 3, 7, 15, 31)


@pytest.mark.parametrize("rows", [17, 30, 60])
def test_what_begins_above_the_rows_of_the_first_proof_is_refused_by_the_second(rows, unnamed):
    model = net(Apply(lambda h: h * (2 if len(h) >= rows else 1)))
    step = train_step(model, micro_batch_size=60)
    batch = X.repeat(5, 1), Y.repeat(5)
    step(*batch)
    with pytest.raises(gradaccum.NotEquivalentError):
        step(*batch)


def test_it_looks_at_few_rows_and_at_fewer_where_memory_is_short():
    model = net()
    calls = counted(model)
    update(model, (X.repeat(8, 1), Y.repeat(8)))
    assert max(calls) == 16
    assert sum(calls) == 2 * 16 + 8 * ROWS
    calls.clear()
    update(model, micro_batch_size=2)
    assert max(calls) == 8

    def fits(h):
        if len(h) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return h

    model = net(Apply(fits))
    update(model)
    refused(model, compute_loss=lambda model, x, y: F.cross_entropy(model(x), y).sqrt())


def test_what_cannot_be_evaluated_is_said_once(caplog):
    model = net(Apply(lambda h: h.reshape(2, 12, 8).flatten(0, 1)))  # of 24 rows, and no others
    with pytest.raises(RuntimeError, match="shape"):
        update(model, micro_batch_size="auto")
    assert not caplog.records  # the error says it
    model = net(Apply(lambda h: h.reshape(3, 8, 8).flatten(0, 1) if len(h) == 24 else h.reshape(-1, 12, 8)[:, 0]))
    step = train_step(model, micro_batch_size=24)
    for _ in range(4):
        step(X.repeat(2, 1), Y.repeat(2))
    (record,) = [record for record in caplog.records if "could not be proven" in record.message]
    assert "16 rows of this batch can't be evaluated" in record.message


DRAWN = {
    "NumPy's": lambda shape, own: np.random.standard_normal(shape),  # noqa: NPY002
    "NumPy's, of its own": lambda shape, own: own.standard_normal(shape),
    "Python's": lambda shape, own: [[random.random() for _ in range(shape[1])] for _ in range(shape[0])],
}


def noisy(draw, own, loss=CE):
    return lambda model, x, y: loss(model(x + torch.as_tensor(draw(tuple(x.shape), own), dtype=x.dtype)), y)


@pytest.mark.parametrize("whose", DRAWN)
def test_random_numbers_of_numpy_and_python_that_follow_rows_are_no_accusation(whose, caplog):
    compute_loss = noisy(DRAWN[whose], np.random.default_rng(0))
    update(net(), compute_loss=compute_loss)
    assert f"draws random numbers of {'its own' if 'own' in whose else whose}, which can't be assigned" in caplog.text
    with pytest.raises(ValueError, match="which can't be assigned to rows"):
        check_equivalence(net(), (X, Y), compute_loss=compute_loss)


@pytest.mark.parametrize("whose", DRAWN)
def test_random_numbers_that_all_rows_share_are_compared_and_hide_no_wrong_loss(whose):
    def draw(shape, own):
        return DRAWN[whose]((1, 6), own)

    own = np.random.default_rng(0)
    update(net(), compute_loss=noisy(draw, own))
    assert check_equivalence(net(), (X, Y), compute_loss=noisy(draw, own)).ok
    centred = noisy(draw, own, lambda outputs, y: (outputs - outputs.mean(0)).square().mean())
    assert "looks across the batch" in refused(net(), compute_loss=centred)


def test_the_proof_leaves_gradients_of_the_batch_alone_and_proves_with_them(caplog):
    def compute_loss(model, x, y, prompt):
        return CE(model(x + prompt), y)

    def batch():
        return X.clone().requires_grad_(), Y, torch.full((6,), 0.1, requires_grad=True)

    keywords = {"compute_loss": compute_loss, "batch_dims": (0, 0, None)}
    expected, found = batch(), batch()
    compute_loss(net(), *expected).backward()
    update(net(), found, **keywords)
    for place in (0, 2):
        assert torch.allclose(found[place].grad, expected[place].grad, rtol=1e-5, atol=1e-7)
    assert "could not be proven" not in caplog.text
    wrong = {**keywords, "compute_loss": lambda model, x, y, prompt: CE(model(x + prompt), y).sqrt()}
    refused(net(), batch(), **wrong)


WRONG = {
    "losses without weights": {"compute_loss": lambda model, x, y: {"one": CE(model(x), y)}},
    "a hook on an exact BatchNorm": {"loss_fn": CE, "batch_norm": "exact"},
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_an_error_of_the_update_is_that_error_alone(name, caplog):
    with pytest.raises((TypeError, ValueError), match="The loss term .one. comes without its weight|has hooks"):
        update(net(with_hook(nn.BatchNorm1d(8))), **WRONG[name])
    assert not [record for record in caplog.records if "could not be proven" in record.message]


def test_without_verify_nothing_is_proven():
    model = net()
    calls = counted(model)
    update(model, (X, TARGETS), loss_fn=LOSSES["the root of a mean"], verify=False)
    assert calls == [8, 8, 8]
