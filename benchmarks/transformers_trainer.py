"""MicroBatchTrainer against the stock Trainer, which accumulates the same micro-batches by itself."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.harness import arguments, publish, ratios, table
from gradaccum.integrations.transformers import MicroBatchTrainer

ROWS, MICRO, LONGEST, WORDS = 64, 8, 128, 1000
UPDATES, CALLS, PROVEN = 3, 22, 11
"""Updates of a call, calls of each trainer, and those before updates are ordinary: 1, 2, 4, ..., 32 are proven."""


def model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, **sizes))


def texts(ragged: bool) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    lengths = torch.empty(ROWS * UPDATES).log_normal_(3.4, 0.8).round().clamp(8, LONGEST).int().tolist()
    return [{"input_ids": torch.randint(1, WORDS, (length if ragged else LONGEST // 2,))} for length in lengths]


def collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([row["input_ids"] for row in rows], batch_first=True)
    mask = pad([torch.ones_like(row["input_ids"]) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Timed(transformers.TrainerCallback):
    """The time from the first update to the end, without what a Trainer does before and after."""

    seconds = 0.0

    def on_epoch_begin(self, *args: Any, **more: Any) -> None:
        self._start = time.process_time()

    def on_epoch_end(self, *args: Any, **more: Any) -> None:
        self.seconds += time.process_time() - self._start


def trainer(kind: type, ragged: bool, rows: int, steps: int = 1, **micro: Any) -> Callable[[], float]:
    """Each call makes the next updates, and returns their time."""
    options = transformers.TrainingArguments(
        tempfile.mkdtemp(), per_device_train_batch_size=rows, gradient_accumulation_steps=steps, max_steps=UPDATES,
        save_strategy="no", logging_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, optim="sgd",
        dataloader_pin_memory=False,
    )  # fmt: skip
    made = kind(model(), options, data_collator=collate, train_dataset=texts(ragged), **micro)
    made.remove_callback(transformers.PrinterCallback)

    def train() -> float:
        timed = Timed()
        made.add_callback(timed)
        made.train()
        made.remove_callback(timed)
        return timed.seconds

    return train


def main() -> None:
    options = arguments(__doc__)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
    calls, proven = (3, 2) if options.quick else (CALLS, PROVEN)
    rows, rival = [], "stock Trainer, gradient_accumulation_steps"
    for ragged in (False, True):
        kind = f"8 to {LONGEST} tokens" if ragged else f"{LONGEST // 2} tokens each"
        contenders = {
            rival: trainer(transformers.Trainer, ragged, MICRO, ROWS // MICRO),
            "micro_batch_size": trainer(MicroBatchTrainer, ragged, ROWS, micro_batch_size=MICRO),
            "max_tokens": trainer(MicroBatchTrainer, ragged, ROWS, max_tokens=MICRO * LONGEST),
        }
        first = dict.fromkeys(contenders, 0.0)
        for _ in range(proven - 1):  # `ratios` calls each once more, before it times
            for name, train in contenders.items():
                first[name] += train()
        about = f"texts of {kind}"
        found = ratios(contenders, rival, calls - proven, time.process_time, about, warm_up=1)
        rows += [[kind, name, found[name], first[name] / (first[rival] or 1)] for name in contenders]
    head = ["texts", "micro-batches", "time per update", f"updates 1 to {(proven - 1) * UPDATES}"]
    body = f"""Processor time of a Llama of three layers with {ROWS} texts of log-normal lengths per update, on
{torch.get_num_threads()} threads. The stock Trainer pads {MICRO} texts to the longest of them;
`micro_batch_size={MICRO}` sorts and trims the batch's rows, and `max_tokens={MICRO * LONGEST}` packs them as well. The
last column includes five proofs, the one before it none.

{table(head, rows)}"""
    publish(
        "transformers_trainer",
        "Inside transformers' Trainer",
        body,
        ["torch", "transformers"],
        options,
        ours=["micro_batch_size", "max_tokens"],
    )


if __name__ == "__main__":
    main()
