"""The ways a run may end other than by finishing, each with its exit code."""


class RunError(Exception):
    """A run that cannot go on; its message is one line for the user."""

    exit_code = 1
    status = "failed"


class UsageError(RunError):
    """The user's mistake: says what was given, what was expected and what to type instead."""

    exit_code = 2


class NonFiniteError(RunError):
    """A loss or a gradient that is infinite or not a number."""

    exit_code = 3
