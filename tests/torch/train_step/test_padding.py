"""Padded rows, packed by tokens, make the update of the padded large batch."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from tests.reference import FLOAT32, relative_error
from tests.torch.train_step.test_train_step import OPTIMIZERS, assert_same_updates, by_hand, step_of

SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
COLUMNS = 12
LENGTHS = [3, 12, 1, 7, 2, 2, 5, 9, 4, 1, 6]


def text(side, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(len(LENGTHS), COLUMNS, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        mask[row, :length] = 1
    if side == "left":
        mask = mask.flip(1)
    tokens = torch.randint(1, 20, mask.shape, generator=generator) * mask
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100), "name": "text"}


def full(seed=0):
    """Rows without any padding."""
    batch = text("right", seed)
    batch["attention_mask"].fill_(1)
    return {**batch, "labels": batch["input_ids"].clone()}


class Attention(nn.Module):
    """A masked self-attention over embedded tokens, with no idea of positions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8, dtype=torch.float64)
        self.attention = nn.MultiheadAttention(8, 2, bias=False, batch_first=True, dtype=torch.float64)
        self.head = nn.Linear(8, 20, dtype=torch.float64)
        self.tokens = []

    def forward(self, input_ids, attention_mask):
        self.tokens.append(input_ids.numel())
        x = self.embedding(input_ids)
        x, _ = self.attention(x, x, x, key_padding_mask=attention_mask == 0, need_weights=False)
        return self.head(x)


def token_mean(model, batch):
    outputs = model(batch["input_ids"], batch["attention_mask"])
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def valid(batch):
    return (batch["labels"] != -100).sum()


PADDED = {"weight": valid, "max_tokens": 24}


def padded_step(model, compute_loss=token_mean, **options):
    return step_of(model, **{"compute_loss": compute_loss, "verify": True, **PADDED, **options})


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("optimizer", ["sgd", *(SLOW(name) for name in OPTIMIZERS if name != "sgd")])
def test_packed_rows_make_the_padded_batchs_update(side, optimizer):
    model, data = Attention(), [(text(side, seed),) for seed in range(3)]
    assert_same_updates(model, data, token_mean, optimizer, **PADDED, verify=False)
    assert max(model.tokens) <= 24
    assert sum(model.tokens) < 0.6 * 3 * len(LENGTHS) * COLUMNS


def test_batches_may_be_dicts_beside_other_arguments():
    class Model(Attention):
        def forward(self, batch):
            return super().forward(batch["input_ids"], batch["attention_mask"]).transpose(1, 2)

    data = [(batch := text("right", seed), batch["labels"]) for seed in range(2)]
    loss_fn = nn.CrossEntropyLoss()
    assert_same_updates(Model(), data, lambda model, x, y: loss_fn(model(x), y), loss_fn=loss_fn, max_tokens=24)


def tiny(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=20, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config).double()
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, intermediate_size=8)).double()
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**common, **dropout, intermediate_size=8, max_position_embeddings=16)
    return transformers.BertForMaskedLM(config).double()


def shifted(batch):
    return (batch["labels"][:, 1:] != -100).sum()


def assert_same_for_transformers(model, data, tolerance=FLOAT32, loss=None, **keywords):
    """As `assert_same_updates`, for models whose attention has keys with a bias, the true gradient of which is 0 (so
    all parameters are compared as one vector), and whose loss is computed in float32."""
    reference = copy.deepcopy(model)
    by_hand(reference, data, loss or keywords["compute_loss"])
    step = step_of(model, **{"verify": True, **keywords})
    for batch in data:
        step(*batch)
    flat = [nn.utils.parameters_to_vector(m.parameters()) for m in (model, reference)]
    assert relative_error(flat[:1], flat[1:]) <= tolerance
    return step


def output_loss(model, batch):
    return model(**{name: value for name, value in batch.items() if name != "name"}).loss


