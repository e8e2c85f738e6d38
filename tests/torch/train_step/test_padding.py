"""Padded rows, packed by tokens, make the update of the padded large batch."""

import copy
import functools
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from gradaccum.torch.packing import causal_lm
from tests.reference import FLOAT32, FLOAT64, relative_error
from tests.torch.train_step.test_train_step import OPTIMIZERS, assert_same_updates, by_hand, left_as_it_was, step_of

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
    assert "padding is not cut off, because the loss can't be evaluated without it (all columns are" in caplog.text
    assert all(tokens % COLUMNS == 0 for tokens in model.tokens)


# Rows laid one behind the other, without padding, make the update of the padded large batch.


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
def test_rows_laid_one_behind_the_other_make_the_padded_batchs_update(kind, side, attention):
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
    message = r"'before' \(Before\) gives a row's tokens other outputs"
    with left_as_it_was(model, NotEquivalentError, message):
        packed_step(model)(batch)


def test_transformers_with_a_cache_mixes_packed_rows_and_is_refused_by_name():
    def cached(batch, rows):
        return {**causal_lm(batch, rows), "use_cache": True}

    with pytest.raises(NotEquivalentError, match=r"'model.layers.0.self_attn' \(LlamaAttention\) gives a row's tokens"):
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
        ({"attention_mask": MASK.flip(1), "labels": IDS.flip(1)}, ValueError, "Row 0 of a micro-batch begins after"),
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
        ({"groups": 1, "verify": False}, ValueError, "`groups` keeps rows together"),
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
    with pytest.raises(TypeError, match="a tuple of 2, as it receives them. Received: None"):
        step(*data("right", 1)[0], torch.ones(len(LENGTHS)))
