"""check_equivalence: a certificate where micro-batches are exact, the culprit's name where they aren't."""

import copy
import logging
import random
import re
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint

import gradaccum
from gradaccum.core.proof import NEARBY
from gradaccum.on_torch.adapter.arrays import bits_flipped
from gradaccum.on_torch.state import evaluated
from gradaccum.torch import TrainStep, check_equivalence
from gradaccum.torch.module_state import ModuleState
from tests.torch.equivalence.problems import CE, net, of, seeded, token_mean, with_gradient_hook
from tests.torch.problems import MIXING, Does

X, Y = torch.randn(16, 6, generator=(same := seeded(5))), torch.randint(4, (16,), generator=same)
XY, IGNORED = (X, Y), torch.where(torch.arange(16) % 3 == 0, -100, Y)
XI = X, IGNORED
TOKENS = torch.randint(1, 20, (10, 7), generator=seeded(6))
MASK = (torch.arange(7) < 2 + torch.arange(10)[:, None] % 6).long()
SHIFTED = TOKENS, torch.where(MASK == 1, TOKENS, -100)
ROWS, MASKED = (TOKENS, Y[:10]), ((TOKENS, MASK), Y[:10])
SECOND = torch.randn(8, 8, 8, generator=seeded(8)), Y[:8]
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])
SAMPLE_WEIGHTS, SIGNED = torch.rand(16, generator=seeded(7)), torch.randn(16, 4, generator=seeded(9))


def embedded(read=lambda m, h, mask: h, inner=None, **embedding):
    """Tokens, optionally with their mask, through some layers into a mean."""

    def run(m, tokens):
        tokens, mask = tokens if isinstance(tokens, tuple) else (tokens, None)
        return m.head(read(m, m.embed(tokens), mask)).mean(1)

    return lambda: Does(run, embed=nn.Embedding(20, 8, **embedding), head=nn.Linear(8, 4), inner=inner and inner())


def lstm():
    return nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True)


def packed(m, h, mask):
    """Rows of different lengths in one packed sequence: noise inside it belongs to no row that could be told."""
    h = nn.utils.rnn.pack_padded_sequence(h, mask.sum(1), batch_first=True, enforce_sorted=False)
    return m.inner(h)[1][0][-1][:, None]


def transformer(**options):
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.2, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def steps_first():
    return nn.Sequential(transformer(), of(lambda h: h.mean(0)), nn.Linear(8, 4))


def tied():
    embed, head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 20, bias=False)
    head.weight = embed.weight
    return nn.Sequential(embed, head)


def checkpointed(use_reentrant):
    def run(m, x):
        return m.head(checkpoint.checkpoint(m.body, x.clone().requires_grad_(), use_reentrant=use_reentrant))

    body = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(inplace=True))
    return lambda: Does(run, body=body, head=nn.Linear(8, 4))


def graph():
    """Takes (x, shared matrix)."""
    return Does(lambda m, inputs: m.linear(inputs[0] @ inputs[1]), linear=nn.Linear(6, 4))


