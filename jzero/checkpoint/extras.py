"""Extras and the position of a data iterator, which users save beside the state, as JSON and arrays."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jzero.checkpoint.damage import REMEDY, DamageError
from jzero.checkpoint.orbax_io import can_store

ARRAY, KEY, BYTES = "__array__", "__prng_key__", "__bytes__"


def encode(value: object, path: str = "extra") -> tuple[Any, dict[str, np.ndarray]]:
    """Splits nested dicts and lists into data for JSON, and arrays by name.

    Raises:
      TypeError: A leaf is not an array, a PRNG key, a number, text, bytes, a boolean or `None`, a key is not text, or
        an array is spread over processes; the message names it.
    """
    arrays: dict[str, np.ndarray] = {}

    def visit(x: object, path: str) -> Any:
        if isinstance(x, Mapping):
            bad = [key for key in x if not isinstance(key, str) or key in (ARRAY, KEY, BYTES)]
            if bad:
                raise TypeError(f"The keys of `{path}` must be text (other than jzero's own markers): got {bad[0]!r}.")
            return {key: visit(item, f"{path}/{key}") for key, item in x.items()}
        if isinstance(x, list | tuple):
            return [visit(item, f"{path}/{i}") for i, item in enumerate(x)]
        if x is None or isinstance(x, bool | int | float | str):
            return x
        if isinstance(x, bytes):
            return {BYTES: base64.b64encode(x).decode()}
        if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return {KEY: str(jax.random.key_impl(x)), ARRAY: _keep(jax.random.key_data(x), path, arrays)}
        if isinstance(x, jax.Array | np.ndarray | np.generic):
            return {ARRAY: _keep(x, path, arrays)}
        raise TypeError(
            f"`{path}` must hold arrays, PRNG keys, numbers, text, bytes, None, and dicts and lists of these: got "
            f"{type(x).__name__}."
        )

    return visit(value, path), arrays


def _keep(x: Any, path: str, arrays: dict[str, np.ndarray]) -> str:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        if not x.is_fully_replicated:
            raise TypeError(
                f"`{path}` is spread over processes: make it a field of the state, which is saved in parts."
            )
        x = x.addressable_data(0)
    name = str(len(arrays))
    array = np.array(x)
    dtype = array.dtype
    arrays[name] = array.astype(dtype.newbyteorder("="), copy=False)  # Orbax notes no byte order
    if not can_store(dtype) or not array.size:
        raise TypeError(
            f"`{path}` is an array of {dtype}{list(array.shape)}: only arrays with elements can be saved, of a dtype "
            "of numbers that Orbax can write."
        )
    return name


def decode(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Inverts `encode`; tuples come back as lists, arrays as NumPy arrays."""
    try:
        return _decode(value, arrays)
    except (KeyError, TypeError, ValueError) as error:
        raise DamageError(
            f"What lies beside the state is damaged ({type(error).__name__}: {error}).\n{REMEDY}"
        ) from error


def _decode(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_decode(x, arrays) for x in value]
    if not isinstance(value, dict):
        return value
    if KEY in value:
        return jax.random.wrap_key_data(jax.numpy.asarray(arrays[value[ARRAY]]), impl=value[KEY])
    if ARRAY in value:
        return arrays[value[ARRAY]]
    if BYTES in value:
        return base64.b64decode(value[BYTES])
    return {key: _decode(x, arrays) for key, x in value.items()}


def iterator_position(iterator: object) -> Any:
    """Returns the position of a data iterator in this process, as data for JSON."""
    position = _method(iterator, "get_state", "state_dict")()
    encoded, arrays = encode(position, "data_iterator")
    if arrays:
        raise TypeError(
            "The position of `data_iterator` holds arrays: it must be numbers, text, bytes, dicts and lists."
        )
    return encoded


def iterator_mover(iterator: object, positions: Sequence[object]) -> Callable[[], None]:
    """Returns a function that moves a data iterator to its saved position.

    Raises:
      ValueError: The positions are from another number of processes, and differ.
    """
    if len(positions) == jax.process_count():
        position = positions[jax.process_index()]
    elif all(position == positions[0] for position in positions):
        position = positions[0]
    else:
        raise ValueError(
            f"The position of the data iterator was saved by {len(positions)} processes, each at another place, but "
            f"there are {jax.process_count()} now. Restore without `data_iterator` and move it yourself, or use an "
            "iterator whose position is the same in all processes."
        )
    return functools.partial(_method(iterator, "set_state", "load_state_dict"), decode(position, {}))


def _method(iterator: object, *names: str) -> Any:
    for name in names:
        if callable(getattr(iterator, name, None)):
            return getattr(iterator, name)
    raise TypeError(
        f"`data_iterator` must have a method {' or '.join(map(repr, names))}, as Grain's and PyTorch's stateful "
        f"iterators have: got {type(iterator).__name__}."
    )
