"""Losses of the user's own: exact, whatever they are a mean over, or refused by name."""

import pytest
import torch
import transformers
from torch import nn

from gradaccum import NotEquivalentError
from gradaccum.integrations.transformers import MicroBatchTrainer
from tests.integrations.transformers.problems import mixtral, model, rows, train, updates
from tests.reference import relative_error

IN_FLOAT32 = 2e-6
LLAMA, TOKENS = "Llama", "BERT, a label for each token"


def tokens(outputs, labels):
    """Each token's loss, in rows; 0 where it is ignored."""
    logits = outputs["logits"].transpose(1, 2)
    return nn.functional.cross_entropy(logits, labels, reduction="none"), (labels != -100)


def ignores_the_count(outputs, labels, num_items_in_batch=None):
    loss, counted = tokens(outputs, labels)
    return loss.sum() / counted.sum()


def divides_by_the_count(outputs, labels, num_items_in_batch=None):
    return tokens(outputs, labels)[0].sum() / num_items_in_batch


def mean_of_each_texts_mean(outputs, labels, num_items_in_batch=None):
    loss, counted = tokens(outputs, labels)
    return (loss.sum(1) / counted.sum(1)).mean()


def mean_over_the_texts(outputs, labels, num_items_in_batch=None):
    return tokens(outputs, labels)[0].sum(1).mean()


