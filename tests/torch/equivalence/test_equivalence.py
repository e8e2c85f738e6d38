"""check_equivalence: a certificate where micro-batches are exact, the culprit's name where they aren't."""

import copy
import logging
import random
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradaccum
from gradaccum.torch import TrainStep, check_equivalence
from tests.torch.equivalence.problems import Apply, Checkpointed, Codebook

CE = nn.CrossEntropyLoss()


def net(*middle):
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), *middle, nn.Linear(8, 4))


def rows(count=16):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(count, 6, generator=generator), torch.randint(4, (count,), generator=generator)


X, Y = rows()
IGNORED = torch.where(torch.arange(16) % 3 == 0, -100, Y)
TOKENS = torch.randint(1, 20, (10, 7), generator=torch.Generator().manual_seed(6))
MASK = (torch.arange(7) < 2 + torch.arange(10)[:, None] % 6).long()
LABELS = Y[:10]
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])
SAMPLE_WEIGHTS = torch.rand(16, generator=torch.Generator().manual_seed(7))


class Embedded(nn.Module):
    """Tokens, optionally with their mask, through some layers into a mean."""

    def __init__(self, layers=None, **embedding):
        super().__init__()
        self.embed = nn.Embedding(20, 8, **embedding)
        self.layers = layers
        self.head = nn.Linear(8, 4)

    def forward(self, tokens):
        tokens, mask = tokens if isinstance(tokens, tuple) else (tokens, None)
        h = self.embed(tokens)
        if isinstance(self.layers, nn.TransformerEncoder):
            h = self.layers(h, src_key_padding_mask=mask == 0)
        elif isinstance(self.layers, nn.LSTM):
            h, _ = self.layers(h)
        elif self.layers is not None:
            h = self.layers(h)
        return self.head(h).mean(1)


class Packed(Embedded):
    """Rows of different lengths in one packed sequence: noise inside it belongs to no row that could be told."""

    def forward(self, tokens):
        tokens, mask = tokens
        lengths = mask.sum(1)
        h = nn.utils.rnn.pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.layers(h)[1][0][-1])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.embed(tokens)).mean(1)


class Graph(nn.Linear):
    """Takes (x, shared matrix)."""

    def __init__(self):
        super().__init__(6, 4)

    def forward(self, inputs):
        x, matrix = inputs
        return super().forward(x @ matrix)


class BackwardMixes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean(0)


def transformer(dropout=0.2):
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def transformer_first():
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.2)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def steps_first():
    return nn.Sequential(transformer_first(), Apply(lambda h: h.mean(0)), nn.Linear(8, 4))


def gradient_penalty(model, x, y):
    x = x.clone().requires_grad_()
    outputs = model(x)
    (gradient,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return F.cross_entropy(outputs, y) + gradient.square().sum(1).mean()


def squares(model):
    return sum(p.square().sum() for p in model.parameters())


def contrastive(model, x, y):
    z = F.normalize(model(x), dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)).roll(1))


def token_mean(model, x, y):
    return F.cross_entropy(model(x), y)


def with_loss(compute_loss, **keywords):
    return {"compute_loss": compute_loss, **keywords}


