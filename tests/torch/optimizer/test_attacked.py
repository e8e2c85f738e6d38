"""Loops that went wrong without a word: each is exact now, or named."""

import copy
import warnings

import pytest
import torch
from torch import nn

from gradaccum import WindowError
from gradaccum.torch import TrainStep
from gradaccum.torch.optim import SGD

torch.manual_seed(0)
X, Y = torch.randn(12, 5, dtype=torch.float64), torch.randint(3, (12,))
BATCHES = list(zip(X.split([3, 1, 4, 2, 2]), Y.split([3, 1, 4, 2, 2])))


def made(**keywords):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    return model, SGD(model.parameters(), lr=0.1, momentum=0.9, **{"steps": 3} | keywords)


def trained(model, optimizer, x, y):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def test_a_batch_of_batches_that_is_split_again_is_refused():
    model, optimizer = made()
    with pytest.raises(WindowError, match=r"step\(\) was called twice for one batch"):
        for x, y in optimizer.batches(BATCHES):
            trained(model, optimizer, x[:1], y[:1])
            trained(model, optimizer, x[1:], y[1:])


def test_a_loop_without_zero_grad_is_refused_where_the_next_window_would_add_to_the_finished_gradient():
    model, optimizer = made()
    for x, y in BATCHES[:3]:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert optimizer.updated
    nn.functional.cross_entropy(model(X), Y).backward()
    with pytest.raises(WindowError, match="left from the last window"):
        optimizer.step()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_clearing_gradients_between_windows_by_the_model_is_fine(set_to_none):
    model, optimizer = made(steps=2)
    for x, y in BATCHES[:4]:
        if not optimizer.micro_batches:
            model.zero_grad(set_to_none)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert optimizer.updates == 2


