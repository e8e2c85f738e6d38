"""Padded rows, sorted, trimmed and packed by tokens, have the outputs and gradients of the padded batch."""

import copy
import logging
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from gradaccum.torch import TrainStep, chunked
from gradaccum.torch.losses import info_nce
from tests.reference import FLOAT64, relative_error
from tests.torch.chunking.problems import assert_same, gradients

COLUMNS = 12
LENGTHS = [3, 12, 1, 7, 2, 2, 5, 9, 4, 1, 6]


def text(side="right", seed=0, longest=COLUMNS):
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(COLUMNS) < torch.tensor(LENGTHS)[:, None].clamp(max=longest)).long()
    if side == "left":
        mask = mask.flip(1)
    return {"input_ids": torch.randint(1, 20, mask.shape, generator=generator) * mask, "attention_mask": mask}


class Encoder(nn.Module):
    """Masked self-attention, mean over tokens."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8)
        self.positions = nn.Embedding(COLUMNS, 8)
        self.attention = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 4)
        self.tokens = []

    def tokens_of(self, input_ids, attention_mask):
        self.tokens.append(input_ids.numel())
        x = self.embedding(input_ids)
        return x + self.attention(x, x, x, key_padding_mask=attention_mask == 0, need_weights=False)[0]

    def forward(self, input_ids, attention_mask):
        x = self.dropout(self.tokens_of(input_ids, attention_mask)) * attention_mask[..., None]
        return self.head(x.sum(1) / attention_mask.sum(1, keepdim=True))


class Numbered(Encoder):
    """Numbers its columns from 0, if it isn't told otherwise."""

    def forward(self, input_ids, attention_mask, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        x = (self.tokens_of(input_ids, attention_mask) + self.positions(position_ids)) * attention_mask[..., None]
        return self.head(x.sum(1) / attention_mask.sum(1, keepdim=True))


class Strict(Numbered):
    """As `Numbered`, and can't be told."""

    def forward(self, input_ids, attention_mask):
        return super().forward(input_ids, attention_mask)


def spread(outputs):
    """A loss across rows, which are not the same to it."""
    return (outputs * torch.arange(1.0, 1 + len(outputs))[:, None]).std()


def assert_exact(module, batch, *, tokens=24, rows=11, **options):
    whole = copy.deepcopy(module)
    small = chunked(module, rows, max_tokens=tokens, **options)
    expected, found = whole(**batch), small(**batch)
    assert relative_error([found], [expected]) <= FLOAT64
    for outputs in (expected, found):
        spread(outputs).backward()
    assert_same(gradients(module), gradients(whole))
    return small


PACKED = [(Encoder, "left", {"keep": 2}), (Numbered, "left", {"rows": 3}), (Strict, "right", {"verify": False})]


@pytest.mark.parametrize(
    ("kind", "side", "options"),
    [
        pytest.param(*one, marks=[] if one in PACKED or not one[-1] else pytest.mark.slow)
        for one in product([Encoder, Numbered, Strict], ["left", "right"], [{}, *(one[-1] for one in PACKED)])
    ],
)
def test_packed_rows_have_the_padded_batchs_outputs_and_gradients_in_order(kind, side, options):
    if side == "left" and kind is not Encoder and options == {"verify": False}:
        pytest.skip("padding on the left is cut off without a look")
    small = assert_exact(kind(), text(side), **options)
    small.tokens.clear()
    small(**text(side, 1))
    assert small._left == {"Numbered": "number", "Strict": "keep"}.get(
        kind.__name__ if side == "left" else "", small._left
    )
    if side == "right" or kind is not Strict:
        assert max(small.tokens) <= 24
        assert sum(small.tokens) < 0.6 * len(LENGTHS) * COLUMNS
    if "rows" in options:
        assert len(small.tokens) >= 4


def test_masks_by_position_and_arguments_in_a_dict():
    class OfDict(Encoder):
        def forward(self, features):
            return {"embedding": super().forward(features["input_ids"], features["attention_mask"])}

    batch = text()
    whole = Encoder()(**batch)
    assert relative_error([chunked(Encoder(), 4, max_tokens=24)(*batch.values())], [whole]) <= FLOAT64
    assert relative_error([chunked(OfDict(), 4, max_tokens=24)(batch)["embedding"]], [whole]) <= FLOAT64


def test_embedded_inputs_get_their_gradients_and_second_derivatives_are_exact():
    class Embedded(Encoder):
        def forward(self, inputs_embeds, attention_mask, scale):
            x = (inputs_embeds * scale).tanh() * attention_mask[..., None]
            return self.head(x.sum(1) / attention_mask.sum(1, keepdim=True))

    mask, found = text()["attention_mask"], []
    x, scale = torch.randn(len(LENGTHS), COLUMNS, 8, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    for module in (Embedded(), chunked(Embedded(), 4, max_tokens=24, batch_dims={"scale": None})):
        loss = spread(module(inputs_embeds=x, attention_mask=mask, scale=scale))
        first = torch.autograd.grad(loss, (x, scale), create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), (x, scale))])
    assert relative_error(*found) <= FLOAT64


