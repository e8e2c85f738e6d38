"""ChunkedMultipleNegativesRankingLoss against sentence-transformers' own losses."""

import copy
import gc
import inspect
import logging
import pickle

import pytest
import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("sentence_transformers")

import sentence_transformers
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    CosineSimilarityLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.util import dot_score, euclidean_sim

from gradaccum import NotEquivalentError
from gradaccum.integrations.sentence_transformers import ChunkedMultipleNegativesRankingLoss
from gradaccum.integrations.transformers import MicroBatchTrainer
from tests.integrations.sentence_transformers.problems import loss_and_gradients, texts, tiny, trained
from tests.reference import FLOAT64, relative_error

BOTH = ("query_to_doc", "doc_to_query")
ALL = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
TILES = [{}, {"scale": 5.0, "similarity_fct": dot_score}, {"directions": BOTH, "partition_mode": "per_direction"}]
MATRICES = [
    {"directions": ALL},
    {"directions": BOTH},
    {"similarity_fct": euclidean_sim},
    {"hardness_mode": "hard_negatives", "hardness_strength": 5.0},
]


@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize("sizes", [{"mini_batch_size": 4}, {"mini_batch_num_tokens": 24}])
@pytest.mark.parametrize("options", TILES + MATRICES, ids=lambda o: "-".join(map(str, o)) or "plain")
def test_loss_and_gradients_are_those_of_the_whole_batch(options, sizes, columns):
    model, batch = tiny(), [texts(seed) for seed in range(columns)]
    expected = loss_and_gradients(MultipleNegativesRankingLoss(model, **options), model, batch)
    loss = ChunkedMultipleNegativesRankingLoss(model, **options, **sizes, tile=4)
    assert relative_error(loss_and_gradients(loss, model, batch), expected) <= FLOAT64


def test_what_takes_the_whole_matrix_is_said(caplog):
    caplog.set_level(logging.INFO, "gradaccum")
    for options in TILES:
        ChunkedMultipleNegativesRankingLoss(tiny(), **options)
    assert caplog.messages == []
    ChunkedMultipleNegativesRankingLoss(tiny(), directions=ALL)
    assert "holds the whole matrix of similarities" in caplog.text


def test_dropout_of_the_second_pass_is_that_of_the_first():
    model, batch = tiny(dropout=0.5), [texts(seed) for seed in range(2)]
    loss = ChunkedMultipleNegativesRankingLoss(model, mini_batch_size=4, tile=4)
    loss_and_gradients(loss, model, batch)  # the first call proves itself
    torch.manual_seed(1)
    found = loss_and_gradients(loss, model, batch)
    torch.manual_seed(1)
    # The same micro-batches, all of them kept.
    embeddings = []
    for features in batch:
        parts = [{name: value[rows] for name, value in features.items()} for rows in torch.arange(11).split(4)]
        sizes = [len(part["input_ids"]) for part in parts]
        assert sizes == [4, 4, 3]
        embeddings.append(torch.cat([model(part)["sentence_embedding"] for part in parts]))
    model.zero_grad()
    value = loss.compute_loss_from_embeddings(embeddings, None)
    value.backward()
    expected = [value, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])]
    assert relative_error(found, expected) <= FLOAT64


def test_its_arguments_and_settings_are_those_of_the_cached_loss():
    ours, theirs = (
        inspect.signature(loss).parameters
        for loss in (ChunkedMultipleNegativesRankingLoss, CachedMultipleNegativesRankingLoss)
    )
    assert [(p.name, p.default) for p in theirs.values()] == [
        (p.name, p.default) for p in ours.values() if p.kind is not p.KEYWORD_ONLY
    ]
    model = tiny()
    loss, cached = ChunkedMultipleNegativesRankingLoss(model), CachedMultipleNegativesRankingLoss(model)
    assert {**loss.get_config_dict(), "tile": None} == {**cached.get_config_dict(), "tile": None}
    assert loss.citation
    loss.scale = 5.0
    assert (loss.scale, loss.temperature) == (5.0, 0.2)
    assert list(loss.state_dict()) == list(MultipleNegativesRankingLoss(model).state_dict())


