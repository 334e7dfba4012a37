"""A drawn case as a train state and a loss, for jzero and for plain jax."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

import jzero
from tests.fuzz_cases import FROZEN, OPTIMIZERS, TRAINABLE, Case, forward, make_params, reduced

STEPS, WIDTH = 3, 7


class Problem(NamedTuple):
    """A case for either side.

    Attributes:
      state: A train state.
      loss_fn: As jzero takes it.
      params: The parameters by path, as plain jax takes them.
      plain_loss: `plain_loss(params, batch)` with those.
    """

    state: Any
    loss_fn: Any
    params: dict[str, Any]
    plain_loss: Any


def path_str(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_frozen(path: str) -> bool:
    return not re.fullmatch(TRAINABLE, path)


def _tx(case: Case) -> Any:
    """The optimizer; where leaves are frozen optax is told so, since `init` knows no moments of integers."""
    tx = OPTIMIZERS[case.optimizer]()
    if not set(case.extras) & set(FROZEN):
        return tx
    return optax.masked(tx, lambda p: jax.tree_util.tree_map_with_path(lambda at, _: not is_frozen(path_str(at)), p))


def make_problem(case: Case) -> Problem:
    params, _ = make_params(case, WIDTH)
    loss_fn = lambda params, batch: reduced(case, params, forward(case, params, batch["x"], batch), batch)
    create = jzero.TrainState.create if case.framework == "plain" else train_state.TrainState.create
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    flat = {path_str(path): x for path, x in leaves}
    plain_loss = lambda flat, batch: loss_fn(jax.tree.unflatten(treedef, list(flat.values())), batch)
    return Problem(create(apply_fn=None, params=params, tx=_tx(case)), loss_fn, flat, plain_loss)


def is_real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