EXACT = {
    "plain": (net, (X, Y), CE),
    "layer norm and group norm": (lambda: net(nn.LayerNorm(8), nn.GroupNorm(2, 8)), (X, Y), CE),
    "dropout": (lambda: net(nn.Dropout(0.5), nn.AlphaDropout(0.3)), (X, Y), CE),
    "noise": (lambda: net(Apply(lambda x: x + torch.randn_like(x) * torch.rand(len(x), 1))), (X, Y), CE),
    "Gumbel noise": (lambda: net(Apply(F.gumbel_softmax)), (X, Y), CE),
    "sampling": (lambda: net(Apply(lambda x: x * torch.multinomial(x.softmax(1).detach(), 2)[:, :1])), (X, Y), CE),
    "stochastic depth by Python's random": (lambda: net(Apply(lambda x: x * (random.random() < 0.5))), (X, Y), CE),
    "BatchNorm in eval mode": (lambda: net(nn.BatchNorm1d(8)).eval(), (X, Y), CE),
    "softmax shifted by the batch's maximum": (lambda: net(Apply(lambda x: (x - x.max()).softmax(1))), (X, Y), CE),
    "attention with masks and dropout": (lambda: Embedded(transformer()), ((TOKENS, MASK), LABELS), CE),
    "recurrent with dropout": (lambda: Embedded(nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True)), (TOKENS, LABELS), CE),
    "packed sequences": (lambda: Packed(nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True)), ((TOKENS, MASK), LABELS), CE),
    "sparse gradients": (lambda: Embedded(sparse=True), (TOKENS, LABELS), CE),
    "tied weights": (Tied, (TOKENS, LABELS), CE),
    "checkpointing": (lambda: Checkpointed(False), (X, Y), CE),
    "reentrant checkpointing": (lambda: Checkpointed(True), (X, Y), CE),
    "gradient penalty": (lambda: net(nn.Tanh()), (X, Y), with_loss(gradient_penalty)),
    "class weights and ignored targets": (net, (X, IGNORED), nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)),
    "a sum": (net, (X, Y), nn.CrossEntropyLoss(reduction="sum")),
    "a regulariser beside a mean": (
        net,
        (X, Y),
        with_loss(lambda model, x, y: token_mean(model, x, y) + 0.1 * squares(model)),
    ),
    "the right weight": (net, (X, IGNORED), with_loss(token_mean, weight=lambda x, y: (y != -100).sum())),
    "loss and weight": (net, (X, IGNORED), with_loss(lambda m, x, y: (token_mean(m, x, y), (y != -100).sum()))),
    "a shared input, said": (Graph, ((X[:6], torch.rand(6, 6)), Y[:6]), {"loss_fn": CE, "batch_dims": ((0, None), 0)}),
    "rows in the second dimension, said": (
        steps_first,
        (torch.randn(8, 8, 8), Y[:8]),
        {"loss_fn": CE, "batch_dims": (1, 0)},
    ),
    "two rows": (net, (X[:2], Y[:2]), CE),
}


def run(model, batch, loss):
    torch.manual_seed(0)
    return check_equivalence(model(), batch, **(loss if isinstance(loss, dict) else {"loss_fn": loss}))


@pytest.mark.parametrize("name", EXACT)
def test_there_is_no_false_alarm_for(name, caplog):
    model, batch, loss = EXACT[name]
    keywords = loss if isinstance(loss, dict) else {"loss_fn": loss}
    torch.manual_seed(0)
    trained = model()
    TrainStep(
        trained, torch.optim.SGD(trained.parameters(), lr=0.1), micro_batch_size=1 + len(batch[1]) // 3, **keywords
    )(*batch)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    result = run(*EXACT[name])
    assert result.ok, str(result)
    assert result.max_error <= 1e-12
    assert result.raise_if_different() is result
    assert result.causes == ()


def weighted_mean(weigh):
    """A mean of cross entropies with these weights of the rows."""

    def loss(model, x, y):
        weights = weigh(x)
        return (F.cross_entropy(model(x), y, reduction="none") * weights).sum() / weights.sum()

    return loss


def first_layers(*layers):
    return nn.Sequential(*layers, nn.Linear(6, 4))


def instance_norm():
    return first_layers(nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten())


class Centred(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 8), nn.Linear(8, 4))

    def forward(self, x):
        h = self[0](x)
        return self[1](h - h.detach().mean(0))


def nested_norm():
    return nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Dropout(0.1), nn.BatchNorm1d(8)), nn.Linear(8, 4))


XY, TOKEN_MEAN = (X, Y), with_loss(token_mean)
UNCLEAR = (X[:6], torch.rand(6, 6)), Y[:6]
INPUT, WEIGHT, LOSS = ("input", "batch[0]"), ("weight", "loss"), ("loss", "loss")


def mixing(function, *said):
    return lambda: net(Apply(function)), XY, CE, "mixes_rows", "2", said


