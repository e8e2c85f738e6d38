"""Trainings whose bits must be the same on any number of ranks, and what to compare of them."""

import copy
import hashlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from gradaccum.torch import GlobalBatchSampler, TrainStep

ROWS, WIDTH, TOKENS, WORDS = 70, 6, 5, 11


class Noisy(nn.Module):
    """Draws from generators of its own, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        self.calls += 1
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x + 0.1 * torch.randn(x.shape, generator=self.generator) + 0.01 * torch.rand(())


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.Linear(8, WORDS)
        self.drop = nn.Dropout(0.2)

    def forward(self, ids):
        return self.head(self.drop(torch.tanh(self.lstm(self.embedding(ids).cumsum(1)))))


def layers(*more):
    return nn.Sequential(*more[:1], nn.Linear(WIDTH, 16), nn.Tanh(), *more[1:], nn.Linear(16, 3))


def plain():
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 3))


def normalised():
    return layers(nn.Identity(), nn.BatchNorm1d(16))


def several(model, x, y):
    outputs = model(x)
    counts = y != 0
    losses = nn.functional.cross_entropy(outputs, y, reduction="none")
    return {"ce": ((losses * counts).sum() / counts.sum(), counts.sum()), "z": (outputs.square().mean(), len(x))}


def told(model, x, y):
    weights = 0.1 + y.to(x.dtype) / 3
    losses = nn.functional.cross_entropy(model(x), y, reduction="none")
    return (losses * weights).sum() / weights.sum(), weights.sum()


CLASS_WEIGHTS = torch.tensor([0.3, 1.7, 0.9])
CROSS_ENTROPY = nn.CrossEntropyLoss()


def weighted(model, x, y):
    losses = nn.functional.cross_entropy(model(x), y, reduction="none")
    weights = CLASS_WEIGHTS.to(x.dtype)[y]
    return (losses * weights).sum() / weights.sum()


def class_weight(x, y):
    return CLASS_WEIGHTS.to(x.dtype)[y].sum()


def by_batch(x, y):
    return {"ce": (y != 0).sum(), "z": len(x)}


def several_alone(model, x, y):
    return {name: loss for name, (loss, _) in several(model, x, y).items()}


def tokens(model, ids, targets):
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=0)


def valid(ids, targets):
    return (targets != 0).sum()


KINDS = {
    "plain": (plain, {"loss_fn": CROSS_ENTROPY}),
    "dropout": (lambda: layers(nn.Dropout(0.1), nn.Dropout(0.4)), {"loss_fn": CROSS_ENTROPY}),
    "own generators": (lambda: nn.Sequential(Noisy(), plain()), {"loss_fn": CROSS_ENTROPY}),
    "class weights": (plain, {"loss_fn": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=2)}),
    "weight": (plain, {"compute_loss": weighted, "weight": class_weight}),
    "told": (plain, {"compute_loss": told}),
    "several": (plain, {"compute_loss": several}),
    "several by batch": (plain, {"compute_loss": several_alone, "weight": by_batch}),
    "sum": (plain, {"loss_fn": nn.CrossEntropyLoss(reduction="sum")}),
    "tokens": (Words, {"compute_loss": tokens, "weight": valid}),
    "clip": (plain, {"loss_fn": CROSS_ENTROPY, "clip_grad_norm": 0.1}),
    "clip value": (plain, {"loss_fn": CROSS_ENTROPY, "clip_grad_value": 0.01}),
    "bfloat16": (plain, {"loss_fn": CROSS_ENTROPY, "autocast": torch.bfloat16}),
    "wide sums": (lambda: plain().bfloat16(), {"loss_fn": CROSS_ENTROPY, "accumulate_dtype": torch.float32}),
    "batch norm": (normalised, {"loss_fn": CROSS_ENTROPY, "batch_norm": "micro"}),
    "pooled": (normalised, {"loss_fn": CROSS_ENTROPY, "batch_norm": "pooled"}),
    "frozen": (normalised, {"loss_fn": CROSS_ENTROPY, "batch_norm": "frozen"}),
    "float64": (lambda: plain().double(), {"loss_fn": CROSS_ENTROPY}),
    "scaler": (plain, {"loss_fn": CROSS_ENTROPY, "clip_grad_norm": 0.5, "scaler": True}),
}  # fmt: skip
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def data(kind, rows=ROWS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    if kind == "tokens":
        ids = torch.randint(WORDS, (rows, TOKENS), generator=generator)
        return TensorDataset(ids, torch.randint(WORDS, (rows, TOKENS), generator=generator))
    x = torch.randn(rows, WIDTH, generator=generator) * 10.0 ** torch.randn(rows, 1, generator=generator)
    dtype = {"float64": torch.float64, "wide sums": torch.bfloat16}.get(kind, torch.float32)
    return TensorDataset(x.to(dtype), torch.randint(3, (rows,), generator=generator))


def in_float64(model):
    """The model, without dropout."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.double()


class Training:
    """A model that is trained by `TrainStep(reproducible=True)`, on this place among the ranks."""

    def __init__(
        self,
        kind="plain",
        optimizer="SGD",
        rank=0,
        ranks=1,
        group=None,
        seed=0,
        batch=24,
        size=4,
        wide=False,
        **options,
    ):
        torch.manual_seed(seed)
        make, loss = KINDS[kind]
        self.model = in_float64(make()) if wide else make()
        self.kind, (self.rank, self.ranks) = kind, (rank, ranks)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.data = data("float64" if wide and kind != "tokens" else kind)
        self.sampler = GlobalBatchSampler(self.data, batch, size, seed=seed, rank=rank, ranks=ranks)
        model = self.model if ranks == 1 else DistributedDataParallel(self.model, process_group=group)
        self.options = options = {**loss, **options}
        if wide and "loss_fn" in options:
            options["loss_fn"] = copy.deepcopy(options["loss_fn"]).double()
        self.scaler = (
            torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=2) if options.get("scaler") else None
        )
        self.step = TrainStep(
            model, self.optimizer, micro_batch_size=size, reproducible=True, **{**options, "scaler": self.scaler}
        )
        self.found = []

    def loader(self):
        return DataLoader(self.data, batch_sampler=self.sampler, collate_fn=self.sampler.collate)

    def run(self, epochs=1, backward=False):
        for _ in range(epochs):
            for batch in self.loader():
                self.update(batch, backward)
        return self

    def update(self, batch, backward=False):
        torch.rand(self.rank)  # what a rank draws by itself doesn't matter
        if backward:
            self.optimizer.zero_grad()
            loss = self.step.backward(*batch)
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
        else:
            loss = self.step(*batch)
        self.found += [loss, self.step.grad_norm, *self.step.losses.values()]
        return loss

    def bits(self):
        """SHA-256 of parameters, buffers, optimizer state, losses and norms."""
        state = [value for one in self.optimizer.state.values() for value in one.values()]
        found = hashlib.sha256()
        for tensor in [*self.model.state_dict().values(), *state, *self.found]:
            if isinstance(tensor, torch.Tensor):
                found.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


def bits_of(rank, kind, optimizer, ranks, **options):
    """On this rank of a process group; None where it has more ranks."""
    import torch.distributed as dist

    group = dist.new_group(list(range(ranks)))
    if rank >= ranks:
        return None
    epochs, backward = options.pop("epochs", 2), options.pop("backward", False)
    training = Training(kind, optimizer, rank, ranks, group, **options).run(epochs, backward)
    found = training.bits()
    training.step = None
    return found
