"""The errors that a person who uses the program can cause, and mend."""


class UserError(Exception):
    """A mistake in what the user gave: a key, a value, a file, a folder, a model.

    The message is one readable line (or a few) that names the thing, the value it had, what was
    expected, and what to do. The command line prints it without a traceback and exits with code 2.
    A mistake in *code* is never a `UserError`; it is a `ValueError` or a `TypeError`.
    """


class AnotherFailed(Exception):
    """Raised where nothing failed, because another process of the run did; that one says what."""
