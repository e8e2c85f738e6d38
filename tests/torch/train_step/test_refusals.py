"""What TrainStep can't do right is refused when it is built, or at the first batch, with what to do."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradaccum.torch
from gradaccum import NotEquivalentError
from gradaccum.torch import TrainStep, check_equivalence
from gradaccum.torch.packing import causal_lm
from tests.torch.train_step.problems import batches, network, plain_loss, randn
from tests.torch.train_step.steps import left_as_it_was, step_of

LOSS = nn.CrossEntropyLoss()
X, Y = batches(24)[0]

ARGUMENTS = [
    ({"loss_fn": None}, "exactly one"),
    ({"loss_fn": LOSS, "compute_loss": plain_loss}, "exactly one"),
    ({"loss_fn": nn.CrossEntropyLoss}, r"the class CrossEntropyLoss. Call it: loss_fn=CrossEntropyLoss\(\)"),
    *(({"micro_batch_size": size}, "micro_batch_size") for size in (0, 2.5, True)),
    ({"micro_batch_size": "big"}, "auto"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"reduction": "none"}, "reduction"),
    ({"weight": 3}, "weight"),
    ({"clip_grad_norm": -1}, "clip_grad_norm"),
    ({"autocast": "bfloat16"}, "autocast"),
    ({"accumulate_dtype": torch.int8}, "accumulate_dtype"),
    ({"batch_norm": "off"}, "batch_norm"),
    *(({"memory_limit": limit}, "memory_limit") for limit in ("lots", -5)),
    ({"sync": "never"}, "sync"),
    ({"scaler": 3}, "`scaler` must be a torch.amp.GradScaler. Received: scaler=3"),
    ({"offload": True}, "exact"),
    *(({"groups": groups}, "groups") for groups in (0, -2, True, 2.5, "ids")),
    ({"pack": 3, "max_tokens": 24}, "Received: 3 of type int"),
    ({"head": "auto"}, r"no argument `head` any more.*torch\.nn\.LinearCrossEntropyLoss\(features, classes"),
]


@pytest.mark.parametrize(("keywords", "message"), ARGUMENTS, ids=str)
def test_wrong_arguments_are_told_with_what_was_received(keywords, message):
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        step_of(network(), **keywords)
    assert "Received" in str(raised.value)


def with_optimizer(make, **keywords):
    model = network()
    step_of(model, make(model.parameters()), **keywords)


sgd = partial(torch.optim.SGD, lr=0.1)
PACKED = nn.utils.rnn.pack_sequence([torch.randn(3, 5), torch.randn(2, 5)])
EMPTY = {"input_ids": torch.ones(4, 0).long(), "attention_mask": torch.ones(4, 0)}
TEXT = {"input_ids": torch.ones(6, 20), "attention_mask": torch.ones(6, 20)}
TOKENS = {"compute_loss": plain_loss, "max_tokens": 24}
SEQUENCE = "PackedSequence cannot be cut into rows.*pack them in the model"


def call(*batch, model=None, **keywords):
    return lambda: step_of(network() if model is None else model, **{"micro_batch_size": 4, **keywords})(*batch)


def by_groups(groups, size=4):
    return call(X, Y, groups=groups, micro_batch_size=size)


WHOLE = "one whole number for each of the batch's 24 rows. Received: "
CALLS = {
    TypeError: {
        "a loss without its keyword": (
            lambda: TrainStep(network(), None, LOSS),
            r"by keyword: loss_fn=... .* Received: CrossEntropyLoss\(\) as the third",
        ),
        "no optimizer": (lambda: with_optimizer(list), r"torch\.optim\.Optimizer"),
        "None among optimizers": (lambda: with_optimizer(lambda p: [sgd(p), None]), r"torch\.optim\.Optimizer"),
        "no targets": (call(X), r"The batch has no targets, .*'target'. Call step\(x, y\), or give compute_loss"),
        "a pack of nothing": (
            call(TEXT, torch.ones(6), pack=lambda *_: None, **TOKENS),
            "a tuple of 2, as it receives them. Received: None",
        ),
        "names as ids": (by_groups(lambda x, y: ["a"] * 24), WHOLE + ".'a'.* Number them"),
        "no ids": (by_groups(lambda x, y: None), WHOLE + "None of type NoneType"),
    },
    ValueError: {
        "an empty list": (lambda: step_of(network(), []), "Received: an empty list"),
        "a wrapped optimizer": (
            lambda: with_optimizer(lambda p: gradaccum.torch.optim.Optimizer(sgd(p), steps=2)), "inner optimizer"
        ),
        "a closure and a scaler": (
            lambda: with_optimizer(torch.optim.LBFGS, scaler=torch.amp.GradScaler("cpu")), "closure"
        ),
        "another model's optimizer": (
            lambda: step_of(network(), sgd(network().parameters()))(X, Y),
            "None of the parameters of SGD is one of the model's",
        ),
        "a mean that is to be a sum": (lambda: step_of(network(), reduction="sum"), "contradicts"),
        "one value per row": (lambda: step_of(network(), loss_fn=nn.MSELoss(reduction="none")), "reduction='none'"),
        "three arguments": (call(X, Y, Y), r"takes batches of \(x, y\). Received: 3 arguments"),
        "no rows": (call(X[:0], Y[:0]), "0 rows"),
        "rows that don't match": (
            call({"x": X, "y": Y[:4]}, [torch.zeros(7)], compute_loss=plain_loss),
            r"(?s)same number of rows.*\[0\]\['x'\].*\(24, 5\).*\['y'\].*\(4,\).*batch\[1\]\[0\].*\(7,\).*batch_dims",
        ),
        "a packed sequence": (call(PACKED, compute_loss=len), SEQUENCE),
        "a packed sequence beside": (call(PACKED, Y[:2], compute_loss=len), SEQUENCE),
        "a packed sequence inside": (call({"x": PACKED, "y": Y[:2]}, compute_loss=len), SEQUENCE),
        "tokens without a mask": (call(X, Y, max_tokens=24), "attention_mask"),
        "tokens without columns": (call(EMPTY, **TOKENS), "The attention mask has no columns"),
        "rows in columns, by tokens": (
            call(TEXT, batch_dims=1, **TOKENS),
            r"batch_dims=0.*20 rows and an attention mask of shape \(6, 20\)",
        ),
        "pack without tokens": (lambda: step_of(network(), pack=causal_lm), "up to `max_tokens` tokens"),
        "pack and groups": (call(TEXT, pack=causal_lm, groups=1, **TOKENS), "`groups` keeps rows together"),
        "an odd group": (by_groups(5, "auto"), "groups=5 keeps 5 rows together, but the batch has 24"),
        "a large group": (by_groups(8), r"group 0 \(8 rows\) in micro_batch_size=4. Its rows stay together"),
        "too few ids": (by_groups(torch.arange(23)), WHOLE + "shape .23,."),
        "ids that are fractions": (by_groups(torch.rand(24)), "one whole number for each"),
        "ids of elements": (by_groups(lambda x, y: x.long()), WHOLE + "shape .24, 5."),
        "groups, exact": (lambda: step_of(network(), groups=2, batch_norm="exact"), "Leave out `groups`"),
    },
    NotEquivalentError: {
        "weights that don't add up": (
            call(X, Y, compute_loss=plain_loss, weight=lambda x, y: 1.0, verify=True),
            "weighed by what `weight` returns. Leave `weight` out",
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("error", "program", "message"),
    [pytest.param(error, *case, id=name) for error, cases in CALLS.items() for name, case in cases.items()],
)
def test_it_is_refused_with_what_to_do(error, program, message):
    with pytest.raises(error, match=message):
        program()


@pytest.mark.parametrize("groups", [0, -2, True, 2.5, "ids"])
def test_the_check_refuses_the_groups_that_the_step_refuses(groups):
    with pytest.raises((TypeError, ValueError), match="groups"):
        check_equivalence(network(), (X, Y), compute_loss=plain_loss, groups=groups)


def test_arrays_are_refused_where_the_model_or_the_loss_takes_none_in_later_batches_too():
    step, (x, y) = step_of(network()), (X, Y)
    for batch in ((x.numpy(), y.numpy()), (x, y.numpy()), (x, y), (x.numpy(), y), (x, y.numpy())):
        if all(isinstance(part, torch.Tensor) for part in batch):
            assert step(batch).isfinite()  # the pair as one argument
            assert step(list(batch)).isfinite()
        else:
            with pytest.raises(TypeError, match=r"Received: a NumPy array.*Pass torch.from_numpy\(x\)"):
                step(*batch)
    in_a_dict = call({"x": x.numpy()}, compute_loss=lambda model, batch: model(batch["x"].float()).sum())
    with pytest.raises(TypeError, match=r"Received: a NumPy array.*no attribute 'float'"):
        in_a_dict()


@pytest.mark.parametrize("make", [nn.MSELoss, nn.CrossEntropyLoss])
@pytest.mark.parametrize("verify", [True, False])
def test_a_loss_that_becomes_a_sum_is_refused(make, verify):
    loss_fn, model = make(), network()
    step = step_of(model, loss_fn=loss_fn, micro_batch_size=4, verify=verify)
    batch = (X, randn(24, 3)) if make is nn.MSELoss else (X, Y)
    for reduction in ("mean", "mean", "sum", "mean"):
        loss_fn.reduction = reduction
        if reduction == "mean":
            step(*batch)
        else:
            with left_as_it_was(model, ValueError, "was 'mean' and is 'sum' now.*Make another TrainStep"):
                step(*batch)


@pytest.mark.parametrize("shape", [(12,), (12, 1), (12, 2)])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "loss",
    [
        *(lambda weight, kind=kind: kind(weight=weight) for kind in (nn.BCEWithLogitsLoss, nn.BCELoss)),
        lambda weight: nn.BCEWithLogitsLoss(pos_weight=weight),
        lambda weight: partial(F.binary_cross_entropy_with_logits, weight=weight),
    ],
    ids=["BCEWithLogitsLoss", "BCELoss", "pos_weight", "function"],
)
def test_a_weight_for_each_row_that_the_loss_holds_is_refused_by_name(loss, shape, nested):
    columns = shape[1] if len(shape) > 1 else 1
    model = nn.Sequential(nn.Linear(3, columns), nn.Sigmoid(), *([nn.Flatten(0)] if len(shape) == 1 else []))
    step = step_of(model, loss_fn=loss(torch.rand(shape)), micro_batch_size=4, verify=True)
    targets = torch.rand(12) if len(shape) == 1 else torch.rand(12, columns)
    with pytest.raises(ValueError, match="weight for each of 12 rows, and was given 4 rows"):
        step(torch.randn(12, 3), (targets,) if nested else targets)


# What is no loss with its weight, in a step and in a wrapped optimizer's backward pass.

NO_WEIGHT = {
    "no weight": (lambda m, x: {"a": (m(x).mean(), 1), "b": m(x).mean()}, "loss term 'b' comes without its weight"),
    "no weight in a list": (lambda m, x: [m(x).mean(), m(x).mean()], "loss term 0 comes without its weight"),
    **{
        f"a weight of {weight}": (
            lambda m, x, weight=weight: {"a": (m(x).mean(), weight)},
            "loss term 'a': A weight must be a finite number >= 0",
        )
        for weight in (-1, float("nan"), "3", None, torch.tensor(True))
    },
    "a differentiable weight": (
        lambda m, x: {"a": (m(x).mean(), m(x).exp().sum())}, "'a': A weight must not require a gradient"
    ),
    "no tensor": (lambda m, x: {"a": (1.0, 3)}, "loss term 'a' must be a tensor"),
    "no scalar": (lambda m, x: {"a": (m(x), 3)}, "loss term 'a' must be a scalar"),
    "no terms": (lambda m, x: {}, "has no terms.*a weight of 0"),
    "a single one of no scalar": (lambda m, x: m(x), r"must be a scalar.*shape \(4, 1\)"),
    "a single one that is no tensor": (lambda m, x: None, "must be a tensor. Received: loss=None"),
}  # fmt: skip
IN_A_STEP = {
    "a single one": (lambda m, x: (m(x).mean(), m(x).exp().sum()), "A weight must not require a gradient"),
    "in the first micro-batch only": (
        lambda m, x: (m(x).mean(), 4) if len(x) == 4 else m(x).mean(),
        "must return .loss, weight. always or never",
    ),
    "in the last micro-batch only": (
        lambda m, x: (m(x).mean(), 3) if len(x) == 3 else m(x).mean(),
        "must return .loss, weight. always or never",
    ),
    "pairs in a tuple": (lambda m, x: ((m(x).mean(), 1), (m(x).mean(), 1)), "a tuple of 2 pairs"),
    "detached": (lambda m, x: {"a": (m(x).mean().detach(), 1)}, "None of the losses requires a gradient: 'a'"),
    "sometimes": (lambda m, x: {"a": (m(x).mean(), 1)} if len(x) == 4 else m(x).mean(), "always or never"),
}  # fmt: skip
BESIDE_WEIGHT = {
    "a pair": (lambda m, x: {"a": (m(x).mean(), 1)}, "'a' comes as .loss, weight.", lambda x: {"a": 1}),
    "unknown": (lambda m, x: dict.fromkeys("ab", m(x).mean()), "no entry for the loss term 'b'", lambda x: {"a": 1}),
    "missing": (lambda m, x: {"a": m(x).mean()}, "gives 2 for the loss term 'b'", lambda x: {"a": 1, "b": 2}),
    "one loss": (lambda m, x: m(x).mean(), "`weight` names loss terms", lambda x: {"a": 1}),
    "one weight": (lambda m, x: {"a": m(x).mean()}, "a number for each of the loss terms", lambda x: 1),
    "negative": (lambda m, x: {"a": m(x).mean()}, "loss term 'a': A weight must be", lambda x: {"a": -1}),
}


@pytest.mark.parametrize(
    ("compute_loss", "message", "weight"),
    [*((*case, None) for case in {**NO_WEIGHT, **IN_A_STEP}.values()), *BESIDE_WEIGHT.values()],
    ids=[*NO_WEIGHT, *IN_A_STEP, *(f"{name} beside `weight`" for name in BESIDE_WEIGHT)],
)
def test_what_is_no_loss_with_its_weight_is_an_error_that_names_the_term(compute_loss, message, weight):
    with pytest.raises((TypeError, ValueError), match=message):
        step_of(nn.Linear(5, 1), compute_loss=compute_loss, micro_batch_size=4, weight=weight)(torch.randn(7, 5))