def weighed(*said, batch=XY, compute_loss=token_mean, **keywords):
    return net, batch, with_loss(compute_loss, **keywords), *WEIGHT, said


def sample_weighted(model, x, y, w):
    return weighted_mean(lambda x: w)(model, x, y)


# Model, batch and loss; the cause's kind and where; what its message says. docs/equivalence.md has five more, and runs.
DIFFERENT = {
    "a BatchNorm inside": (nested_norm, XY, CE, "batch_norm", "1.1", ["'1.1' is a BatchNorm1d", 'batch_norm="exact"']),
    "BatchNorm on two rows": (lambda: net(nn.BatchNorm1d(8)), (X[:2], Y[:2]), CE, "batch_norm", "2", ["1 rows"]),
    "a detached batch mean": mixing(lambda x: x - x.mean(0).detach(), "'2' (Apply) mixes rows"),
    "mixing in the model's own forward": (Centred, XY, CE, "mixes_rows", "model", ["'model' (Centred) mixes rows"]),
    "a contrastive loss": (net, XY, with_loss(contrastive), *LOSS, ["not additive", "chunked"]),
    "ignored targets": weighed("weight=lambda x, y: (y != -100).sum()", batch=(X, IGNORED)),
    "sample weights": weighed(
        "weight=lambda x, y, w: w.sum()", batch=(X, Y, SAMPLE_WEIGHTS), compute_loss=sample_weighted
    ),
    "a wrong weight beside the loss": weighed(
        "what `compute_loss` returns with the loss",
        "or its rows with it",
        compute_loss=lambda *batch: (token_mean(*batch), 1),
    ),
    "an unknown divisor": weighed(
        "would have to weigh", "Return (loss, weight)", compute_loss=weighted_mean(lambda x: x[:, 0].abs())
    ),
    "a mean taken for a sum": weighed('Pass reduction="mean"', reduction="sum"),
    "an input with another number of rows": (
        *(Graph, ((X, torch.rand(6, 6)), Y), CE, "input", "batch[0][1]"),
        ["6 entries in dimension 0", "batch_dims=((0, None), 0)"],
    ),
    "a shared input with as many entries as rows": (
        *(Graph, UNCLEAR, CE, "input", "batch[0][1]"),
        ["not per-row", "batch_dims=((0, None), 0)"],
    ),
    "rows in the second dimension": (
        *(lambda: first_layers(Apply(lambda x: x.mean(0))), (torch.randn(5, 16, 6), Y), CE, *INPUT),
        ["batch_dims=(1, 0)"],
    ),
    "rows in the second dimension of as many steps as rows": (
        *(steps_first, (torch.randn(8, 8, 8), Y[:8]), CE, *INPUT),
        ["not per-row", "has its rows in dimension 1", "batch_dims=(1, 0)"],
    ),
    "a codebook that moves": (lambda: net(Codebook()), XY, CE, "buffer", "2", ["code"]),
    "running statistics of InstanceNorm": (instance_norm, XY, CE, "buffer", "1", ["running_mean"]),
    "a backward pass that mixes": (
        *(lambda: net(Apply(BackwardMixes.apply)), XY, CE, "unknown", "0"),
        ["The last module whose gradient differs is '0'", "custom backward pass"],
    ),
}


REPEAT = (  # what another of its kind is here for
    *("sample weights", "a mean taken for a sum", "rows in the second dimension"),
    *("an input with another number of rows", "running statistics of InstanceNorm"),
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in REPEAT else name for name in DIFFERENT]
)
def test_the_culprit_is_named_for(name):
    *setup, kind, where, parts = DIFFERENT[name]
    result = run(*setup)
    assert not result.ok
    assert (result.max_buffer_error if kind == "buffer" else result.max_error) > 1e-3
    assert kind != "buffer" or "buffers left behind are NOT" in str(result) or name == "a codebook that moves"
    assert [(cause.kind, cause.where) for cause in result.causes] == [(kind, where)]
    for part in parts:
        assert part in result.causes[0].message
    with pytest.raises(gradaccum.NotEquivalentError) as raised:
        result.raise_if_different()
    assert "differ from the large batch's" in str(raised.value)
    assert result.causes[0].message in str(raised.value)
    assert result.causes[0].message.split()[0] in str(result)


