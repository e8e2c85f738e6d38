"""Settings that contradict micro-batches are refused, each by its name and with what to do."""

import types

import pytest
import torch
import transformers

import gradaccum.torch
from gradaccum.integrations.transformers import MicroBatchTrainer, settings
from tests.integrations.transformers.problems import arguments, collate, model, rows, sgd, train

KIND = "BERT, a label for each text"


def made(folder, micro=None, optimizers=(None, None), cls=MicroBatchTrainer, **more):
    return cls(
        model(KIND),
        arguments(folder, **more),
        data_collator=collate,
        train_dataset=rows(KIND),
        optimizers=optimizers,
        **(micro or {"micro_batch_size": 4}),
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"gradient_accumulation_steps": 4},
            r"gradient_accumulation_steps=4, which accumulates, too\. Remove it.*per_device_train_batch_size=40",
        ),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 3}}},
            r"gradient_accumulation_steps=3, which accumulates, too",
        ),
        ({"auto_find_batch_size": True}, r'auto_find_batch_size=True.*MicroBatchTrainer\(micro_batch_size="auto"\)'),
        ({"optim": "lomo"}, r"optim='lomo' updates parameters in the backward pass"),
        ({"optim": "galore_adamw_layerwise"}, r"optim='galore_adamw_layerwise'.*such as optim='galore_adamw'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_argument_is_refused_by_name(more, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        made(tmp_path, **more)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: setattr(t.args, "_n_gpu", 2), r"DataParallel splits.*torchrun --nproc-per-node=2"),
        (
            lambda t: setattr(t, "is_deepspeed_enabled", True),
            r"DeepSpeed keeps gradients of its own.*Remove `deepspeed`",
        ),
        (lambda t: setattr(t.model, "_tp_size", 2), r"2 tensor-parallel ranks\. Remove it"),
        (lambda t: setattr(t, "is_distributed_loading_by_transformers", True), r"sharded when it was loaded"),
        (lambda t: setattr(t, "is_fsdp_xla_enabled", True), r"Remove `xla` from `fsdp_config`"),
        (lambda t: setattr(t, "is_fsdp_enabled", True), r"FSDP1 reduces in every backward pass.*Use FSDP2"),
        (lambda t: setattr(t, "aux_loss_enabled", True), r"load-balancing loss"),
        (lambda t: setattr(t.args, "gradient_accumulation_steps", 2), r"gradient_accumulation_steps=2"),
    ],
)
def test_what_shows_only_when_training_begins_is_refused_then(change, message, tmp_path):
    trainer = made(tmp_path)
    change(trainer)
    with pytest.raises(ValueError, match=message):
        settings.check_settings(trainer, trainer._gradaccum_large_batch.micro_batches)


def test_neftune_and_max_tokens_do_not_go_together(tmp_path):
    with pytest.raises(ValueError, match=r"neftune_noise_alpha scales noise.*`max_tokens` shortens"):
        made(tmp_path, {"max_tokens": 36}, neftune_noise_alpha=5.0)


def test_under_neftune_micro_batches_of_so_many_rows_keep_their_padding(tmp_path):
    micro = {"micro_batch_size": 4}
    found = train(
        MicroBatchTrainer, model(KIND), rows(KIND), tmp_path, micro=micro, max_steps=1, neftune_noise_alpha=5.0
    )
    assert found._gradaccum_large_batch.step.batcher.packing is None


def test_an_optimizer_that_accumulates_is_refused_by_name(tmp_path):
    trained = model(KIND)
    wrapped = gradaccum.torch.optim.Optimizer(sgd(trained.parameters()), steps=2)
    with pytest.raises(ValueError, match=r"Received: optimizers=\(Optimizer, \.\.\.\), which accumulates, too"):
        made(tmp_path, optimizers=(wrapped, None))


def test_an_unknown_argument_is_the_trainers_error(tmp_path):
    with pytest.raises(TypeError, match="micro_batches"):
        made(tmp_path, {"micro_batches": 4})


@pytest.mark.parametrize("micro", [{"micro_batch_size": 0}, {"micro_batch_size": "all"}, {"max_tokens": 0}], ids=str)
def test_sizes_are_checked_by_name(micro, tmp_path):
    with pytest.raises((ValueError, TypeError), match=next(iter(micro))):
        train(MicroBatchTrainer, model(KIND), rows(KIND), tmp_path, micro=micro)


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


def train_with(more, folder, cls=MicroBatchTrainer, micro=None, **keywords):
    """On batches that the collator adds to."""

    def collator(examples):
        batch = collate(examples)
        return batch | more(batch)

    micro, trainer = micro or {"micro_batch_size": 4}, {"data_collator": collator}
    return train(cls, model(KIND), rows(KIND), folder, micro=micro, trainer=trainer, **keywords)


@pytest.mark.parametrize(
    ("more", "how", "message"),
    [
        (with_names, {"cls": DropsNames}, r"inputs\['names'\] is a list with an entry for each of 10 rows"),
        (
            with_positions,
            {},
            r"labels 10, position_ids 1\. .*repeat what all rows share: tensor.expand\(10, \.\.\.\)",
        ),
        (
            with_two_masks,
            {"micro": {"max_tokens": 36}},
            r"several attention masks \(attention_mask, other_attention_mask\)",
        ),
    ],
)
def test_batches_that_cannot_be_cut_are_refused_by_name(more, how, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train_with(more, tmp_path, **how)


def test_the_advice_to_expand_what_all_rows_share_can_be_followed(tmp_path):
    def expanded(batch):
        return with_positions(batch, len(batch["labels"]))

    assert train_with(expanded, tmp_path, max_steps=1).state.global_step == 1


def test_a_version_without_a_hook_is_named():
    lacking = types.SimpleNamespace(training_step=0, compute_loss=0, _save_rng_state=0, _load_rng_state=0)
    with pytest.raises(ImportError, match=rf"transformers {transformers.__version__} has no _get_num_items_in_batch"):
        settings.check_hooks(lacking)


def test_this_version_has_every_hook():
    settings.check_hooks(transformers.Trainer)


def test_without_its_settings_nothing_is_said(tmp_path):
    settings.check_settings(made(tmp_path, max_grad_norm=0.5, bf16=True), settings.MicroBatches())
    assert torch.is_grad_enabled()
