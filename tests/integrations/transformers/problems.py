"""Tiny models built from configs, ragged rows for them, and runs of a Trainer on both."""

import copy
import dataclasses

import torch
import transformers

VOCABULARY, LONGEST = 37, 12


SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def mixtral(**more):
    sizes = {"num_local_experts": 4, "num_key_value_heads": 1, "max_position_embeddings": 32}
    made = transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=VOCABULARY, **SIZES, **sizes, **more))
    made.set_experts_implementation("eager")  # the others multiply no float64
    return made


def _bert(cls, **more):
    return cls(transformers.BertConfig(vocab_size=VOCABULARY, **SIZES, **QUIET, **more))


def _llama(cls, **more):
    sizes = SIZES | {"max_position_embeddings": 64, "num_key_value_heads": 1, "pad_token_id": 0}
    return cls(transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes, **more))


CAUSAL = {
    "llama": lambda: _llama(transformers.LlamaForCausalLM),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=64,
            n_embd=16,
            n_layer=1,
            n_head=2,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        )
    ),
    "qwen": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=VOCABULARY, max_position_embeddings=64, num_key_value_heads=1, tie_word_embeddings=True, **SIZES
        )
    ),
    "gpt-neox": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            vocab_size=VOCABULARY, max_position_embeddings=64, hidden_dropout=0.0, attention_dropout=0.0, **SIZES
        )
    ),
}
OTHERS = {
    "classes": lambda: _bert(transformers.BertForSequenceClassification, num_labels=3),
    "numbers": lambda: _bert(transformers.BertForSequenceClassification, num_labels=1),
    "several classes": lambda: _bert(
        transformers.BertForSequenceClassification, num_labels=3, problem_type="multi_label_classification"
    ),
    "tokens": lambda: _bert(transformers.BertForTokenClassification, num_labels=3),
    "masked": lambda: _bert(transformers.BertForMaskedLM),
    "answers": lambda: _bert(transformers.BertForQuestionAnswering),
    "llama classes": lambda: _llama(transformers.LlamaForSequenceClassification, num_labels=3),
    "llama tokens": lambda: _llama(transformers.LlamaForTokenClassification, num_labels=3, classifier_dropout=0.0),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
    ),
    "bart": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=VOCABULARY,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            dropout=0.0,
            max_position_embeddings=64,
            pad_token_id=0,
            decoder_start_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            forced_eos_token_id=None,
        )
    ),
    "images": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=8, patch_size=4, num_channels=3, num_labels=3, **SIZES, **QUIET)
    ),
}
MODELS = CAUSAL | OTHERS
"""Tiny, without dropout."""
SHORT = {"max_position_embeddings": 32}
FAMILIES = {
    "BERT, a label for each text": lambda: _bert(transformers.BertForSequenceClassification, num_labels=3, **SHORT),
    "BERT, a number for each text": lambda: _bert(transformers.BertForSequenceClassification, num_labels=1, **SHORT),
    "BERT, a label for each token": lambda: _bert(transformers.BertForTokenClassification, num_labels=3, **SHORT),
    "BERT, masked tokens": lambda: _bert(transformers.BertForMaskedLM, **SHORT),
    "Llama": MODELS["llama"],
    "Mixtral": mixtral,
    "GPT-2": MODELS["gpt2"],
    "T5": MODELS["t5"],
}
"""Of each family one."""


def model(kind, *, dropout=0.0, seed=0):
    torch.manual_seed(seed)
    made = FAMILIES[kind]()
    for module in made.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    for name in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if hasattr(made.config, name):
            setattr(made.config, name, dropout)
    return made