def gradient_penalty(model, x, y):
    x = x.clone().requires_grad_()
    outputs = model(x)
    (gradient,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return F.cross_entropy(outputs, y) + gradient.square().sum(1).mean()


def next_token(model, tokens, labels):
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def own_loss():
    def run(m, x, y):
        logits = m.layers(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}

    return Does(run, layers=net(nn.Dropout(0.1)))


def of_dict(model, batch):
    return model(**batch)["loss"]


def counted(x, y):
    return (y != -100).sum()


def own(loss, **keywords):
    return {"compute_loss": loss, **keywords}


def middle(*layers):
    return lambda: net(*layers)


EXACT = {
    "plain": (net, XY, CE),
    "layer norm and group norm": (middle(nn.LayerNorm(8), nn.GroupNorm(2, 8)), XY, CE),
    "dropout": (middle(nn.Dropout(0.5), nn.AlphaDropout(0.3)), XY, CE),
    "noise": (middle(lambda x: x + torch.randn_like(x) * torch.rand(len(x), 1)), XY, CE),
    "Gumbel noise": (middle(F.gumbel_softmax), XY, CE),
    "sampling": (middle(lambda x: x * torch.multinomial(x.softmax(1).detach(), 2)[:, :1]), XY, CE),
    "stochastic depth by Python's random": (middle(lambda x: x * (random.random() < 0.5)), XY, CE),
    "BatchNorm in eval mode": (lambda: net(nn.BatchNorm1d(8)).eval(), XY, CE),
    "softmax shifted by the batch's maximum": (middle(lambda x: (x - x.max()).softmax(1)), XY, CE),
    "attention with masks and dropout": (
        embedded(
            lambda m, h, mask: m.inner(h, src_key_padding_mask=mask == 0), lambda: transformer(batch_first=True)
        ), MASKED, CE,
    ),
    "recurrent with dropout": (embedded(lambda m, h, mask: m.inner(h)[0], lstm), ROWS, CE),
    "packed sequences": (embedded(packed, lstm), MASKED, CE),
    "sparse gradients": (embedded(sparse=True), ROWS, CE),
    "tied weights": (lambda: nn.Sequential(tied(), of(lambda h: h.mean(1))), ROWS, CE),
    "checkpointing": (checkpointed(False), XY, CE),
    "reentrant checkpointing": (checkpointed(True), XY, CE),
    "gradient penalty": (middle(nn.Tanh()), XY, own(gradient_penalty)),
    "class weights and ignored targets": (net, XI, nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)),
    "a sum": (net, XY, nn.CrossEntropyLoss(reduction="sum")),
    "a regulariser beside a mean": (
        net, XY, own(lambda m, x, y: token_mean(m, x, y) + 0.1 * sum(p.square().sum() for p in m.parameters())),
    ),
    "the right weight": (net, XI, own(token_mean, weight=counted)),
    "the right weight of shifted labels": (tied, SHIFTED, own(next_token, weight=lambda _, y: counted(_, y[:, 1:]))),
    "loss and weight": (net, XI, own(lambda m, x, y: (token_mean(m, x, y), counted(x, y)))),
    "a model's own loss": (own_loss, {"x": X, "y": Y}, own(of_dict)),
    "a shared input, said": (graph, ((X[:6], torch.rand(6, 6)), Y[:6]), {"loss_fn": CE, "batch_dims": ((0, None), 0)}),
    "rows in the second dimension, said": (steps_first, SECOND, {"loss_fn": CE, "batch_dims": (1, 0)}),
    "a hook that halves": (lambda: with_gradient_hook(lambda g: g * 0.5), XY, CE),
    "two rows": (net, (X[:2], Y[:2]), CE),
    "rows that cancel each other to zero": (
        net, (X.repeat(2, 1), torch.cat([SIGNED, -SIGNED])), own(lambda m, x, y: (m(x) * y).sum(1).mean()),
    ),
}  # fmt: skip


def keywords_of(loss):
    return loss if isinstance(loss, dict) else {"loss_fn": loss}


def run(model, batch, loss):
    torch.manual_seed(0)
    return check_equivalence(model(), batch, **keywords_of(loss))


def trained(model, batch, **keywords):
    sgd, size = torch.optim.SGD(model.parameters(), lr=0.1), 1 + len(batch[1] if type(batch) is tuple else X) // 3
    TrainStep(model, sgd, micro_batch_size=size, **keywords)(*batch if type(batch) is tuple else [batch])


@pytest.mark.parametrize("name", EXACT)
def test_there_is_no_false_alarm_for(name, caplog):
    model, batch, loss = EXACT[name]
    torch.manual_seed(0)
    trained(model(), batch, **keywords_of(loss))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    result = run(*EXACT[name])
    assert result.ok, str(result)
    assert result.max_error <= 1e-12
    assert result.raise_if_different() is result
    assert result.causes == ()


def weighted_mean(weigh):
    def loss(model, x, y, *others):
        weights = weigh(x, *others)
        return (F.cross_entropy(model(x), y, reduction="none") * weights).sum() / weights.sum()

    return loss


def contrastive(model, x, y):
    z = F.normalize(model(x), dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)).roll(1))


def centred():
    run = lambda m, x: m.second((h := m.first(x)) - h.detach().mean(0))  # noqa: E731
    return Does(run, first=nn.Linear(6, 8), second=nn.Linear(8, 4))


def quantised(m, h):
    """Vector quantisation whose codes follow an average of what they stand for."""
    nearest = torch.cdist(h, m.code).argmin(1)
    codes = m.code[nearest]
    with torch.no_grad():
        for index in nearest.unique():
            m.code[index] = 0.9 * m.code[index] + 0.1 * h[nearest == index].mean(0)
    return h + (codes - h).detach()


