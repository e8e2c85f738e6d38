"""For the site's reference: what a docstring calls `Example:` is the section that Griffe calls `Examples:`."""

import re
from typing import Any

import griffe

__all__ = ["Examples"]


class Examples(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
