"""Random settings of a Trainer: MicroBatchTrainer against the stock Trainer at the batch of an update."""

import copy
import os
import random

import torch
import transformers

from gradaccum import NotEquivalentError
from gradaccum.integrations.transformers import MicroBatchTrainer
from tests.integrations.transformers import problems
from tests.integrations.transformers.problems import ACROSS, EITHER, MEANS, MODELS, Collate
from tests.reference import FLOAT64

IN_FLOAT32, LOGS = 2e-6, 1e-4
"""Relative errors that rounding makes: losses are computed in float32 inside, and small ones are rounded in logs."""
IN_FLOAT64 = (problems.TEXTS, problems.NUMBERS, problems.SEVERAL)
"""Models whose losses aren't."""


class Orders(transformers.TrainerCallback):
    """Orders of a callback at the end of the second update."""

    def __init__(self, order):
        self.order = order

    def on_step_end(self, args, state, control, optimizer=None, **_):
        if state.global_step == 2 and self.order == "less":
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        elif state.global_step == 2:
            setattr(control, f"should_{self.order}", True)


class Stream(torch.utils.data.IterableDataset):
    """Rows without a length."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def beside(choose, kind, more):
    """What a run has beside its arguments, which this may add to."""
    extra, labelled = {}, kind not in ("ViT", "BERT, answers", problems.NUMBERS, problems.SEVERAL, "T5", "BART")
    if labelled and choose.random() < 0.35:
        extra["loss"] = choose.choice([*MEANS, *MEANS, *ACROSS, *EITHER])
        more.pop("label_smoothing_factor", None)
    if choose.random() < 0.2:
        extra["order"] = choose.choice(["evaluate", "log", "epoch_stop", "training_stop", "less"])
    if choose.random() < 0.2:
        extra["groups"] = True
    if choose.random() < 0.1:
        extra["frozen"] = True
    if choose.random() < 0.08:
        extra["stream"] = True
        more.pop("train_sampling_strategy", None)
        more["max_steps"], more["dataloader_drop_last"] = choose.randint(1, 5), False
    elif choose.random() < 0.15 and "order" not in extra:
        extra["resume"] = more["save_steps"] = choose.choice([1, 2, 3])
        more["save_strategy"] = "steps"
    if choose.random() < 0.1:
        more["include_num_input_tokens_seen"] = "all"
    if choose.random() < 0.03:
        more |= {"torch_compile": True, "torch_compile_backend": "eager"}
    if "loss" in extra and choose.random() < 0.5:
        extra["func"] = True
    return extra


def scenario(seed):
    """Everything about a run: (kind, rows, micro-batches, collator, arguments, what is beside them)."""
    choose = random.Random(seed)
    kind, number = choose.choice([*MODELS]), choose.randint(9, 30)
    batch = choose.choice([6, 8, 12, 16])
    by_tokens = kind != "ViT" and choose.random() < 0.5
    micro = {"max_tokens": choose.choice([12, 24, 40])} if by_tokens else {}
    if not by_tokens or choose.random() < 0.2:
        micro["micro_batch_size"] = choose.choice([1, 2, 3, 4, 5, "auto"])
    left = kind in (*problems.CAUSAL, problems.LLAMA_TEXTS, problems.LLAMA_TOKENS) and choose.random() < 0.4
    collate = Collate(left, by_tokens or choose.random() < 0.85, choose.choice([1, 1, 8]))
    more = {
        "per_device_train_batch_size": batch,
        "num_train_epochs": choose.choice([1, 2, 3]),
        "max_grad_norm": choose.choice([0, 0.1, 1.0]),
        "lr_scheduler_type": choose.choice(["linear", "cosine", "constant"]),
        "warmup_steps": choose.choice([0, 2]),
        "dataloader_drop_last": number >= batch and choose.random() < 0.2,
        "logging_steps": choose.choice([1, 1, 2, 3]),
        "weight_decay": choose.choice([0, 0.1]),
        "optim": "sgd",
        "learning_rate": 0.1,
    }
    rare = [
        (0.2, {"train_sampling_strategy": "group_by_length"} if kind != "ViT" else {}),
        (0.2, {"label_smoothing_factor": 0.1}),
        (0.15, {"max_steps": choose.randint(1, 5)}),
        (0.2, {"optim": "adamw_torch", "learning_rate": 1e-3, "adam_epsilon": 1e-3}),
        (0.15, {"gradient_checkpointing": True}),
        (0.15, {"eval_strategy": "steps", "eval_steps": 2}),
        (0.1, {"logging_nan_inf_filter": False}),
        (0.1, {"torch_empty_cache_steps": 1}),
    ]
    for chance, setting in rare:
        more |= setting if choose.random() < chance else {}
    extra = beside(choose, kind, more)
    return kind, problems.rows(kind, number, choose), micro, collate, more, extra


REFUSED = (
    "Cutting off columns of nothing but padding changes",  # answers by a softmax over columns
    "`max_tokens` needs an attention mask",
)


def trainer(cls, start, data, folder, extra, micro, collate, more):
    """A Trainer on a copy of the model."""
    trained = copy.deepcopy(start)
    if extra.get("frozen"):
        next(iter(trained.parameters())).requires_grad_(False)
    keywords = {"callbacks": [Orders(extra["order"])] if "order" in extra else []} | micro
    if loss := extra.get("loss"):
        own = type(f"{cls.__name__}With{loss}", (problems.Loss, cls), {"kind": loss})
        cls, keywords["compute_loss_func"] = (cls, own.of_outputs(trained)) if extra.get("func") else (own, None)
    if extra.get("groups"):
        left = [p for p in trained.parameters() if p.requires_grad]
        groups = [{"params": left[::2], "lr": 0.1}, {"params": left[1::2], "lr": 0.02, "weight_decay": 0.1}]
        keywords["optimizers"] = torch.optim.SGD(groups, lr=0.1, momentum=0.9), None
    run = cls(
        trained, problems.arguments(folder, **more, remove_unused_columns=False), data_collator=collate,
        train_dataset=Stream(data) if extra.get("stream") else data, eval_dataset=data[:7], **keywords,
    )  # fmt: skip
    run.remove_callback(transformers.PrinterCallback)
    return run


def wrong(seed, folder):
    """What is wrong with a run; empty where it is right, or refused for a known reason."""
    kind, data, micro, collate, more, extra = scenario(seed)
    said = f"seed {seed}: {kind}, {len(data)} rows, {micro}, {collate}, {more}, {extra}"
    torch.manual_seed(seed)
    model = MODELS[kind]().double()

    def outcome(cls, how, own, checkpoint=None):
        try:
            run = trainer(cls, model, data, os.path.join(folder, str(seed), own), extra, how, collate, more)
            resumed = checkpoint and os.path.join(run.args.output_dir, checkpoint)
            if resumed and not os.path.isdir(resumed):
                return None  # it ended before
            run.train(resume_from_checkpoint=resumed)
        except Exception as error:
            return error
        moved = problems.updates(run, model)
        return torch.cat([update.flatten() for update in moved]), run.state.log_history

    extra["limit"] = FLOAT64 if kind in IN_FLOAT64 else IN_FLOAT32
    stock, ours = outcome(transformers.Trainer, {}, "stock"), outcome(MicroBatchTrainer, micro, "ours")
    if (problem := _judged(said, stock, ours, extra)) or "resume" not in extra:
        return problem
    checkpoint = f"checkpoint-{extra['resume']}"
    if (ours := outcome(MicroBatchTrainer, micro, "ours", checkpoint)) is None:
        return ""
    # Logs of several updates begin anew where a run is resumed.
    if problem := _judged(f"resumed, {said}", stock, ours, extra, more["logging_steps"] == 1):
        stock = outcome(transformers.Trainer, {}, "stock", checkpoint)  # which doesn't always go on as before
        problem = _judged(f"resumed, {said}", stock, ours, extra)
    return problem


def _judged(said, stock, ours, extra, logs=True):
    if isinstance(stock, Exception):
        return "" if isinstance(ours, Exception) else f"{said}\n  the stock Trainer fails: {stock}"
    if isinstance(ours, Exception):
        refused = isinstance(ours, NotEquivalentError) and extra.get("loss") in (*ACROSS, *EITHER)
        refused = refused or any(line in str(ours) for line in REFUSED)
        return "" if refused else f"{said}\n  {type(ours).__name__}: {ours}"
    if not stock[0].isfinite().all():
        return ""
    error = float((ours[0] - stock[0]).norm() / (stock[0].norm() or 1.0))  # of 0, a warmup moves nothing
    logged = _logs_error(ours[1], stock[1]) if logs else 0.0
    return "" if error <= extra["limit"] and logged < LOGS else f"{said}\n  updates {error:.1e}, logs {logged:.1e}"


def _logs_error(found, expected):
    names = "loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "num_input_tokens_seen"
    kept = [[{name: entry[name] for name in names if name in entry} for entry in run] for run in (found, expected)]
    if [list(entry) for entry in kept[0]] != [list(entry) for entry in kept[1]]:
        return float("inf")
    pairs = [(a[name], b[name]) for a, b in zip(*kept, strict=True) for name in a]
    return max((abs(a - b) / (abs(b) + 1e-6) for a, b in pairs if b == b), default=0.0)
