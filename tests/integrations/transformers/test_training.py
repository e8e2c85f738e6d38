"""What a Trainer does around its batches sees one finished gradient for each: clips, schedules, checkpoints, logs."""

import copy
import os

import pytest
import torch
import transformers

from gradaccum.integrations.transformers import MicroBatchTrainer
from tests.integrations.transformers.problems import logs, model, rows, train, updates
from tests.reference import FLOAT64, relative_error

KIND, TOKENS = "BERT, a label for each text", "BERT, a label for each token"
MICRO = {"micro_batch_size": 4}
ON_CUDA = pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def both(kind, folder, micro=MICRO, trainer=None, double=True, **more):
    start = model(kind).double() if double else model(kind)
    runs = [
        train(cls, start, rows(kind), folder, micro=how, trainer=trainer, **more)
        for cls, how in ((transformers.Trainer, None), (MicroBatchTrainer, micro))
    ]
    return start, *runs


@pytest.mark.parametrize(
    "more",
    [
        {"dataloader_drop_last": True, "torch_empty_cache_steps": 1},
        pytest.param(
            {"optim": "sgd", "learning_rate": 0.1, "torch_compile": True, "torch_compile_backend": "eager"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda more: " ".join(more),
)
def test_the_trainers_own_settings_act_on_the_large_batchs_gradient(more, tmp_path):
    """Clipping, schedules, optimizers, sampling and checkpointing: fuzz/trainer_runs.py."""
    start, expected, found = both(KIND, tmp_path, **more)
    assert relative_error(updates(found, start), updates(expected, start)) <= FLOAT64
    names = ["loss", "grad_norm", "learning_rate", "epoch"]
    assert relative_error([torch.tensor(logs(found, *names))], [torch.tensor(logs(expected, *names))]) <= 1e-6


class Events(transformers.TrainerCallback):
    """What was called, at which update, and with which gradient."""

    def __init__(self):
        self.seen, self.norms = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def _noting(name):
    def note(self, args, state, control, **_):
        self.seen.append((name, state.global_step))

    return note


for event in (
    "on_train_begin", "on_epoch_begin", "on_step_begin", "on_substep_end", "on_optimizer_step", "on_step_end",
    "on_evaluate", "on_save", "on_log", "on_epoch_end", "on_train_end",
):  # fmt: skip
    setattr(Events, event, _noting(event))


def test_callbacks_evaluation_and_saves_come_when_they_do_for_the_stock_trainer(tmp_path):
    seen = []
    more = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.1}

    for cls, micro in ((transformers.Trainer, None), (MicroBatchTrainer, MICRO)):
        events = Events()
        trainer = {"callbacks": [events], "eval_dataset": rows(KIND, 8, seed=2)}
        run = train(cls, model(KIND).double(), rows(KIND), tmp_path, micro=micro, trainer=trainer, **more)
        seen.append((events, logs(run, "eval_loss")))
    (stock, stock_losses), (found, losses) = seen
    assert found.seen == stock.seen
    assert found.seen.count(("on_save", 2)) == 1
    assert relative_error([torch.stack(found.norms)], [torch.stack(stock.norms)]) <= FLOAT64
    assert relative_error([torch.tensor(losses)], [torch.tensor(stock_losses)]) <= 1e-6


@pytest.mark.parametrize(
    ("saved", "micro"),
    [(2, MICRO), (3, MICRO), (2, {"max_tokens": 36})],
    ids=["mid-epoch", "epoch's end", "max_tokens"],
)
def test_a_resumed_run_goes_on_bit_for_bit_dropout_included(saved, micro, tmp_path):
    more = {"optim": "adamw_torch", "learning_rate": 0.01, "num_train_epochs": 2, "save_strategy": "steps"}
    start = model(TOKENS, dropout=0.3)
    whole = train(MicroBatchTrainer, start, rows(TOKENS), tmp_path, micro=micro, save_steps=saved, **more)
    checkpoint = os.path.join(tmp_path, f"checkpoint-{saved}")
    torch.manual_seed(99)
    resumed = train(
        MicroBatchTrainer, start, rows(TOKENS), tmp_path, micro=micro, resume=checkpoint, save_steps=100, **more
    )
    assert whole.state.global_step == resumed.state.global_step == 6
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))
    assert logs(whole, "loss", "grad_norm")[saved:] == logs(resumed, "loss", "grad_norm")[saved:]


def test_the_sizes_that_auto_has_found_are_saved_and_loaded(tmp_path):
    micro = {"micro_batch_size": "auto"}
    more = {"save_strategy": "steps", "save_steps": 3, "num_train_epochs": 2, "optim": "sgd"}
    start = model(KIND)
    whole = train(MicroBatchTrainer, start, rows(KIND), tmp_path, micro=micro, **more)
    resumed = train(
        MicroBatchTrainer, start, rows(KIND), tmp_path, micro=micro, resume=str(tmp_path / "checkpoint-6"), **more
    )
    assert whole._gradaccum_large_batch.step.micro_batch_size is not None
    resumed._load_rng_state(str(tmp_path / "checkpoint-6"))
    assert resumed._gradaccum_large_batch._state["sizes"] == whole._gradaccum_large_batch.step.state_dict()["sizes"]


