"""Arguments of an optimizer beside gradients and parameters (optax's extra arguments), and errors about all of them."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import jax
import numpy as np
import optax

from jzero.core.base.types import PyTree
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.trainable import MaskedTransformation

Transformation: TypeAlias = optax.GradientTransformation | MaskedTransformation
"""The user's optimizer."""

DIFFERENT = (
    "The optimizer (`tx`) of a sharded state takes gradients of the structure and shapes of the parameters. One whose "
    "gradients differ from them, such as `optax.lookahead`, cannot train it: keep the second copy of the parameters in "
    "another field of the state."
)

UNEXPECTED = re.compile(r"got an unexpected keyword argument '(\w+)'")
MISSING = re.compile(
    r"missing \d+ required keyword-only arguments?: (?P<names>.+)|^(?P<name>(?!params\b)\w+) must be provided"
)


def extra_args(value: jax.Array | None, grads: PyTree) -> dict[str, PyTree]:
    """Returns the extra arguments that a train step offers to its optimizer.

    Args:
      value: The loss of these gradients, the mean over the global batch; `None` if it is not known.
      grads: The gradients as the optimizer sees them.
    """
    return {} if value is None else {"value": value, "grad": grads}


def call_update(
    tx: Transformation,
    offered: Mapping[str, PyTree],
    grads: PyTree,
    state: PyTree,
    params: PyTree | None = None,
    **given: PyTree | Callable[..., object],
) -> tuple[PyTree, PyTree]:
    """Returns the updates and the new state of an optimizer, with all arguments that it takes.

    Whether an optimizer takes an argument shows only in the call: `optax.chain`, `masked` and others take any, and pass
    them on to their parts, of which one may name those that it takes (`optax.contrib.sam`). A program that trains with
    such an optimizer does not hand over the others. The step keeps callbacks of a call that failed (`jax.debug.print`
    in a part before the one that refuses), beside those of the call that counts.

    Args:
      tx: The user's transformation.
      offered: Extra arguments that it gets if all of its parts take them.
      grads: The gradients.
      state: Its state.
      params: The parameters; `None` if they are not known.
      **given: Extra arguments that it gets in any case, in place of those offered.
    """
    refused: list[str] = []
    while True:
        extra = {**{name: x for name, x in offered.items() if name not in refused}, **given}
        try:
            return _update(tx, grads, state, params, extra, refused)
        except TypeError as error:
            found = UNEXPECTED.search(str(error))
            if found is None or found[1] in given or found[1] not in extra:
                raise
            refused.append(found[1])


def _update(
    tx: Transformation,
    grads: PyTree,
    state: PyTree,
    params: PyTree | None,
    extra: Mapping[str, PyTree],
    refused: Sequence[str],
) -> tuple[PyTree, PyTree]:
    """Calls an optimizer; its errors say how to pass the arguments that it needs, or which gradients it gets."""
    try:
        return tx.update(grads, state, params, **extra)
    except (TypeError, ValueError) as error:
        missing = MISSING.search(str(error))
        if missing is None:
            if _compares_trees(error):
                error.add_note(f"Raised in the state's optimizer (`tx`). {DIFFERENT}")
            raise
        names = re.findall(r"'(\w+)'", missing["names"] or f"'{missing['name']}'")
        if {*names} & {*refused}:
            raise TypeError(
                f"One part of the optimizer (`tx`) asks for {names}, and another does not take {refused}, though optax "
                "hands the same arguments to all parts: let that part's `update` take `**extra_args`, too."
            ) from error
        arguments = ", ".join(f"{name}=..." for name in names)
        raise TypeError(
            f"The optimizer (`tx`) asks for {names}, which it was not given. A step of `make_train_step` hands over "
            "`value`, the loss, and `grad`. "
            "Else take a step of your own: `loss, grads = jzero.value_and_grad(loss_fn)(state, batch)`, then "
            f"`state.tx.update(grads, state.opt_state, state.params, {arguments})`."
        ) from error


def _compares_trees(error: Exception) -> bool:
    """Whether jax raised an error when it compared the structures of trees."""
    frames = traceback.extract_tb(error.__traceback__)
    return Path(frames[-1].filename).name == "tree_util.py"


def check_grads(plan: ZeroPlan, grads: PyTree) -> None:
    """Raises unless gradients have the structure of the parameters."""
    try:
        plan.view.params.nodes(grads)
    except ValueError as error:
        raise ValueError(
            "The gradients do not have the structure of the parameters. Parameters: "
            f"{plan.params_treedef!s:.300}\nGradients: {jax.tree.structure(grads)!s:.300}\n{DIFFERENT}"
        ) from error


def check_params_stored(plan: ZeroPlan, params: PyTree) -> None:
    """Raises if parameters do not have the shape that the plan stores; optax could not add to them."""
    for i, x in enumerate([] if params is None else plan.view.params.flat(params)):
        leaf = plan.leaves[i].param
        if np.shape(x) != leaf.stored_shape and i not in plan.keys:
            raise ValueError(
                f"{leaf.path!r} is stored as {leaf.stored_shape}, but the parameters to be updated hold it as "
                f"{np.shape(x)}. Pass those of the state, `state.tx.update(grads, state.opt_state, state.params)`, not "
                "`jzero.natural_params(state)`. Edit parameters with `jzero.update_params` or `.at[...]`; shard the "
                "state again (`jzero.shard_train_state`) if they come from another one."
            )
