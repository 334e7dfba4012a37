"""The key-value store that processes share: texts by key, on the host of the first process."""

from __future__ import annotations

import jax

from jzero.core.base.compat import DistributedClient


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