@pytest.mark.parametrize(
    "half",
    [
        {"bf16": True},
        pytest.param({"fp16": True, "use_cpu": False}, marks=ON_CUDA),
        pytest.param({"bf16": True, "use_cpu": False}, marks=ON_CUDA),
    ],
    ids=str,
)
def test_in_half_precision_it_is_no_further_from_the_stock_trainer_than_that_is_from_float32(half, tmp_path):
    start, exact, _ = both(KIND, tmp_path, double=False)
    _, stock, found = both(KIND, tmp_path, double=False, **half)
    rounding = relative_error([_flat(stock, start)], [_flat(exact, start)])
    assert relative_error([_flat(found, start)], [_flat(stock, start)]) <= rounding
    assert 1e-4 < rounding < 0.2


@pytest.mark.slow
def test_fp16_on_a_cpu_is_float32_as_for_the_stock_trainer(tmp_path):
    start, stock, found = both(KIND, tmp_path, double=False, fp16=True)
    assert found.accelerator.scaler is None
    assert relative_error(updates(found, start), updates(stock, start)) <= 1e-5


def _flat(trainer, start):
    return torch.cat([update.flatten() for update in updates(trainer, start)])


def test_training_twice_and_evaluating_in_between_goes_on_as_the_stock_trainer_does(tmp_path):
    trained = []
    start = model(KIND).double()
    for cls, micro in ((transformers.Trainer, None), (MicroBatchTrainer, MICRO)):
        run = train(cls, start, rows(KIND), tmp_path, micro=micro, optim="sgd", learning_rate=0.1)
        run.evaluate(rows(KIND, 8, seed=2))
        run.train()
        trained.append(updates(run, start))
    assert relative_error(trained[1], trained[0]) <= FLOAT64


@pytest.mark.parametrize("micro", [MICRO, {"max_tokens": 40}], ids=str)
def test_a_batch_without_any_label_makes_the_stock_trainers_update_with_a_gradient_of_zero(micro, tmp_path):
    """Momentum and weight decay move the parameters."""
    data = rows(TOKENS, 10) + [row | {"labels": torch.full_like(row["labels"], -100)} for row in rows(TOKENS, 10)]
    start, trained = model(TOKENS).double(), []
    for cls, how in ((transformers.Trainer, None), (MicroBatchTrainer, micro)):
        for decay in (0.0, 0.5):
            copied = copy.deepcopy(start)
            optimizer = torch.optim.SGD(copied.parameters(), lr=0.1, momentum=0.9, weight_decay=decay)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0)
            kept = {"train_sampling_strategy": "sequential"}
            more = {"micro": how, "trainer": {"optimizers": (optimizer, scheduler)}, **kept}
            found = train(cls, _Same(copied), data, tmp_path, **more)
            trained.append(updates(found, start))
    assert relative_error(trained[2], trained[0]) <= FLOAT64
    assert relative_error(trained[3], trained[1]) <= FLOAT64
    assert relative_error(trained[1], trained[0]) > 1e-3


class _Same:
    """A model that a run trains itself, not a copy of it."""

    def __init__(self, model):
        self._model = model

    def __deepcopy__(self, memo):
        return self._model


def test_a_proof_calls_no_callback_and_logs_nothing(tmp_path):
    """58 calls of compute_loss logged where 36 micro-batches had run."""
    events = []

    class Logs(MicroBatchTrainer):
        calls = 0

        def compute_loss(self, model, inputs, *arguments, **keywords):
            type(self).calls += 1
            self.log({"rows": len(inputs["labels"])})
            self.callback_handler.call_event("on_substep_end", self.args, self.state, self.control)
            return super().compute_loss(model, inputs, *arguments, **keywords)

    class Counts(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **more):
            events.append(logs)

        def on_substep_end(self, args, state, control, **more):
            events.append(None)

    found = train(
        Logs, model(TOKENS), rows(TOKENS), tmp_path, micro={"micro_batch_size": 3}, trainer={"callbacks": [Counts()]}
    )
    logged = [entry["rows"] for entry in found.state.log_history if "rows" in entry]
    assert sum(logged) == 24
    assert [e["rows"] for e in events if e and "rows" in e] == logged
    assert events.count(None) == len(logged)
    assert Logs.calls > len(logged)


