"""TRL's trainers become exact by one base class: tiny models from configs, nothing is downloaded."""

import copy
import functools
import re
import runpy

import datasets
import peft
import pytest
import tokenizers
import torch
import transformers
import trl

from gradaccum import NotEquivalentError
from gradaccum.integrations.transformers import MicroBatchTrainer
from tests.documents import ROOT
from tests.reference import relative_error

VOCABULARY = 64
IN_FLOAT32 = 2e-6
"""TRL computes log-probabilities in float32, whatever the parameters are."""


class SFT(MicroBatchTrainer, trl.SFTTrainer):
    pass


class DPO(MicroBatchTrainer, trl.DPOTrainer):
    pass


class Reward(MicroBatchTrainer, trl.RewardTrainer):
    pass


def llama(cls=transformers.LlamaForCausalLM, **more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return cls(transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes, **special, **more)).double()


def tokenizer():
    names = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


def texts(*columns):
    generator = torch.Generator().manual_seed(1)

    def words(length):
        return " " + " ".join(f"w{i}" for i in torch.randint(3, VOCABULARY, (length,), generator=generator).tolist())

    lengths = torch.randint(2, 12, (14, len(columns)), generator=generator).tolist()
    rows = [dict(zip(columns, map(words, row), strict=True)) for row in lengths]
    return datasets.Dataset.from_list(rows)


def train(cls, config, model, data, folder, micro=None, trainer=None, batch=8, **more):
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}
    arguments = config(
        str(folder), per_device_train_batch_size=batch, num_train_epochs=1, save_strategy="no", logging_steps=1,
        bf16=False, optim="sgd", learning_rate=0.1, seed=3, **quiet, **more,
    )  # fmt: skip
    torch.manual_seed(0)  # adapters may be drawn before the trainer sets its seed
    run = cls(
        model=copy.deepcopy(model), args=arguments, train_dataset=data, processing_class=tokenizer(), **(micro or {}),
        **(trainer or {}),
    )  # fmt: skip
    run.remove_callback(transformers.PrinterCallback)
    start = [p.detach().clone() for p in run.model.parameters() if p.requires_grad]
    run.train()
    trained = [p for p in run.model.parameters() if p.requires_grad]
    return run, [b.detach() - a for a, b in zip(start, trained, strict=True)]


@pytest.fixture(autouse=True)
def no_progress_bars():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed in v6:FutureWarning")


def assert_same(classes, config, model, data, folder, micro, trainer=None, **more):
    stock, expected = train(classes[1], config, model, data, folder, trainer=trainer and trainer(), **more)
    found, actual = train(classes[0], config, model, data, folder, micro, trainer and trainer(), **more)
    assert relative_error(actual, expected) <= IN_FLOAT32
    pairs = list(zip(found.state.log_history, stock.state.log_history, strict=True))
    for ours, theirs in pairs[:-1]:
        assert ours["num_tokens"] == theirs["num_tokens"]  # each row once, whatever was proven
        assert abs(ours["loss"] - theirs["loss"]) <= IN_FLOAT32
    assert len(pairs) == 3
    return found


def test_lora_sft_by_tokens_makes_the_large_batchs_update(tmp_path):
    def adapters():
        return {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}

    data = texts("prompt", "completion")
    found = assert_same((SFT, trl.SFTTrainer), trl.SFTConfig, llama(), data, tmp_path, {"max_tokens": 60}, adapters)
    assert isinstance(found.model, peft.PeftModel)


@pytest.mark.parametrize(
    "more",
    [{}, pytest.param({"precompute_ref_log_probs": True}, marks=pytest.mark.slow), {"loss_type": ["sigmoid", "ipo"]}],
    ids=str,
)
def test_dpo_keeps_the_pairs_of_a_micro_batch_together(more, tmp_path):
    data = texts("prompt", "chosen", "rejected")

    def reference():
        return {"ref_model": llama()}

    seen = []

    class Watched(DPO):
        def compute_loss(self, model, inputs, *arguments, **keywords):
            if not self._gradaccum_large_batch.step.proving:
                seen.append(len(inputs["input_ids"]))
            return super().compute_loss(model, inputs, *arguments, **keywords)

    classes = Watched, trl.DPOTrainer
    assert_same(classes, trl.DPOConfig, llama(), data, tmp_path, {"micro_batch_size": 3}, reference, **more)
    assert seen == [6, 6, 4, 6, 6]  # 8 and 6 pairs


@pytest.mark.parametrize("kind", ["aot", "aot_unpaired"])
def test_dpo_across_the_batch_is_refused_by_name(kind, tmp_path):
    data, trainer = texts("prompt", "chosen", "rejected"), {"ref_model": llama()}
    with pytest.raises(ValueError, match=f"loss_type='{kind}' sorts the log-ratios of the whole batch"):
        train(DPO, trl.DPOConfig, llama(), data, tmp_path, {"micro_batch_size": 3}, trainer, loss_type=kind)


@pytest.mark.slow
def test_dpo_with_two_denominators_is_refused(tmp_path):
    data, trainer = texts("prompt", "chosen", "rejected"), {"ref_model": llama()}
    with pytest.raises(NotEquivalentError, match=r"DPO\.compute_loss"):
        train(
            DPO, trl.DPOConfig, llama(), data, tmp_path, {"micro_batch_size": 3}, trainer, loss_type=["sigmoid", "sft"]
        )