def test_copied_pickled_or_without_gradients_it_is_the_loss():
    model, batch = tiny(), [texts(seed) for seed in range(2)]
    loss = ChunkedMultipleNegativesRankingLoss(model, mini_batch_size=4)
    expected = loss_and_gradients(loss, model, batch)
    for again in (copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert again.model is not model
        assert relative_error(loss_and_gradients(again, again.model, batch), expected) <= FLOAT64
    with torch.no_grad():
        found, plain = (each([dict(f) for f in batch], None) for each in (loss, MultipleNegativesRankingLoss(model)))
    assert relative_error([found], [plain]) <= FLOAT64


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    # A replica that outlives the group ends it while it holds the interpreter's lock, for which a thread of gloo's may
    # wait: for ever.
    gc.collect()
    dist.destroy_process_group()


def test_distributed_data_parallel_sees_one_forward_pass_and_its_hooks_see_each_gradient_once(one_rank):
    model, batch = tiny(), [texts(seed) for seed in range(3)]
    expected = loss_and_gradients(MultipleNegativesRankingLoss(model), model, batch)
    parallel, buckets = DistributedDataParallel(model, find_unused_parameters=True), []

    def count(_, bucket):
        buckets.append(bucket.buffer().clone())
        return _done(bucket.buffer())

    parallel.register_comm_hook(None, count)
    loss = ChunkedMultipleNegativesRankingLoss(model, mini_batch_size=4, gather_across_devices=True)
    loss.model = parallel  # as the trainer does
    assert relative_error(loss_and_gradients(loss, model, batch), expected) <= FLOAT64
    assert len(buckets) == 1
    assert parallel.module is model


def _done(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def test_their_trainer_makes_the_same_updates_with_it(tmp_path):
    expected = trained(MultipleNegativesRankingLoss, output_dir=f"{tmp_path}/a")
    for sizes in ({"mini_batch_size": 3}, {"mini_batch_num_tokens": 24}):
        found = trained(
            lambda model, sizes=sizes: ChunkedMultipleNegativesRankingLoss(model, **sizes), output_dir=f"{tmp_path}/b"
        )
        assert relative_error([found], [expected]) <= FLOAT64


def test_errors_say_what_to_do():
    model, fewer = tiny(), {name: value[:4] for name, value in texts(1).items()}
    for options, columns, says in [
        ({}, [texts(0)], "Expected at least 2 inputs, got 1"),
        ({}, [texts(0), fewer], "at least as many documents as queries.*columns of 11, 4 texts"),
        ({}, [{"cu_seq_lens_q": torch.tensor([0, 3])}] * 2, "Leave them padded, and pass `mini_batch_num_tokens`"),
        ({"mini_batch_size": 0}, [], "`mini_batch_size` must be an int >= 1"),
        ({"scale": 0.0}, [], "Scale must be a positive value"),
    ]:
        with pytest.raises(ValueError, match=says):
            ChunkedMultipleNegativesRankingLoss(model, **{"mini_batch_size": 4} | options)(columns, None)
    matryoshka = MatryoshkaLoss(model, ChunkedMultipleNegativesRankingLoss(model, mini_batch_size=4), [8, 4])
    with pytest.raises(ValueError, match="A ForwardDecorator replaces the model's forward"):
        matryoshka([texts(0), texts(1)], None)


class Sentences(MicroBatchTrainer, sentence_transformers.SentenceTransformerTrainer):
    pass


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_in_micro_batches_of_their_trainer_a_loss_over_pairs_is_exact_and_one_across_the_batch_refused(tmp_path):
    start = torch.nn.utils.parameters_to_vector(tiny().parameters()).detach()
    scored = {"output_dir": str(tmp_path), "scored": True}
    expected = trained(CosineSimilarityLoss, **scored)
    found = trained(CosineSimilarityLoss, Sentences, {"micro_batch_size": 3}, **scored)
    assert (expected - start).abs().max() > 1e-3
    assert relative_error([found - start], [expected - start]) <= 2e-6  # scores among the labels are float32
    with pytest.raises(NotEquivalentError, match=r"Sentences\.compute_loss"):
        trained(MultipleNegativesRankingLoss, Sentences, {"micro_batch_size": 3}, output_dir=str(tmp_path))