def test_flattened_sequences_are_cut_by_their_positions(tmp_path):
    """One row holds the whole batch, which ran at once."""
    seen, trained = [], []

    class Watched(MicroBatchTrainer):
        def compute_loss(self, model, inputs, *arguments, **keywords):
            if not self._gradaccum_large_batch.step.proving:
                assert inputs["cu_seq_lens_q"].tolist()[-1] == inputs["input_ids"].shape[1]
                seen.append(len(inputs["cu_seq_lens_q"]) - 1)
            return super().compute_loss(model, inputs, *arguments, **keywords)

    class Collator(transformers.DataCollatorWithFlattening):
        def __call__(self, features, **keywords):
            batch = super().__call__([dict(f) for f in features], **keywords)
            lengths = torch.tensor([0, *(len(f["input_ids"]) for f in features)])
            return batch | {"cu_seq_lens_q": lengths.cumsum(0).int()}

    class Plain(transformers.Trainer):
        def compute_loss(self, model, inputs, *arguments, **keywords):
            inputs.pop("cu_seq_lens_q")
            return super().compute_loss(model, inputs, *arguments, **keywords)

    class Cut(Watched, Plain):
        pass

    start = model("Llama").double()
    start.set_attn_implementation("sdpa")
    for cls, micro in ((Plain, None), (Cut, {"micro_batch_size": 3})):
        found = train(cls, start, rows("Llama", 20), tmp_path, micro=micro, trainer={"data_collator": Collator()})
        trained.append(updates(found, start))
    assert relative_error(trained[1], trained[0]) <= 1e-6  # Llama's loss is computed in float32
    assert seen[-4:] == [3, 3, 2, 2]


def test_running_out_of_memory_costs_a_micro_batch_and_no_update(tmp_path):
    failed = []

    class Full(MicroBatchTrainer):
        def compute_loss(self, model, inputs, *arguments, **keywords):
            if inputs["input_ids"].numel() > 30 and not self._gradaccum_large_batch.step.proving:
                failed.append(len(inputs["input_ids"]))
                raise torch.OutOfMemoryError("out of memory")
            return super().compute_loss(model, inputs, *arguments, **keywords)

    start = model(KIND).double()
    expected = train(transformers.Trainer, start, rows(KIND), tmp_path)
    found = train(Full, start, rows(KIND), tmp_path, micro={"micro_batch_size": 8})
    assert failed == [8, 4]
    assert relative_error(updates(found, start), updates(expected, start)) <= FLOAT64


# Padding that a micro-batch's rows have in common.


class Watching(MicroBatchTrainer):
    """Keeps the shapes of micro-batches."""

    def __init__(self, *arguments, **keywords):
        self.shapes = []
        super().__init__(*arguments, **keywords)

    def compute_loss(self, model, inputs, *arguments, **keywords):
        if not self._gradaccum_large_batch.step.proving:
            self.shapes.append(tuple(inputs["input_ids"].shape))
        return super().compute_loss(model, inputs, *arguments, **keywords)


def test_micro_batches_of_so_many_rows_are_sorted_and_trimmed(tmp_path):
    start = model(KIND).double()
    expected = train(transformers.Trainer, start, rows(KIND), tmp_path)
    found = train(Watching, start, rows(KIND), tmp_path, micro=MICRO)
    assert relative_error(updates(found, start), updates(expected, start)) <= FLOAT64
    assert [count for count, _ in found.shapes] == [4, 4, 2, 4, 4, 2, 4]
    assert [width for _, width in found.shapes[:3]] == sorted((width for _, width in found.shapes[:3]), reverse=True)
    assert sum(a * b for a, b in found.shapes) < 0.8 * 24 * max(width for _, width in found.shapes)


def over_padding(outputs, labels, num_items_in_batch=None):
    """A mean over all columns, those of padding, too."""
    return outputs["logits"].float().square().mean()


@pytest.mark.parametrize("late", [False, True], ids=["from the first batch", "from the third"])
def test_where_padding_counts_it_stays(late, tmp_path):
    data = rows(TOKENS, 30)
    for row in data[:20] if late else []:  # nothing to cut off
        row["input_ids"], row["labels"] = row["input_ids"][:2], row["labels"][:2]
    start = model(TOKENS).double()
    more = {"trainer": {"compute_loss_func": over_padding}, "train_sampling_strategy": "sequential"}
    # Each batch has its own number of columns, by which nothing is weighed within it.
    expected = train(transformers.Trainer, start, data, tmp_path, **more)
    found = train(Watching, start, data, tmp_path, micro=MICRO, **more)
    assert relative_error(updates(found, start), updates(expected, start)) <= 2e-6
    assert not found._gradaccum_large_batch.trims
    assert {width for _, width in found.shapes[-3:]} == {max(len(row["input_ids"]) for row in data[-10:])}


def test_that_padding_stays_is_saved_with_a_checkpoint(tmp_path):
    more = {"trainer": {"compute_loss_func": over_padding}, "save_strategy": "steps", "save_steps": 1}
    start = model(TOKENS, dropout=0.3)
    whole = train(Watching, start, rows(TOKENS), tmp_path, micro=MICRO, optim="sgd", **more)
    resumed = train(
        Watching, start, rows(TOKENS), tmp_path, micro=MICRO, optim="sgd", resume=str(tmp_path / "checkpoint-1"), **more
    )
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))


def test_without_a_proof_padding_stays(tmp_path):
    found = train(Watching, model(KIND), rows(KIND), tmp_path, micro=MICRO | {"verify": False})
    assert len({width for _, width in found.shapes[:3]}) == 1
