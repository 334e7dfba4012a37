"""One program at a time writes to a directory."""

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
    """A lock that the operating system takes back when the process ends, however it ends.

    Within one process the holder gives way: a manager that is made anew, as notebooks do, takes over from the old one.

    Args:
      directory: What is locked.
      give_way: Finishes what the holder does, and releases the lock; a weak reference to such a method.
    """

    def __init__(self, directory: epath.Path, give_way: Callable[[], Callable[[], None] | None]) -> None:
        self._directory = directory
        self._give_way = give_way
        self._file: Any = None

    def take_over(self) -> None:
        """Has another manager of this program finish, and takes its place; in several processes each must call it."""
        holder = _HOLDERS.get(str(self._directory))
        give_way = None if holder is None else holder._give_way()
        if give_way is not None:
            give_way()
        _HOLDERS[str(self._directory)] = self

    def acquire(self) -> str:
        """Locks the directory; returns who has it, and what to do, if that is another program."""
        if "://" in os.fspath(self._directory):  # object stores know no locks
            return ""
        file = open(self._directory / LOCK_FILE, "a+")  # noqa: SIM115  # held until it is released
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
        """Lets others write."""
        file, self._file = self._file, None
        if _HOLDERS.get(str(self._directory)) is self:
            del _HOLDERS[str(self._directory)]
        if file is not None:
            file.close()


def _release_in_child() -> None:
    """Has a forked process let go of locks, which it would hold on to after the process that took them has ended."""
    for lock in list(_HOLDERS.values()):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)
