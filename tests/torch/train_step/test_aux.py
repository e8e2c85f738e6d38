"""`has_aux`: what the loss returns beside itself is that of the large batch."""

import pytest
import torch
from torch import nn

from gradaccum.torch import TrainStep

OUT = "out of memory"


def build(how=None, rows=10, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(rows, 4, dtype=torch.float64), torch.randint(3, (rows,))
    loss = {"loss_fn": nn.CrossEntropyLoss()} if how is None else {"compute_loss": how}
    options = {"micro_batch_size": 4, "has_aux": True, **loss, **options}
    return model, (x, y), TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def cross_entropy(model, x, y):
    outputs = model(x)
    accuracy = (outputs.argmax(1) == y).double().mean()
    return nn.functional.cross_entropy(outputs, y), {
        "outputs": outputs,
        "scores": [accuracy, accuracy.item()],
        "y": y,
        "none": None,
    }


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("call", ["__call__", "backward"])
def test_rows_are_concatenated_and_scalars_averaged_beside_the_same_update(call):
    model, (x, y), step = build(cross_entropy)
    expected_loss, expected = cross_entropy(model, x, y)
    loss, aux = getattr(step, call)(x, y)
    close(loss, expected_loss.detach())
    close(aux["outputs"], expected["outputs"].detach())
    assert not aux["outputs"].requires_grad
    close(aux["scores"][0], expected["scores"][0])
    assert aux["scores"][1] == pytest.approx(expected["scores"][1], abs=1e-12)
    assert aux["y"].equal(y)
    assert aux["none"] is None
    plain, batch, other = build(lambda *a: cross_entropy(*a)[0], has_aux=False)
    getattr(other, call)(*batch)
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.equal(two)


def test_with_loss_fn_the_aux_is_the_models_outputs():
    model, (x, y), step = build()
    y[::3] = -100
    for _ in range(3):  # with and without a proof
        expected = model(x).detach()
        close(step(x, y)[1], expected)


@pytest.mark.parametrize("where", ["returned", "weight"])
def test_a_scalar_is_averaged_by_what_the_loss_is_a_mean_over(where):
    def compute_loss(model, x, y):
        counts = y > 0
        loss = (nn.functional.cross_entropy(model(x), y, reduction="none") * counts).sum()
        mean = x[:, 0][counts].mean()  # NaN where nothing counts
        return (loss / counts.sum(), counts.sum(), mean) if where == "returned" else (loss / counts.sum(), mean)

    weight = (lambda x, y: (y > 0).sum()) if where == "weight" else None
    _, (x, y), step = build(compute_loss, weight=weight)
    y[4:7] = 0
    close(step(x, y)[1], x[:, 0][y > 0].mean())


def test_beside_a_loss_with_a_divisor_a_mean_is_weighed_by_it():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64))
    model, (x, y), step = build(loss_fn=loss, aux="mean", rows=8)
    weights = [loss.weight[y[rows]].sum() for rows in (slice(4), slice(4, 8))]
    parts = [model(x[rows]).detach() for rows in (slice(4), slice(4, 8))]
    close(step(x, y)[1], (weights[0] * parts[0] + weights[1] * parts[1]) / sum(weights))


