"""The two errors that have a meaning of their own; everything else is a ValueError or a TypeError."""


class WindowError(RuntimeError):
    """An operation that isn't allowed inside an open window.

    Example:
        >>> issubclass(WindowError, RuntimeError)
        True
    """


class NotEquivalentError(AssertionError):
    """Accumulated gradients differ from the large batch's; the message names what causes it.

    Example:
        >>> issubclass(NotEquivalentError, AssertionError)
        True
    """
