"""Losses that users write into a Trainer's compute_loss, most of which never look at num_items_in_batch."""

import torch
from torch.nn import functional as F


def _ignores_the_count(logits, labels, items):
    return F.cross_entropy(logits, labels)


def _uses_the_count(logits, labels, items):
    loss = F.cross_entropy(logits, labels, reduction="sum")
    return loss / (items if items is not None else (labels != -100).sum())


def _mean_of_rows(logits, labels, items):
    loss = F.cross_entropy(logits, labels, reduction="none")
    return loss.mean() if loss.dim() == 1 else (loss.sum(1) / (labels != -100).sum(1).clamp(min=1)).mean()


def _mean_of_sums(logits, labels, items):
    loss = F.cross_entropy(logits, labels, reduction="none")
    return loss.flatten(1).sum(1).mean() if loss.dim() > 1 else loss.mean()


def _and_a_constant(logits, labels, items):
    return F.cross_entropy(logits, labels) + 0.3


def _focal(logits, labels, items):
    loss = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - (-loss).exp()) ** 2 * loss).sum() / (labels != -100).sum()


def _sum(logits, labels, items):
    return F.cross_entropy(logits, labels, reduction="sum")


def _root(logits, labels, items):
    return F.cross_entropy(logits, labels).sqrt()


def _hardest(logits, labels, items):
    return F.cross_entropy(logits, labels, reduction="none").amax()


def _spread(logits, labels, items):
    return F.cross_entropy(logits, labels) + 0.1 * logits[..., 0].std()


def _two_denominators(logits, labels, items):
    return _mean_of_rows(logits, labels, items) + F.cross_entropy(logits, labels)


def _class_weights(logits, labels, items):
    weight = torch.ones(logits.shape[1], dtype=logits.dtype)
    weight[0] = 9.0
    return F.cross_entropy(logits, labels, weight=weight)


def _above_a_threshold(logits, labels, items):
    loss = F.cross_entropy(logits, labels, reduction="none")
    kept = loss > loss[labels != -100].median()
    return loss[kept].mean()


def _of_some_tokens(logits, labels, items):
    kept = (labels != -100) & (labels % 2 == 0)
    return F.cross_entropy(logits, labels, reduction="none")[kept].sum() / kept.sum().clamp(min=1)


MEANS = {
    "ignoring the count": _ignores_the_count,
    "using the count": _uses_the_count,
    "mean of rows": _mean_of_rows,
    "mean of sums": _mean_of_sums,
    "and a constant": _and_a_constant,
    "focal": _focal,
}
"""A mean over what a denominator can be found for."""
ACROSS = {"sum": _sum, "root": _root, "hardest": _hardest, "spread": _spread, "threshold": _above_a_threshold}
"""To be refused, but where a batch is one micro-batch."""
EITHER = {"class weights": _class_weights, "two denominators": _two_denominators, "some tokens": _of_some_tokens}
"""Exact where the rows happen to agree."""
LOSSES = MEANS | ACROSS | EITHER


class Loss:
    """A base class that makes a Trainer compute one of these, of the class's `kind`."""

    kind = ""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        logits = outputs["logits"]
        if "CausalLM" in type(self.accelerator.unwrap_model(model)).__name__ or "LMHead" in type(model).__name__:
            logits, labels = logits[:, :-1], labels[:, 1:]
        if logits.dim() == 3:
            logits = logits.transpose(1, 2)
        loss = LOSSES[self.kind](logits, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss
