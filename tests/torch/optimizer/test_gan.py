"""The page's two loops of a GAN: generator and discriminator both get the large batch's updates."""

import re

import pytest
import torch

import gradaccum.torch
from tests.documents import ROOT
from tests.reference import FLOAT64, relative_error

pytestmark = pytest.mark.usefixtures("float64")

PAGE = (ROOT / "docs" / "howto" / "gan.md").read_text(encoding="utf-8")
IN_TURNS, AT_ONCE = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
JUDGE = torch.nn.BCEWithLogitsLoss()


def trained(*loops):
    torch.manual_seed(3)
    names = {"torch": torch, "gradaccum": gradaccum}
    for loop in loops:
        exec(loop, names)
    return [*names["generator"].parameters(), *names["discriminator"].parameters()]


def discriminators_loss(discriminator, real, fake):
    targets = torch.cat([torch.ones(len(real), 1), torch.zeros(len(fake), 1)])
    return JUDGE(discriminator(torch.cat([real, fake])), targets)


def large_batches(*loops):
    torch.manual_seed(3)
    generator, discriminator = torch.nn.Linear(4, 2), torch.nn.Linear(2, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
    real, noise = torch.randn(2, 64, 2), torch.randn(2, 64, 4)
    for loop in loops:
        for x, z in zip(real, noise):
            fake = generator(z)
            losses = JUDGE(discriminator(fake), torch.ones(64, 1)), discriminators_loss(discriminator, x, fake.detach())
            if loop is AT_ONCE:
                gradients = torch.autograd.grad(losses[0], [*generator.parameters()])
            of_discriminator.zero_grad()
            losses[1].backward()
            of_discriminator.step()
            if loop is IN_TURNS:
                after = JUDGE(discriminator(generator(z)), torch.ones(64, 1))
                gradients = torch.autograd.grad(after, [*generator.parameters()])
            for parameter, gradient in zip(generator.parameters(), gradients):
                parameter.grad = gradient
            of_generator.step()
    return [*generator.parameters(), *discriminator.parameters()]


@pytest.mark.parametrize("loops", [[IN_TURNS], [IN_TURNS, AT_ONCE]], ids=["in turns", "at once"])
def test_both_networks_of_a_gan_get_the_large_batchs_updates(loops):
    assert relative_error(trained(*loops), large_batches(*loops)) <= FLOAT64


def test_the_order_of_steps_in_the_page_matters():
    """The generator's step before the discriminator's backward pass: the case that the page warns of."""
    step = "for_discriminator.step()"
    lines = AT_ONCE.replace(f"    for_generator.step(), {step}", f"    {step}")
    early = lines.replace(
        "    discriminator.requires_grad_(True)\n",
        "    discriminator.requires_grad_(True)\n    for_generator.step()\n    fake = generator(z)\n",
    )
    assert early.count("for_generator.step()") == 1
    assert relative_error(trained(IN_TURNS, early), large_batches(IN_TURNS, AT_ONCE)) > 1e-9
