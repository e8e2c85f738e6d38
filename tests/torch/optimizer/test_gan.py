"""The page's two loops of a GAN: generator and discriminator both get the large batch's updates."""

import re

import pytest
import torch

import gradaccum.torch
from tests.documents import ROOT
from tests.reference import FLOAT64, relative_error

pytestmark = pytest.mark.usefixtures("float64")

PAGE = (ROOT / "docs" / "howto" / "gan.md").read_text(encoding="utf-8")
IN_TURNS, AT_ONCE, STEPS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
JUDGE = torch.nn.BCEWithLogitsLoss()


def trained(*loops):
    torch.manual_seed(3)
    names = {"torch": torch, "gradaccum": gradaccum}
    for loop in loops:
        exec(loop, names)
    return [*names["generator"].parameters(), *names["discriminator"].parameters()]


def large_batches(*loops):
    torch.manual_seed(3)
    generator, discriminator = torch.nn.Linear(4, 2), torch.nn.Linear(2, 1)
    networks = generator, discriminator
    of_generator, of_discriminator = (torch.optim.Adam(each.parameters(), lr=1e-3) for each in networks)
    real, noise = torch.randn(2, 64, 2), torch.randn(2, 64, 4)
    for loop, x, z in ((loop, x, z) for loop in loops for x, z in zip(real, noise)):
        fake, ones = generator(z), torch.ones(64, 1)
        at_once = torch.autograd.grad(JUDGE(discriminator(fake), ones), [*generator.parameters()])
        of_discriminator.zero_grad()
        judged = discriminator(torch.cat([x, fake.detach()]))
        JUDGE(judged, torch.cat([ones, torch.zeros(64, 1)])).backward()
        of_discriminator.step()
        in_turns = torch.autograd.grad(JUDGE(discriminator(generator(z)), ones), [*generator.parameters()])
        for parameter, gradient in zip(generator.parameters(), at_once if loop is AT_ONCE else in_turns):
            parameter.grad = gradient
        of_generator.step()
    return [*generator.parameters(), *discriminator.parameters()]


@pytest.mark.parametrize("loops", [[IN_TURNS], [IN_TURNS, AT_ONCE]], ids=["in turns", "at once"])
def test_both_networks_of_a_gan_get_the_large_batchs_updates(loops):
    assert relative_error(trained(*loops), large_batches(*loops)) <= FLOAT64


def test_a_train_step_for_each_network_makes_the_large_batchs_updates():
    torch.manual_seed(3)
    networks = {"generator": torch.nn.Linear(4, 2), "discriminator": torch.nn.Linear(2, 1)}
    data = {"real": torch.randn(8, 16, 2), "noise": torch.randn(8, 16, 4)}
    exec(STEPS, {"torch": torch, "gradaccum": gradaccum, "judge": JUDGE, **networks, **data})
    ours = [parameter for network in networks.values() for parameter in network.parameters()]
    assert relative_error(ours, large_batches(STEPS)) <= FLOAT64


def test_the_order_of_steps_in_the_page_matters():
    """The generator's step before the discriminator's backward pass: the case that the page warns of."""
    step, trains = "for_discriminator.step()", "    discriminator.requires_grad_(True)\n"
    lines = AT_ONCE.replace(f"    for_generator.step(), {step}", f"    {step}")
    early = lines.replace(trains, f"{trains}    for_generator.step()\n    fake = generator(z)\n")
    assert early.count("for_generator.step()") == 1
    assert relative_error(trained(IN_TURNS, early), large_batches(IN_TURNS, AT_ONCE)) > 1e-9
