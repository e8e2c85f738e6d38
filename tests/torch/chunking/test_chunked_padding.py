"""Padded rows, sorted, trimmed and packed by tokens, have the outputs and gradients of the padded batch."""

import copy
import logging
from itertools import product

import pytest
import torch
from torch import nn

from gradaccum import NotEquivalentError
from gradaccum.torch import TrainStep, chunked
from tests.reference import FLOAT64, relative_error, torch_updates
from tests.torch.chunking import problems
from tests.torch.problems import Does
from tests.torch.train_step import test_padding
from tests.torch.train_step.test_padding import COLUMNS, LENGTHS


def text(side="right", seed=0, longest=COLUMNS):
    batch = test_padding.text(side, seed, [min(length, longest) for length in LENGTHS])
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def mean(m, x, mask):
    return m.head((m.dropout(x) * mask).sum(1) / mask.sum(1))


class Encoder(nn.Module):
    """Masked self-attention, and `pool` over tokens."""

    def __init__(self, pool=mean, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.pool, self.tokens, self.dropout = pool, [], nn.Dropout(dropout)
        self.embedding, self.positions = nn.Embedding(20, 8), nn.Embedding(COLUMNS, 8)
        self.attention, self.head = nn.MultiheadAttention(8, 2, bias=False, batch_first=True), nn.Linear(8, 4)
        if pool is not mean:
            self.recurrent, self.window = nn.GRU(8, 4, batch_first=True), nn.Conv1d(8, 4, 3, padding=1)

    def forward(self, input_ids, attention_mask):
        self.tokens.append(input_ids.numel())
        x = self.embedding(input_ids)
        x = x + self.attention(x, x, x, key_padding_mask=attention_mask == 0, need_weights=False)[0]
        return self.pool(self, x, attention_mask[..., None])


class Numbered(Encoder):
    """Numbers its columns from 0, if it isn't told otherwise."""

    def forward(self, input_ids, attention_mask, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        self.pool = lambda _, x, mask: mean(self, x + self.positions(position_ids), mask)
        return super().forward(input_ids, attention_mask)


class Strict(Numbered):
    """As `Numbered`, and can't be told."""

    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids, attention_mask)


def spread(outputs):
    """A loss across rows, which are not the same to it."""
    return (outputs * torch.arange(1.0, 1 + len(outputs))[:, None]).std()


def assert_exact(module, batch, *, tokens=24, rows=11, **options):
    loss = lambda m: (spread(outputs := m(**batch)), outputs)  # noqa: E731
    return problems.assert_exact(module, loss, size=rows, max_tokens=tokens, **options)


PACKED = [(Encoder, "left", {"keep": 2}), (Numbered, "left", {"rows": 3}), (Strict, "right", {"verify": False})]


@pytest.mark.parametrize(
    ("kind", "side", "options"), [*PACKED, *product([Encoder, Numbered, Strict], ["left", "right"], [{}])]
)
def test_packed_rows_have_the_padded_batchs_outputs_and_gradients_in_order(kind, side, options):
    small = assert_exact(kind(), text(side), **options)
    small.tokens.clear()
    small(**text(side, 1))
    if side == "left" and kind is not Encoder:
        assert small._left == {Numbered: "number", Strict: "keep"}[kind]
    if side == "right" or kind is not Strict:
        assert max(small.tokens) <= 24
        assert sum(small.tokens) < 0.6 * len(LENGTHS) * COLUMNS
    if "rows" in options:
        assert len(small.tokens) >= 4


def test_masks_by_position_and_arguments_in_a_dict():
    batch = text()
    whole, of_dict = Encoder()(**batch), Does(lambda m, one: {"embedding": m.encoder(**one)}, encoder=Encoder())
    assert relative_error([chunked(Encoder(), 4, max_tokens=24)(*batch.values())], [whole]) <= FLOAT64
    assert relative_error([chunked(of_dict, 4, max_tokens=24)(batch)["embedding"]], [whole]) <= FLOAT64


def test_embedded_inputs_get_their_gradients_and_second_derivatives_are_exact():
    def embedded(m, inputs_embeds, attention_mask, scale):
        return mean(m.encoder, (inputs_embeds * scale).tanh(), attention_mask[..., None])

    module, mask, found = Does(embedded, encoder=Encoder()), text()["attention_mask"], []
    x, scale = torch.randn(len(LENGTHS), COLUMNS, 8, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    for call in (module, chunked(module, 4, max_tokens=24, batch_dims={"scale": None})):
        loss = spread(call(inputs_embeds=x, attention_mask=mask, scale=scale))
        first = torch.autograd.grad(loss, (x, scale), create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), (x, scale))])
    assert relative_error(*found) <= FLOAT64


def test_dropout_is_replayed():
    """The gradient by the dropped numbers is known: what was kept."""

    def constant(m, x, mask):
        return m.dropout(torch.ones(len(x), 4)) * m.head.bias

    module = chunked(Encoder(constant, 0.5), 4, max_tokens=24, verify=False)
    outputs = module(**text())
    kept = (outputs / module.head.bias).detach()
    outputs.sum().backward()
    assert relative_error([module.head.bias.grad], [kept.sum(0)]) <= FLOAT64


def test_dropout_is_no_difference_to_the_proof(caplog):
    with caplog.at_level(logging.WARNING, "gradaccum"):
        spread(chunked(Encoder(dropout=0.5), 4, max_tokens=24)(**text())).backward()
    assert caplog.messages == []


