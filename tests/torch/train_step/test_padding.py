"""Padded rows, packed by tokens or laid one behind the other, make the update of the padded large batch."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradaccum import NotEquivalentError
from gradaccum.torch.packing import causal_lm
from tests.reference import FLOAT32, FLOAT64
from tests.torch.train_step.problems import OUT, Of
from tests.torch.train_step.steps import assert_same_updates, left_as_it_was, step_of

SLOW = partial(pytest.param, marks=pytest.mark.slow)
COLUMNS = 12
LENGTHS = [3, 12, 1, 7, 2, 2, 5, 9, 4, 1, 6]


def text(side, seed=0, lengths=LENGTHS, columns=COLUMNS):
    """Rows that are padded on a side, or full: with no padding at all."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(columns) < torch.tensor(lengths)[:, None]).long()
    mask = {"left": mask.flip(1), "right": mask, "full": torch.ones_like(mask)}[side]
    tokens = torch.randint(1, 20, mask.shape, generator=generator) * mask
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100), "name": "text"}


class Attention(nn.Module):
    """A masked self-attention over embedded tokens, maybe one that knows the column of each token."""

    def __init__(self, limit=math.inf, *, numbered=False, masked=True):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8, dtype=torch.float64)
        self.attention = nn.MultiheadAttention(8, 2, bias=False, batch_first=True, dtype=torch.float64)
        self.head = nn.Linear(8, 20, dtype=torch.float64)
        self.limit, self.numbered, self.masked, self.tokens = limit, numbered, masked, []

    def forward(self, input_ids, attention_mask):
        if input_ids.numel() > self.limit:
            raise torch.OutOfMemoryError(OUT)
        self.tokens.append(input_ids.numel())
        x, mask = self.embedding(input_ids), attention_mask == 0 if self.masked else None
        x, _ = self.attention(x, x, x, key_padding_mask=mask, need_weights=False)
        columns = torch.arange(1.0, 1.0 + input_ids.shape[1], dtype=torch.float64)[:, None]
        return self.head(x) * (columns if self.numbered else 1.0)


class OfDicts(Attention):
    def forward(self, batch):
        return super().forward(batch["input_ids"], batch["attention_mask"]).transpose(1, 2)


def token_mean(model, batch):
    outputs = model(batch["input_ids"], batch["attention_mask"])
    return F.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())


def valid(batch):
    return (batch["labels"] != -100).sum()


def terms(model, batch):
    outputs = model(batch["input_ids"], batch["attention_mask"])
    found = (batch["attention_mask"] * outputs.logsumexp(-1).square()).sum(1).mean()
    return {"tokens": (token_mean(model, batch), valid(batch)), "z": (1e-2 * found, len(outputs))}


def texts(side, updates=2):
    return [(text(side, seed),) for seed in range(updates)]


def pairs(model, batch):
    """The mean of the tokens' scores is compared."""
    scores = model(batch["input_ids"], batch["attention_mask"]).logsumexp(-1)
    score = (scores * batch["attention_mask"]).sum(1) / batch["attention_mask"].sum(1)
    return -F.logsigmoid(score[0::2] - score[1::2]).mean()


OUTSIDE = texts("right")
for _batch, *_ in OUTSIDE:
    _batch["labels"][2, 9] = 5  # outside of the mask
PAIRS = [(text("right", seed, [*LENGTHS, 3]),) for seed in range(2)]
OF_GROUPS = {"loss": pairs, "groups": 2, "max_tokens": 40}
PADDED = {"compute_loss": token_mean, "weight": valid, "max_tokens": 24}
OF_PAIRS = {"loss": lambda m, x, y: F.cross_entropy(m(x), y), "loss_fn": nn.CrossEntropyLoss(), "max_tokens": 24}
PROGRAMS = {  # name: (model, data, keywords, most tokens of a micro-batch, and of all: 132 with all padding)
    "padding on the right": (Attention, texts("right"), PADDED, 24, 79),
    "padding on the left": (Attention, texts("left"), PADDED, 24, 79),
    "a dict beside targets": (OfDicts, [(batch, batch["labels"]) for (batch,) in texts("right")], OF_PAIRS, 24, 79),
    "terms, counted and proven before": (Attention, texts("right"), {"terms": terms, "max_tokens": 24}, 24, 3 * 132),
    "labels outside the mask": (Attention, OUTSIDE, {**PADDED, "verify": False}, 24, 79),
    "a row longer than the budget": (Attention, texts("right"), {**PADDED, "max_tokens": 4}, COLUMNS, 79),
    "columns that are numbered by the model": (partial(Attention, numbered=True), texts("left"), PADDED, 24, 132),
    "memory that runs out": (
        partial(Attention, 15), texts("right"), {**PADDED, "max_tokens": 36, "reference": Attention()}, 15, 79
    ),
    "groups": (Attention, PAIRS, OF_GROUPS, 40, 105),
    "groups, where memory runs out": (partial(Attention, 30), PAIRS, {**OF_GROUPS, "reference": Attention()}, 30, 105),
}  # fmt: skip


