"""The large batch's updates, whatever a loss is a mean over, against the stock Trainer at the full batch.

All models, losses and settings: fuzz/trainer_runs.py.
"""

import pytest
import torch
import transformers
from torch import nn

from gradaccum import NotEquivalentError
from gradaccum.integrations.transformers import MicroBatchTrainer
from tests.integrations.transformers import problems
from tests.integrations.transformers.problems import TOKENS, both, error, logs, model, rows, train, updates
from tests.reference import relative_error

IN_FLOAT32 = 2e-6
"""Others compute in float32 inside, whatever the parameters are: the loss of logits.float(), or T5's layer norm."""
BY_ROWS, BY_TOKENS = problems.MICRO, {"max_tokens": 36}
SLOW = pytest.mark.slow


# Seq2SeqTrainer: texts that are generated in between, as the stock Trainer does.


class Seq2Seq(MicroBatchTrainer, transformers.Seq2SeqTrainer):
    pass


def with_decoder_inputs(examples):
    """As DataCollatorForSeq2Seq(model=...) makes them, without which there is no label smoothing."""
    batch = problems.collate(examples)
    ids = batch["labels"].new_zeros(batch["labels"].shape)
    ids[:, 1:] = batch["labels"][:, :-1].clamp(min=0)
    return batch | {"decoder_input_ids": ids}


@pytest.mark.parametrize("smoothing", [0.1, pytest.param(0.0, marks=SLOW)])
@pytest.mark.parametrize("micro", [BY_ROWS, pytest.param(BY_TOKENS, marks=SLOW)], ids=str)
def test_t5_makes_the_large_batchs_updates_and_generates_the_same(micro, smoothing, tmp_path):
    start, generated = model("T5").double(), []

    def keep(prediction):
        generated.append(torch.tensor(prediction.predictions))
        return {"first": float(prediction.predictions[0, -1])}

    more = {
        "kind": transformers.Seq2SeqTrainingArguments, "predict_with_generate": True, "generation_max_length": 6,
        "eval_strategy": "epoch", "label_smoothing_factor": smoothing,
        "trainer": {
            "eval_dataset": rows("T5", 8, seed=2), "compute_metrics": keep, "data_collator": with_decoder_inputs,
        },
    }  # fmt: skip
    runs = both(start, tmp_path, rows("T5"), Seq2Seq, micro, transformers.Seq2SeqTrainer, **more)
    assert error(start, *runs) <= IN_FLOAT32
    for names in (["loss", "grad_norm"], ["eval_loss"]):
        theirs, ours = (torch.tensor(logs(run, *names)) for run in runs)
        assert relative_error([ours], [theirs]) <= 1e-6
    assert torch.equal(generated[0], generated[1])
    assert len(generated[0]) == 8


# Losses of the user's own.


class Tokenwise(nn.Module):
    """Logits of each token, by two layers: for what is about the loss alone. A cause is looked for in every module."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(37, 4), nn.Linear(4, 3)

    def forward(self, input_ids, attention_mask, labels=None):  # as the Trainer asks, or it drops the column
        return {"logits": self.out(self.embedding(input_ids).tanh())}


def test_a_loss_across_the_batch_is_refused_before_anything_changes(tmp_path):
    start, trainers = Tokenwise().double(), []

    class Watched(MicroBatchTrainer):
        def training_step(self, *arguments):
            trainers.append(self)
            return super().training_step(*arguments)

    spread = {"compute_loss_func": lambda outputs, labels, num_items_in_batch=None: outputs["logits"].std()}
    with pytest.raises(NotEquivalentError, match=r"Watched\.compute_loss.*MicroBatchTrainer\(weight=\.\.\.\)"):
        train(Watched, start, rows(TOKENS), tmp_path, micro=BY_ROWS, trainer=spread)
    assert all(torch.equal(a, b) for a, b in zip(trainers[0].model.parameters(), start.parameters(), strict=True))
    assert "compute_loss" not in vars(trainers[0])


def test_a_given_weight_is_taken_as_it_is(tmp_path):
    def mean_over_labels(outputs, labels, num_items_in_batch=None):
        loss = nn.functional.cross_entropy(outputs["logits"].transpose(1, 2), labels, reduction="none")
        return (loss * labels.clamp(min=0)).sum() / labels.clamp(min=0).sum()

    start, trainer = Tokenwise().double(), {"compute_loss_func": mean_over_labels}
    with pytest.raises(NotEquivalentError):
        train(MicroBatchTrainer, start, rows(TOKENS), tmp_path, micro=BY_ROWS, trainer=trainer)
    weighed = BY_ROWS | {"weight": lambda inputs: inputs["labels"].clamp(min=0).sum()}
    assert error(start, *both(start, tmp_path, rows(TOKENS), micro=weighed, trainer=trainer)) <= IN_FLOAT32


class WithRouter(nn.Module):
    """A loss over rows, and one that balances a router over all of them."""

    def __init__(self):
        super().__init__()
        self.embedding, self.router = nn.Embedding(37, 4), nn.Linear(4, 3)

    def forward(self, input_ids, attention_mask, labels):
        chosen = self.router(self.embedding(input_ids).mean(1)).softmax(1)
        return {"loss": -chosen[:, 0].log().mean() + 0.1 * (chosen.mean(0) ** 2).sum()}


class Asks(transformers.Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        return self.compute_loss(model, inputs, return_outputs=True)[0]


class Found(MicroBatchTrainer, Asks):
    pass


@pytest.mark.parametrize(
    ("made", "cls", "kind", "says"),
    [
        (WithRouter, MicroBatchTrainer, NotEquivalentError, "MicroBatchTrainer.compute_loss"),
        (Tokenwise, Found, TypeError, r"Found\.training_step asks compute_loss for the outputs of the large batch"),
    ],
    ids=["a router of which nothing tells", "outputs of the large batch"],
)  # fmt: skip
def test_what_is_no_mean_is_refused_by_name(made, cls, kind, says, tmp_path):
    with pytest.raises(kind, match=says):
        train(cls, made(), rows(TOKENS), tmp_path, micro=BY_ROWS)


class Experts(nn.Module):
    """Each text goes through the embedding of its length alone: single rows leave parameters without a gradient."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Embedding(37, 3) for _ in range(13)])

    def forward(self, input_ids, attention_mask, labels):
        lengths = attention_mask.sum(1)
        parts = [(self.experts[int(n)](input_ids[lengths == n]), labels[lengths == n]) for n in lengths.unique()]
        logits, targets = (torch.cat([part[i].flatten(0, 1) for part in parts]) for i in (0, 1))
        return {"loss": nn.functional.cross_entropy(logits, targets)}


def test_parameters_that_single_rows_leave_out_are_no_obstacle(tmp_path):
    made = Experts().double()
    expected, found = both(made, tmp_path, rows(TOKENS))
    assert found._gradaccum_large_batch.denominator.left[-1] == "labels"  # the Trainer counts nothing for such a model
    pairs = zip(updates(found, made), updates(expected, made), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) <= 1e-12
