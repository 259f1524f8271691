"""The few kinds of error dualform raises.

Every message says three things: what was seen, what was expected, and what to do about it. Catching
`DualFormError` catches them all.
"""


class DualFormError(Exception):
    """Anything dualform refuses to do.

    Example:
        >>> import dualform
        >>> try:
        ...     dualform.Memory.open("no/such/run")
        ... except dualform.DualFormError as error:
        ...     print(type(error).__name__)
        MemoryFileError
    """


class RecordingError(DualFormError):
    """The recorder was used in a way that would leave a wrong or incomplete memory.

    Example:
        >>> import dualform
        >>> issubclass(dualform.RecordingError, dualform.DualFormError)
        True
    """


class AuditError(RecordingError):
    """A training step did something the learning rule cannot explain, so the run is not exact.

    Example:
        >>> import dualform
        >>> issubclass(dualform.AuditError, dualform.RecordingError)
        True
    """


class MemoryFileError(DualFormError):
    """A file or directory is not a sound memory: damaged, foreign, truncated, another version.

    Example:
        >>> import dualform
        >>> issubclass(dualform.MemoryFileError, dualform.DualFormError)
        True
    """


class QueryError(DualFormError):
    """A question the memory cannot answer: an unknown layer or column, a wrong shape.

    Example:
        >>> import dualform
        >>> issubclass(dualform.QueryError, dualform.DualFormError)
        True
    """
