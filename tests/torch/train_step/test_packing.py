"""Rows laid one behind the other, without padding, make the update of the padded large batch."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from gradaccum.torch import TrainStep
from gradaccum.torch.packing import causal_lm
from tests.reference import FLOAT64, relative_error, torch_updates
from tests.torch.train_step.test_padding import COLUMNS, LENGTHS, SLOW, shifted, text, tiny
from tests.torch.train_step.test_train_step import OPTIMIZERS

Batch = dict[str, Any]


def of_width(batch):
    """Without what is no tensor: transformers' models would not know it."""
    return {name: value for name, value in batch.items() if name != "name"}


def left(batch):
    """Padding on the left; the first label of such rows counts no more."""
    mask = batch["attention_mask"]
    first = (mask.cumsum(1) == 1) & (mask == 1) & (mask[:, :1] == 0)
    return batch | {"labels": batch["labels"].masked_fill(first, -100)}


def next_token_mean(model, batch):
    """The model's own loss, in the model's dtype."""
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def packed_step(model, **keywords):
    options = {"compute_loss": next_token_mean, "weight": shifted, "max_tokens": 24, "pack": causal_lm} | keywords
    return TrainStep(model, OPTIMIZERS["sgd"](model.parameters()), **options)


def data(side, updates=3):
    made = [of_width(text(side, seed)) for seed in range(updates)]
    return [(left(batch) if side == "left" else batch,) for batch in made]


def computed(model):
    """Tokens of the model's calls."""
    found = []
    model.register_forward_pre_hook(lambda _, args, kwargs: found.append(kwargs["input_ids"].numel()), with_kwargs=True)
    return found


@pytest.mark.parametrize(
    ("kind", "side", "attention"),
    [
        ("llama", "right", "sdpa"),
        SLOW("llama", "left", "sdpa"),
        SLOW("gpt2", "right", "eager"),
        ("gpt2", "left", "sdpa"),
    ],
)
def test_packed_rows_make_the_padded_batchs_update(kind, side, attention):
    model = tiny(kind)
    model.set_attn_implementation(attention)
    reference = copy.deepcopy(model)
    torch_updates(reference, OPTIMIZERS["sgd"](reference.parameters()), data(side), next_token_mean)
    step = packed_step(model)
    for batch in data(side):
        step(*batch)
    flat = [nn.utils.parameters_to_vector(m.parameters()) for m in (model, reference)]
    assert relative_error(flat[:1], flat[1:]) <= FLOAT64


def test_hardly_any_padding_is_computed_and_a_line_says_so_once(caplog):
    model = tiny("llama")
    tokens = computed(model)
    step = packed_step(model, verify=False)
    with caplog.at_level(logging.INFO, logger="gradaccum"):
        for batch in data("right", 2):
            step(*batch)
    assert max(tokens) <= 24
    assert sum(LENGTHS) <= sum(tokens) / 2 <= sum(LENGTHS) + 8 < 0.5 * len(LENGTHS) * COLUMNS
    (line,) = [record.message for record in caplog.records if record.message.startswith("pack:")]
    assert f"{100 * (1 - sum(LENGTHS) / (sum(tokens) / 2)):.1f} % of the tokens computed are padding" in line
    assert f"as it came {100 * (1 - sum(LENGTHS) / (len(LENGTHS) * COLUMNS)):.1f} %" in line


