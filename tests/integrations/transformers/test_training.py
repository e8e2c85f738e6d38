"""What a Trainer does around its batches sees one finished gradient for each: clips, schedules, checkpoints, logs.

Clipping, schedules, optimizers, sampling, checkpoints by settings: fuzz/trainer_runs.py.
"""

import os

import pytest
import torch
import transformers

from gradaccum.integrations.transformers import MicroBatchTrainer
from tests.integrations.transformers.problems import (
    MICRO,
    TEXTS,
    TOKENS,
    Watching,
    both,
    error,
    logs,
    model,
    rows,
    train,
    updates,
)
from tests.reference import FLOAT64, relative_error

ON_CUDA = pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Events(transformers.TrainerCallback):
    """What was called, at which update, and with which gradient."""

    def __init__(self):
        self.seen, self.norms = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def _noting(name):
    return lambda self, args, state, control, **_: self.seen.append((name, state.global_step))


for event in dir(transformers.TrainerCallback):
    if event.startswith("on_") and event != "on_pre_optimizer_step":
        setattr(Events, event, _noting(event))


def test_callbacks_evaluation_and_saves_come_when_they_do_for_the_stock_trainer(tmp_path):
    seen = []
    more = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.1}
    for cls, micro in ((transformers.Trainer, None), (MicroBatchTrainer, MICRO)):
        events = Events()
        trainer = {"callbacks": [events], "eval_dataset": rows(TEXTS, 8, seed=2)}
        run = train(cls, model(TEXTS).double(), rows(TEXTS), tmp_path, micro=micro, trainer=trainer, **more)
        seen.append((events, logs(run, "eval_loss")))
    (stock, stock_losses), (found, losses) = seen
    assert found.seen == stock.seen
    assert found.seen.count(("on_save", 2)) == 1
    assert relative_error([torch.stack(found.norms)], [torch.stack(stock.norms)]) <= FLOAT64
    assert relative_error([torch.tensor(losses)], [torch.tensor(stock_losses)]) <= 1e-6


def resumed(start, data, folder, saved, micro, cls=MicroBatchTrainer, **more):
    """A whole run, and one that goes on from a checkpoint of it."""
    whole = train(cls, start, data, folder, micro=micro, save_steps=saved, save_strategy="steps", **more)
    torch.manual_seed(99)
    more |= {"resume": os.path.join(folder, f"checkpoint-{saved}"), "save_strategy": "steps", "save_steps": 100}
    return whole, train(cls, start, data, folder, micro=micro, **more)


def assert_bit_for_bit(whole, resumed):
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("saved", "micro"),
    [(2, MICRO), (3, MICRO), (2, {"max_tokens": 36})],
    ids=["mid-epoch", "epoch's end", "max_tokens"],
)
def test_a_resumed_run_goes_on_bit_for_bit_dropout_included(saved, micro, tmp_path):
    more = {"optim": "adamw_torch", "learning_rate": 0.01, "num_train_epochs": 2}
    whole, again = resumed(model(TOKENS, dropout=0.3), rows(TOKENS), tmp_path, saved, micro, **more)
    assert whole.state.global_step == again.state.global_step == 6
    assert_bit_for_bit(whole, again)
    assert logs(whole, "loss", "grad_norm")[saved:] == logs(again, "loss", "grad_norm")[saved:]


def test_the_sizes_that_auto_has_found_are_saved_and_loaded(tmp_path):
    auto = {"micro_batch_size": "auto"}
    whole, again = resumed(model(TEXTS), rows(TEXTS), tmp_path, 6, auto, num_train_epochs=2, optim="sgd")
    assert whole._gradaccum_large_batch.step.micro_batch_size is not None
    again._load_rng_state(str(tmp_path / "checkpoint-6"))
    assert again._gradaccum_large_batch._state["sizes"] == whole._gradaccum_large_batch.step.state_dict()["sizes"]


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
    start, data = model(TEXTS), rows(TEXTS, seed=2)
    runs = [both(start, tmp_path, data)[0], *both(start, tmp_path, data, **half)]
    exact, stock, found = (torch.cat([u.flatten() for u in updates(run, start)]) for run in runs)
    rounding = relative_error([stock], [exact])
    assert relative_error([found], [stock]) <= rounding
    assert 1e-4 < rounding < 0.2


def test_training_twice_and_evaluating_in_between_goes_on_as_the_stock_trainer_does(tmp_path):
    start = model(TEXTS).double()
    runs = both(start, tmp_path, optim="sgd", learning_rate=0.1)
    for run in runs:
        run.evaluate(rows(TEXTS, 8, seed=2))
        run.train()
    assert error(start, *runs) <= FLOAT64