@pytest.mark.parametrize(("make", "data", "keywords", "most", "all_"), PROGRAMS.values(), ids=PROGRAMS)
def test_packed_rows_make_the_padded_batchs_update_with(make, data, keywords, most, all_):
    model = make()
    step = assert_same_updates(model, data, **{"loss": token_mean, **keywords})
    model.tokens.clear()
    step(*data[0])
    assert max(model.tokens) <= most
    assert sum(model.tokens) <= all_


def tiny(kind):
    t = pytest.importorskip("transformers")
    config, model = {
        "gpt2": (t.GPT2Config, t.GPT2LMHeadModel),
        "llama": (t.LlamaConfig, t.LlamaForCausalLM),
        "bert": (t.BertConfig, t.BertForMaskedLM),
    }[kind]
    sizes = dict.fromkeys(["hidden_size", "intermediate_size"], 8) | {"num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"vocab_size": 20, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 1}
    dropout = ["resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob"]
    torch.manual_seed(0)
    return model(config(**sizes, **ends, **dict.fromkeys(dropout, 0.0))).double()


def shifted(batch):
    return (batch["labels"][:, 1:] != -100).sum()


def output_loss(model, batch):
    return model(**{name: value for name, value in batch.items() if name != "name"}).loss


def assert_same_for_transformers(model, data, loss=output_loss, tolerance=FLOAT32, **keywords):
    """The attention's keys have a bias, whose true gradient is 0; the model's own loss is computed in float32."""
    keywords = {"compute_loss": loss, "weight": shifted, "max_tokens": 24, **keywords}
    return assert_same_updates(model, data, loss, tolerance=tolerance, as_one=True, **keywords)


def packed(kind, data, *, loss=output_loss, **keywords):
    model, weight = tiny(kind), valid if kind == "bert" else shifted
    return model, assert_same_for_transformers(model, data, loss, **{"weight": weight, **keywords})


def calls(model, step, batch):
    """What the model is called with in another update."""
    found = []
    model.register_forward_pre_hook(lambda _, args, keywords: found.append(keywords), with_kwargs=True)
    step(*batch)
    return found


def way(model, step, batch):
    """What an update does about padding on the left: cut it off, cut it off and number the columns, or keep it."""
    found = calls(model, step, batch)
    if any(call.get("position_ids") is not None for call in found):
        return "number"
    return "cut" if any(call["input_ids"].shape[1] < COLUMNS for call in found) else "keep"


ALL = range(len(LENGTHS))


def first_labels(batch, rows=ALL, name="labels", ignored=-100):
    """The batch with the labels of these rows' first tokens ignored."""
    rows = torch.tensor([*rows], dtype=torch.long)
    batch[name][rows, batch["attention_mask"].argmax(1)[rows]] = ignored
    return batch


LATE = "full", "right", "left", "left"


@pytest.mark.parametrize(
    ("kind", "sides", "first", "expected"),  # whether labels of first tokens count; what is done about the last batch
    [
        ("llama", ("right",) * 2, False, "cut"),
        ("bert", ("left",) * 2, True, "number"),  # it numbers the columns, as GPT-2 does
        ("gpt2", ("left",) * 2, False, "number"),
        # A causal model predicts the first token from padding, and what it makes of that depends on all of it.
        ("gpt2", LATE, True, "keep"),
        *(SLOW(kind, LATE, True, expected) for kind, expected in (("bert", "number"), ("llama", "keep"))),
        *(SLOW("gpt2", ("left",) * 2, True, "keep"), SLOW("llama", ("left",) * 2, True, "keep")),
        *(SLOW("bert", ("left",) * 2, False, "number"), SLOW("llama", ("left",) * 2, False, "cut")),
        *(SLOW(kind, ("right",) * 2, first, "cut") for kind in ("bert", "gpt2", "llama") for first in (True, False)),
    ],
)
def test_models_of_transformers_take_packed_batches(kind, sides, first, expected):
    data = [text(side, seed) for seed, side in enumerate(sides)]
    data = [(batch if first else first_labels(batch),) for batch in data]
    model, step = packed(kind, data)
    assert way(model, step, data[-1]) == expected


@pytest.mark.parametrize("rows", [[3], [0, 7]], ids=["one row", "others"])
@pytest.mark.parametrize("kind", ["gpt2", SLOW("llama")])
def test_a_first_label_that_counts_in_a_later_batch_alone_is_noticed(kind, rows, caplog):
    data = texts("left", 4)
    for index, (batch,) in enumerate(data):
        first_labels(batch, [row for row in ALL if index != 2 or row not in rows])
    caplog.set_level("INFO", "gradaccum")
    model, step = packed(kind, data, micro_batch_size=2)
    assert way(model, step, data[-1]) == ("number" if kind == "gpt2" else "cut")
    assert "A first label of -100 predicts nothing from padding" in caplog.text
    assert "batch[0]['labels']" in caplog.text


def test_a_loss_mask_of_the_users_own_is_noticed_as_labels_are():
    """The first token of some rows counts by a mask that has no name known to the library."""

    def loss(model, batch):
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        each = F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="none")
        counts = batch["counts"][:, 1:].flatten()
        return (each * counts).sum() / counts.sum()

    data = texts("left", 3)
    for index, (batch,) in enumerate(data):
        batch["counts"] = batch["attention_mask"].double()
        first_labels(batch, ALL if index < 2 else (), "counts", 0)
    counted = lambda batch: batch["counts"][:, 1:].sum()  # noqa: E731
    model, step = packed("llama", data, loss=loss, weight=counted)
    assert way(model, step, data[-1]) == "keep"