def test_padding_that_comes_later_is_proven_where_it_comes_first_in_a_call_for_gradients():
    full = {"input_ids": torch.randint(1, 20, (11, COLUMNS)), "attention_mask": torch.ones(11, COLUMNS).long()}
    small = chunked(Numbered(), 4, max_tokens=24)
    with torch.no_grad():
        assert relative_error([small(**text("left"))], [Numbered()(**text("left"))]) <= FLOAT64
    small = chunked(Numbered(), 4, max_tokens=24)
    spread(small(**full)).backward()
    assert small._left == "keep"
    for side in ("right", "left"):
        assert relative_error([small(**text(side))], [Numbered()(**text(side))]) <= FLOAT64
    assert small._left == "number"


CUTTING = "Cutting off columns of nothing but padding"
REFUSED = {  # pooling, rows, the longest text, the error
    "padding counts": (lambda m, x, mask: m.head(x.mean(1)), 4, COLUMNS, rf"(?s){CUTTING}.*output   relative"),
    "rows depend on each other": (
        lambda m, x, mask: (y := mean(m, x, mask)) - y.mean(0), 4, COLUMNS, r"Encoder is not per-row.*\n.*",
    ),
    "outputs for each token": (
        lambda m, x, mask: m.head(x), 1, COLUMNS, r"pool over tokens in the chunked module.*\(12, 4\) and \(9, 4\)",
    ),
    "one token in each text": (lambda m, x, mask: m.head(x), 1, 1, CUTTING),
}  # fmt: skip


@pytest.mark.parametrize("verify", ["the first call", "verify()"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_packed_is_refused_by_name(name, verify):
    pool, rows, longest, message = REFUSED[name]
    small, batch = chunked(Encoder(pool), rows, max_tokens=24), text(longest=longest)
    with pytest.raises((NotEquivalentError, ValueError), match=message):
        small(**batch) if verify == "the first call" else small.verify(**batch)


READS = {  # encoders that look at padding, each in its own way
    "the last state": lambda m, x, mask: m.recurrent(x)[0][:, -1],
    "a recurrence over gaps": lambda m, x, mask: (m.recurrent(x)[0] * mask).sum(1),
    "neighbours": lambda m, x, mask: (m.window(x.transpose(1, 2)).transpose(1, 2).tanh() * mask).sum(1),
    "the first column": lambda m, x, mask: m.window((x * mask).transpose(1, 2))[..., 0],
    "the largest state": lambda m, x, mask: m.recurrent(x)[0].masked_fill(mask == 0, -9.0).amax(1),
}


def with_gaps(seed, width=9, rows=11):
    """Tokens and padding in no order, so that rows share hardly a column of padding."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, width, generator=generator) < 0.5).long()
    mask[0] = 1
    return {"input_ids": torch.randint(1, 20, mask.shape, generator=generator) * mask, "attention_mask": mask}


@pytest.mark.parametrize(("rows", "grad"), [(3, True), (1, False)])
@pytest.mark.parametrize("kind", READS)
def test_whoever_reads_padding_has_the_padded_batchs_outputs_or_is_refused(kind, rows, grad):
    refused = []
    for seed in range(3):
        module, batch = Encoder(READS[kind]), with_gaps(seed)
        try:
            with torch.set_grad_enabled(grad):
                found = chunked(copy.deepcopy(module), rows, max_tokens=16)(**batch)
        except NotEquivalentError:
            refused.append(True)
        else:
            refused.append(False)
            assert relative_error([found], [module(**batch)]) <= FLOAT64
    assert refused == [kind in ("the last state", "neighbours")] * 3


@pytest.mark.parametrize("kind", READS)
def test_a_single_row_keeps_its_padding_until_that_is_proven(kind):
    batch = {name: value[1:2] for name, value in with_gaps(1).items()}
    batch["attention_mask"][:, [0, -1]] = 0
    assert_exact(Encoder(READS[kind]), batch, tokens=4)


def test_padding_stays_where_cutting_it_off_cannot_be_tried_out(caplog):
    def pairs(m, x, mask):
        if len(x) < 2:
            raise ValueError("two rows at least")
        return READS["the last state"](m, x, mask)

    batch, module = {name: value.repeat(2, 1) for name, value in with_gaps(1).items()}, Encoder(pairs)
    with caplog.at_level(logging.WARNING, "gradaccum"):
        found = chunked(module, 6, max_tokens=60)(**batch)
    assert "two rows at least" in caplog.text
    assert "Padding is not cut off." in caplog.text
    assert relative_error([found], [module(**batch)]) <= FLOAT64


def square(model, batch):
    return model(**batch).square().mean()


@pytest.mark.parametrize("way", ["chunked", "TrainStep"])
@pytest.mark.parametrize("given", ["10", "01", "1010", "0110", "001", "110"])
def test_positions_in_some_batches_and_none_in_others_with_padding_on_the_left(given, way):
    model, large = Numbered(), Numbered()
    small = chunked(model, 64, max_tokens=12)
    sgd, optimizer = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (large, model))
    step = TrainStep(model, optimizer, compute_loss=square, max_tokens=12)
    mask = (torch.arange(7) >= torch.tensor([4, 2, 0, 0, 5])[:, None]).long()
    for is_given in given:
        ids = torch.randint(1, 20, mask.shape) * mask
        positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if is_given == "1" else {}
        batch = {"input_ids": ids, "attention_mask": mask, **positions}
        if way == "chunked":
            assert relative_error([small(ids, mask, **positions)], [large(**batch)]) <= FLOAT64
        else:
            step(batch)
            torch_updates(large, sgd, [(batch,)], square)
            assert relative_error(model.parameters(), large.parameters()) <= FLOAT64