def nested_norm():
    return nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Dropout(0.1), nn.BatchNorm1d(8)), nn.Linear(8, 4))


TOKEN_MEAN, WEIGHT, INPUT = own(token_mean), ("weight", "loss"), ("input", "batch[0]")
UNCLEAR, SIX = ((X[:6], torch.rand(6, 6)), Y[:6]), ((X, torch.rand(6, 6)), Y)
COUNT = "weight=lambda x, y: (y != -100).sum()"
IN_SHIFTED = "weight=lambda tokens, labels: (labels[:, 1:] != -100).sum()"
# Model, batch and loss; the cause's kind and where; what its message says. docs/equivalence.md has five more, and runs.
DIFFERENT = {
    "a BatchNorm inside": (nested_norm, XY, CE, "batch_norm", "1.1", "'1.1' is a BatchNorm1d", 'batch_norm="exact"'),
    "BatchNorm on two rows": (middle(nn.BatchNorm1d(8)), (X[:2], Y[:2]), CE, "batch_norm", "2", "1 rows"),
    "BatchNorm before a wrong loss": (middle(nn.BatchNorm1d(8)), XI, TOKEN_MEAN, "batch_norm", "2"),
    "GroupNorm before a wrong loss": (middle(nn.GroupNorm(2, 8)), XI, TOKEN_MEAN, *WEIGHT),
    "a detached batch mean": (
        middle(lambda x: x - x.mean(0).detach()), XY, CE, "mixes_rows", "2", "'2' (Does) mixes rows",
    ),
    "mixing in the model's own forward": (centred, XY, CE, "mixes_rows", "model", "'model' (Does) mixes rows"),
    "a contrastive loss": (net, XY, own(contrastive), "loss", "loss", "not additive", "chunked"),
    "ignored targets": (net, XI, TOKEN_MEAN, *WEIGHT, COUNT),
    "shifted labels": (tied, SHIFTED, own(next_token), *WEIGHT, IN_SHIFTED),
    "ignored targets of a model's own loss": (
        own_loss, {"x": X, "y": IGNORED}, own(of_dict), *WEIGHT, "weight=lambda batch: (batch['y'] != -100).sum()",
    ),
    "sample weights": (
        net, (X, Y, SAMPLE_WEIGHTS), own(lambda model, x, y, w: weighted_mean(lambda x, w: w)(model, x, y, w)), *WEIGHT,
        "weight=lambda x, y, w: w.sum()",
    ),
    "a wrong weight beside the loss": (
        net, XY, own(lambda *batch: (token_mean(*batch), 1)), *WEIGHT, "what `compute_loss` returns with the loss",
        "or its rows with it",
    ),
    "an unknown divisor": (
        net, XY, own(weighted_mean(lambda x: x[:, 0].abs())), *WEIGHT, "would have to weigh", "Return (loss, weight)",
    ),
    "a mean taken for a sum": (net, XY, own(token_mean, reduction="sum"), *WEIGHT, 'Pass reduction="mean"'),
    "an input with another number of rows": (
        graph, SIX, CE, "input", "batch[0][1]", "6 entries in dimension 0", "batch_dims=((0, None), 0)",
    ),
    "a shared input with as many entries as rows": (
        graph, UNCLEAR, CE, "input", "batch[0][1]", "not per-row", "batch_dims=((0, None), 0)",
    ),
    "rows in the second dimension of as many steps as rows": (
        steps_first, SECOND, CE, *INPUT, "not per-row", "has its rows in dimension 1", "batch_dims=(1, 0)",
    ),
    "a hook that clamps": (lambda: with_gradient_hook(lambda g: g.clamp(-1e-3, 1e-3)), XY, CE, "hook", "0.weight"),
    "a codebook that moves": (lambda: net(Does(quantised, code=torch.randn(5, 8))), XY, CE, "buffer", "2", "code"),
    "a backward pass that mixes": (
        middle(MIXING["a gradient across rows"]), XY, CE, "unknown", "0",
        "The last module whose gradient differs is '0'", "custom backward pass",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_culprit_is_named_for(name):
    *setup, kind, where = DIFFERENT[name][:5]
    result = run(*setup)
    assert not result.ok
    assert (result.max_buffer_error if kind == "buffer" else result.max_error) > 1e-3
    assert kind != "buffer" or "buffers left behind are NOT" in str(result) or name == "a codebook that moves"
    assert [(cause.kind, cause.where) for cause in result.causes] == [(kind, where)]
    message = result.causes[0].message
    assert all(part in message for part in DIFFERENT[name][5:])
    with pytest.raises(gradaccum.NotEquivalentError) as raised:
        result.raise_if_different()
    assert "differ from the large batch's" in str(raised.value)
    assert message in str(raised.value)
    assert message.split()[0] in str(result)


def test_the_largest_error_is_that_of_a_hand_written_comparison():
    torch.manual_seed(0)
    model, x = net().double(), X.double()
    result = check_equivalence(model, (x, IGNORED), micro_batch_size=8, **TOKEN_MEAN)

    def gradient(rows):
        return torch.autograd.grad(F.cross_entropy(model(x[rows]), IGNORED[rows]), [model[0].weight])[0]

    expected, halves = gradient(slice(16)), [gradient(slice(8)), gradient(slice(8, 16))]
    by_hand = (sum(halves) / 2 - expected).abs().max() / expected.abs().max()
    found = next(difference.error for difference in result.differences if difference.name == "0.weight")
    assert found >= by_hand.item() - 1e-12
    assert result.partitions[0] == (8, 8)
    assert all(sum(sizes) == 16 for sizes in result.partitions)
    assert any(len(set(sizes)) > 1 for sizes in result.partitions)


def test_model_optimizer_gradients_batch_and_random_state_stay_as_they_were():
    generator = seeded(1)
    model = net(nn.BatchNorm1d(8), nn.Dropout(0.5), of(lambda x: x * torch.rand(x.shape, generator=generator)))
    teacher, optimizer = nn.Sequential(nn.BatchNorm1d(6)), torch.optim.Adam(model.parameters())
    CE(model(X), Y).backward()
    optimizer.step()
    batch = (X.clone(), Y.clone())

    def loss(model, x, y):
        x.mul_(0.5)  # in place, as some do
        return F.cross_entropy(model(x), y) + teacher(x).square().mean()

    def everything():
        states = [one.state_dict() for one in (model, teacher, optimizer)]
        numpy = np.random.get_state()[1].tolist()  # noqa: NPY002  # the global generator is what users have
        drawn = [torch.get_rng_state(), generator.get_state(), random.getstate(), numpy]
        return copy.deepcopy([*states, [p.grad for p in model.parameters()], batch, drawn])

    before = everything()
    assert not check_equivalence(model, batch, compute_loss=loss).ok
    torch.testing.assert_close(everything(), before, rtol=0, atol=0)
    assert model.training
    assert model[0].weight.dtype == torch.float32
    assert not model._forward_hooks
    model[2] = nn.Identity()
    assert check_equivalence(model, XY, loss_fn=CE).ok
    assert torch.equal(generator.get_state(), before[-1][1])


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_it_works_where_gradients_are_off(off):
    with off():
        assert check_equivalence(net(), XY, loss_fn=CE).ok


def in_float32(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, weight=torch.ones(4))


THROUGH_FLOAT32 = middle(lambda x: (x.float() @ torch.ones(8, 8, dtype=torch.float32)).double(), nn.Tanh())
NOTED = {  # what the check of an exact model cannot exclude: the model, batch and loss, the note, the precision
    "eval mode": (lambda: net().eval(), XY, CE, "eval mode", "float64"),
    "parameters that aren't used": (
        lambda: Does(lambda m, x: m.used(x), used=net(), unused=nn.Linear(2, 2)), XY, CE,
        "No gradient reached 2 parameters .*unused.weight", "float64",
    ),
    "noise of no row": (*EXACT["packed sequences"], "belong to no row", "float64"),
    "a loss that cannot run in float64": (net, XY, in_float32, "own dtype", "float32"),
    "a model that computes in float32 inside": (
        THROUGH_FLOAT32, XY, lambda o, t: F.cross_entropy(o.float() / 3, t), "computes in float32", "float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTED)
def test_what_it_cannot_exclude_it_says(name):
    *setup, note, precision = NOTED[name]
    result = run(*setup)
    assert result.ok
    assert result.precision == precision
    assert any(re.search(note, one) for one in result.notes)
    assert "evidence from one batch, not a proof" in result.notes[-1]
    assert "evidence" in str(result)
    if setup[0] is THROUGH_FLOAT32:  # its rounding is allowed
        assert 1e-9 < result.max_error < 1e-5
        assert result.tolerance == 1e-4


HOLDER, BAD = type("Holder", (), {"model": net()}), X * float("nan")
WRONG = {
    "one row": (net, (X[:1], Y[:1]), CE, ValueError, "at least 2 rows, to be split. Received: 1"),
    "a lock": (lambda: Does(net(), lock=threading.Lock()), XY, CE, TypeError, "model can't be copied"),
    "no gradient": (net, XY, own(lambda m, x, y: m(x).detach().mean()), ValueError, "loss has no gradient"),
    "no scalar": (net, XY, own(lambda m, x, y: m(x).argmax(1) * 1.0), ValueError, "must be a scalar"),
    "a NaN": (net, (BAD, Y), CE, ValueError, "own loss is nan"),
    "frozen": (lambda: net().requires_grad_(False), XY, CE, ValueError, "No parameter of the model requires"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(4)), XY, CE, ValueError, "run it once before the check"),
    "no loss": (net, XY, {}, ValueError, "exactly one of `loss_fn`"),
    "no rows": (net, XY, {"loss_fn": CE, "micro_batch_size": 0}, ValueError, "micro_batch_size"),
    "a typo": (net, XY, {"loss_fn": CE, "reductoin": "sum"}, TypeError, "unexpected keyword argument 'reductoin'"),
    "a function": (lambda: lambda x: x, XY, CE, TypeError, "must be a torch.nn.Module"),
    "text": (net, ("text", 3), CE, ValueError, "has no tensor with rows"),
    "a word": (net, XY, {"loss_fn": CE, "batch_norm": "exakt"}, ValueError, "batch_norm"),
    "another model": (
        net, XY, own(lambda m, x, y: HOLDER.model(x).mean()), ValueError, "must use the model that it is given",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_one_clear_line(name):
    model, batch, loss, error, message = WRONG[name]
    with pytest.raises(error, match=message) as raised:
        run(model, batch, loss)
    assert "\n" not in str(raised.value)


def test_train_steps_keywords_are_taken_as_they_are():
    keywords = {"clip_grad_norm": 1.0, "accumulate_dtype": torch.float32, "verify": False, "memory_limit": "1GiB"}
    assert check_equivalence(net(), XY, loss_fn=CE, micro_batch_size="auto", **keywords).ok
    assert not check_equivalence(net(nn.BatchNorm1d(8)), XY, loss_fn=in_float32).ok


@pytest.mark.parametrize("batch_norm", ["exact", "frozen", "warn", "micro", "pooled"])
def test_what_train_step_does_about_batch_norm_is_what_is_checked(batch_norm):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4), nn.BatchNorm1d(4))
    result = check_equivalence(model, XY, loss_fn=CE, batch_norm=batch_norm)
    if batch_norm in ("exact", "frozen"):
        assert result.ok, str(result)
        assert result.max_error < 1e-12
    else:
        # The second, too, which the first hides.
        assert [(cause.kind, cause.where) for cause in result.causes] == [("batch_norm", "1"), ("batch_norm", "4")]
    if batch_norm == "exact":  # the loss sees all rows
        assert check_equivalence(model, XI, batch_norm="exact", **TOKEN_MEAN).ok


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_is_computed_there():
    result = check_equivalence(net(nn.Dropout(0.5)), XY, loss_fn=CE, device="cuda")
    assert result.ok
    assert result.device == "cuda"
    assert check_equivalence(net(nn.BatchNorm1d(8)).cuda(), (X.cuda(), Y.cuda()), loss_fn=CE).causes[0].where == "2"


@pytest.mark.parametrize("kind", ["TinyCausalLM", "Tagger"])
def test_labels_that_a_model_shifts_are_counted_from_the_second_position_on(kind):
    """Where the prompts are ignored, the first position says nothing, and one batch can't tell."""
    tokens = torch.randint(9, (8, 7), generator=seeded(0))
    labels = torch.where(torch.arange(7) < torch.arange(1, 9)[:, None] % 6 + 1, -100, tokens)
    layers = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9))
    model = type(kind, (Does,), {})(lambda m, *batch: next_token(m.layers, *batch), layers=layers).double()
    result = check_equivalence(model, (tokens, labels), compute_loss=lambda m, tokens, labels: m(tokens, labels))
    [cause] = result.causes
    assert cause.kind == "weight"
    assert ("(labels[:, 1:] != -100).sum(): that makes" in cause.message) is ("Causal" in kind)
    assert "(labels[:, 1:] != -100).sum()" in cause.message


DRAWN = {
    "NumPy's": lambda shape, own: np.random.standard_normal(shape),  # noqa: NPY002
    "NumPy's, of its own": lambda shape, own: own.standard_normal(shape),
    "Python's": lambda shape, own: [[random.random() for _ in range(shape[1])] for _ in range(shape[0])],
}


def noisy(draw, own, loss=CE):
    return lambda model, x, y: loss(model(x + torch.as_tensor(draw(tuple(x.shape), own), dtype=x.dtype)), y)


@pytest.mark.parametrize("whose", DRAWN)
def test_random_numbers_of_numpy_and_python_that_follow_rows_are_no_accusation_and_shared_ones_are_compared(
    whose, caplog
):
    draw, own = DRAWN[whose], np.random.default_rng(0)
    trained(net(), XY, compute_loss=noisy(draw, own))
    assert f"draws random numbers of {'its own' if 'own' in whose else whose}, which can't be assigned" in caplog.text
    with pytest.raises(ValueError, match="which can't be assigned to rows"):
        check_equivalence(net(), XY, compute_loss=noisy(draw, own))
    draw = lambda shape, own: DRAWN[whose]((1, 6), own)  # noqa: E731
    trained(net(), XY, compute_loss=noisy(draw, own))
    assert check_equivalence(net(), XY, compute_loss=noisy(draw, own)).ok
    centred = noisy(draw, own, lambda outputs, y: (outputs - outputs.mean(0)).square().mean())
    with pytest.raises(gradaccum.NotEquivalentError, match="looks across the batch"):
        trained(net(), XY, compute_loss=centred)


# What a proof leaves as it was.


class Quantised(torch.Tensor):
    """Eight bits and a scale, as torchao has them: nothing is defined on it but what a linear layer needs."""

    def __new__(cls, weight, scale):
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=scale.dtype)

    def __init__(self, weight, scale):
        self.weight, self.scale = weight, scale

    def __tensor_flatten__(self):
        return ["weight", "scale"], None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            x, weight = args[:2]
            return x @ (weight.weight.to(x) * weight.scale).T
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].weight, args[0].scale)
        raise NotImplementedError(f"Quantised has no {function}.")