def test_batch_encodings_are_split_and_packed():
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({k: v for k, v in text("right").items() if k != "name"})
    for how in ({}, {"micro_batch_size": 3, "max_tokens": None}):
        packed("bert", [(batch,)], **how)


# What is as wide as the text.


def ratings_loss(model, batch):
    mask = batch["attention_mask"]
    scores = (model(batch["input_ids"], mask).mean(-1) * mask).sum(1) / mask.sum(1)
    scores = scores * (batch["features"] @ torch.ones(14).double()) if "features" in batch else scores
    return (scores - batch["ratings"].flatten(1).mean(1)).square().mean()


def rated(columns, ratings=(14,), side="right"):
    """Text with ratings of each row, of this shape."""
    generator = torch.Generator().manual_seed(columns)
    lengths = torch.randint(2, columns + 1, (20,), generator=generator).tolist()
    batch = text(side, columns, lengths, columns)
    made = torch.rand(20, *ratings, generator=generator, dtype=torch.float64)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "ratings": made}


RATED = {"compute_loss": ratings_loss, "weight": None, "max_tokens": 40}


@pytest.mark.parametrize(
    ("columns", "ratings"),
    [((10, 14), (14,)), ((10, 14), (14, 4)), ((10, 11, 14, 12, 14), (14,)), ((10, 11, 14), (14, 4)), ((14,), (1, 14))],
    ids=str,
)
def test_what_is_as_wide_as_the_text_by_chance_or_has_another_dimension_between_is_left_alone(columns, ratings):
    assert_same_updates(Attention(), [(rated(n, ratings),) for n in columns], ratings_loss, **RATED)


def test_padding_stays_where_a_leaf_is_taken_for_text_by_its_shape_and_that_is_named(caplog):
    batch, model = rated(14, (3,)) | {"features": torch.ones(20, 14).double()}, Attention()
    assert_same_updates(model, [(batch,)], ratings_loss, reference=Attention(), **RATED)
    assert all(tokens % 14 == 0 for tokens in model.tokens[-10:])  # of the update itself
    for named in ("padding is not cut off, because the loss can't be", "['features']", "tensor[:, None]"):
        assert named in caplog.text