def mean_over_labels_but_the_first(outputs, labels, num_items_in_batch=None):
    return nn.functional.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Tokenwise(nn.Module):
    """Logits of each token, by two layers: for what is about the loss alone. A cause is looked for in every module."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(37, 4), nn.Linear(4, 3)

    def forward(self, input_ids, attention_mask, labels=None):  # as the Trainer asks, or it drops the column
        return {"logits": self.out(self.embedding(input_ids).tanh())}


def assert_same(
    kind, folder, cls=MicroBatchTrainer, stock=transformers.Trainer, micro=None, trainer=None, start=None, **more
):
    start, data = start or model(kind).double(), rows(kind)
    expected = train(stock, start, data, folder, trainer=trainer, **more)
    found = train(cls, start, data, folder, micro=micro or {"micro_batch_size": 4}, trainer=trainer, **more)
    assert relative_error(updates(found, start), updates(expected, start)) <= IN_FLOAT32
    return found


BY_ROWS, BY_TOKENS = {"micro_batch_size": 4}, {"max_tokens": 36}


@pytest.mark.parametrize(
    ("function", "micro"),
    [
        (mean_of_each_texts_mean, BY_ROWS),
        (mean_of_each_texts_mean, BY_TOKENS),
        (divides_by_the_count, BY_ROWS),
        (mean_over_labels_but_the_first, BY_TOKENS),
        pytest.param(ignores_the_count, BY_ROWS, marks=pytest.mark.slow),
        pytest.param(ignores_the_count, BY_TOKENS, marks=pytest.mark.slow),
        pytest.param(divides_by_the_count, BY_TOKENS, marks=pytest.mark.slow),
        (mean_over_the_texts, BY_ROWS),
        pytest.param(mean_over_the_texts, BY_TOKENS, marks=pytest.mark.slow),
        pytest.param(mean_over_labels_but_the_first, BY_ROWS, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_a_compute_loss_func_is_a_mean_over_is_found_out(function, micro, tmp_path):
    assert_same(TOKENS, tmp_path, micro=micro, trainer={"compute_loss_func": function})


def test_a_compute_loss_in_a_subclass_may_ignore_the_count(tmp_path):
    class Ignores:
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            labels = inputs["labels"][:, 1:]
            return nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels.flatten())

    class Found(Ignores, MicroBatchTrainer):
        pass

    class Stock(Ignores, transformers.Trainer):
        pass

    found = assert_same(LLAMA, tmp_path, Found, Stock)
    assert found._gradaccum_large_batch.denominator.left[-1] == "labels shifted by one"


@pytest.mark.parametrize("kind", [LLAMA, TOKENS])
def test_label_smoothing_is_the_large_batchs(kind, tmp_path):
    assert_same(kind, tmp_path, label_smoothing_factor=0.1)


def test_a_loss_across_the_batch_is_refused_before_anything_changes(tmp_path):
    def spread(outputs, labels, num_items_in_batch=None):
        return outputs["logits"].std()

    start = Tokenwise().double()
    trainers = []

    class Watched(MicroBatchTrainer):
        def training_step(self, *arguments):
            trainers.append(self)
            return super().training_step(*arguments)

    with pytest.raises(NotEquivalentError, match=r"Watched\.compute_loss.*MicroBatchTrainer\(weight=\.\.\.\)"):
        train(
            Watched, start, rows(TOKENS), tmp_path, micro={"micro_batch_size": 4}, trainer={"compute_loss_func": spread}
        )
    assert all(torch.equal(a, b) for a, b in zip(trainers[0].model.parameters(), start.parameters(), strict=True))
    assert "compute_loss" not in vars(trainers[0])


def test_a_given_weight_is_taken_as_it_is(tmp_path):
    def mean_over_squares(outputs, labels, num_items_in_batch=None):
        loss, _ = tokens(outputs, labels)
        return (loss * labels.clamp(min=0)).sum() / labels.clamp(min=0).sum()

    trainer, start = {"compute_loss_func": mean_over_squares}, Tokenwise().double()
    with pytest.raises(NotEquivalentError):
        assert_same(TOKENS, tmp_path, trainer=trainer, start=start)

    def weight(inputs):
        return inputs["labels"].clamp(min=0).sum()

    assert_same(TOKENS, tmp_path, micro={"micro_batch_size": 4, "weight": weight}, trainer=trainer, start=start)


def test_outputs_of_the_large_batch_are_not_to_be_had(tmp_path):
    class Asks(transformers.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            return self.compute_loss(model, inputs, return_outputs=True)[0]

    class Found(MicroBatchTrainer, Asks):
        pass

    with pytest.raises(TypeError, match=r"Found\.training_step asks compute_loss for the outputs of the large batch"):
        train(Found, model(TOKENS), rows(TOKENS), tmp_path, micro={"micro_batch_size": 4})


def test_a_loss_that_logs_counts_each_row_once(tmp_path):
    class Counts(transformers.Trainer):
        seen = 0

        def compute_loss(self, model, inputs, *arguments, **keywords):
            self.seen += len(inputs["input_ids"])
            self.history = [*getattr(self, "history", []), len(inputs["input_ids"])]
            return super().compute_loss(model, inputs, *arguments, **keywords)

    class Found(MicroBatchTrainer, Counts):
        pass

    found = train(Found, model(TOKENS), rows(TOKENS), tmp_path, micro={"micro_batch_size": 5})
    assert found.seen == 24
    assert found.history == [5, 5, 5, 5, 4]


class WithRouter(nn.Module):
    """A loss over rows, and one that balances a router over all of them."""

    def __init__(self):
        super().__init__()
        self.embedding, self.router = nn.Embedding(37, 4), nn.Linear(4, 3)

    def forward(self, input_ids, attention_mask, labels):
        chosen = self.router(self.embedding(input_ids).mean(1)).softmax(1)
        return {"loss": -chosen[:, 0].log().mean() + 0.1 * (chosen.mean(0) ** 2).sum()}


def test_a_routers_loss_that_nothing_tells_of_is_no_mean(tmp_path):
    made = WithRouter()
    with pytest.raises(NotEquivalentError, match="MicroBatchTrainer.compute_loss"):
        train(MicroBatchTrainer, made, rows(TOKENS), tmp_path, micro={"micro_batch_size": 4})


def test_mixtrals_router_loss_is_refused_by_name(tmp_path):
    made = mixtral(output_router_logits=True)
    named = "output_router_logits=True in the model's config adds the router's load-balancing loss"
    with pytest.raises(ValueError, match=named):
        train(MicroBatchTrainer, made, rows("Mixtral"), tmp_path, micro={"micro_batch_size": 4})


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
    made, data = Experts().double(), rows(TOKENS)
    expected = train(transformers.Trainer, made, data, tmp_path)
    found = train(MicroBatchTrainer, made, data, tmp_path, micro={"micro_batch_size": 4})
    assert found._gradaccum_large_batch.denominator.left[-1] == "labels"  # the Trainer counts nothing for such a model
    pairs = zip(updates(found, made), updates(expected, made), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) <= 1e-12
