"""One call of TrainStep makes the update of one ordinary step on the whole batch."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from gradaccum.torch import TrainStep
from tests.reference import FLOAT32, FLOAT64, relative_error

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
}


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def batches(rows=13, count=3, dtype=torch.float64):
    torch.manual_seed(1)
    return [(torch.randn(rows, 5, dtype=dtype), torch.randint(0, 3, (rows,))) for _ in range(count)]


def plain_loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def by_hand(model, data, loss=plain_loss, make="sgd"):
    """Ordinary steps on whole batches, by closures, as any optimizer takes them; the losses."""
    optimizer, losses = OPTIMIZERS.get(make, make)(model.parameters()), []
    for batch in data:

        def closure(batch=batch):
            optimizer.zero_grad()
            value = loss(model, *batch)
            value.backward()
            return value

        losses.append(optimizer.step(closure).detach())
    return losses


def step_of(model, optimizer="sgd", *, verify=False, **keywords):
    """A TrainStep with an optimizer of all parameters, or one by name, and cross entropy where no loss is given."""
    inner = OPTIMIZERS[optimizer](model.parameters()) if isinstance(optimizer, str) else optimizer
    loss = {} if "compute_loss" in keywords else {"loss_fn": nn.CrossEntropyLoss()}
    return TrainStep(model, inner, **{**loss, **keywords}, verify=verify)


@contextlib.contextmanager
def left_as_it_was(model, error, match=None):
    """What is raised inside leaves parameters, buffers and random numbers as they were."""
    before, generator = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(error, match=match) as raised:
        yield raised
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert torch.equal(generator, torch.get_rng_state())


def assert_same_updates(
    model, data, loss=plain_loss, make="sgd", tolerance=FLOAT64, reference=None, buffers=False, **keywords
):
    """Train a copy by ordinary steps and the model by TrainStep: the same parameters and losses, maybe buffers."""
    reference = copy.deepcopy(model) if reference is None else reference
    expected = by_hand(reference, data, loss, make)
    own = {} if "loss_fn" in keywords else {"compute_loss": loss}
    step = TrainStep(model, OPTIMIZERS.get(make, make)(model.parameters()), **{**own, **keywords})
    losses = [step(*batch) for batch in data]
    assert not any(value.requires_grad or value.dim() for value in losses)
    assert relative_error(model.parameters(), reference.parameters()) <= tolerance
    assert relative_error([torch.stack(losses).double()], [torch.stack(expected).double()]) <= tolerance
    assert not buffers or relative_error(model.buffers(), reference.buffers()) <= tolerance
    assert step.updates == len(data)
    return step


def test_one_call_makes_the_large_batchs_update():
    for make in OPTIMIZERS:
        for size in (1, 2, 4, 5, 13, 64, "auto"):
            keywords = {"loss_fn": nn.CrossEntropyLoss(), "micro_batch_size": size}
            step = assert_same_updates(network(), batches(), make=make, **keywords)
            assert size == "auto" or step.micro_batch_size == size, make


def test_float32_is_exact_to_its_rounding():
    keywords = {"loss_fn": nn.CrossEntropyLoss(), "micro_batch_size": 3}
    data = batches(32, dtype=torch.float32)
    assert_same_updates(network(torch.float32), data, tolerance=FLOAT32, **keywords)


@pytest.mark.parametrize("size", [4, 6])
def test_micro_batches_come_in_two_shapes_at_most(size):
    seen = []
    model = network()
    model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    step = step_of(model, micro_batch_size=size)
    step(*batches(13)[0])
    assert sum(seen) == 13
    assert len(set(seen)) <= 2
    assert max(seen) <= size


def test_at_the_prompt_a_step_says_what_it_is_and_shows_what_is_public():
    step = step_of(network(), micro_batch_size=16)
    assert repr(step) == "TrainStep(Sequential, SGD, micro_batch_size=16, updates=0)"
    assert [name for name in dir(step) if not name.startswith("_")] == [
        "backward", "grad_norm", "load_state_dict", "losses", "micro_batch_size", "model", "noise_scale", "state_dict",
        "updates",
    ]  # fmt: skip


def test_a_loss_without_its_keyword_and_a_batch_without_targets_are_told():
    model = network()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(TypeError, match=r"by keyword: loss_fn=... .* Received: CrossEntropyLoss\(\) as the third"):
        TrainStep(model, optimizer, nn.CrossEntropyLoss())
    x, y = batches()[0]
    step = TrainStep(model, optimizer, loss_fn=nn.CrossEntropyLoss(), micro_batch_size=4)
    with pytest.raises(
        TypeError, match=r"The batch has no targets, .*'target'. Call step\(x, y\), or give compute_loss"
    ):
        step(x)
    with pytest.raises(ValueError, match="takes batches of \\(x, y\\). Received: 3 arguments"):
        step(x, y, y)
