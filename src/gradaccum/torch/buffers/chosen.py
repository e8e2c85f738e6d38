"""What a proof makes of buffers: it sees where all rows at once take them, and where each rule does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradaccum.torch.buffers.rules import Word, choose, rules_of, said_of

__all__ = ["choose_rules", "tell_of_buffers"]

logger = logging.getLogger("gradaccum")


def choose_rules(
    wrong: Collection[str],
    roots: Mapping[str, nn.Module],
    owners: Mapping[str, tuple[str, str, str]],
    still_wrong: Callable[[], Collection[str]],
) -> dict[str, Word]:
    """Of buffers that go elsewhere: have those follow another rule of which exactly one is right.

    What users have said is left as it is. A rule that was chosen before and is wrong now is taken back.

    Args:
        wrong: The full names of buffers that do not go where all rows at once take them.
        roots: The modules, by the prefix of their names.
        owners: By the buffers' names the path and the kind of the module, and the name there.
        still_wrong: Compares again, with the rules as they are then.

    Returns:
        What was chosen.
    """
    modules = {path: module for prefix, root in roots.items() for path, module in root.named_modules(prefix=prefix)}
    tried = {full: (modules[path], name) for full in wrong if full in owners for path, _, name in [owners[full]]}
    tried = {
        full: (module, name)
        for full, (module, name) in tried.items()
        if name not in said_of(module) and not isinstance(module, _BatchNorm)
    }
    fits: dict[str, list[Word]] = {full: [] for full in tried}
    before = {full: rules_of(module).get(name, "mean") for full, (module, name) in tried.items()}
    try:
        for word in get_args(Word) if tried else ():
            left = {full: place for full, place in tried.items() if before[full] != word}
            if word == "sum":  # of truth values it is the largest
                left = {full: place for full, place in left.items() if place[0]._buffers[place[1]].dtype != torch.bool}
            for module, name in left.values():
                choose(module, name, word)
            for full in left.keys() - set(still_wrong()):
                fits[full].append(word)
    finally:
        for module, name in tried.values():
            choose(module, name, None)
    chosen = {full: words[0] for full, words in fits.items() if len(words) == 1}
    for full, word in chosen.items():
        choose(*tried[full], word)
    if chosen:
        logger.info(
            "Buffers that go where all rows at once take them by another rule than the mean over micro-batches, as the "
            "proof has found: %s. gradaccum.torch.combine_buffers says it for good.",
            ", ".join(f"{full!r} ({owners[full][1]}): {word!r}" for full, word in chosen.items()),
        )
    return chosen


def tell_of_buffers(buffers: Sequence[tuple[str, str, str]]) -> None:
    """Warn of buffers that no rule takes where all rows at once do.

    Args:
        buffers: Of each the path and the kind of its module, and its name there.
    """
    if not buffers:
        return
    listed = [f"{name!r} of {path or 'the model'!r} ({kind})" for path, kind, name in buffers]
    _, kind, name = buffers[0]
    logger.warning(
        "The update is the large batch's, but these buffers do not go where all rows at once take them: %s. "
        "They go to the mean over rows of where micro-batches take them from one start, unless something else "
        'is said: gradaccum.torch.combine_buffers(%s, %s="sum"), or "max", "once", or a callable.',
        ", ".join(listed[:5]) + (", ..." if len(listed) > 5 else ""),
        kind,
        name,
    )