def rows(kind, number=24, seed=1):
    """Texts of 2 to LONGEST tokens, with labels as the model takes them: few, and of other numbers than the tokens."""
    generator = torch.Generator().manual_seed(seed)

    def some(most, *shape, least=1):
        return torch.randint(least, most, shape, generator=generator)

    found = []
    for _ in range(number):
        length = int(some(LONGEST + 1, 1, least=2))
        row = {"input_ids": some(VOCABULARY, length)}
        if kind == "BERT, a label for each text":
            row["labels"] = int(some(3, 1, least=0))
        elif kind == "BERT, a number for each text":
            row["labels"] = float(torch.randn((), generator=generator))
        elif kind == "T5":
            row["labels"] = some(VOCABULARY, int(some(9, 1)))
        else:
            labels = some(3 if "token" in kind and "masked" not in kind else VOCABULARY, length, least=0)
            if kind in ("Llama", "Mixtral", "GPT-2"):
                labels = row["input_ids"].clone()
            keep = torch.rand(length, generator=generator) < 0.7
            keep[1] = True
            row["labels"] = labels.masked_fill(~keep, -100)
        found.append(row)
    return found


def collate(examples, side="right"):
    """Padded to the longest of the batch."""

    def padded(name, value):
        most = max(len(row[name]) for row in examples)
        return torch.stack([_pad(row[name], most, value, side) for row in examples])

    batch = {"input_ids": padded("input_ids", 0)}
    lengths = torch.tensor([len(row["input_ids"]) for row in examples])[:, None]
    columns = torch.arange(batch["input_ids"].shape[1])
    count = columns if side == "right" else columns.flip(0)
    batch["attention_mask"] = (count < lengths).long()
    one = examples[0]["labels"]
    batch["labels"] = padded("labels", -100) if torch.is_tensor(one) else torch.tensor([r["labels"] for r in examples])
    return batch


def _pad(tensor, most, value, side):
    filler = tensor.new_full((most - len(tensor),), value)
    return torch.cat([tensor, filler] if side == "right" else [filler, tensor])


def sgd(parameters):
    """One large step, so that a wrong scale shows; with momentum, so that the first update matters later."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def arguments(folder, kind=transformers.TrainingArguments, **more):
    defaults = {
        "per_device_train_batch_size": 10, "num_train_epochs": 1, "seed": 3, "logging_steps": 1, "save_strategy": "no",
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return kind(str(folder), **_as_named_here(defaults | more))


def _as_named_here(settings):
    """Settings by the names that they have in this version of transformers."""
    known, named = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}, dict(settings)
    if "activation_checkpointing" not in known and "activation_checkpointing" in named:  # as in 5.5
        named["gradient_checkpointing"] = named.pop("activation_checkpointing")
    if "train_sampling_strategy" not in known and "train_sampling_strategy" in named:  # as in 5.0
        named["group_by_length"] = named.pop("train_sampling_strategy") == "group_by_length"
    return named


def train(cls, model, data, folder, *, micro=None, resume=None, trainer=None, **more):
    """Train a copy of the model. Returns the trainer."""
    trainer = trainer or {}
    trained = copy.deepcopy(model)
    if "optimizers" not in trainer and "optim" not in more:
        optimizer = sgd(trained.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0 / (1 + update))
        trainer = trainer | {"optimizers": (optimizer, scheduler)}
    trainer = {"data_collator": collate} | trainer
    run = cls(trained, arguments(folder, **more), train_dataset=data, **trainer, **(micro or {}))
    run.remove_callback(transformers.PrinterCallback)
    if more.get("train_sampling_strategy") == "sequential":  # also where there is no such setting
        run._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)
    run.train(resume_from_checkpoint=resume)
    return run


def logs(trainer, *names):
    return [[entry[name] for name in names] for entry in trainer.state.log_history if names[0] in entry]


def updates(trainer, start):
    """How far each parameter has moved: a wrong divisor shows there in full.

    But for the biases of keys: a softmax doesn't see them, so that their gradient is rounding alone.
    """
    pairs = zip(trainer.model.named_parameters(), start.parameters(), strict=True)
    return [a.detach().to(b.device) - b.detach() for (name, a), b in pairs if not name.endswith("key.bias")]
