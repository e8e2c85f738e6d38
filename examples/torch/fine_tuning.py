"""LoRA fine-tuning, DPO and a reward model with TRL: each in micro-batches, and checked against the large batch.

    python examples/torch/fine_tuning.py

Models are built from configs and texts are random, so nothing is downloaded. One base class gives an existing trainer
the large batch's updates in the memory of a few rows.
"""

import copy
import tempfile

import datasets
import peft
import tokenizers
import torch
import transformers
import trl

from gradaccum.integrations.transformers import MicroBatchTrainer


class MicroBatchSFTTrainer(MicroBatchTrainer, trl.SFTTrainer):
    pass


class MicroBatchDPOTrainer(MicroBatchTrainer, trl.DPOTrainer):
    pass


class MicroBatchRewardTrainer(MicroBatchTrainer, trl.RewardTrainer):
    pass


WORDS = [f"w{i}" for i in range(3, 64)]
ARGUMENTS = {
    "per_device_train_batch_size": 16, "num_train_epochs": 1, "optim": "sgd", "learning_rate": 0.1, "bf16": False,
    "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False,
}  # fmt: skip


def llama(kind, **more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes, **more)
    return kind(config).double()


def tokenizer():
    names = {"<pad>": 0, "<s>": 1, "</s>": 2} | {word: i for i, word in enumerate(WORDS, 3)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def texts(*columns):
    generator = torch.Generator().manual_seed(1)

    def text(length):
        return " " + " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=generator))

    lengths = torch.randint(2, 20, (32, len(columns)), generator=generator).tolist()
    return datasets.Dataset.from_list([dict(zip(columns, map(text, row), strict=True)) for row in lengths])


def moved(trainer_class, config, model, data, **keywords):
    """How far training moves the model's parameters."""
    torch.manual_seed(0)  # of the adapters, which older trainers draw before they set their seed
    trainer = trainer_class(
        model=copy.deepcopy(model), args=config(tempfile.mkdtemp(), **ARGUMENTS), train_dataset=data,
        processing_class=tokenizer(), **keywords,
    )  # fmt: skip
    before = [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]
    trainer.train()
    after = [p.detach() for p in trainer.model.parameters() if p.requires_grad]
    return torch.cat([(b - a).flatten() for a, b in zip(before, after, strict=True)])


def error(found, expected):
    return float((found - expected).norm() / expected.norm())


def lora():
    data, model = texts("prompt", "completion"), llama(transformers.LlamaForCausalLM)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    expected = moved(trl.SFTTrainer, trl.SFTConfig, model, data, peft_config=adapters)
    return error(
        moved(MicroBatchSFTTrainer, trl.SFTConfig, model, data, peft_config=adapters, max_tokens=128), expected
    )


def dpo():
    """The chosen and the rejected answer of a prompt stay in one micro-batch."""
    data, model = texts("prompt", "chosen", "rejected"), llama(transformers.LlamaForCausalLM)
    expected = moved(trl.DPOTrainer, trl.DPOConfig, model, data, ref_model=copy.deepcopy(model))
    return error(
        moved(
            MicroBatchDPOTrainer, trl.DPOConfig, model, data, ref_model=copy.deepcopy(model), micro_batch_size=4
        ),
        expected,
    )  # fmt: skip


def reward():
    data = texts("prompt", "chosen", "rejected")
    model = llama(transformers.LlamaForSequenceClassification, num_labels=1)
    expected = moved(trl.RewardTrainer, trl.RewardConfig, model, data)
    return error(moved(MicroBatchRewardTrainer, trl.RewardConfig, model, data, micro_batch_size=4), expected)


if __name__ == "__main__":
    datasets.disable_progress_bars()
    for recipe in (lora, dpo, reward):
        off = recipe()
        print(f"{recipe.__name__}: relative error of the updates against the large batch {off:.1e}")
        assert off < 1e-6  # TRL computes log-probabilities in float32
