"""The ways a run may end other than by finishing, each with its exit code."""


class RunError(Exception):
    """A run that cannot go on; its message is one line for the user."""

    exit_code = 1
    label = "stopped"  # the word that its line begins with
    status = "failed"  # in the run card


class UsageError(RunError):
    """The user's mistake: says what was given, what was expected and what to type instead."""

    exit_code = 2
    label = "error"


class NonFiniteError(RunError):
    """A loss or a gradient that is infinite or not a number."""

    exit_code = 3
