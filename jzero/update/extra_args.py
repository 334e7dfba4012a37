"""Arguments of an optimizer beside gradients and parameters (optax's extra arguments), and errors about all of them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TypeAlias

import jax
import numpy as np
import optax

from jzero._types import PyTree
from jzero.plan.plan import ZeroPlan
from jzero.plan.trainable import MaskedTransformation

Transformation: TypeAlias = optax.GradientTransformation | MaskedTransformation
"""The user's optimizer."""

DIFFERENT = (
    "The optimizer (`tx`) of a sharded state takes gradients of the structure and shapes of the parameters. One whose "
    "gradients differ from them, such as `optax.lookahead`, cannot train it: keep the second copy of the parameters in "
    "another field of the state."
)


def extra_args(tx: Transformation, value: jax.Array | None, grads: PyTree) -> dict[str, PyTree]:
    """Returns the extra arguments that a train step hands to an optimizer; none if that takes none.

    Args:
      tx: The user's transformation.
      value: The loss of these gradients, the mean over the global batch; `None` if it is not known.
      grads: The gradients as the optimizer sees them.
    """
    inner = tx.inner if isinstance(tx, MaskedTransformation) else tx
    takes = isinstance(inner, optax.GradientTransformationExtraArgs)
    return {"value": value, "grad": grads} if takes and value is not None else {}


@contextlib.contextmanager
def explained_errors() -> Iterator[None]:
    """Adds to errors raised in the optimizer where they come from, and how to pass the arguments that it needs."""
    try:
        yield
    except TypeError as error:
        missing = re.search(r"missing \d+ required keyword-only arguments?: (.+)", str(error))
        if missing is None:
            _add_note(error)
            raise
        names = re.findall(r"'(\w+)'", missing[1])
        arguments = ", ".join(f"{name}=..." for name in names)
        raise TypeError(
            f"The optimizer (`tx`) asks for {names}, which it was not given. A step of `make_train_step` hands over "
            "`value`, the loss, and `grad`. "
            "Else take a step of your own: `loss, grads = jzero.value_and_grad(loss_fn)(state, batch)`, then "
            f"`state.tx.update(grads, state.opt_state, state.params, {arguments})`."
        ) from error
    except ValueError as error:
        _add_note(error)
        raise


def check_grads(plan: ZeroPlan, grads: PyTree) -> None:
    """Raises unless gradients have the structure of the parameters."""
    try:
        plan.params_treedef.flatten_up_to(grads)
    except ValueError as error:
        raise ValueError(
            "The gradients do not have the structure of the parameters. Parameters: "
            f"{plan.params_treedef!s:.300}\nGradients: {jax.tree.structure(grads)!s:.300}\n{DIFFERENT}"
        ) from error


def check_params_stored(plan: ZeroPlan, params: PyTree) -> None:
    """Raises if parameters do not have the shape that the plan stores; optax could not add to them."""
    for i, x in enumerate([] if params is None else plan.flat_params(params)):
        leaf = plan.leaves[i].param
        if np.shape(x) != leaf.stored_shape and i not in plan.keys:
            raise ValueError(
                f"{leaf.path!r} is stored as {leaf.stored_shape}, but the parameters to be updated hold it as "
                f"{np.shape(x)}. Edit parameters with `jzero.update_params` or `.at[...]`; shard the state again "
                "(`jzero.shard_train_state`) if they come from another one."
            )


def _add_note(error: Exception) -> None:
    error.add_note(f"Raised in the state's optimizer (`tx`). {DIFFERENT}")