def test_of_two_causes_the_loss_is_named_once_the_model_is_right():
    for layer, expected in ((nn.BatchNorm1d(8), ("batch_norm", "2")), (nn.GroupNorm(2, 8), ("weight", "loss"))):
        result = run(lambda layer=layer: net(layer), (X, IGNORED), TOKEN_MEAN)
        assert [(cause.kind, cause.where) for cause in result.causes] == [expected]


def test_every_batch_norm_is_named_though_the_first_hides_the_others():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4), nn.BatchNorm1d(4))
    result = check_equivalence(model, (X, Y), loss_fn=CE)
    assert [cause.where for cause in result.causes] == ["1", "3"]


def test_a_language_model_divides_by_shifted_labels():
    labels = torch.where(MASK == 1, TOKENS, -100)

    def next_token(model, tokens, labels):
        logits = model.head(model.embed(tokens))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    result = check_equivalence(Tied(), (TOKENS, labels), compute_loss=next_token)
    (cause,) = result.causes
    assert "weight=lambda tokens, labels: (labels[:, 1:] != -100).sum()" in cause.message
    weight = lambda tokens, labels: (labels[:, 1:] != -100).sum()  # noqa: E731  # as the message has it
    assert check_equivalence(Tied(), (TOKENS, labels), compute_loss=next_token, weight=weight).ok


def test_a_model_that_returns_its_own_loss_in_a_dict_is_judged_as_a_whole():
    class Own(nn.Sequential):
        def forward(self, x, y):
            logits = super().forward(x)
            return {"loss": F.cross_entropy(logits, y), "logits": logits}

    def loss(model, batch):
        return model(**batch)["loss"]

    model = Own(*net(nn.Dropout(0.1)))
    assert check_equivalence(model, {"x": X, "y": Y}, compute_loss=loss).ok
    (cause,) = check_equivalence(model, {"x": X, "y": IGNORED}, compute_loss=loss).causes
    assert cause.kind == "weight"
    assert "weight=lambda batch: (batch['y'] != -100).sum()" in cause.message


def test_the_largest_error_is_that_of_a_hand_written_comparison():
    torch.manual_seed(0)
    model = net().double()
    x, y = X.double(), IGNORED
    result = check_equivalence(model, (x, y), micro_batch_size=8, **TOKEN_MEAN)
    (expected,) = torch.autograd.grad(F.cross_entropy(model(x), y), [model[0].weight])
    halves = [(x[:8], y[:8]), (x[8:], y[8:])]
    parts = [torch.autograd.grad(F.cross_entropy(model(a), b), [model[0].weight])[0] for a, b in halves]
    by_hand = ((parts[0] + parts[1]) / 2 - expected).abs().max() / expected.abs().max()
    found = next(difference.error for difference in result.differences if difference.name == "0.weight")
    assert found >= by_hand.item() - 1e-12
    assert result.partitions[0] == (8, 8)
    assert all(sum(sizes) == 16 for sizes in result.partitions)
    assert any(len(set(sizes)) > 1 for sizes in result.partitions)


def test_model_optimizer_gradients_batch_and_random_state_stay_as_they_were():
    model = net(nn.BatchNorm1d(8), nn.Dropout(0.5))
    teacher = nn.Sequential(nn.BatchNorm1d(6))
    optimizer = torch.optim.Adam(model.parameters())
    CE(model(X), Y).backward()
    optimizer.step()
    batch = (X.clone(), Y.clone())

    def loss(model, x, y):
        x.mul_(0.5)  # in place, as some do
        return F.cross_entropy(model(x), y) + teacher(x).square().mean()

    def everything():
        states = [one.state_dict() for one in (model, teacher, optimizer)]
        numpy = np.random.get_state()[1].tolist()  # noqa: NPY002  # the global generator is what users have
        drawn = [torch.get_rng_state(), random.getstate(), numpy]
        return copy.deepcopy([*states, [p.grad for p in model.parameters()], batch, drawn])

    before = everything()
    assert not check_equivalence(model, batch, compute_loss=loss).ok
    torch.testing.assert_close(everything(), before, rtol=0, atol=0)
    assert model.training
    assert model[0].weight.dtype == torch.float32
    assert not model._forward_hooks


