"""One program at a time writes to a directory."""

from __future__ import annotations

import fcntl
import os
import socket
import warnings
import weakref
from typing import Any

from etils import epath

__all__ = ["DirectoryLock"]

LOCK_FILE = "jzero.lock"


class DirectoryLock:
    """A lock that the operating system takes back when the process ends, however it ends."""

    def __init__(self, directory: epath.Path) -> None:
        self._directory = directory
        self._file: Any = None

    def acquire(self) -> str:
        """Locks the directory; returns who has it, and what to do, if that is somebody else."""
        if "://" in os.fspath(self._directory):  # object stores know no locks
            return ""
        file = open(self._directory / LOCK_FILE, "a+")  # noqa: SIM115  # held until it is released
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip()
            file.close()
            if holder == _this_process():
                return "another manager of this program writes there. Close that one first."
            return (
                f"another program writes there ({holder or 'unknown'}), and one at a time may. End that one, or choose "
                "another directory."
            )
        except OSError as error:
            warnings.warn(
                f"{self._directory} knows no locks ({error}): see that one program writes there.", stacklevel=2
            )
            file.close()
            return ""
        file.truncate(0)
        file.write(_this_process())
        file.flush()
        self._file = file
        _close_in_children(self)
        return ""

    def release(self) -> None:
        """Lets others write."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _close_in_children(lock: DirectoryLock) -> None:
    """Has forked processes let go of the lock, which they would hold on to after this one has ended."""
    reference = weakref.ref(lock)

    def release() -> None:
        held = reference()
        if held is not None:
            held.release()

    os.register_at_fork(after_in_child=release)