def adapted():
    torch.manual_seed(0)
    weight = Quantised(torch.randint(-9, 9, (3, 4), dtype=torch.int8), torch.rand(()))
    run = lambda m, x: nn.functional.linear(x, m.base) + m.adapter(x)  # noqa: E731
    return Does(run, base=nn.Parameter(weight, requires_grad=False), adapter=nn.Linear(4, 3))


def test_weights_of_a_class_that_can_be_neither_compared_nor_copied_are_held_by_what_is_inside(caplog):
    model, plain, x, y = adapted(), adapted(), torch.randn(7, 4), torch.randn(7, 3)
    state, before = ModuleState({"": model}), model.base.weight.clone()
    model.base.weight.add_(1)
    state.put_back()
    assert torch.equal(model.base.weight, before)
    assert {"base.weight", "base.scale"} <= state.tensors().keys()
    nn.functional.mse_loss(plain(x), y).backward()
    optimizer = torch.optim.SGD(model.adapter.parameters(), lr=0.1)
    TrainStep(model, optimizer, loss_fn=nn.MSELoss(), micro_batch_size=3).backward(x, y)
    assert not caplog.messages  # nothing "could not be proven"
    torch.testing.assert_close(model.adapter.weight.grad, plain.adapter.weight.grad)


def test_layers_that_pack_their_weights_for_good_in_evaluation_stay_in_training():
    packing = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})(2, 2)
    model = nn.Sequential(packing, nn.Dropout())
    with evaluated(list(model.modules()), torch.device("cpu")):
        assert [module.training for module in model.modules()] == [False, True, False]
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_changing_the_last_bits_of_parameters_turns_a_sign_that_rounding_decides_and_is_undone(dtype):
    torch.manual_seed(0)
    parameter = torch.randn(1000, dtype=dtype)
    before, total = parameter.clone(), parameter.sum()
    signs = []
    for seed in range(NEARBY):
        with bits_flipped([parameter, parameter], seed):
            assert 500 < (parameter != before).sum() < 1000
            signs.append((parameter - before).sum().real > 0)
    assert torch.equal(parameter, before)
    assert parameter.sum() == total
    assert 2 <= sum(signs) <= NEARBY - 2