def test_a_generator_of_the_users_own_stays_as_it_was():
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    model = net(Apply(lambda x: x * torch.rand(x.shape, generator=generator)))
    assert check_equivalence(model, (X, Y), loss_fn=CE).ok
    assert torch.equal(generator.get_state(), before)


def test_it_works_where_gradients_are_off():
    with torch.no_grad():
        assert check_equivalence(net(), (X, Y), loss_fn=CE).ok
    with torch.inference_mode():
        assert check_equivalence(net(), (X, Y), loss_fn=CE).ok


def test_a_model_that_computes_in_float32_inside_gets_its_rounding_allowed_with_a_note():
    model = net(Apply(lambda x: (x.float() @ torch.ones(8, 8, dtype=torch.float32)).double()), nn.Tanh())
    result = check_equivalence(model, (X, Y), loss_fn=lambda o, t: F.cross_entropy(o.float() / 3, t))
    assert result.ok
    assert 1e-9 < result.max_error < 1e-5
    assert result.tolerance == 1e-4
    assert any("computes in float32" in note for note in result.notes)


def test_a_loss_that_cannot_run_in_float64_is_checked_in_float32():
    def loss(outputs, targets):
        return F.cross_entropy(outputs, targets, weight=torch.ones(4))

    result = check_equivalence(net(), (X, Y), loss_fn=loss)
    assert result.ok
    assert result.precision == "float32"
    assert any("own dtype" in note for note in result.notes)
    assert not check_equivalence(net(nn.BatchNorm1d(8)), (X, Y), loss_fn=loss).ok


def test_what_it_cannot_exclude_it_says():
    result = check_equivalence(net().eval(), (X, Y), loss_fn=CE)
    assert any("eval mode" in note for note in result.notes)
    assert "evidence from one batch, not a proof" in result.notes[-1]
    assert "evidence" in str(result)

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = net(), nn.Linear(2, 2)

        def forward(self, x):
            return self.used(x)

    notes = check_equivalence(Half(), (X, Y), loss_fn=CE).notes
    assert any("No gradient reached 2 parameters" in note and "unused.weight" in note for note in notes)
    notes = run(*EXACT["packed sequences"]).notes
    assert any("belong to no row" in note for note in notes)


class Uncopyable(nn.Module):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("model", "batch", "keywords", "error", "message"),
    [
        (net(), (X[:1], Y[:1]), {"loss_fn": CE}, ValueError, "at least 2 rows, to be split. Received: 1"),
        (net(Uncopyable()), (X, Y), {"loss_fn": CE}, TypeError, "model can't be copied"),
        (net(), (X, Y), {"compute_loss": lambda m, x, y: m(x).detach().mean()}, ValueError, "loss has no gradient"),
        (net(), (X, Y), {"compute_loss": lambda m, x, y: m(x).argmax(1) * 1.0}, ValueError, "must be a scalar"),
        (net(), (X * float("nan"), Y), {"loss_fn": CE}, ValueError, "own loss is nan"),
        (net().requires_grad_(False), (X, Y), {"loss_fn": CE}, ValueError, "No parameter of the model requires"),
        (nn.Sequential(nn.LazyLinear(4)), (X, Y), {"loss_fn": CE}, ValueError, "run it once before the check"),
        (net(), (X, Y), {}, ValueError, "exactly one of `loss_fn`"),
        (net(), (X, Y), {"loss_fn": CE, "micro_batch_size": 0}, ValueError, "micro_batch_size"),
        (net(), (X, Y), {"loss_fn": CE, "reductoin": "sum"}, TypeError, "unexpected keyword argument 'reductoin'"),
        (lambda x: x, (X, Y), {"loss_fn": CE}, TypeError, "must be a torch.nn.Module"),
        (net(), ("text", 3), {"loss_fn": CE}, ValueError, "has no tensor with rows"),
    ],
)
def test_bad_input_is_one_clear_line(model, batch, keywords, error, message):
    with pytest.raises(error, match=message) as raised:
        check_equivalence(model, batch, **keywords)
    assert "\n" not in str(raised.value)