@pytest.mark.parametrize(
    ("kind", "side", "first"),
    [
        *(("bert", "left", True), ("gpt2", "left", False), ("llama", "right", False)),
        *(SLOW("gpt2", "left", True), SLOW("llama", "left", True), SLOW("bert", "left", False)),
        *(SLOW("llama", "left", False), SLOW("llama", "right", True)),
        *(SLOW(kind, "right", first) for kind in ("bert", "gpt2") for first in (True, False)),
    ],
)
def test_models_of_transformers_take_packed_batches(kind, side, first):
    data = [(text(side, seed),) for seed in range(2)]
    if not first:
        for (batch,) in data:
            rows = torch.arange(len(LENGTHS))
            batch["labels"][rows, batch["attention_mask"].argmax(1)] = -100
    count = valid if kind == "bert" else shifted
    step = assert_same_for_transformers(tiny(kind), data, compute_loss=output_loss, weight=count, max_tokens=24)
    if side == "left" and kind in ("bert", "gpt2"):  # they number the columns
        # A causal model predicts the first token from padding, and what it makes of that depends on all of it.
        assert step.batcher.packing.left == ("keep" if first and kind == "gpt2" else "number")


@pytest.mark.parametrize("kind", ["gpt2", SLOW("bert"), SLOW("llama")])
def test_padding_on_the_left_is_judged_where_it_comes_first(kind):
    data = [(text(side, seed),) for seed, side in enumerate(["right", "right", "left", "left"])]
    for batch, *_ in data[:1]:  # full rows
        batch["attention_mask"].fill_(1)
    count = valid if kind == "bert" else shifted
    step = assert_same_for_transformers(tiny(kind), data, compute_loss=output_loss, weight=count, max_tokens=24)
    assert step.batcher.packing.left == {"bert": "number", "gpt2": "keep", "llama": "keep"}[kind]


@pytest.mark.parametrize("rows", [[3], [0, 7]], ids=["one row", "others"])
@pytest.mark.parametrize("kind", ["gpt2", SLOW("llama")])
def test_a_first_label_that_counts_in_a_later_batch_alone_is_noticed(kind, rows, caplog):
    data = [(text("left", seed),) for seed in range(4)]
    for index, (batch,) in enumerate(data):
        first = batch["attention_mask"].argmax(1)
        kept = {row: int(batch["labels"][row, first[row]]) for row in rows if index == 2}
        batch["labels"][torch.arange(len(LENGTHS)), first] = -100
        for row, label in kept.items():
            batch["labels"][row, first[row]] = label
    caplog.set_level("INFO", "gradaccum")
    step = assert_same_for_transformers(
        tiny(kind), data, compute_loss=output_loss, weight=shifted, max_tokens=24, micro_batch_size=2
    )
    assert step.batcher.packing is not None
    assert step.batcher.packing.left == ("number" if kind == "gpt2" else "cut")  # of the last batch
    assert "A first label of -100 predicts nothing from padding" in caplog.text
    assert "batch[0]['labels']" in caplog.text


def test_a_loss_mask_of_the_users_own_is_noticed_as_labels_are():
    """The first token of some rows counts by a mask that has no name known to the library."""

    def loss(model, batch):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        each = F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="none")
        counts = batch["counts"][:, 1:].flatten()
        return (each * counts).sum() / counts.sum()

    data = [(text("left", seed),) for seed in range(3)]
    for index, (batch,) in enumerate(data):
        batch["counts"] = batch["attention_mask"].double()
        if index < 2:
            batch["counts"][torch.arange(len(LENGTHS)), batch["attention_mask"].argmax(1)] = 0
    counted = lambda batch: batch["counts"][:, 1:].sum()  # noqa: E731
    step = assert_same_for_transformers(tiny("llama"), data, compute_loss=loss, weight=counted, max_tokens=24)
    assert step.batcher.packing is not None
    assert step.batcher.packing.left == "keep"


def test_padded_labels_that_count_in_a_later_batch_alone_are_refused():
    data = [text("right", seed) for seed in range(3)]
    data[2]["labels"] = data[2]["labels"].masked_fill(data[2]["attention_mask"] == 0, 0)  # 0 is a token here
    step = padded_step(Attention())
    for batch in (full(9), *data[:2]):
        step(batch)
    with pytest.raises(NotEquivalentError, match="mark them with -100 in the labels.*Leave out `max_tokens`"):
        step(data[2])