def test_terms_by_name_take_an_aux_whose_scalars_are_averaged_by_rows():
    def compute_loss(model, x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        of_some = nn.functional.cross_entropy(model(x), y, ignore_index=0)
        return {"a": (loss, len(x)), "b": (of_some, (y > 0).sum())}, (x[:, 0].mean(), x)

    _, (x, y), step = build(compute_loss)
    _, (mean, rows) = step(x, y)
    close(mean, x[:, 0].mean())
    assert rows.equal(x)


def test_groups_that_lie_apart_come_back_in_the_batchs_order():
    _, (x, y), step = build(groups=torch.tensor([3, 1, 0, 3, 2, 1, 0, 2, 0, 1]), micro_batch_size=3)
    expected = step.model(x).detach()
    close(step(x, y)[1], expected)


def tagging(model, batch):
    mask = batch["attention_mask"]
    hidden = model(batch["input_ids"])[..., 0] * mask
    return hidden.sum() / mask.sum(), mask.sum(), {"rows": hidden.sum(1), "tokens": hidden}


def texts(name):
    torch.manual_seed(0)
    mask = (torch.arange(9) < torch.tensor([3, 9, 1, 7, 9, 2, 8])[:, None]).long()
    model, batch = (
        nn.Embedding(20, 2).double(),
        {"input_ids": torch.randint(1, 20, (7, 9)) * mask, "attention_mask": mask},
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def compute_loss(model, batch):
        *loss, aux = tagging(model, batch)
        return *loss, aux[name]

    return model, batch, TrainStep(model, optimizer, compute_loss=compute_loss, max_tokens=18, has_aux=True)


def test_rows_that_max_tokens_sorts_come_back_in_the_batchs_order():
    model, batch, step = texts("rows")
    expected = tagging(model, batch)[2]["rows"].detach()
    close(step(batch)[1], expected)


def test_rows_of_other_lengths_under_max_tokens_are_an_error_that_names_aux():
    model, batch, step = texts("tokens")
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match=r"aux has rows of other shapes(.|\n)*`aux=`"):
        step(batch)
    assert model.weight.equal(before)


def test_a_prefix_says_what_becomes_of_each_part():
    def compute_loss(model, x, y):
        loss = nn.functional.cross_entropy(model(x), y)
        return loss, {"a": (y.bincount(minlength=3), len(x)), "b": f"of {len(x)} rows", "c": x[:1].sum(0), "d": x}

    _, (x, y), step = build(compute_loss, aux={"a": "sum", "b": "last", "c": "mean", "d": "auto"})
    _, aux = step(x, y)
    assert aux["a"][0].equal(y.bincount(minlength=3))
    assert aux["a"][1] == 10
    assert aux["b"] in ("of 2 rows", "of 3 rows")
    assert aux["c"].shape == (4,)
    assert aux["d"].equal(x)


def aux_of(make):
    return lambda model, x, y: (nn.functional.cross_entropy(model(x), y), make(x))


@pytest.mark.parametrize(
    ("how", "options", "message"),
    [
        (aux_of(lambda x: {"a": x[0]}), {"rows": 9}, r"aux\['a'\] has no row for each of the 3 rows.*aux=\"mean\""),
        (aux_of(lambda x: ["text"]), {}, r"aux\[0\] has no row.*'text'"),
        (aux_of(lambda x: x), {"aux": {"a": "mean"}}, "prefix of the structure"),
        (aux_of(lambda x: "text"), {"aux": "sum"}, "neither a tensor nor a number"),
        (lambda model, x, y: model(x).mean(), {}, r"\(loss, aux\) or \(loss, weight, aux\). Received: a Tensor"),
        (lambda model, x, y: (model(x).mean(), model(x)), {"has_aux": False}, "has_aux=True"),
        (lambda model, x, y: (model(x).mean(), {"a": x}), {"has_aux": False}, "has_aux=True"),
        (lambda model, x, y: (model(x).mean(), 1, x), {"has_aux": False}, "has_aux=True"),
    ],
)  # fmt: skip
def test_what_cannot_be_put_together_is_an_error_before_any_update(how, options, message):
    model, batch, step = build(how, **options)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises((TypeError, ValueError), match=message):
        step(*batch)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aux": "first"}, "`aux` must be one of 'auto'"),
        ({"aux": {"a": 3}}, r"aux\['a'\]=3"),
        ({"has_aux": False, "aux": "mean"}, "give has_aux=True"),
        ({"has_aux": 1}, "True or False"),
        ({"compile": True}, "compile="),
        ({"reproducible": True}, "reproducible=True"),
        ({"batch_norm": "exact"}, 'batch_norm="exact"'),
    ],
)
def test_what_has_aux_does_not_go_with_is_refused_by_name(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build(**options)


def test_closures_are_refused():
    model, _, _ = build()
    with pytest.raises(ValueError, match="can't be combined with LBFGS"):
        TrainStep(model, torch.optim.LBFGS(model.parameters()), loss_fn=nn.MSELoss(), has_aux=True)


def test_a_window_that_starts_over_out_of_memory_collects_each_row_once():
    def compute_loss(model, x, y):
        if len(x) > 2 and not x[0, 0] > 0 and step.updates:
            raise torch.OutOfMemoryError(OUT)
        return nn.functional.cross_entropy(model(x), y), (x, len(x), 1)

    _, (x, y), step = build(compute_loss, aux=("auto", "sum", "sum"))
    x[:, 0] = x[:, 0].abs()
    step(x, y)
    x[5:, 0] *= -1
    _, (rows, number, micro_batches) = step(x, y)
    assert rows.equal(x)
    assert number == 10
    assert micro_batches == 5
