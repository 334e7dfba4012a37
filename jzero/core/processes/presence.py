"""What processes tell each other beside comparisons: that one has ended, and that others do not wait for it any more.

See [Note: How processes compare].
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Sequence

import jax

from jzero.core.base import compat
from jzero.core.base.compat import DistributedClient

LISTEN_S = 3.0
"""How often a process looks whether others have given it up."""


def join(client: DistributedClient, process: int) -> None:
    """Starts to listen for what others say of this process, and has its end told to them. Once per connection."""
    ends = threading.Event()
    listener = threading.Thread(target=_listen, args=(client, process, ends), daemon=True)
    listener.start()
    atexit.register(_end, client, process, os.getpid(), ends, listener)


def ended(client: DistributedClient, processes: Sequence[int]) -> list[int]:
    """Returns those of the processes that have ended."""
    return [i for i in processes if get(client, _ended_key(i)) is not None]


def give_up(client: DistributedClient, processes: Sequence[int], why: str) -> None:
    """Tells processes that this one does not wait for them any more."""
    for i in processes:
        put(client, _given_up_key(i), why)


def _listen(client: DistributedClient, process: int, ends: threading.Event) -> None:
    """Logs, once, why others have given this process up. It cannot raise: Python may be waiting for a collective."""
    while not ends.wait(LISTEN_S) and client is compat.distributed_client():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            why = get(client, _given_up_key(process))
            if why is not None:
                logging.getLogger("jzero").error(
                    "Others do not wait for process %s any more, which may now wait for them for ever. %s", process, why
                )
                return


def _end(client: DistributedClient, process: int, pid: int, ends: threading.Event, listener: threading.Thread) -> None:
    if os.getpid() == pid and client is compat.distributed_client():  # neither in a fork, nor after it was closed
        ends.set()
        listener.join()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            put(client, _ended_key(process), "")


def _ended_key(process: int) -> str:
    return f"jzero/ended/{process}"


def _given_up_key(process: int) -> str:
    return f"jzero/given_up/{process}"


def put(client: DistributedClient, key: str, text: str) -> None:
    """Stores a text under a key."""
    client.key_value_set(key, text, allow_overwrite=True)


def get(client: DistributedClient, key: str, wait_s: float = 0.0) -> str | None:
    """Waits for the text under a key; `None` if none comes."""
    try:
        return client.blocking_key_value_get(key, int(wait_s * 1000)) if wait_s else client.key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if str(error).startswith(("DEADLINE_EXCEEDED", "NOT_FOUND")):
            return None
        raise
