"""Settings and wrapped optimizers that contradict micro-batches are refused, each by its name and with what to do."""

import functools
import math
import types

import pytest
import torch
import transformers

from gradaccum import WindowError
from gradaccum.integrations.trainer import refuse
from gradaccum.integrations.transformers import MicroBatchTrainer, settings
from gradaccum.torch.optim import Optimizer
from tests.integrations.transformers.problems import TEXTS, arguments, collate, model, rows, train, updates
from tests.reference import FLOAT64, relative_error

BY_ROWS, BY_TOKENS = {"micro_batch_size": 4}, {"max_tokens": 36}


def made(folder, micro=BY_ROWS, **more):
    return MicroBatchTrainer(
        model(TEXTS), arguments(folder, **more), data_collator=collate, train_dataset=rows(TEXTS), **micro
    )


ARGUMENTS = [
    (
        {"gradient_accumulation_steps": 4},
        r"gradient_accumulation_steps=4, which accumulates, too\. Remove it.*per_device_train_batch_size=40",
    ),
    (
        {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 3}}},
        "gradient_accumulation_steps=3, which accumulates, too",
    ),
    ({"auto_find_batch_size": True}, r'auto_find_batch_size=True.*MicroBatchTrainer\(micro_batch_size="auto"\)'),
    ({"optim": "lomo"}, "optim='lomo' updates parameters in the backward pass"),
    ({"optim": "galore_adamw_layerwise"}, "optim='galore_adamw_layerwise'.*such as optim='galore_adamw'"),
    ({"micro": BY_TOKENS, "neftune_noise_alpha": 5.0}, "neftune_noise_alpha scales noise.*`max_tokens` shortens"),
]


