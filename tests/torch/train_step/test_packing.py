"""Rows laid one behind the other, without padding, make the update of the padded large batch."""

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from gradaccum.torch.packing import causal_lm
from tests.reference import FLOAT64
from tests.torch.train_step.test_padding import (
    COLUMNS,
    LENGTHS,
    SLOW,
    assert_same_for_transformers,
    shifted,
    text,
    tiny,
)
from tests.torch.train_step.test_train_step import assert_same_updates, left_as_it_was, step_of

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
    return step_of(model, **{"verify": True, **PACKED, **keywords})


PACKED = {"compute_loss": next_token_mean, "weight": shifted, "max_tokens": 24, "pack": causal_lm}


def assert_same(model, batches, tolerance=FLOAT64, **keywords):
    assert_same_for_transformers(model, batches, tolerance, loss=next_token_mean, **{**PACKED, **keywords})


def data(side, updates=3):
    made = [of_width(text(side, seed)) for seed in range(updates)]
    return [(left(batch) if side == "left" else batch,) for batch in made]


def computed(model):
    """Tokens of the model's calls; not of its copies'."""
    found = []

    def count(module, args, keywords):
        if module is model:
            found.append(keywords["input_ids"].numel())

    model.register_forward_pre_hook(count, with_kwargs=True)
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
    assert_same(model, data(side))


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
    batch = {name: value[:rows] for name, value in data("right", 1)[0][0].items()}
    message = r"'before' \(Before\) gives the tokens of a row something else"
    with left_as_it_was(model, NotEquivalentError, message):
        packed_step(model)(batch)


def test_transformers_with_a_cache_mixes_packed_rows_and_is_refused_by_name():
    def cached(batch, rows):
        return {**causal_lm(batch, rows), "use_cache": True}

    with pytest.raises(NotEquivalentError, match=r"'model.layers.0.self_attn' \(LlamaAttention\) gives the tokens"):
        packed_step(tiny("llama"), pack=cached)(*data("right", 1)[0])


def test_all_rows_of_a_micro_batch_may_lie_in_one_without_any_padding():
    """What attention of variable lengths takes."""
    model = tiny("llama")

    def flat(batch, rows):
        return causal_lm(batch, [[row for pack in rows for row in pack]])

    tokens = computed(model)
    assert_same(model, data("right", 1), pack=flat, verify=False)
    assert sum(tokens) == sum(LENGTHS)


def test_running_out_of_memory_goes_on_in_fewer_tokens():
    model = tiny("llama")
    tokens = computed(model)

    def limited(model, batch):
        if batch["input_ids"].numel() > 12:
            raise torch.OutOfMemoryError("injected")
        return next_token_mean(model, batch)

    assert_same(model, data("right", 1), compute_loss=limited, max_tokens=48, verify=False)
    assert max(tokens) <= 12
    assert len(tokens) > 1


def test_a_pack_of_ones_own_takes_what_follows_the_model():
    """Inputs and targets, and `torch.nn`'s own mean over the targets that count."""
    loss_fn = nn.CrossEntropyLoss(ignore_index=0)

    class Words(nn.Sequential):
        def forward(self, x):
            return super().forward(x["input_ids"]).transpose(1, 2)

    def pack(batch, rows):
        x, y = batch
        kept = [torch.cat([torch.nonzero(x["attention_mask"][row])[:, 0] + row * COLUMNS for row in p]) for p in rows]
        take = [torch.cat([t.flatten()[k] for k in kept])[None] for t in (x["input_ids"], y)]
        return {"input_ids": take[0]}, take[1]

    model = Words(nn.Embedding(20, 8, dtype=torch.float64), nn.Linear(8, 20, dtype=torch.float64))
    batches = [(of_width(text("right", seed)), text("right", seed)["input_ids"]) for seed in range(2)]
    keywords = {"loss_fn": loss_fn, "max_tokens": 24, "pack": pack}
    assert_same_updates(model, batches, lambda model, x, y: loss_fn(model(x), y), **keywords)


IDS = torch.tensor([[5, 6, 0], [7, 0, 0]])
MASK = (IDS > 0).long()


@pytest.mark.parametrize(
    ("batch", "error", "message"),
    [
        ((IDS, MASK), TypeError, "a flat mapping"),
        ({"attention_mask": torch.tensor([[1, 0, 1], [1, 0, 0]])}, ValueError, "row 0 of a micro-batch"),
        ({"attention_mask": MASK, "score": torch.ones(2)}, ValueError, r"batch\['score'\] of shape \(2,\)"),
        ({"attention_mask": MASK.flip(1), "labels": IDS.flip(1)}, ValueError, "Row 0 of a micro-batch begins behind"),
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
        ({"groups": 1, "verify": False}, ValueError, "`groups` keeps some together"),
    ],
)
def test_bad_options_are_refused(options, error, message):
    batch = data("right", 1)[0]
    with pytest.raises(error, match=message):
        packed_step(Mixing(), **options)(*batch)


def test_what_a_pack_returns_is_checked():
    def first(model, x, y):
        return next_token_mean(model, x)

    step = packed_step(Mixing(), compute_loss=first, weight=None, pack=lambda *_: None, verify=False)
    with pytest.raises(TypeError, match="a tuple of 2, as it is given. Received: None"):
        step(*data("right", 1)[0], torch.ones(len(LENGTHS)))