class Mixing(nn.Module):
    """Adds to each token the mean of all tokens before it, whatever their rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8, dtype=torch.float64)
        self.before = Before()
        self.head = nn.Linear(8, 20, dtype=torch.float64)

    def forward(self, input_ids, **_):
        class Outputs:
            logits = self.head(self.before(torch.tanh(self.embedding(input_ids))))

        return Outputs


class Before(nn.Module):
    def forward(self, x):
        return x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]


@pytest.mark.parametrize("rows", [len(LENGTHS), 2])
def test_a_model_that_mixes_packed_rows_is_refused_by_name(rows):
    model = Mixing()
    before = copy.deepcopy(model.state_dict())
    batch = {name: value[:rows] for name, value in data("right", 1)[0][0].items()}
    with pytest.raises(NotEquivalentError, match=r"'before' \(Before\) gives the tokens of a row something else"):
        packed_step(model)(batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_transformers_with_a_cache_mixes_packed_rows_and_is_refused_by_name():
    def cached(batch, rows):
        return {**causal_lm(batch, rows), "use_cache": True}

    with pytest.raises(NotEquivalentError, match=r"'model.layers.0.self_attn' \(LlamaAttention\) gives the tokens"):
        packed_step(tiny("llama"), pack=cached)(*data("right", 1)[0])


def test_all_rows_of_a_micro_batch_may_lie_in_one_without_any_padding():
    """What attention of variable lengths takes."""
    model, reference = tiny("llama"), tiny("llama")
    tokens = computed(model)

    def flat(batch, rows):
        return causal_lm(batch, [[row for pack in rows for row in pack]])

    packed_step(model, pack=flat, verify=False)(*data("right", 1)[0])
    torch_updates(reference, OPTIMIZERS["sgd"](reference.parameters()), data("right", 1), next_token_mean)
    vectors = [nn.utils.parameters_to_vector(m.parameters()) for m in (model, reference)]
    assert relative_error(vectors[:1], vectors[1:]) <= FLOAT64
    assert sum(tokens) == sum(LENGTHS)


def test_running_out_of_memory_goes_on_in_fewer_tokens():
    model, reference = tiny("llama"), tiny("llama")
    torch_updates(reference, OPTIMIZERS["sgd"](reference.parameters()), data("right", 1), next_token_mean)
    tokens = computed(model)

    def limited(model, batch):
        if batch["input_ids"].numel() > 12:
            raise torch.OutOfMemoryError("injected")
        return next_token_mean(model, batch)

    packed_step(model, compute_loss=limited, max_tokens=48, verify=False)(*data("right", 1)[0])
    vectors = [nn.utils.parameters_to_vector(m.parameters()) for m in (model, reference)]
    assert relative_error(vectors[:1], vectors[1:]) <= FLOAT64
    assert max(tokens) <= 12
    assert len(tokens) > 1


def test_a_pack_of_ones_own_takes_what_follows_the_model():
    """Inputs and targets, and `torch.nn`'s own mean over the targets that count."""
    model = nn.Sequential(nn.Embedding(20, 8, dtype=torch.float64), nn.Linear(8, 20, dtype=torch.float64))
    reference = copy.deepcopy(model)
    loss_fn = nn.CrossEntropyLoss(ignore_index=0)

    class Words(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x["input_ids"]).transpose(1, 2)

    def pack(batch, rows):
        x, y = batch
        kept = [torch.cat([torch.nonzero(x["attention_mask"][row])[:, 0] + row * COLUMNS for row in p]) for p in rows]
        take = [torch.cat([t.flatten()[k] for k in kept])[None] for t in (x["input_ids"], y)]
        return {"input_ids": take[0]}, take[1]

    batches = [(of_width(text("right", seed)), text("right", seed)["input_ids"]) for seed in range(2)]
    step = TrainStep(Words(model), OPTIMIZERS["sgd"](model.parameters()), loss_fn=loss_fn, max_tokens=24, pack=pack)
    outer = Words(reference)
    optimizer = OPTIMIZERS["sgd"](reference.parameters())
    torch_updates(outer, optimizer, batches, lambda model, x, y: loss_fn(model(x), y))
    for batch in batches:
        step(*batch)
    assert relative_error(list(model.parameters()), list(reference.parameters())) <= FLOAT64


IDS = torch.tensor([[5, 6, 0], [7, 0, 0]])
MASK = (IDS > 0).long()


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ((IDS, MASK), TypeError, "a flat mapping"),
        ({"attention_mask": torch.tensor([[1, 0, 1], [1, 0, 0]])}, ValueError, "row 0 of a micro-batch"),
        ({"attention_mask": MASK, "score": torch.ones(2)}, ValueError, r"batch\['score'\] of shape \(2,\)"),
        (
            {"attention_mask": MASK.flip(1), "labels": IDS.flip(1)},
            ValueError,
            "Row 0 of a micro-batch begins behind padding",
        ),
        ({"attention_mask": MASK, "cross_attention_mask": MASK}, ValueError, "one attention mask"),
    ],
)
def test_what_causal_lm_cannot_pack_is_refused(batch, error, message):
    with pytest.raises(error, match=message):
        causal_lm(batch, [[0, 1]])


def test_rows_begin_anew_whatever_side_they_are_padded_on():
    """With padding on the left a position follows the one before it by chance, if rows lie in the wrong order."""
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 1], [0, 1, 1, 1]])
    positions = causal_lm({"attention_mask": mask, "input_ids": mask}, [[0, 1, 2]])["position_ids"]
    assert positions.tolist() == [[3, 1, 2, 3, 0, 1, 2]]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_tokens": None}, ValueError, "up to `max_tokens` tokens"),
        ({"pack": 3}, TypeError, "Received: 3 of type int"),
    ],
)
def test_bad_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        packed_step(Mixing(), **options)


def test_groups_and_other_results_are_refused():
    with pytest.raises(ValueError, match="`groups` keeps some together"):
        packed_step(Mixing(), groups=1, verify=False)(*data("right", 1)[0])
    step = packed_step(
        Mixing(), compute_loss=lambda model, x, y: next_token_mean(model, x), weight=None, pack=lambda *_: None,
        verify=False,
    )  # fmt: skip
    with pytest.raises(TypeError, match="a tuple of 2, as it is given. Received: None"):
        step(*data("right", 1)[0], torch.ones(len(LENGTHS)))