def test_a_plain_loop_of_one_micro_batch_adds_up_without_zero_grad_as_torch_does():
    model, optimizer = made(steps=1)
    plain = copy.deepcopy(model)
    inner = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for network, each in ((model, optimizer), (plain, inner)):
        for x, y in BATCHES[:3]:
            nn.functional.cross_entropy(network(x), y).backward()
            each.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_hooks_on_gradients_are_named_once():
    model, optimizer = made()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    with pytest.warns(UserWarning, match=r"4 parameters have hooks on their gradients .* not for those that clip"):
        trained(model, optimizer, *BATCHES[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(model, optimizer, *BATCHES[1])


def test_an_epoch_that_was_over_when_it_was_saved_is_over_when_it_is_resumed():
    model, optimizer = made()
    batches = optimizer.batches(BATCHES)
    for x, y in batches:
        trained(model, optimizer, x, y)
        saved = optimizer.state_dict(), batches.state_dict(), copy.deepcopy(model.state_dict())
    resumed, again = made()
    resumed.load_state_dict(saved[2])
    again.load_state_dict(saved[0])
    rest = again.batches(BATCHES)
    rest.load_state_dict(saved[1])
    assert list(rest) == []
    for network, each in ((model, optimizer), (resumed, again)):
        for x, y in each.batches(BATCHES):
            trained(network, each, x, y)
    assert again.updates == optimizer.updates == 4
    assert again.epoch == optimizer.epoch == 2
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


def test_an_open_window_of_means_is_not_continued_as_one_of_sums():
    model, optimizer = made()
    trained(model, optimizer, *BATCHES[0])
    _, other = made(reduction="sum")
    with pytest.raises(WindowError, match='reduction="mean", and this optimizer has reduction="sum"'):
        other.load_state_dict(optimizer.state_dict())


def test_true_and_false_in_a_batch_are_targets_as_any_others():
    model, _ = made()
    plain = copy.deepcopy(model)

    def loss_of(model, x, y):
        return nn.functional.mse_loss(model(x)[:, 0], y.double())

    step = TrainStep(model, torch.optim.SGD(model.parameters(), lr=0.1), compute_loss=loss_of, micro_batch_size=5)
    step(X, Y > 0)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    loss_of(plain, X, Y > 0).backward()
    optimizer.step()
    assert all(torch.allclose(a, b, 1e-12, 1e-14) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("change", ["clamp", "another optimizer", "load"])
def test_parameters_that_change_inside_an_open_window_are_named_once(change, caplog):
    model, optimizer = made()
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in optimizer.batches(BATCHES):
        trained(model, optimizer, x, y)
        if change == "clamp":
            with torch.no_grad():
                model[0].weight.clamp_(-0.3, 0.3)
        elif change == "another optimizer":
            other.step()
        else:
            model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert caplog.text.count("Parameters were changed inside an open window") == 1


def test_parameters_may_change_between_windows(caplog):
    model, optimizer = made()
    for x, y in optimizer.batches(BATCHES):
        trained(model, optimizer, x, y)
        if optimizer.updated:
            with torch.no_grad():
                model[0].weight.clamp_(-0.3, 0.3)
    assert "Parameters were changed" not in caplog.text


@pytest.mark.parametrize("in_batches", [False, True])
def test_a_step_without_a_gradient_is_named_once(in_batches, caplog):
    model, optimizer = made()
    for i, (x, y) in enumerate(optimizer.batches(BATCHES) if in_batches else BATCHES):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        if i != 1:
            loss.backward()
        optimizer.step()
    assert caplog.text.count("whose loss reached none of the parameters") == 1


def ahead(batches):
    """As a prefetcher does: the next batch is fetched before one is handed on."""
    batches = iter(batches)
    held = next(batches)
    for batch in batches:
        yield held
        held = batch
    yield held


@pytest.mark.parametrize("around", [list, ahead])
def test_what_fetches_ahead_around_batches_is_refused(around):
    model, optimizer = made()
    with pytest.raises(WindowError, match=r"fetches ahead.*optimizer\.batches\(prefetched\(loader\)\)"):
        for x, y in around(optimizer.batches(BATCHES)):
            trained(model, optimizer, x, y)
    optimizer.discard()
    for x, y in optimizer.batches(ahead(BATCHES)):
        trained(model, optimizer, x, y)


@pytest.mark.parametrize("weight", [1e-320, 9e307, 10**400], ids=["subnormal", "large", "no float"])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip_micro_batch"])
def test_weights_whose_total_would_overflow_or_lose_digits_are_refused_at_the_entry(weight, nonfinite):
    model, optimizer = made(nonfinite=nonfinite)
    with pytest.raises(ValueError, match="A weight must be"):
        optimizer.backward(nn.functional.cross_entropy(model(X), Y), weight=weight)
    with pytest.raises(ValueError, match="A weight must be"):
        for x, y in optimizer.batches(BATCHES, weight=lambda batch: weight):
            trained(model, optimizer, x, y)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(model, x, y):
        return nn.functional.cross_entropy(model(x), y), weight

    step = TrainStep(model, inner, compute_loss=loss_of, micro_batch_size=5)
    with pytest.raises(ValueError, match="A weight must be"):
        step(X, Y)


def test_a_loop_of_batches_inside_of_another_one_is_among_the_causes_that_are_named():
    model, optimizer = made()
    with pytest.raises(WindowError, match=r"another loop over the same optimizer's batches\(\)"):
        for _ in optimizer.batches(BATCHES):
            for _ in optimizer.batches(BATCHES):
                pass
            trained(model, optimizer, *BATCHES[0])


def test_an_optimizer_that_goes_with_an_open_window_says_so(caplog):
    model, optimizer = made()
    for x, y in BATCHES[:4]:
        trained(model, optimizer, x, y)
    del optimizer
    assert caplog.text.count("was deleted while its open window held 1 of 3 micro-batches") == 1


def loaded_in_the_body(optimizer, model):
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])


@pytest.mark.parametrize("at", range(5))
def test_a_checkpoint_that_is_loaded_in_the_loop_s_body_leaves_the_batch_its_weight_and_its_place(at):
    (model, optimizer), (other, plain) = made(), made()
    for number, (x, y) in enumerate(optimizer.batches(BATCHES)):
        if number == at:
            loaded_in_the_body(optimizer, model)
        trained(model, optimizer, x, y)
    for x, y in plain.batches(BATCHES):
        trained(other, plain, x, y)
    assert optimizer.updates == plain.updates == 2
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("only_after_updates", [False, True])
def test_parameters_that_change_through_data_inside_a_window_are_named(only_after_updates, caplog):
    model, optimizer = made()
    for x, y in optimizer.batches(BATCHES):
        trained(model, optimizer, x, y)
        if optimizer.updated or not only_after_updates:
            for parameter in model.parameters():
                parameter.data.clamp_(-0.1, 0.1)
    assert caplog.text.count("Parameters were changed inside an open window") == (not only_after_updates)


@pytest.mark.parametrize("began", [1, 4])
def test_hooks_on_gradients_that_come_later_are_named_in_the_next_watched_window(began):
    model, optimizer = made(steps=2)

    def train():
        for number, (x, y) in enumerate(2 * BATCHES):
            if number == began:
                for parameter in model.parameters():
                    parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            trained(model, optimizer, x, y)

    with pytest.warns(UserWarning, match="4 parameters have hooks on their gradients") as caught:
        train()
    assert len(caught) == 1
    assert caught[0].filename == __file__


def two_optimizers():
    model, _ = made()
    return model, *(SGD(layer.parameters(), lr=0.1, momentum=0.9, steps=3) for layer in (model[0], model[2]))


@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize("batches", [False, True])
def test_weights_that_reach_another_optimizer_s_window_are_named(batches, names):
    model, one, two = two_optimizers()

    def train():
        for x, y in one.batches(two.batches(BATCHES)) if batches else BATCHES:
            one.zero_grad(), two.zero_grad()
            loss, weight = nn.functional.cross_entropy(model(x), y), len(x) ** 2
            one.backward({"loss": (loss, weight)}) if names else one.backward(loss, weight=weight)
            one.step(), two.step()

    with pytest.warns(UserWarning, match=r"also reached parameters of another wrapped one.*weight=count") as caught:
        train()
    assert len(caught) == 1


def test_optimizers_that_share_batches_and_weights_make_the_large_batch_s_update():
    def weight(batch):
        return len(batch[0]) ** 2

    model, one, two = two_optimizers()
    other, plain = made()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for x, y in one.batches(two.batches(BATCHES, weight=weight), weight=weight):
            one.zero_grad(), two.zero_grad()
            one.backward(nn.functional.cross_entropy(model(x), y))
            one.step(), two.step()
        for x, y in plain.batches(BATCHES, weight=weight):
            trained(other, plain, x, y)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)