def test_pairs_are_not_packed_by_tokens(tmp_path):
    data, trainer = texts("prompt", "chosen", "rejected"), {"ref_model": llama()}
    with pytest.raises(ValueError, match=r"`max_tokens` packs single rows, and here 2 rows belong together"):
        train(DPO, trl.DPOConfig, llama(), data, tmp_path, {"max_tokens": 60}, trainer)


def test_a_reward_model_is_exact(tmp_path):
    model, data = (
        llama(transformers.LlamaForSequenceClassification, num_labels=1),
        texts("prompt", "chosen", "rejected"),
    )
    classes, micro = (Reward, trl.RewardTrainer), {"micro_batch_size": 3}
    assert_same(classes, trl.RewardConfig, model, data, tmp_path, micro, center_rewards_coefficient=0.1)


def test_sequences_that_trl_flattens_are_cut_and_its_metrics_are_the_large_batchs(tmp_path):
    more = {"padding_free": True, "max_length": None}
    data, classes = texts("prompt", "completion"), (SFT, trl.SFTTrainer)
    assert_same(classes, trl.SFTConfig, llama(), data, tmp_path, {"micro_batch_size": 3}, **more)


class KTO(MicroBatchTrainer, trl.KTOTrainer):
    pass


def desirable():
    data = texts("prompt", "completion")
    return data.add_column("label", [index % 3 > 0 for index in range(len(data))])


SIDES = ["logits/chosen", "logits/rejected", "rewards/margins", "logps/chosen", "rewards/rejected"]
METRICS = [
    (SFT, trl.SFTTrainer, trl.SFTConfig, texts("prompt", "completion"), {}, ["mean_token_accuracy", "entropy"]),
    (DPO, trl.DPOTrainer, trl.DPOConfig, texts("prompt", "chosen", "rejected"), {}, ["mean_token_accuracy", *SIDES]),
    (KTO, trl.KTOTrainer, trl.KTOConfig, desirable(), {"loss_type": "apo_zero_unpaired"}, SIDES),
]


@pytest.mark.parametrize(("cls", "stock", "config", "data", "more", "names"), METRICS, ids=["SFT", "DPO", "KTO"])
def test_trls_metrics_are_means_over_the_batchs_rows_and_tokens(cls, stock, config, data, more, names, tmp_path):
    """Means of micro-batches' values were up to 86 % off; those of one side count its tokens, or its rows, alone."""
    trainer = {} if cls is SFT else {"ref_model": llama()}
    expected, moved = train(stock, config, llama(), data, tmp_path, trainer=dict(trainer), **more)
    found, ours = train(cls, config, llama(), data, tmp_path, {"micro_batch_size": 1}, dict(trainer), **more)
    assert relative_error(ours, moved) <= IN_FLOAT32
    for theirs, logged in list(zip(expected.state.log_history, found.state.log_history, strict=True))[:2]:
        for name in names:
            assert logged[name] == pytest.approx(theirs[name], rel=1e-5, abs=IN_FLOAT32), name


def test_kto_across_the_batch_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="mean KL divergence of the whole batch. Choose loss_type=.apo_zero_unpaired"):
        train(KTO, trl.KTOConfig, llama(), desirable(), tmp_path, {"micro_batch_size": 3}, {"ref_model": llama()})


GRPO = [("GRPO", {"loss_type": kind}) for kind in ("dapo", "grpo", "bnpo", "dr_grpo", "cispo")]
GRPO += [("RLOO", {"beta": 0.0})]


@pytest.mark.parametrize(("kind", "more"), GRPO, ids=str)
def test_reinforcement_learning_makes_the_large_batchs_update(kind, more, tmp_path):
    """GRPO counts its steps in `_step`, which was ours. It divides by rows, tokens, or the tokens of the generation."""

    def reward(completions, **_):
        return [float(len(set(completion.split()))) for completion in completions]

    stock, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    sizes = {"num_generations": 4, "max_completion_length": 9}
    data, trainer = texts("prompt").select(range(4)), {"reward_funcs": reward}
    _, expected = train(stock, config, llama(), data, tmp_path, trainer=trainer, **sizes, **more)
    cls = type("Cut", (MicroBatchTrainer, stock), {})
    found, actual = train(cls, config, llama(), data, tmp_path, {"micro_batch_size": 3}, trainer, **sizes, **more)
    assert relative_error(actual, expected) <= IN_FLOAT32
    assert found.state.global_step == 2


def test_the_recipes_of_the_example_are_the_large_batchs(capsys):
    runpy.run_path(str(ROOT / "examples" / "torch" / "fine_tuning.py"), run_name="__main__")
    assert capsys.readouterr().out.count("relative error of the updates against the large batch") == 3


def test_the_pages_examples_run(tmp_path, monkeypatch):
    plain = trl.DPOTrainer.__init__
    more = {"processing_class": tokenizer(), "ref_model": llama()}  # whose names a model from a hub has
    monkeypatch.setattr(trl.DPOTrainer, "__init__", functools.partialmethod(plain, **more))
    arguments = trl.DPOConfig(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True, bf16=False)
    pairs = texts("prompt", "chosen", "rejected")
    names = {"__name__": "page", "model": llama(), "arguments": arguments, "pairs": pairs}
    for page in ("howto/dpo.md", "transformers.md"):
        for code in re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs" / page).read_text("utf-8"), re.M | re.S):
            exec(code, names)
    assert isinstance(names["trainer"], trl.DPOTrainer)
    assert issubclass(names["MicroBatchSFTTrainer"], MicroBatchTrainer)
