"""Tiny models built from configs, ragged rows for them, losses that users write, and runs of a Trainer on these."""

import copy
import dataclasses
import random

import torch
import transformers
from torch.nn import functional as F

from gradaccum.integrations.transformers import MicroBatchTrainer
from tests.reference import relative_error

VOCABULARY = 37

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FEW_HEADS = {"num_key_value_heads": 1, "max_position_embeddings": 64}
GPT2 = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
NEOX = {"max_position_embeddings": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0}
T5 = {
    "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0,
    "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
BART = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "dropout": 0.0, "max_position_embeddings": 64,
    "pad_token_id": 0, "decoder_start_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip


def _made(cls, *settings, **more):
    """What makes a model of this class, from its config's settings."""
    settings = {name: value for each in settings for name, value in each.items()} | more
    sized = {} if cls is transformers.ViTForImageClassification else {"vocab_size": VOCABULARY}
    return lambda **most: cls(cls.config_class(**sized, **settings, **most))


def _bert(cls, **more):
    return _made(cls, SIZES, QUIET, max_position_embeddings=32, **more)


def _llama(cls, **more):
    return _made(cls, SIZES, FEW_HEADS, pad_token_id=0, **more)


def mixtral(**more):
    made = _made(transformers.MixtralForCausalLM, SIZES, FEW_HEADS, num_local_experts=4)(**more)
    made.set_experts_implementation("eager")  # the others multiply no float64
    return made


TEXTS, NUMBERS = "BERT, a label for each text", "BERT, a number for each text"
SEVERAL, TOKENS, MASKED = "BERT, labels for each text", "BERT, a label for each token", "BERT, masked tokens"
LLAMA_TEXTS, LLAMA_TOKENS = "Llama, a label for each text", "Llama, a label for each token"
CAUSAL = {
    "Llama": _llama(transformers.LlamaForCausalLM),
    "Mixtral": mixtral,
    "GPT-2": _made(transformers.GPT2LMHeadModel, GPT2),
    "Qwen": _made(transformers.Qwen2ForCausalLM, SIZES, FEW_HEADS, tie_word_embeddings=True),
    "GPT-NeoX": _made(transformers.GPTNeoXForCausalLM, SIZES, NEOX),
}
MODELS = CAUSAL | {
    TEXTS: _bert(transformers.BertForSequenceClassification, num_labels=3),
    NUMBERS: _bert(transformers.BertForSequenceClassification, num_labels=1),
    SEVERAL: _bert(transformers.BertForSequenceClassification, num_labels=3, problem_type="multi_label_classification"),
    TOKENS: _bert(transformers.BertForTokenClassification, num_labels=3),
    MASKED: _bert(transformers.BertForMaskedLM),
    "BERT, answers": _bert(transformers.BertForQuestionAnswering),
    LLAMA_TEXTS: _llama(transformers.LlamaForSequenceClassification, num_labels=3),
    LLAMA_TOKENS: _llama(transformers.LlamaForTokenClassification, num_labels=3, classifier_dropout=0.0),
    "T5": _made(transformers.T5ForConditionalGeneration, T5),
    "BART": _made(transformers.BartForConditionalGeneration, BART),
    "ViT": _made(
        transformers.ViTForImageClassification, SIZES, QUIET, image_size=8, patch_size=4, num_channels=3, num_labels=3
    ),
}
"""Tiny, without dropout."""


def model(kind, *, dropout=0.0, seed=0):
    torch.manual_seed(seed)
    made = MODELS[kind]()
    for module in made.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if hasattr(made.config, name):
            setattr(made.config, name, dropout)
    return made


def rows(kind, number=24, seed=1):
    """Texts of 2 to 11 tokens, with labels as the model takes them: few, and of other numbers than the tokens."""
    choose = seed if isinstance(seed, random.Random) else random.Random(seed)
    return [_row(kind, choose) for _ in range(number)]


def _row(kind, choose):
    if kind == "ViT":
        generator = torch.Generator().manual_seed(choose.randint(0, 10**9))
        pixels = torch.randn(3, 8, 8, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.tensor(choose.randint(0, 2))}
    length = choose.randint(2, 11)
    ids = torch.tensor([choose.randint(3, VOCABULARY - 1) for _ in range(length)])
    if kind == "BERT, answers":
        places = {name: torch.tensor(choose.randint(0, length - 1)) for name in ("start_positions", "end_positions")}
        return {"input_ids": ids, **places}
    if kind in CAUSAL:  # of half of them, the first tokens have no label
        labels = ids.clone()
        labels[: choose.randint(1, length - 1) if choose.random() < 0.5 else 0] = -100
    elif kind in (TEXTS, LLAMA_TEXTS):
        labels = torch.tensor(choose.randint(0, 2))
    elif kind == NUMBERS:
        labels = torch.tensor(choose.gauss(0, 1), dtype=torch.float64)
    elif kind == SEVERAL:
        labels = torch.tensor([float(choose.randint(0, 1)) for _ in range(3)], dtype=torch.float64)
    elif kind in (TOKENS, LLAMA_TOKENS, MASKED):
        few = [-100, -100, 5, 6] if kind == MASKED else [-100, 0, 1, 2]
        labels = torch.tensor([few[2], *(choose.choice(few) for _ in range(length - 1))])
    else:  # an encoder and a decoder
        labels = torch.tensor([choose.randint(3, VOCABULARY - 1) for _ in range(choose.randint(1, 8))])
    return {"input_ids": ids, "labels": labels}


class Collate:
    """Pads on either side, up to a multiple of some number, with or without a mask."""

    def __init__(self, left=False, mask=True, multiple=1):
        self.left, self.mask, self.multiple = left, mask, multiple

    def __call__(self, examples):
        batch = {}
        for name in examples[0]:
            values = [row[name] for row in examples]
            if values[0].dim() != 1 or values[0].is_floating_point():
                batch[name] = torch.stack(values)
                continue
            longest = -(-max(map(len, values)) // self.multiple) * self.multiple
            batch[name] = self._padded(values, longest, 0 if name == "input_ids" else -100)
            if name == "input_ids" and self.mask:
                batch["attention_mask"] = self._padded([torch.ones_like(value) for value in values], longest, 0)
        return batch

    def _padded(self, values, longest, filler):
        missing = [longest - len(value) for value in values]
        sides = [(count, 0) if self.left else (0, count) for count in missing]
        return torch.stack([F.pad(value, side, value=filler) for value, side in zip(values, sides, strict=True)])

    def __repr__(self):
        return f"Collate{(self.left, self.mask, self.multiple)}"


collate = Collate()


# Losses that users write, most of which never look at num_items_in_batch.


def each(logits, labels):
    """Of each label, 0 where it is ignored."""
    return F.cross_entropy(logits, labels, reduction="none")


def _rows(reduce):
    """A mean over rows of what their labels are reduced to."""
    return lambda logits, labels, items: (
        reduce(loss, (labels != -100).sum(1).clamp(min=1)) if (loss := each(logits, labels)).dim() > 1 else loss
    ).mean()


def _class_weights(logits, labels, items):
    weight = torch.ones(logits.shape[1], dtype=logits.dtype)
    weight[0] = 9.0
    return F.cross_entropy(logits, labels, weight=weight)


def _some_tokens(logits, labels, items):
    kept = (labels != -100) & (labels % 2 == 0)
    return each(logits, labels)[kept].sum() / kept.sum().clamp(min=1)


def _threshold(logits, labels, items):
    loss = each(logits, labels)
    return loss[loss > loss[labels != -100].median()].mean()


def _focal(logits, labels, items):
    loss = each(logits, labels)
    return ((1 - (-loss).exp()) ** 2 * loss).sum() / (labels != -100).sum()


MEANS = {
    "ignoring the count": lambda logits, labels, items: F.cross_entropy(logits, labels),
    "using the count": lambda logits, labels, items: (
        each(logits, labels).sum() / (items if items is not None else (labels != -100).sum())
    ),
    "mean of rows": _rows(lambda loss, counts: loss.sum(1) / counts),
    "mean of sums": _rows(lambda loss, counts: loss.flatten(1).sum(1)),
    "and a constant": lambda logits, labels, items: F.cross_entropy(logits, labels) + 0.3,
    "focal": _focal,
}
"""A mean over what a denominator can be found for."""
ACROSS = {
    "sum": lambda logits, labels, items: each(logits, labels).sum(),
    "root": lambda logits, labels, items: F.cross_entropy(logits, labels).sqrt(),
    "hardest": lambda logits, labels, items: each(logits, labels).amax(),
    "spread": lambda logits, labels, items: F.cross_entropy(logits, labels) + 0.1 * logits[..., 0].std(),
    "threshold": _threshold,
}
"""To be refused, but where a batch is one micro-batch."""
EITHER = {
    "class weights": _class_weights,
    "two denominators": lambda *arguments: MEANS["mean of rows"](*arguments) + F.cross_entropy(*arguments[:2]),
    "some tokens": _some_tokens,
}
"""Exact where the rows happen to agree."""
LOSSES = MEANS | ACROSS | EITHER


class Loss:
    """A base class that makes a Trainer compute one of these, of the class's `kind`."""

    kind = ""

    @classmethod
    def of_outputs(cls, model):
        """The same as a `compute_loss_func`."""
        shifts = "CausalLM" in type(model).__name__ or "LMHead" in type(model).__name__

        def loss(outputs, labels, num_items_in_batch=None):
            logits, labels = (outputs["logits"][:, :-1], labels[:, 1:]) if shifts else (outputs["logits"], labels)
            logits = logits.transpose(1, 2) if logits.dim() == 3 else logits
            return LOSSES[cls.kind](logits, labels, num_items_in_batch)

        return loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        loss = self.of_outputs(self.accelerator.unwrap_model(model))(outputs, inputs["labels"], num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


# Runs.


def sgd(parameters, weight_decay=0.0):
    """One large step, so that a wrong scale shows; with momentum, so that the first update matters later."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=weight_decay)


def arguments(folder, kind=transformers.TrainingArguments, **more):
    defaults = {
        "per_device_train_batch_size": 10, "num_train_epochs": 1, "seed": 3, "logging_steps": 1, "save_strategy": "no",
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    settings = defaults | more
    # By the names that they have in this version of transformers.
    known = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    if "activation_checkpointing" not in known and "activation_checkpointing" in settings:  # as in 5.5
        settings["gradient_checkpointing"] = settings.pop("activation_checkpointing")
    if "train_sampling_strategy" not in known and "train_sampling_strategy" in settings:  # as in 5.0
        settings["group_by_length"] = settings.pop("train_sampling_strategy") == "group_by_length"
    return kind(str(folder), **settings)


def train(cls, model, data, folder, *, micro=None, resume=None, trainer=None, wrap=None, decay=0.0, **more):
    """Train a copy of the model, with SGD unless `optim` says otherwise. Returns the trainer."""
    trained, trainer = copy.deepcopy(model), {"data_collator": collate} | (trainer or {})
    if "optim" not in more:
        optimizer = sgd(trained.parameters(), decay)
        optimizer = optimizer if wrap is None else wrap(optimizer)
        constant = wrap is not None or decay
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0 if constant else 1.0 / (1 + update))
        trainer["optimizers"] = optimizer, scheduler
    run = cls(trained, arguments(folder, **more), train_dataset=data, **trainer, **(micro or {}))
    run.remove_callback(transformers.PrinterCallback)
    if more.get("train_sampling_strategy") == "sequential":  # also where there is no such setting
        run._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)
    run.train(resume_from_checkpoint=resume)
    return run


MICRO = {"micro_batch_size": 4}


def both(start, folder, data=None, cls=MicroBatchTrainer, micro=MICRO, stock=transformers.Trainer, **more):
    """The stock trainer, and ours."""
    data = rows(TEXTS) if data is None else data
    return [train(each, start, data, folder, micro=how, **more) for each, how in ((stock, None), (cls, micro))]


def error(start, stock, found):
    """Of our updates, against the stock trainer's."""
    return relative_error(updates(found, start), updates(stock, start))


class Watching(MicroBatchTrainer):
    """Keeps the shapes of micro-batches, but for those of a proof."""

    shapes = ()

    def compute_loss(self, model, inputs, *arguments, **keywords):
        if not self._gradaccum_large_batch.step.proving:
            self.shapes = [*self.shapes, tuple(inputs["input_ids"].shape)]
        return super().compute_loss(model, inputs, *arguments, **keywords)


def logs(trainer, *names):
    return [[entry[name] for name in names] for entry in trainer.state.log_history if names[0] in entry]


def updates(trainer, start):
    """How far each parameter has moved: a wrong divisor shows there in full.

    But for the biases of keys: a softmax doesn't see them, so that their gradient is rounding alone.
    """
    pairs = zip(trainer.model.named_parameters(), start.parameters(), strict=True)
    return [a.detach().to(b.device) - b.detach() for (name, a), b in pairs if not name.endswith("key.bias")]
