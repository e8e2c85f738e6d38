"""Where activations fill the memory: an attention network on text, three loops beside each other."""

from gradaccum.demo.text.loops import Loop, TextOutcome, TextSetup, perform

__all__ = ["Loop", "TextOutcome", "TextSetup", "perform"]