@pytest.mark.parametrize(("more", "message"), ARGUMENTS, ids=str)
def test_an_argument_is_refused_by_name(more, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        made(tmp_path, **more)


LATER = {
    "args._n_gpu": (2, r"DataParallel splits.*torchrun --nproc-per-node=2"),
    "is_deepspeed_enabled": (True, "DeepSpeed keeps gradients of its own.*Remove `deepspeed`"),
    "model._tp_size": (2, r"2 tensor-parallel ranks\. Remove it"),
    "is_distributed_loading_by_transformers": (True, "sharded when it was loaded"),
    "is_fsdp_xla_enabled": (True, "Remove `xla` from `fsdp_config`"),
    "is_fsdp_enabled": (True, "FSDP1 reduces in every backward pass.*Use FSDP2"),
    "aux_loss_enabled": (True, "load-balancing loss"),
    "args.gradient_accumulation_steps": (2, "gradient_accumulation_steps=2"),
}


@pytest.mark.parametrize("name", LATER)
def test_what_shows_only_when_training_begins_is_refused_then(name, tmp_path):
    trainer, (value, message) = made(tmp_path), LATER[name]
    *path, last = name.split(".")
    setattr(functools.reduce(getattr, path, trainer), last, value)
    with pytest.raises(ValueError, match=message):
        refuse(settings.wrong(trainer, trainer._gradaccum_large_batch.micro_batches))


def test_under_neftune_micro_batches_of_so_many_rows_keep_their_padding(tmp_path):
    found = train_with(dict, tmp_path, max_steps=1, neftune_noise_alpha=5.0)
    assert found._gradaccum_large_batch.step.batcher.packing is None


class DropsNames(MicroBatchTrainer):
    def compute_loss(self, model, inputs, *arguments, **keywords):
        inputs.pop("names")
        return super().compute_loss(model, inputs, *arguments, **keywords)


def with_names(batch):
    return {"names": ["a text"] * len(batch["labels"])}


def with_positions(batch, rows=1):
    return {"position_ids": torch.arange(batch["input_ids"].shape[1])[None].expand(rows, -1)}


def with_two_masks(batch):
    return {"other_attention_mask": batch["attention_mask"]}


def train_with(more, folder, cls=MicroBatchTrainer, micro=BY_ROWS, **keywords):
    """On batches that the collator adds to."""
    trainer = {"data_collator": lambda examples: (batch := collate(examples)) | more(batch)}
    return train(cls, model(TEXTS), rows(TEXTS), folder, micro=micro, trainer=trainer, **keywords)


@pytest.mark.parametrize(
    ("more", "how", "message"),
    [
        (with_names, {"cls": DropsNames}, r"inputs\['names'\] is a list with an entry for each of 10 rows"),
        (
            with_positions, {},
            r"labels 10, position_ids 1\. .*repeat what all rows share: tensor.expand\(10, \.\.\.\)",
        ),
        (with_two_masks, {"micro": BY_TOKENS}, r"several attention masks \(attention_mask, other_attention_mask\)"),
        (dict, {"micro": {"micro_batch_size": 0}}, "micro_batch_size"),
        (dict, {"micro": {"micro_batch_size": "all"}}, "micro_batch_size"),
        (dict, {"micro": {"max_tokens": 0}}, "max_tokens"),
        (dict, {"micro": {"micro_batches": 4}}, "micro_batches"),  # the Trainer's own error
        (
            dict, {"wrap": lambda optimizer: Optimizer(optimizer, steps=2)},
            r"Received: optimizers=\(Optimizer, \.\.\.\), which accumulates, too",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_batches_sizes_and_optimizers_that_cannot_be_are_refused_by_name(more, how, message, tmp_path):
    with pytest.raises((ValueError, TypeError), match=message):
        train_with(more, tmp_path, **how)


def test_the_advice_to_expand_what_all_rows_share_can_be_followed(tmp_path):
    expanded = train_with(lambda batch: with_positions(batch, len(batch["labels"])), tmp_path, max_steps=1)
    assert expanded.state.global_step == 1


def test_this_version_has_every_hook_and_one_that_lacks_any_is_named():
    assert not [*settings.TRANSFORMERS.lacks(transformers.Trainer)]
    lacking = types.SimpleNamespace(training_step=0, compute_loss=0, _save_rng_state=0, _load_rng_state=0)
    with pytest.raises(ImportError, match=rf"transformers {transformers.__version__} has no _get_num_items_in_batch"):
        refuse(settings.TRANSFORMERS.lacks(lacking), ImportError)


# Wrapped optimizers in the stock Trainer.


@pytest.mark.parametrize(
    "arguments",
    [{}, {"max_grad_norm": 1.0}, {"gradient_accumulation_steps": 2}, {"max_grad_norm": math.inf}, None],
    ids=["no clipping", "clipping", "its own accumulation", "only the norm", "zero_grad that waits for windows"],
)
def test_windows_are_refused_before_anything_has_changed(tmp_path, arguments):
    """Where zero_grad waits, nothing would close an epoch's last window."""
    wrapped, before = [], model(TEXTS)

    class Waits(transformers.Trainer):
        def training_step(self, model, *rest):
            if arguments is None:
                model.zero_grad = self.optimizer.optimizer.zero_grad
            return super().training_step(model, *rest)

    def wrap(optimizer):
        wrapped.append(Optimizer(optimizer, steps=3))
        return wrapped[0]

    with pytest.raises(WindowError, match=r"transformers' Trainer.*MicroBatchTrainer.* without gradient_accum"):
        train(Waits, before, rows(TEXTS), tmp_path, wrap=wrap, **{"max_grad_norm": 0} | (arguments or {}))
    assert wrapped[0].updates == 0
    assert all(
        torch.equal(a, b) for a, b in zip(before.parameters(), wrapped[0].param_groups[0]["params"], strict=True)
    )


def test_windows_of_one_are_the_plain_trainers(tmp_path):
    start = model(TEXTS).double()
    plain, windowed = (
        train(transformers.Trainer, start, rows(TEXTS), tmp_path, max_grad_norm=0, wrap=wrap)
        for wrap in (lambda optimizer: optimizer, lambda optimizer: Optimizer(optimizer, steps=1))
    )
    assert relative_error(updates(windowed, start), updates(plain, start)) <= FLOAT64
