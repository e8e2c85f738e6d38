"""Settings of a Trainer that don't go with micro-batches: each is refused by name, with what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import transformers

from gradaccum.extras import PrivateName
from gradaccum.integrations.trainer import Library, accumulates, fsdp1
from gradaccum.integrations.transformers.router import router_of


class MicroBatches(NamedTuple):
    """The arguments of a MicroBatchTrainer beyond a Trainer's."""

    micro_batch_size: int | Literal["auto"] = "auto"
    max_tokens: int | None = None
    weight: Callable[[Any], Any] | None = None
    memory_limit: int | str | None = None
    verify: bool = True


TRANSFORMERS = Library(
    "transformers",
    transformers.__version__,
    'Install one that has it: pip install "gradaccum[transformers]"',
    (
        PrivateName("Trainer", "training_step", "runs a batch"),
        PrivateName("Trainer", "compute_loss", "computes its loss"),
        PrivateName("Trainer", "_get_num_items_in_batch", "counts what a loss is a mean over"),
        PrivateName("Trainer", "_save_rng_state", "saves what belongs to a rank"),
        PrivateName("Trainer", "_load_rng_state", "loads it"),
    ),
)


def inner_of(trainer: Any) -> Any:
    """The user's optimizer, which Accelerate's has inside."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def gathers(trainer: Any) -> bool:
    """Whether `compute_loss` gathers over the ranks, as TRL's trainers do for their metrics."""
    return any(cls.__module__.partition(".")[0] == "trl" for cls in type(trainer).__mro__)


def wrong(trainer: Any, micro_batches: MicroBatches) -> Iterator[str]:
    """Settings that contradict micro-batches."""
    args, name = trainer.args, type(trainer).__name__
    steps = args.gradient_accumulation_steps
    if steps > 1:
        rows = args.per_device_train_batch_size
        yield (
            f"{name} makes one update per batch, in micro-batches. Received: gradient_accumulation_steps={steps}, "
            f"which accumulates, too. Remove it, and set per_device_train_batch_size={steps * rows} in place of {rows}."
        )
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size=True makes the batch of an update smaller where memory runs out. Remove it: "
            f'{name}(micro_batch_size="auto") keeps the update, and finds micro-batches that fit.'
        )
    if args.n_gpu > 1:
        yield (
            f"DataParallel splits each batch over {args.n_gpu} devices by itself. Start a process per device "
            f"(torchrun --nproc-per-node={args.n_gpu}), or show the Trainer one device: CUDA_VISIBLE_DEVICES=0."
        )
    if trainer.is_deepspeed_enabled:
        yield (
            "DeepSpeed keeps gradients of its own, which micro-batches would not reach. Remove `deepspeed`; FSDP2 "
            '(fsdp="full_shard", fsdp_config={"version": 2}) shards in a way that works.'
        )
    yield from _strange_ranks(trainer, micro_batches)
    optim = str(getattr(args.optim, "value", args.optim))
    if optim in ("lomo", "adalomo") or optim.endswith("layerwise"):
        yield (
            f"optim={optim!r} updates parameters in the backward pass, before the batch's gradient is complete. Choose "
            f"another, such as optim={optim.removesuffix('_layerwise') if 'layerwise' in optim else 'adafactor'!r}."
        )
    optimizer = inner_of(trainer)
    if accumulates(optimizer):
        yield (
            f"{name} makes one update per batch by itself. Received: optimizers=({type(optimizer).__name__}, ...), "
            "which accumulates, too. Give it the inner optimizer."
        )
    yield from _across_rows(trainer, micro_batches)


def _across_rows(trainer: Any, micro_batches: MicroBatches) -> Iterator[str]:
    """Losses that look across the rows of a batch."""
    if across := [kind for kind in getattr(trainer, "loss_types", ()) if str(kind).startswith("aot")]:
        # With the policy still at its reference there is no difference yet that a proof could find.
        yield f"loss_type={across[0]!r} sorts the log-ratios of the whole batch. Choose one that judges pair by pair."
    if getattr(trainer, "calculate_KL", False):
        yield (
            "KTO compares each row with the mean KL divergence of the whole batch. Choose "
            'loss_type="apo_zero_unpaired", which has none.'
        )
    if trainer.args.neftune_noise_alpha is not None and micro_batches.max_tokens is not None:
        yield (
            "neftune_noise_alpha scales noise by the length of the padded rows, which `max_tokens` shortens. Remove "
            "one of them."
        )
    if balances(trainer) and router_of(trainer.model) is not None:
        if trainer.is_fsdp_enabled:
            yield "A sharded model's router loss isn't balanced over micro-batches. Use DDP, or switch it off."
    elif micro_batches.verify and (router := _router(trainer)):
        yield (
            f"{router} adds the router's load-balancing loss, which looks across the whole batch: micro-batches would "
            "balance each by itself. Switch it off, or pass verify=False if this is intended."
        )


def _strange_ranks(trainer: Any, micro_batches: MicroBatches) -> Iterator[str]:
    args, several = trainer.args, trainer.args.world_size > 1
    sizes = {"tensor": trainer.get_tp_size(), "context": trainer.get_cp_size(), "sequence": trainer.get_sp_size()}
    unknown = [
        f"a parallelism_config of {n} {kind}-parallel ranks. Remove it, as they share the rows of a batch."
        for kind, n in sizes.items()
        if n > 1
    ]
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        unknown.append(
            "a model that was sharded when it was loaded (distributed_config). Load it unsharded, and let Accelerate "
            'shard it: fsdp_config={"version": 2}.'
        )
    if getattr(trainer, "is_fsdp_xla_enabled", False):
        unknown.append("XLA's FSDP. Remove `xla` from `fsdp_config`.")
    for ranks in unknown:
        yield f"Micro-batches work with DistributedDataParallel and FSDP2. Received: {ranks}"
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) != 2:
        yield fsdp1('fsdp_config={"version": 2}')
    if several and not args.average_tokens_across_devices:
        yield (
            "average_tokens_across_devices=False asks for the mean of the ranks' means, which is not that of the large "
            "batch. Remove it."
        )
    found = micro_batches.micro_batch_size, micro_batches.max_tokens
    if several and gathers(trainer) and (found[0] == "auto" or found[1] is not None):
        yield (
            f"{type(trainer).__name__}.compute_loss gathers metrics over the ranks, so all of them need as many "
            f"micro-batches. Received: micro_batch_size={found[0]!r}, max_tokens={found[1]!r}. Give a number of rows."
        )


def balances(trainer: Any) -> bool:
    """Whether the model's own loss has that of a router in it."""
    return not hasattr(trainer, "aux_loss_enabled") and _router(trainer) != ""


def _router(trainer: Any) -> str:
    """The setting that adds a router's loss, or nothing."""
    if getattr(trainer, "aux_loss_enabled", False):
        return "aux_loss_enabled" if not hasattr(trainer.args, "router_aux_loss_coef") else "router_aux_loss_coef > 0"
    config = getattr(trainer.model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    if getattr(text, "output_router_logits", False) and getattr(text, "router_aux_loss_coef", 1.0):
        return "output_router_logits=True in the model's config"
    return ""