def test_a_group_of_more_tokens_than_the_budget_is_refused():
    step = step_of(Attention(), compute_loss=pairs, max_tokens=20, groups=2)
    with pytest.raises(ValueError, match=r"group 0 \(2 rows\) of up to 12 columns, 24 padded tokens, in max_tokens=20"):
        step(*PAIRS[0])


def padded_mean(model, batch):
    outputs = model(batch["input_ids"], batch["attention_mask"])
    return F.cross_entropy(outputs.flatten(0, 1), batch["input_ids"].flatten())


def mean_of_means(model, batch):
    outputs = model(batch["input_ids"], batch["attention_mask"])
    each = F.cross_entropy(outputs.transpose(1, 2), batch["labels"], reduction="none")
    return (each.sum(1) / (batch["labels"] != -100).sum(1)).mean()


def padded_labels(seed):
    batch = text("right", seed)
    return batch | {"labels": batch["labels"].masked_fill(batch["attention_mask"] == 0, 0)}  # 0 is a token here


class States(Attention):
    """A recurrence from the right, which comes to the padding there first."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(8, 8, batch_first=True, dtype=torch.float64)

    def forward(self, input_ids, attention_mask):
        return self.head(self.recurrent(self.embedding(input_ids).flip(1))[0].flip(1))


TAKEN = r"batch\[0\]\['ratings'\].*tensor\[:, None\]"
CUT = "Cutting off columns of nothing but padding changes the loss"
REFUSED = {  # name: (model, batches, of which the last is refused, keywords, message)
    "padding that counts": (
        Attention, [text("right")], {"compute_loss": padded_mean, "weight": None}, "padded positions count"
    ),
    "padded labels that count in a later batch alone": (
        Attention, [text("full", 9), text("right"), text("right", 1), padded_labels(2)], {},
        "mark them with -100 in the labels.*Leave out `max_tokens`",
    ),
    "a mean of means, of cut rows": (
        Attention, [text("left")], {"compute_loss": mean_of_means},
        "`max_tokens` has cut off padding there. Taken for text",
    ),
    **{
        f"a recurrence, after {before or 'nothing'}": (States, [*map(text, before), text("right")], {}, CUT)
        for before in ([], ["full"], ["left"], ["full", "left"])
    },
    "a model without a mask, padded late": (
        partial(Attention, masked=False), [rated(6, side="full"), rated(7)], RATED, "Cutting off columns"
    ),
    "ratings as wide as the first text": (Attention, [rated(14)], RATED, TAKEN),
    **{
        f"ratings as wide as the text in batch {at} alone":
            (Attention, [rated(9 + n, (9 + n,) if n == at else (1,)) for n in range(1, at + 1)], RATED, TAKEN)
        for at in (2, 3, 4)
    },
}  # fmt: skip


@pytest.mark.parametrize(("make", "batches", "keywords", "message"), REFUSED.values(), ids=REFUSED)
def test_max_tokens_is_refused_where_it_would_change_the_update(make, batches, keywords, message):
    model = make()
    step = step_of(model, verify=True, **{**PADDED, **keywords})
    for batch in batches[:-1]:
        step(batch)
    with left_as_it_was(model, NotEquivalentError, message):
        step(batches[-1])


# Rows laid one behind the other, without padding.


def next_token_mean(model, batch):
    """The model's own loss, in the model's dtype."""
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def data(side, updates=3):
    """Without what is no tensor, which transformers' models don't know; first labels after padding count no more."""
    made = [{name: value for name, value in batch.items() if name != "name"} for (batch,) in texts(side, updates)]
    padded = [(batch["attention_mask"][:, 0] == 0).nonzero()[:, 0].tolist() for batch in made]
    return [(first_labels(batch, rows),) for batch, rows in zip(made, padded)]


PACKED = {"compute_loss": next_token_mean, "weight": shifted, "max_tokens": 24, "pack": causal_lm}


def limited(model, batch):
    if batch["input_ids"].numel() > 12:
        raise torch.OutOfMemoryError(OUT)
    return next_token_mean(model, batch)


def in_one(batch, rows):
    """All rows of a micro-batch in one, as attention of variable lengths takes them."""
    return causal_lm(batch, [[row for pack in rows for row in pack]])


IN_ONE, LIMITED = {"pack": in_one, "verify": False}, {"compute_loss": limited, "max_tokens": 48, "verify": False}


@pytest.mark.parametrize(
    ("kind", "side", "attention", "keywords", "most", "padding"),
    [
        ("llama", "right", "sdpa", {}, 24, 8),
        SLOW("llama", "left", "sdpa", {}, 24, 8),
        SLOW("gpt2", "right", "eager", {}, 24, 8),
        ("gpt2", "left", "sdpa", {}, 24, 8),
        ("llama", "right", "sdpa", IN_ONE, 24, 0),
        ("llama", "right", "sdpa", LIMITED, 12, 12),
    ],
    ids=["llama", "llama, left", "gpt2, eager", "gpt2, left", "in one row", "running out of memory"],
)
def test_rows_laid_one_behind_the_other_make_the_padded_batchs_update(
    kind, side, attention, keywords, most, padding, caplog
):
    caplog.set_level("INFO", "gradaccum")
    model, batches = tiny(kind), data(side, 2)
    model.set_attn_implementation(attention)
    own = {"reference": tiny(kind), "compute_loss": next_token_mean, "pack": causal_lm, **keywords}
    step = assert_same_for_transformers(model, batches, next_token_mean, FLOAT64, **own)
    tokens = [call["input_ids"].numel() for call in calls(model, step, batches[0])]
    assert max(tokens) <= most
    assert 0 <= sum(tokens) - sum(LENGTHS) <= padding
    (line,) = [record.message for record in caplog.records if record.message.startswith("pack:")]
    share = 100 * (1 - sum(LENGTHS) / sum(tokens))
    assert keywords or f"{share:.1f} % of the tokens computed are padding; in the batch as it came 60.6 %" in line


def test_a_pack_of_ones_own_takes_what_follows_the_model():
    """Inputs and targets, and `torch.nn`'s own mean over the targets that count."""
    loss_fn = nn.CrossEntropyLoss(ignore_index=0)

    def pack(batch, rows):
        x, y = batch
        kept = [torch.cat([torch.nonzero(x["attention_mask"][row])[:, 0] + row * COLUMNS for row in p]) for p in rows]
        take = [torch.cat([t.flatten()[k] for k in kept])[None] for t in (x["input_ids"], y)]
        return {"input_ids": take[0]}, take[1]

    layers = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)).double()
    model = Of(lambda model, x: model.layers(x["input_ids"]).transpose(1, 2), layers=layers)
    batches = [(batch, batch["input_ids"]) for (batch,) in data("right", 2)]
    keywords = {"loss_fn": loss_fn, "max_tokens": 24, "pack": pack}
    assert_same_updates(model, batches, lambda model, x, y: loss_fn(model(x), y), **keywords)


def mixing():
    """Adds to each token the mean of all tokens before it, whatever their rows."""
    before = Of(lambda _, x: x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None])
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(20, 8).double(), before, nn.Linear(8, 20).double())
    return Of(lambda model, input_ids, **_: SimpleNamespace(logits=model.layers(input_ids)), layers=layers)


def with_a_cache(batch, rows):
    return {**causal_lm(batch, rows), "use_cache": True}


@pytest.mark.parametrize(
    ("make", "rows", "pack", "named"),
    [
        *((mixing, rows, causal_lm, r"'layers.1' \(Does\)") for rows in (len(LENGTHS), 2)),
        (partial(tiny, "llama"), 11, with_a_cache, r"'model.layers.0.self_attn' \(LlamaAttention\)"),
    ],
    ids=["many rows", "two rows", "transformers with a cache"],
)
def test_a_model_that_mixes_packed_rows_is_refused_by_name(make, rows, pack, named):
    model, batch = make(), {name: value[:rows] for name, value in data("right", 1)[0][0].items()}
    with left_as_it_was(model, NotEquivalentError, rf"{named} gives a row's tokens other outputs"):
        step_of(model, verify=True, **{**PACKED, "pack": pack})(batch)


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
