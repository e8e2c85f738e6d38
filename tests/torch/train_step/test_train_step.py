"""One call of TrainStep makes the update of one ordinary step on the whole batch."""

import copy

import pytest
import torch
from torch import nn

from gradaccum.torch import TrainStep
from tests.reference import FLOAT32, FLOAT64, relative_error, torch_updates

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


def step_of(model, optimizer="sgd", *, verify=False, **keywords):
    """A TrainStep with an optimizer of all parameters, or one by name, and cross entropy where no loss is given."""
    inner = OPTIMIZERS[optimizer](model.parameters()) if isinstance(optimizer, str) else optimizer
    loss = {} if "compute_loss" in keywords else {"loss_fn": nn.CrossEntropyLoss()}
    return TrainStep(model, inner, **{**loss, **keywords}, verify=verify)


def assert_same_updates(model, data, plain_loss, make=OPTIMIZERS["sgd"], tolerance=FLOAT64, **keywords):
    """Train a copy by ordinary steps and the model by TrainStep: the same parameters, the same losses."""
    reference = copy.deepcopy(model)
    expected = torch_updates(reference, make(reference.parameters()), data, plain_loss)
    step = TrainStep(model, make(model.parameters()), **keywords)
    losses = [step(*batch) for batch in data]
    assert not any(loss.requires_grad or loss.dim() for loss in losses)
    assert relative_error(model.parameters(), reference.parameters()) <= tolerance
    assert relative_error([torch.stack(losses).double()], [torch.tensor(expected, dtype=torch.float64)]) <= tolerance
    assert step.updates == len(data)
    return step


def test_one_call_makes_the_large_batchs_update():
    for name, make in OPTIMIZERS.items():
        for size in (1, 2, 4, 5, 13, 64, "auto"):
            loss_fn = nn.CrossEntropyLoss()
            step = assert_same_updates(
                network(),
                batches(),
                lambda model, x, y, loss_fn=loss_fn: loss_fn(model(x), y),
                make,
                loss_fn=loss_fn,
                micro_batch_size=size,
            )
            assert size == "auto" or step.micro_batch_size == size, name


def test_float32_is_exact_to_its_rounding():
    loss_fn = nn.CrossEntropyLoss()
    data = batches(32, dtype=torch.float32)
    model = network(torch.float32)
    assert_same_updates(
        model, data, lambda model, x, y: loss_fn(model(x), y), tolerance=FLOAT32, loss_fn=loss_fn, micro_batch_size=3
    )


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
