"""Guards: the state of Python's that a trace has read, whether it has changed since, and undoing its changes."""