def test_a_loss_on_another_model_is_told_and_leaves_that_model_alone():
    class Holder:
        model = net()

    def loss(model, x, y):
        return Holder.model(x).mean()

    with pytest.raises(ValueError, match="must use the model that it is given"):
        check_equivalence(net(), (X, Y), compute_loss=loss)


def test_train_steps_keywords_are_taken_as_they_are():
    keywords = {"clip_grad_norm": 1.0, "accumulate_dtype": torch.float32, "verify": False, "memory_limit": "1GiB"}
    assert check_equivalence(net(), (X, Y), loss_fn=CE, micro_batch_size="auto", **keywords).ok


def test_what_train_step_does_about_batch_norm_is_what_is_checked():
    def model():
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4), nn.BatchNorm1d(4))

    for batch_norm in ("exact", "frozen"):
        result = check_equivalence(model(), (X, Y), loss_fn=CE, batch_norm=batch_norm)
        assert result.ok, str(result)
        assert result.max_error < 1e-12
    for batch_norm in ("warn", "micro", "pooled"):
        result = check_equivalence(model(), (X, Y), loss_fn=CE, batch_norm=batch_norm)
        assert {cause.kind for cause in result.causes} == {"batch_norm"}
    assert check_equivalence(model(), (X, IGNORED), batch_norm="exact", **TOKEN_MEAN).ok  # the loss sees all rows
    with pytest.raises(ValueError, match="batch_norm"):
        check_equivalence(model(), (X, Y), loss_fn=CE, batch_norm="exakt")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_it_is_computed_there():
    result = check_equivalence(net(nn.Dropout(0.5)), (X, Y), loss_fn=CE, device="cuda")
    assert result.ok
    assert result.device == "cuda"
    assert check_equivalence(net(nn.BatchNorm1d(8)).cuda(), (X.cuda(), Y.cuda()), loss_fn=CE).causes[0].where == "2"


@pytest.mark.parametrize("count", [8, *(pytest.param(count, marks=pytest.mark.slow) for count in (4, 16))])
def test_rows_that_cancel_each_other_to_zero_are_no_difference(count):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(count, 4, dtype=torch.float64), torch.randn(count, 3, dtype=torch.float64)
    batch = torch.cat([x, x]), torch.cat([y, -y])
    assert check_equivalence(model, batch, compute_loss=lambda m, x, y: (m(x) * y).sum(1).mean()).ok
    wrong = check_equivalence(model, batch, compute_loss=lambda m, x, y: (m(x) * y).sum(1).mean() + m(x).std())
    assert not wrong.ok


class TinyCausalLM(nn.Module):
    """Predicts the next token, as a causal language model that shifts its labels by one."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)

    def forward(self, tokens, labels):
        logits = self.head(self.embed(tokens))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@pytest.mark.parametrize("causal", [True, False])
def test_labels_that_a_model_shifts_are_counted_from_the_second_position_on(causal):
    """Where the prompts are ignored, the first position says nothing, and one batch can't tell."""
    tokens = torch.randint(9, (8, 7), generator=torch.Generator().manual_seed(0))
    labels = torch.where(torch.arange(7) < torch.arange(1, 9)[:, None] % 6 + 1, -100, tokens)
    kind = TinyCausalLM if causal else type("Tagger", (TinyCausalLM,), {})
    result = check_equivalence(
        kind().double(), (tokens, labels), compute_loss=lambda model, tokens, labels: model(tokens, labels)
    )
    [cause] = result.causes
    assert cause.kind == "weight"
    assert ("(labels[:, 1:] != -100).sum(): that makes" in cause.message) is causal
    assert "(labels[:, 1:] != -100).sum()" in cause.message
