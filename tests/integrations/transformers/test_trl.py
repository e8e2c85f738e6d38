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
from tests.integrations.transformers.problems import SIZES, Watching
from tests.reference import relative_error

VOCABULARY = 64
IN_FLOAT32 = 2e-6
"""TRL computes log-probabilities in float32, whatever the parameters are."""


SFT, DPO, Reward, KTO = (
    type(name, (MicroBatchTrainer, getattr(trl, f"{name}Trainer")), {}) for name in ("SFT", "DPO", "Reward", "KTO")
)


def llama(cls=transformers.LlamaForCausalLM, **more):
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return cls(transformers.LlamaConfig(vocab_size=VOCABULARY, **SIZES, **special, **more)).double()


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


def assert_same(classes, config, data, micro, folder, model=None, trainer=None, **more):
    """The same updates and losses as the stock trainer's; each row is counted once, whatever was proven."""
    model = model or llama()
    stock, expected = train(classes[1], config, model, data, folder, trainer=trainer and trainer(), **more)
    found, actual = train(classes[0], config, model, data, folder, micro, trainer and trainer(), **more)
    assert relative_error(actual, expected) <= IN_FLOAT32
    pairs = list(zip(found.state.log_history, stock.state.log_history, strict=True))
    assert len(pairs) == 3
    for ours, theirs in pairs[:-1]:
        assert ours["num_tokens"] == theirs["num_tokens"]
        assert abs(ours["loss"] - theirs["loss"]) <= IN_FLOAT32
    return found, pairs[:-1]


BY_ROWS, BY_TOKENS = {"micro_batch_size": 3}, {"max_tokens": 60}
TEXTS, PAIRS = texts("prompt", "completion"), texts("prompt", "chosen", "rejected")
LABELLED = TEXTS.add_column("label", [index % 3 > 0 for index in range(len(TEXTS))])


def adapters():
    return {"peft_config": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}


def reference():
    return {"ref_model": llama()}


@pytest.mark.parametrize(
    "more",
    [{}, pytest.param({"precompute_ref_log_probs": True}, marks=pytest.mark.slow), {"loss_type": ["sigmoid", "ipo"]}],
    ids=str,
)
def test_dpo_keeps_the_pairs_of_a_micro_batch_together(more, tmp_path):
    cls = type("Watched", (Watching, trl.DPOTrainer), {})
    found, _ = assert_same((cls, trl.DPOTrainer), trl.DPOConfig, PAIRS, BY_ROWS, tmp_path, trainer=reference, **more)
    assert [rows for rows, _ in found.shapes] == [6, 6, 4, 6, 6]  # 8 and 6 pairs


REFUSED = [
    *(
        (DPO, trl.DPOConfig, PAIRS, BY_ROWS, {"loss_type": kind}, f"loss_type='{kind}' sorts the log-ratios")
        for kind in ("aot", "aot_unpaired")
    ),
    (DPO, trl.DPOConfig, PAIRS, BY_TOKENS, {}, "`max_tokens` packs single rows, and here 2 rows belong together"),
    (
        KTO, trl.KTOConfig, LABELLED, BY_ROWS, {},
        "mean KL divergence of the whole batch. Choose loss_type=.apo_zero_unpaired",
    ),
    pytest.param(
        DPO, trl.DPOConfig, PAIRS, BY_ROWS, {"loss_type": ["sigmoid", "sft"]}, r"DPO\.compute_loss",
        marks=pytest.mark.slow,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "config", "data", "micro", "more", "says"), REFUSED)
def test_what_goes_across_the_batch_is_refused_by_name(cls, config, data, micro, more, says, tmp_path):
    with pytest.raises(NotEquivalentError if "compute_loss" in says else ValueError, match=says):
        train(cls, config, llama(), data, tmp_path, micro, reference(), **more)


def test_a_reward_model_is_exact(tmp_path):
    model = llama(transformers.LlamaForSequenceClassification, num_labels=1)
    classes, more = (Reward, trl.RewardTrainer), {"center_rewards_coefficient": 0.1}
    assert_same(classes, trl.RewardConfig, PAIRS, BY_ROWS, tmp_path, model, **more)


SIDES = ["logits/chosen", "logits/rejected", "rewards/margins", "logps/chosen", "rewards/rejected"]
ACCURACY = ["mean_token_accuracy", "entropy"]
ONE, FLAT = {"micro_batch_size": 1}, {"padding_free": True, "max_length": None}
METRICS = {
    "SFT": ((SFT, trl.SFTTrainer), trl.SFTConfig, TEXTS, ONE, {}, None, ACCURACY),
    "SFT, flattened": ((SFT, trl.SFTTrainer), trl.SFTConfig, TEXTS, BY_ROWS, FLAT, None, ACCURACY),
    "SFT of adapters, by tokens": ((SFT, trl.SFTTrainer), trl.SFTConfig, TEXTS, BY_TOKENS, {}, adapters, ACCURACY),
    "DPO": ((DPO, trl.DPOTrainer), trl.DPOConfig, PAIRS, ONE, {}, reference, [*ACCURACY[:1], *SIDES]),
    "KTO": ((KTO, trl.KTOTrainer), trl.KTOConfig, LABELLED, ONE, {"loss_type": "apo_zero_unpaired"}, reference, SIDES),
}


@pytest.mark.parametrize("kind", METRICS)
def test_trls_updates_and_metrics_are_those_of_the_batchs_rows_and_tokens(kind, tmp_path):
    """Means of micro-batches' values were up to 86 % off; those of one side count its tokens, or its rows, alone."""
    classes, config, data, micro, more, trainer, names = METRICS[kind]
    _, pairs = assert_same(classes, config, data, micro, tmp_path, trainer=trainer, **more)
    for ours, theirs in pairs:
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=IN_FLOAT32), name


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
    found, actual = train(cls, config, llama(), data, tmp_path, BY_ROWS, trainer, **sizes, **more)
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
    names = {"__name__": "page", "model": llama(), "arguments": arguments, "pairs": PAIRS}
    for page in ("howto/dpo.md", "transformers.md"):
        for code in re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs" / page).read_text("utf-8"), re.M | re.S):
            exec(code, names)
    assert isinstance(names["trainer"], trl.DPOTrainer)
    assert issubclass(names["MicroBatchSFTTrainer"], MicroBatchTrainer)
