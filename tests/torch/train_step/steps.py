"""Calls of TrainStep beside ordinary steps on whole batches: the same parameters, buffers, losses and norms."""

import contextlib
import copy
import math

import pytest
import torch
from torch import Tensor, nn

from gradaccum.torch import TrainStep
from tests.reference import FLOAT64, relative_error
from tests.torch.train_step.problems import OPTIMIZERS, batches, plain_loss


def total(terms):
    """The large batch's loss that has these terms, `{name: (loss, weight)}`: their sum, in which some weigh nothing."""
    return lambda *batch: added(terms(*batch))


def added(found):
    return sum(loss if weight else 0 * loss.nan_to_num() for loss, weight in found.values())


def by_hand(model, data, loss=plain_loss, make="sgd", *, evaluated=False, clip=math.inf):
    """Ordinary steps on whole batches, by closures, `evaluated` before; the losses, and norms before clipping."""
    optimizers, losses, norms = OPTIMIZERS.get(make, make)(list(model.parameters())), [], []
    for batch in data:

        def closure(batch=batch):
            model.zero_grad()
            value = loss(model, *batch)
            value.backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
            return value

        first = closure() if evaluated or isinstance(optimizers, list) else None
        if isinstance(optimizers, list):
            for optimizer in optimizers:
                optimizer.step()
        else:
            value = optimizers.step(closure)
        losses.append((value if first is None else first).detach())
    return losses, norms


def step_of(model, optimizer="sgd", *, kind=TrainStep, verify=False, **keywords):
    """A step with an optimizer of all parameters, or one by name, and cross entropy where no loss is given."""
    inner = OPTIMIZERS[optimizer](model.parameters()) if isinstance(optimizer, str) else optimizer
    loss = {} if "compute_loss" in keywords else {"loss_fn": nn.CrossEntropyLoss()}
    return kind(model, inner, **{**loss, **keywords}, verify=verify)


def assert_same_updates(
    model, data=None, loss=plain_loss, make="sgd", tolerance=FLOAT64, *,
    reference=None, terms=None, evaluated=False, buffers=True, as_one=False, kind=TrainStep, **keywords,
):  # fmt: skip
    """Train a copy by ordinary steps and the model by TrainStep: the same parameters, losses, norms and buffers.

    Args:
        terms: `{name: (loss, weight)}` of a batch, in place of `loss`: `step.losses` has the large batch's of each.
        evaluated: The ordinary steps find gradients when they begin, as TrainStep's do.
        kind: The class of the step.
        as_one: Parameters are one vector, because the true gradient of some is 0; the loss is computed in float32.
    """
    data = batches() if data is None else data
    reference = copy.deepcopy(model) if reference is None else reference
    means, clip = {}, keywords.get("clip_grad_norm", math.inf)
    if terms is not None:

        def loss(model, *batch):
            found = terms(model, *batch)
            means.setdefault(id(batch[0]), found)
            return added(found)

    expected, norms = by_hand(reference, data, loss, make, evaluated=evaluated, clip=clip)
    own = {} if "loss_fn" in keywords else {"compute_loss": loss if terms is None else terms}
    own |= {} if "max_tokens" in keywords else {"micro_batch_size": 4}
    optimizer = OPTIMIZERS.get(make, make)(list(model.parameters()))
    step = kind(model, optimizer, **{**own, **keywords})
    losses = []
    for number, batch in enumerate(data):
        losses.append(step(*batch))
        if clip < math.inf:
            assert relative_error([step.grad_norm], [norms[number]]) <= tolerance
        assert step.losses.keys() == means.get(id(batch[0]), {}).keys()
        for name, mean in step.losses.items():
            of_all, weight = means[id(batch[0])][name]
            assert (mean.requires_grad, mean.dim()) == (False, 0)
            assert relative_error([mean], [of_all]) <= tolerance if weight else mean.isnan(), name
    assert not any(value.requires_grad or value.dim() for value in losses)
    assert relative_error([torch.stack(losses).double()], [torch.stack(expected).double()]) <= tolerance
    assert_same_state(model, reference, tolerance, buffers=buffers, as_one=as_one)
    assert step.updates == len(data)
    return step


def assert_same_state(model, reference, tolerance=FLOAT64, *, buffers=True, as_one=False):
    """The same parameters, and buffers of the same names, kinds and values."""
    parameters = [list(m.parameters()) for m in (model, reference)]
    parameters = [[nn.utils.parameters_to_vector(own)] for own in parameters] if as_one else parameters
    assert relative_error(*parameters) <= tolerance
    found, expected = (dict(m.named_buffers(remove_duplicate=False)) for m in (model, reference))
    assert found.keys() == expected.keys()
    for name, buffer in expected.items() if buffers else ():
        assert (found[name].shape, found[name].dtype) == (buffer.shape, buffer.dtype)
        assert relative_error([found[name].double()], [buffer.double()]) <= tolerance, name


def everything(model, *optimizers):
    """Parameters, buffers, optimizer state, groups and random state, as copies."""
    values = [*model.state_dict().values(), torch.get_rng_state()]
    for optimizer in optimizers:
        values += [[dict(state) for state in optimizer.state.values()], list(optimizer.state), optimizer.param_groups]
    return copy.deepcopy(values)


def same(one, other):
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@contextlib.contextmanager
def left_as_it_was(model, error, match=None, *optimizers):
    """What is raised inside leaves parameters, buffers, random numbers and these optimizers as they were."""
    before = everything(model, *optimizers)
    with pytest.raises(error, match=match) as raised:
        yield raised
    assert same(everything(model, *optimizers), before)
