"""The lock that lets only one program at a time write to a directory."""

from __future__ import annotations

import fcntl
import os
import socket
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from etils import epath

__all__ = ["DirectoryLock"]

LOCK_FILE = "jzero.lock"


_HOLDERS: weakref.WeakValueDictionary[str, DirectoryLock] = weakref.WeakValueDictionary()
"""The locks that this process holds, by directory."""


class DirectoryLock:
    """A lock that the operating system releases when the process ends, however it ends.

    Within one process the holder gives way: a new manager, as notebooks make them, takes over from the old one.

    Args:
      directory: The directory to lock.
      give_way: A weak reference to a method that finishes the holder's work and releases the lock.
    """

    def __init__(self, directory: epath.Path, give_way: Callable[[], Callable[[], None] | None]) -> None:
        self._directory = directory
        self._give_way = give_way
        self._file: Any = None

    def take_over(self) -> None:
        """Lets another manager of this program finish, and takes its place. Each process must call it."""
        holder = _HOLDERS.get(str(self._directory))
        give_way = None if holder is None else holder._give_way()
        if give_way is not None:
            give_way()
        _HOLDERS[str(self._directory)] = self

    def acquire(self) -> str:
        """Locks the directory. If another program holds it, returns text about that program and the way out."""
        if "://" in os.fspath(self._directory):  # object stores have no locks
            return ""
        file = open(self._directory / LOCK_FILE, "a+")  # noqa: SIM115  # held until `release`
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            other = file.read().strip()
            file.close()
            return (
                f"another program writes there ({other or 'unknown'}), and one at a time may. End that one, or choose "
                "another directory."
            )
        except OSError as error:
            file.close()
            warnings.warn(
                f"{self._directory} knows no locks ({error}): see that one program writes there.", stacklevel=2
            )
            return ""
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        self._file = file
        return ""

    def release(self) -> None:
        """Releases the lock."""
        file, self._file = self._file, None
        if _HOLDERS.get(str(self._directory)) is self:
            del _HOLDERS[str(self._directory)]
        if file is not None:
            file.close()


def _release_in_child() -> None:
    """Releases the locks in a forked process, which would hold them after its parent has ended."""
    for lock in list(_HOLDERS.values()):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