def test_dropout_is_replayed():
    class Constant(Encoder):
        """Its gradient by the dropped numbers is known: what was kept."""

        def forward(self, input_ids, attention_mask):
            self.kept = self.dropout(torch.ones(len(input_ids), 4))
            return self.kept * self.head.bias

    module = chunked(Constant(0.5), 4, max_tokens=24, verify=False)
    outputs = module(**text())
    kept = (outputs / module.head.bias).detach()
    outputs.sum().backward()
    assert relative_error([module.head.bias.grad], [kept.sum(0)]) <= FLOAT64


def test_dropout_is_no_difference_to_the_proof(caplog):
    with caplog.at_level(logging.WARNING, "gradaccum"):
        spread(chunked(Encoder(0.5), 4, max_tokens=24)(**text())).backward()
    assert caplog.messages == []


def test_padding_that_comes_later_is_proven_where_it_comes_first():
    full = {"input_ids": torch.randint(1, 20, (11, COLUMNS)), "attention_mask": torch.ones(11, COLUMNS).long()}
    small = chunked(Numbered(), 4, max_tokens=24)
    spread(small(**full)).backward()
    assert small._left == "keep"
    for side in ("right", "left"):
        assert relative_error([small(**text(side))], [Numbered()(**text(side))]) <= FLOAT64
    assert small._left == "number"


def test_without_gradients_padding_on_the_left_stays_until_it_is_proven():
    small = chunked(Numbered(), 4, max_tokens=24)
    with torch.no_grad():
        assert relative_error([small(**text("left"))], [Numbered()(**text("left"))]) <= FLOAT64


class CountsPadding(Encoder):
    def forward(self, input_ids, attention_mask):
        return self.head(self.tokens_of(input_ids, attention_mask).mean(1))


class Tokens(Encoder):
    def forward(self, input_ids, attention_mask):
        return self.head(self.tokens_of(input_ids, attention_mask))


class AcrossRows(Encoder):
    def forward(self, input_ids, attention_mask):
        outputs = super().forward(input_ids, attention_mask)
        return outputs - outputs.mean(0)


REFUSED = {  # the module, its rows, the longest text, the error
    "padding counts": (CountsPadding, 4, COLUMNS, r"(?s)Cutting off columns of nothing but padding.*output   relative"),
    "rows depend on each other": (AcrossRows, 4, COLUMNS, r"AcrossRows is not per-row.*\n.*"),
    "outputs for each token": (Tokens, 1, COLUMNS, r"pool over tokens in the chunked module.*\(12, 4\) and \(9, 4\)"),
    "one token in each text": (Tokens, 1, 1, "Cutting off columns of nothing but padding"),
}


