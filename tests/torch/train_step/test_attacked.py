"""What was silently wrong, or unclear, in hostile hands: each is right now, or named."""

import copy
import functools
import pickle
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import gradaccum
import gradaccum.torch
from gradaccum.torch import TrainStep
from tests.reference import relative_error
from tests.torch.train_step.test_train_step import assert_same_updates, left_as_it_was, step_of

pytestmark = pytest.mark.usefixtures("float64")


class Raters(nn.Module):
    """A bag of words."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(40, 8), nn.Linear(8, 1)

    def forward(self, batch):
        mask = batch["attention_mask"][..., None].double()
        return self.out((self.embedding(batch["input_ids"]) * mask).sum(1) / mask.sum(1))[:, 0]


def ratings_loss(model, batch):
    return (model(batch) - batch["ratings"].flatten(1).mean(1)).square().mean()


def rated(columns, ratings=(14,), rows=20):
    generator = torch.Generator().manual_seed(columns)
    lengths = torch.randint(2, columns + 1, (rows,), generator=generator)
    mask = (torch.arange(columns) < lengths[:, None]).long()
    ids = torch.randint(1, 40, (rows, columns), generator=generator) * mask
    ids[0, :2] = torch.tensor([1, 39])
    return {"input_ids": ids, "attention_mask": mask, "ratings": torch.rand(rows, *ratings, generator=generator)}


def trained_on(batches, **keywords):
    torch.manual_seed(0)
    assert_same_updates(Raters(), [(batch,) for batch in batches], ratings_loss, **keywords)


@pytest.mark.parametrize("ratings", [(14,), (14, 4)])
@pytest.mark.parametrize("columns", [(10, 14), (10, 11, 14, 12, 14)])
def test_max_tokens_leaves_what_is_as_wide_as_one_batchs_text_by_chance(columns, ratings):
    trained_on([rated(n, ratings) for n in columns], max_tokens=40)


def test_max_tokens_names_what_it_takes_for_text_where_the_first_batch_is_as_wide():
    with pytest.raises(gradaccum.NotEquivalentError, match=r"batch\[0\]\['ratings'\].*tensor\[:, None\]"):
        trained_on([rated(14)], max_tokens=40)
    trained_on([rated(14, (1, 14))], max_tokens=40)


@pytest.mark.parametrize("at", [2, 3, 4])
def test_max_tokens_is_proven_anew_where_something_else_becomes_as_wide_as_the_text(at):
    batches = [rated(9 + index, (9 + index,) if index == at else (1,)) for index in range(1, at + 1)]
    with pytest.raises(gradaccum.NotEquivalentError, match="ratings"):
        trained_on(batches, max_tokens=40)


class Unmasked(Raters):
    def forward(self, batch):
        return self.out(self.embedding(batch["input_ids"]).mean(1))[:, 0]


def test_a_model_that_ignores_the_mask_is_named_with_max_tokens_where_padding_comes_late():
    step = step_of(Unmasked(), compute_loss=ratings_loss, max_tokens=40, verify=True)
    full = rated(6)
    full["attention_mask"].fill_(1)
    full["input_ids"].clamp_(min=1)
    step(full)
    with pytest.raises(gradaccum.NotEquivalentError, match="Cutting off columns"):
        step(rated(7))


def test_max_tokens_needs_rows_in_front_and_columns():
    make = functools.partial(step_of, Raters(), compute_loss=ratings_loss, max_tokens=40, verify=True)
    turned = {name: tensor.T for name, tensor in rated(6, (6,)).items()}
    with pytest.raises(ValueError, match=r"batch_dims=0.*20 rows and an attention mask of shape \(6, 20\)"):
        make(batch_dims=1)(turned)
    empty = {"input_ids": torch.ones(4, 0).long(), "attention_mask": torch.ones(4, 0), "ratings": torch.ones(4, 2)}
    with pytest.raises(ValueError, match="The attention mask has no columns"):
        make()(empty)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_a_leaf_that_is_taken_for_text_by_its_shape_is_named_and_nothing_is_cut(caplog):
    class Wide(Raters):
        def forward(self, batch):
            return nn.functional.linear(batch["features"], torch.ones(1, 14))[:, 0] * super().forward(batch)

    model = Wide()
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), compute_loss=ratings_loss, max_tokens=40)
    batch = rated(14, (3,))
    batch["features"] = torch.ones(20, 14)
    expected = ratings_loss(model, batch).item()
    assert step(batch).item() == pytest.approx(expected, rel=1e-12)
    assert "padding is not cut off" in caplog.text
    assert "['features']" in caplog.text
    assert "tensor[:, None]" in caplog.text


class Counting(nn.Module):
    def __init__(self, entries, **keywords):
        super().__init__()
        self.embedding, self.out = nn.Embedding(entries, 6, scale_grad_by_freq=True), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(self.embedding(x).mean(1))


def test_an_embedding_that_counts_indices_is_refused_whatever_the_rows():
    x, y = torch.randint(50_000, (64, 4)), torch.randint(3, (64,))
    model = Counting(50_000)
    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy, micro_batch_size=16)
    with pytest.raises(gradaccum.NotEquivalentError, match="'embedding' .*scale_grad_by_freq=True"):
        step(x, y)
    with pytest.raises(gradaccum.NotEquivalentError, match="'embedding' .*scale_grad_by_freq=True"):
        gradaccum.torch.chunked(model, 16)(x)
    found = gradaccum.torch.check_equivalence(Counting(5), (x % 5, y), loss_fn=F.cross_entropy)
    assert [cause.where for cause in found.causes] == ["embedding"]
    model.embedding.requires_grad_(False)
    step(x, y)


def test_step_backward_refuses_gradients_that_are_there():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = step_of(model, optimizer, loss_fn=nn.MSELoss(), micro_batch_size=2, verify=True)
    batch = torch.randn(4, 3), torch.randn(4, 1)
    step.backward(*batch)
    with pytest.raises(gradaccum.WindowError, match=r"optimizer.zero_grad\(\)"):
        step.backward(*batch)
    optimizer.zero_grad(set_to_none=False)
    step.backward(*batch)


def test_exact_statistics_behind_a_checkpoint_are_no_warning(caplog):
    inside = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = inside

        def forward(self, x):
            return checkpoint(self.inside, x, use_reentrant=False)

    step = step_of(Block(), loss_fn=nn.MSELoss(), micro_batch_size=3, batch_norm="exact", verify=True)
    step(torch.randn(8, 3), torch.randn(8, 1))
    assert inside[1].num_batches_tracked == 1
    assert not caplog.records


def test_a_train_step_is_copied_with_its_model_and_pickled_by_its_state_alone():
    model = nn.Linear(3, 1)
    step = step_of(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=nn.MSELoss(), micro_batch_size=2)
    x, y = torch.randn(5, 3), torch.randn(5, 1)
    twin = copy.deepcopy(step)
    assert step(x, y) == twin(x, y)
    assert relative_error(list(model.parameters()), list(twin.model.parameters())) == 0
    with pytest.raises(TypeError, match=r"can't be pickled: it holds .* Save the state_dict\(\)"):
        pickle.dumps(step)
    for state in ({}, None, {"updates": 1}):
        with pytest.raises(ValueError, match="This is no state of a TrainStep: 'updates' and 'sizes' must be in it"):
            step.load_state_dict(state)
    assert step.updates == 1


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(context, loss):
        return loss.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient.mul_(0.5)


def halved_by_a_hook(loss):
    loss = loss * 1.0
    loss.register_hook(lambda gradient: gradient.mul_(0.5) and None)
    return loss


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("halved", [Halved.apply, halved_by_a_hook])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_gradient_that_is_edited_where_it_begins_is_no_other_passs(halved, reduction, verify):
    def loss(model, x, y):
        return halved(F.mse_loss(model(x), y, reduction=reduction))

    batches = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(3)]
    torch.manual_seed(0)
    assert_same_updates(nn.Linear(3, 1), batches, loss, micro_batch_size=2, reduction=reduction, verify=verify)


@pytest.mark.parametrize("make", [nn.MSELoss, nn.CrossEntropyLoss])
@pytest.mark.parametrize("verify", [True, False])
def test_a_loss_that_becomes_a_sum_is_refused(make, verify):
    loss_fn, model = make(), nn.Linear(3, 2)
    step = step_of(model, loss_fn=loss_fn, micro_batch_size=2, verify=verify)
    x, y = torch.randn(7, 3), torch.randn(7, 2) if make is nn.MSELoss else torch.randint(2, (7,))
    for _ in range(2):
        step(x, y)
    loss_fn.reduction = "sum"
    with left_as_it_was(model, ValueError, match="was 'mean' and is 'sum' now.*Make another TrainStep"):
        step(x, y)
    loss_fn.reduction = "mean"
    step(x, y)
