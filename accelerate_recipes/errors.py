"""The error for a user's mistake."""


class UsageError(Exception):
    """A mistake in the command. The message is one line that says what to type instead; the exit code is 2."""