def test_an_error_where_padding_was_cut_off_names_max_tokens():
    def mean_of_means(model, batch):
        outputs = model(batch["input_ids"], batch["attention_mask"])
        each = F.cross_entropy(outputs.transpose(1, 2), batch["labels"], reduction="none")
        return (each.sum(1) / (batch["labels"] != -100).sum(1)).mean()

    with pytest.raises(NotEquivalentError, match="`max_tokens` has cut off padding there. Taken for text"):
        padded_step(Attention(), mean_of_means)(text("left"))


def test_padding_that_stays_on_the_left_counts_in_the_budget():
    class Numbered(Attention):
        """Knows the column of each token, and takes no `position_ids`."""

        def forward(self, input_ids, attention_mask):
            outputs = super().forward(input_ids, attention_mask)
            return outputs * torch.arange(1.0, 1.0 + input_ids.shape[1], dtype=torch.float64)[:, None]

    model = Numbered()
    data = [(text("left", seed),) for seed in range(2)]
    step = assert_same_updates(model, data, token_mean, compute_loss=token_mean, weight=valid, max_tokens=2 * COLUMNS)
    assert step.batcher.packing.left == "keep"
    model.tokens.clear()
    step(*data[0])
    assert max(model.tokens) <= 2 * COLUMNS


def test_batch_encodings_are_split_and_packed():
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({k: v for k, v in text("right").items() if k != "name"})
    for how in ({"max_tokens": 24}, {"micro_batch_size": 3}):
        assert_same_for_transformers(tiny("bert"), [(batch,)], compute_loss=output_loss, weight=valid, **how)


def test_a_row_longer_than_the_budget_goes_alone():
    model = Attention()
    assert_same_updates(model, [(text("right"),)], token_mean, weight=valid, max_tokens=4, verify=False)
    assert max(model.tokens) == COLUMNS


def test_labels_that_count_are_never_cut_off():
    batch = text("right")
    batch["labels"][2, 9] = 5  # outside the mask
    assert_same_updates(Attention(), [(batch,)], token_mean, **PADDED, verify=False)


def test_a_loss_that_counts_padding_is_refused():
    def padded_mean(model, batch):
        outputs = model(batch["input_ids"], batch["attention_mask"])
        return F.cross_entropy(outputs.flatten(0, 1), batch["input_ids"].flatten())

    with pytest.raises(NotEquivalentError, match="padded positions count"):
        padded_step(Attention(), padded_mean, weight=None)(text("right"))


def test_out_of_memory_splits_a_pack_and_lowers_the_budget():
    class Limited(Attention):
        def forward(self, input_ids, attention_mask):
            if input_ids.numel() > 15:
                raise torch.OutOfMemoryError("simulated")
            return super().forward(input_ids, attention_mask)

    data = [(text("right", seed),) for seed in range(2)]
    assert_same_updates(Limited(), data, token_mean, reference=Attention(), weight=valid, max_tokens=36)


def test_a_batch_without_a_mask_is_refused():
    batch = text("right")
    del batch["attention_mask"]
    with pytest.raises(ValueError, match="attention_mask"):
        padded_step(Attention(), verify=False)(batch)


class States(Attention):
    """Reads what is padded, as a recurrence does."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(8, 8, batch_first=True, bidirectional=False, dtype=torch.float64)

    def forward(self, input_ids, attention_mask):
        return self.head(self.recurrent(self.embedding(input_ids).flip(1))[0].flip(1))


@pytest.mark.parametrize("before", [[], ["full"], ["left"], ["full", "left"]])
def test_padding_on_the_right_that_counts_is_refused_where_it_first_comes(before):
    """A recurrence from the right, which comes to the padding there first."""
    step = padded_step(States())
    for kind in before:
        step(full() if kind == "full" else text("left"))
    with pytest.raises(NotEquivalentError, match="Cutting off columns of nothing but padding changes the loss"):
        step(text("right"))


def test_padding_stays_where_it_cannot_be_tried_out(caplog):
    class Wide(Attention):
        def forward(self, input_ids, attention_mask):
            if not self.training and input_ids.shape[1] < COLUMNS:
                raise ValueError("all columns are needed")
            return super().forward(input_ids, attention_mask)

    model = Wide()
    step = padded_step(model)
    with caplog.at_level("WARNING", "gradaccum"):
        step(text("right"))
    assert "padding is not cut off, for the loss can't be tried out without (all columns are needed)" in caplog.text
    assert all(tokens % COLUMNS == 0 for tokens in model.tokens)
