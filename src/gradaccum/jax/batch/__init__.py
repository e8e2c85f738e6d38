"""Where the rows of a batch are: pytrees and axes."""