@pytest.mark.parametrize("verify", ["the first call", "verify()"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_packed_is_refused_by_name(name, verify):
    kind, rows, longest, message = REFUSED[name]
    small, batch = chunked(kind(), rows, max_tokens=24), text(longest=longest)
    with pytest.raises((NotEquivalentError, ValueError), match=message):
        small(**batch) if verify == "the first call" else small.verify(**batch)


@pytest.mark.parametrize("side", ["left", pytest.param("right", marks=pytest.mark.slow)])
def test_towers_of_transformers_train_as_the_padded_batch(side):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip

    class Bert(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.bert = transformers.BertModel(config, add_pooling_layer=False).double()

        def forward(self, input_ids, attention_mask, position_ids=None):
            x = self.bert(input_ids, attention_mask, position_ids=position_ids).last_hidden_state
            return F.normalize((x * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True), dim=1)

    whole, small = Bert(), chunked(Bert(), 4, max_tokens=24)
    losses = []
    for model in (whole, small):
        losses.append(info_nce(model(**text(side)), model(**text(side, 1)), tile=4))
        losses[-1].backward()
    vectors = [torch.cat([g.flatten() for g in gradients(m)]) for m in (small, whole)]
    assert relative_error([losses[1], vectors[0]], [losses[0], vectors[1]]) <= FLOAT64
    assert small._left == ("number" if side == "left" else "keep")


class Reads(nn.Module):
    """Encoders that look at padding, each in its own way."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.embedding = kind, nn.Embedding(20, 6)
        self.recurrent, self.window = nn.GRU(6, 4, batch_first=True), nn.Conv1d(6, 4, 3, padding=1)

    def forward(self, input_ids, attention_mask):
        x, mask = self.embedding(input_ids), attention_mask[..., None]
        if self.kind == "the last state":
            return self.recurrent(x)[0][:, -1]
        if self.kind == "a recurrence over gaps":
            return (self.recurrent(x)[0] * mask).sum(1)
        if self.kind == "neighbours":
            return (self.window(x.transpose(1, 2)).transpose(1, 2).tanh() * mask).sum(1)
        if self.kind == "the first column":
            return self.window((x * mask).transpose(1, 2))[..., 0]
        return self.recurrent(x)[0].masked_fill(mask == 0, -9.0).amax(1)


def with_gaps(seed, width=9, rows=11):
    """Tokens and padding in no order, so that rows share hardly a column of padding."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(rows, width, generator=generator) < 0.5).long()
    mask[0] = 1
    return {"input_ids": torch.randint(1, 20, mask.shape, generator=generator) * mask, "attention_mask": mask}


READS = ["the last state", "a recurrence over gaps", "neighbours", "the first column", "the largest state"]


@pytest.mark.parametrize(
    ("rows", "without_gradients"),
    [
        (3, False),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in [(3, True), *product([1, 11], [False, True])]),
    ],
)
@pytest.mark.parametrize("kind", READS)
def test_whoever_reads_padding_has_the_padded_batchs_outputs_or_is_refused(kind, rows, without_gradients):
    exact, refused = 0, 0
    for seed in range(3):
        module, batch = Reads(kind), with_gaps(seed)
        try:
            with torch.set_grad_enabled(not without_gradients):
                found = chunked(copy.deepcopy(module), rows, max_tokens=16)(**batch)
        except NotEquivalentError:
            refused += 1
        else:
            exact += 1
            assert relative_error([found], [module(**batch)]) <= FLOAT64
    assert (exact, refused) == ((0, 3) if kind in ("the last state", "neighbours") else (3, 0))


@pytest.mark.parametrize("kind", READS)
def test_a_single_row_keeps_its_padding_until_that_is_proven(kind):
    module, batch = Reads(kind), {name: value[1:2] for name, value in with_gaps(1).items()}
    batch["attention_mask"][:, [0, -1]] = 0
    assert_exact(module, batch, tokens=4)


def test_padding_stays_where_cutting_it_off_cannot_be_tried_out(caplog):
    class Pairs(Reads):
        def forward(self, input_ids, attention_mask):
            if len(input_ids) < 2:
                raise ValueError("two rows at least")
            return super().forward(input_ids, attention_mask)

    batch = {name: value.repeat(2, 1) for name, value in with_gaps(1).items()}
    module = Pairs("the last state")
    with caplog.at_level(logging.WARNING, "gradaccum"):
        found = chunked(module, 6, max_tokens=60)(**batch)
    assert "two rows at least" in caplog.text
    assert "Padding is not cut off." in caplog.text
    assert relative_error([found], [module(**batch)]) <= FLOAT64


class NumbersColumns(nn.Module):
    """Multiplies by the positions that it is given, or by the numbers of its columns."""

    def __init__(self):
        super().__init__()
        self.embedding, self.places = nn.Embedding(20, 4), nn.Embedding(20, 4)

    def forward(self, input_ids, attention_mask, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand(len(input_ids), -1)
        return ((self.embedding(input_ids) * self.places(position_ids)) * attention_mask[..., None]).sum(1)


@pytest.mark.parametrize("given", ["10", "01", "1010", "0110"])
def test_padding_on_the_left_with_positions_in_some_calls_and_without_in_others(given):
    torch.manual_seed(0)
    module = NumbersColumns().double()
    small = chunked(copy.deepcopy(module), 64, max_tokens=12)
    mask = (torch.arange(7) >= torch.tensor([4, 2, 0, 0, 5])[:, None]).long()
    for is_given in given:
        ids = torch.randint(1, 20, mask.shape) * mask
        positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if is_given == "1" else {}
        torch.testing.assert_close(small(ids, mask, **positions), module(ids, mask, **positions))


@pytest.mark.parametrize("given", ["10", "01", "1010", "0110", "001", "110"])
def test_a_training_step_with_positions_in_some_batches_and_without_in_others(given):
    torch.manual_seed(0)
    module = NumbersColumns().double()
    large = copy.deepcopy(module)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (module, large)]

    def loss(model, batch):
        return model(**batch).square().mean()

    step = TrainStep(module, optimizers[0], compute_loss=loss, max_tokens=12)
    mask = (torch.arange(7) >= torch.tensor([4, 2, 0, 0, 5])[:, None]).long()
    for is_given in given:
        ids = torch.randint(1, 20, mask.shape) * mask
        positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if is_given == "1" else {}
        batch = {"input_ids": ids, "attention_mask": mask, **positions}
        step(batch)
        optimizers[1].zero_grad()
        loss(large, batch).backward()
        optimizers[1].step()
        assert relative_error([*module.parameters()], [*large.parameters()]) <= FLOAT64
