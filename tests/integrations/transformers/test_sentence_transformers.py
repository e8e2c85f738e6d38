"""sentence-transformers' trainer becomes exact by the same base class, or refuses losses across the batch."""

import copy

import pytest
import sentence_transformers
import torch
import transformers
from sentence_transformers.sentence_transformer import losses, modules

from gradaccum import NotEquivalentError
from gradaccum.integrations.transformers import MicroBatchTrainer
from tests.integrations.transformers.test_trl import no_progress_bars, texts, tokenizer
from tests.reference import relative_error

IN_FLOAT32 = 2e-6
"""Scores among the labels are float32."""

__all__ = ["no_progress_bars"]


class Sentences(MicroBatchTrainer, sentence_transformers.SentenceTransformerTrainer):
    pass


@pytest.fixture
def encoder(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=64, **sizes, **rates))
    folder = str(tmp_path / "bert")
    bert.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    parts = [modules.Transformer(folder), modules.Pooling(16)]
    return sentence_transformers.SentenceTransformer(modules=parts, device="cpu").double()


def train(cls, model, loss, data, folder, micro=None, **more):
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(
        str(folder), per_device_train_batch_size=8, num_train_epochs=1, save_strategy="no", optim="sgd",
        learning_rate=0.1, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False,
        seed=3, **more,
    )  # fmt: skip
    trained = copy.deepcopy(model)
    run = cls(trained, arguments, train_dataset=data, loss=loss(trained), **(micro or {}))
    run.remove_callback(transformers.PrinterCallback)
    start = [p.detach().clone() for p in model.parameters()]
    run.train()
    return [b.detach() - a for a, b in zip(start, trained.parameters(), strict=True) if not torch.equal(a, b)]


def pairs():
    data = texts("one", "other")
    return data.add_column("score", [i / len(data) for i in range(len(data))])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_loss_over_pairs_is_exact_and_one_across_the_batch_is_refused(encoder, tmp_path):
    stock = sentence_transformers.SentenceTransformerTrainer
    micro = {"micro_batch_size": 3}
    expected = train(stock, encoder, losses.CosineSimilarityLoss, pairs(), tmp_path)
    found = train(Sentences, encoder, losses.CosineSimilarityLoss, pairs(), tmp_path, micro)
    names = [index for index, update in enumerate(expected) if update.abs().max() > 1e-12]
    assert relative_error([found[i] for i in names], [expected[i] for i in names]) <= IN_FLOAT32
    with pytest.raises(NotEquivalentError, match=r"Sentences\.compute_loss"):
        train(Sentences, encoder, losses.MultipleNegativesRankingLoss, texts("one", "other"), tmp_path, micro)
