"""Errors about a checkpoint: each is a ValueError or an OSError that names the function and the file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...ranks.messages import RankEnded

_LONGEST = 300  # characters of a message that another library wrote


@contextmanager
def named(function: str) -> Iterator[None]:
    """Puts the public function's name before the message of every ValueError, OSError and RankEnded."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{function}: {error}") from None
    except OSError as error:
        raise OSError(f"{function}: {error}") from None
    except RankEnded as error:
        raise RankEnded(f"{function}: {error}") from None


@contextmanager
def errors_at(path: Path) -> Iterator[None]:
    """Makes every error an OSError that names ``path``.

    The system's own carry no name where a write fails, and what safetensors and pickle raise is of many kinds.
    """
    try:
        yield
    except OSError as error:
        raise OSError(f"{path}: {error.strerror or error}") from None
    except Exception as error:
        raise OSError(f"{path}: {type(error).__name__}: {error}"[: len(str(path)) + _LONGEST]) from None
