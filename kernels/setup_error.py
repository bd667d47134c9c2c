"""What a machine lacks for the kernels that were asked for. Knows nothing of kernels."""


class SetupError(RuntimeError):
    """Something is not installed, not built or not there; the message says what to do."""
