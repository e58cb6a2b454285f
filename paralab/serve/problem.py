"""The explanation on a page for a folder that cannot be shown."""

from paralab.errors import DAMAGED, ParalabError, from_os_error

EXPECTED = (ParalabError, OSError, *DAMAGED)


def explain(error: Exception) -> str:
    """Return one or two sentences without a traceback."""
    if isinstance(error, ParalabError):
        return str(error)
    if isinstance(error, OSError):
        return str(from_os_error(error))
    return f"The folder is damaged: {type(error).__name__}: {error}."