@pytest.mark.parametrize("micro", [MICRO, {"max_tokens": 40}], ids=str)
def test_a_batch_without_any_label_makes_the_stock_trainers_update_with_a_gradient_of_zero(micro, tmp_path):
    """Momentum and weight decay move the parameters."""
    data = rows(TOKENS, 10) + [row | {"labels": torch.full_like(row["labels"], -100)} for row in rows(TOKENS, 10)]
    start, moved = model(TOKENS).double(), []
    for decay in (0.0, 0.5):
        stock, found = both(start, tmp_path, data, micro=micro, decay=decay, train_sampling_strategy="sequential")
        assert error(start, stock, found) <= FLOAT64
        moved.append(updates(stock, start))
    assert relative_error(moved[1], moved[0]) > 1e-3


def test_a_proof_calls_no_callback_logs_nothing_and_counts_no_row(tmp_path):
    """58 calls of compute_loss logged where 36 micro-batches had run."""
    events = []

    class Logs(MicroBatchTrainer):
        calls, seen = 0, 0

        def compute_loss(self, model, inputs, *arguments, **keywords):
            type(self).calls += 1
            self.seen += len(inputs["labels"])
            self.history = [*getattr(self, "history", []), len(inputs["labels"])]
            self.log({"rows": len(inputs["labels"])})
            self.callback_handler.call_event("on_substep_end", self.args, self.state, self.control)
            return super().compute_loss(model, inputs, *arguments, **keywords)

    class Counts(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **more):
            events.append(logs)

        def on_substep_end(self, args, state, control, **more):
            events.append(None)

    callbacks = {"callbacks": [Counts()]}
    found = train(Logs, model(TOKENS), rows(TOKENS), tmp_path, micro={"micro_batch_size": 5}, trainer=callbacks)
    logged = [entry["rows"] for entry in found.state.log_history if "rows" in entry]
    assert logged == [e["rows"] for e in events if e and "rows" in e] == found.history == [5, 5, 5, 5, 4]
    assert found.seen == 24
    assert events.count(None) == len(logged) < Logs.calls


def test_flattened_sequences_are_cut_by_their_positions(tmp_path):
    """One row holds the whole batch, which ran at once."""
    seen = []

    class Collator(transformers.DataCollatorWithFlattening):
        def __call__(self, features, **keywords):
            batch = super().__call__([dict(f) for f in features], **keywords)
            lengths = torch.tensor([0, *(len(f["input_ids"]) for f in features)])
            return batch | {"cu_seq_lens_q": lengths.cumsum(0).int()}

    class Plain(transformers.Trainer):
        def compute_loss(self, model, inputs, *arguments, **keywords):
            inputs.pop("cu_seq_lens_q")
            return super().compute_loss(model, inputs, *arguments, **keywords)

    class Cut(MicroBatchTrainer, Plain):
        def compute_loss(self, model, inputs, *arguments, **keywords):
            if not self._gradaccum_large_batch.step.proving:
                assert inputs["cu_seq_lens_q"].tolist()[-1] == inputs["input_ids"].shape[1]
                seen.append(len(inputs["cu_seq_lens_q"]) - 1)
            return super().compute_loss(model, inputs, *arguments, **keywords)

    start, collator = model("Llama").double(), {"data_collator": Collator()}
    start.set_attn_implementation("sdpa")
    runs = both(start, tmp_path, rows("Llama", 20), Cut, {"micro_batch_size": 3}, Plain, trainer=collator)
    assert error(start, *runs) <= 1e-6  # Llama's loss is computed in float32
    assert seen[-4:] == [3, 3, 2, 2]


# Padding that a micro-batch's rows have in common.


def test_micro_batches_of_so_many_rows_are_sorted_and_trimmed(tmp_path):
    start = model(TEXTS).double()
    stock, found = both(start, tmp_path, cls=Watching)
    assert error(start, stock, found) <= FLOAT64
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
    # Each batch has its own number of columns, by which nothing is weighed within it.
    more = {"trainer": {"compute_loss_func": over_padding}, "train_sampling_strategy": "sequential"}
    stock, found = both(start, tmp_path, data, Watching, **more)
    assert error(start, stock, found) <= 2e-6
    assert not found._gradaccum_large_batch.trims
    assert {width for _, width in found.shapes[-3:]} == {max(len(row["input_ids"]) for row in data[-10:])}


def test_that_padding_stays_is_saved_with_a_checkpoint(tmp_path):
    more = {"optim": "sgd", "trainer": {"compute_loss_func": over_padding}}
    assert_bit_for_bit(*resumed(model(TOKENS, dropout=0.3), rows(TOKENS), tmp_path, 1, MICRO, Watching, **more))


def test_without_a_proof_padding_stays(tmp_path):
    found = train(Watching, model(TEXTS), rows(TEXTS), tmp_path, micro=MICRO | {"verify": False})
    assert len({width for _, width in found.shapes[:3]}) == 1
