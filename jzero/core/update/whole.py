"""The whole update of a state, written once: natural shapes, one device, no layout.

    WholeUpdate(plan, tx, new_params)(before) -> after

Everything that happens to a parameter in an update happens here: scaling, casts, edits, optax, rounding, the choice to
skip. `split` takes the traced function apart, and the runners compute it where the arrays lie.

[Note: Masters]
If parameters are stored in 16 bits, the optimizer updates a wider master copy, cut like the gradient. Each device
rounds its shard of the new parameter, and the devices gather it in 16 bits. The wrapper returns the fp32 difference
between the new and the old parameter, so `optax.apply_updates` arrives at the rounded master to the bit (unless one
step makes an element 2^16 times smaller: then the fp32 sum itself rounds). If a parameter differs from its rounded
master, the user edited it (`state.replace(params=...)`); the master takes over the edit, element by element, before the
update.

[Note: Stochastic rounding]
The noise of an element is a function of the update's number, the leaf and the element's position in the natural array,
so it does not depend on who computes the element: a device on its shard, a chunk, or the host. Positions are an input
of the update for that reason.
"""

from __future__ import annotations

import dataclasses
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jzero.core.base.types import DType, PyTree
from jzero.core.config.precision import Precision, cast, is_float8, is_key, scale_by
from jzero.core.layout.casts import apply_edits, positions_of, round_stochastically, round_to
from jzero.core.layout.leaves import LeafPlan
from jzero.core.layout.placement import make_strongly_typed
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.trainable import MaskedTransformation

NOTHING = np.float32(-0.0)
"""The number whose addition changes no bit."""


X_co = TypeVar("X_co", covariant=True)
Functions: TypeAlias = tuple[tuple[str, Callable[..., PyTree]], ...]
"""Arguments of an optimizer that are functions, by name."""


class Grad(NamedTuple, Generic[X_co]):
    """A gradient, with factors that the update multiplies it by: no array holds the product.

    Attributes:
      reduced: The reduced gradient, in its natural or its stored shape.
      factors: Its factors, 0-d, applied one after the other.
    """

    reduced: X_co
    factors: tuple[jax.Array, ...] = ()


class StepGrads(NamedTuple):
    """The gradients of one step.

    Attributes:
      grads: One per parameter leaf, laid out as planned; the factors are the loss scale and clipping.
      applied: Whether to apply them, a 0-d boolean; `None` means yes.
      weighs: Whether the batch had any weight, a 0-d boolean; `None` means yes.
      overflowed: One boolean per parameter leaf, if the precision policy needs them.
      value: The loss, the mean over the global batch.
    """

    grads: list[Grad[jax.Array]]
    applied: jax.Array | None
    weighs: jax.Array | None
    overflowed: jax.Array
    value: jax.Array

    @property
    def is_applied(self) -> bool:
        """Whether to apply them; waits for the program that says so."""
        return self.applied is None or bool(jax.device_get(self.applied))

    @property
    def without_grads(self) -> StepGrads:
        """The same without gradients, for programs that need none."""
        return self._replace(grads=[])


class Before(NamedTuple, Generic[X_co]):
    """What an update reads, one entry per parameter or leaf of the optimizer's state.

    Attributes:
      grads: The gradients; `None` for a parameter that is not trained.
      params: The parameters; `None` for random keys, and everywhere if they are not known.
      masters: The master copies; `None` where the parameter is its own.
      inner: The leaves of the optimizer's state.
      positions: The position of each element, uint32, if results are rounded stochastically; else `None`.
      number: The number of updates before this one, if results are rounded stochastically.
      applied: Whether the update changes anything, a 0-d boolean; `None` means yes.
      value: The loss, for optimizers that ask for it; `None` if it is not known.
      extra: Further arguments of the optimizer, by name.
    """

    grads: Sequence[Grad[X_co] | None]
    params: Sequence[X_co | None]
    masters: Sequence[X_co | None]
    inner: Sequence[X_co]
    positions: Sequence[X_co | None]
    number: jax.Array | None = None
    applied: jax.Array | None = None
    value: jax.Array | None = None
    extra: dict[str, PyTree] | None = None


class After(NamedTuple, Generic[X_co]):
    """What an update makes, in the order of `Before`.

    Attributes:
      results: For each parameter its new value or its update, as `WholeUpdate.new_params` says; `None` if the optimizer
        returned none, or if it is not trained.
      inner: The new leaves of the optimizer's state.
    """

    results: Sequence[X_co | None]
    masters: Sequence[X_co | None]
    inner: Sequence[X_co]


@dataclasses.dataclass(frozen=True)
class WholeUpdate:
    """The update of a plan's parameters by an optimizer: a function of arrays in natural shapes.

    Attributes:
      tx: The user's transformation.
      new_params: Numbers of the parameters whose results are new parameters; those of the others are updates.
      functions: Further arguments of the optimizer that are functions.
    """

    plan: ZeroPlan
    tx: Transformation
    new_params: frozenset[int]
    functions: Functions = ()

    def __call__(self, x: Before[jax.Array]) -> After[jax.Array]:
        """Returns the new parameters, or their updates, and the new state."""
        plan, tree = self.plan, self.plan.view.params.tree
        knows = any(p is not None for p in x.params)
        optimizer_inputs = (
            [self._optimizer_input(*y) for y in zip(plan.leaves, x.params, x.masters, strict=True)]
            if knows
            else x.params
        )
        grads = tree([self._gradient(leaf, grad) for leaf, grad in zip(plan.leaves, x.grads, strict=True)])
        state = [cast(y, leaf.update_dtype or y.dtype) for y, leaf in zip(x.inner, plan.inner_leaves, strict=True)]
        params, given = tree(optimizer_inputs) if knows else None, {**(x.extra or {}), **dict(self.functions)}
        returned, new = call_update(
            self.tx, extra_args(x.value, grads), grads, plan.inner_treedef.unflatten(state), params, **given
        )
        updates = [self._as_update(*y) for y in zip(plan.leaves, plan.view.params.flat(returned), strict=True)]
        results = [self._result(i, x, *y) for i, y in enumerate(zip(optimizer_inputs, updates, strict=True))]
        inner = [self._new_inner(j, x, y) for j, y in enumerate(plan.inner_treedef.flatten_up_to(new))]
        return After([result for result, _ in results], [master for _, master in results], inner)

    def _optimizer_input(self, leaf: LeafPlan, param: jax.Array | None, master: jax.Array | None) -> jax.Array:
        """Returns a parameter as the optimizer sees it: its master, with the user's edits."""
        return optimizer_view(param if master is None else apply_edits(master, param), leaf)

    def _gradient(self, leaf: LeafPlan, grad: Grad[jax.Array] | None) -> jax.Array:
        if grad is None:  # never read; see [Note: Frozen parameters]
            return jnp.zeros(leaf.param.shape, leaf.update_dtype)
        return self._cast(scale_by(grad.reduced, *grad.factors) if grad.factors else grad.reduced, leaf)

    def _as_update(self, leaf: LeafPlan, update: jax.Array | None) -> jax.Array | None:
        return self._cast(update, leaf) if leaf.trained and update is not None else None

    def _cast(self, x: jax.Array, leaf: LeafPlan) -> jax.Array:
        # Gradients are fp32 or wider, and so are optax's results from them and the parameters, except for float8.
        as_it_is = self.plan.config.policy == Precision() and not is_float8(leaf.update_dtype)
        return x if as_it_is else cast(x, leaf.update_dtype)

    def _result(
        self, i: int, x: Before[jax.Array], optimizer_input: jax.Array | None, update: jax.Array | None
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """Returns the result of a parameter, and its new master."""
        leaf, param, master = self.plan.leaves[i], x.params[i], x.masters[i]
        if update is None or i not in self.new_params:
            if update is None or x.applied is None:
                return update, master
            return jnp.where(x.applied, update, NOTHING.astype(update.dtype)), master
        assert param is not None
        assert optimizer_input is not None
        if leaf.param.dtype == leaf.update_dtype:
            with jax.numpy_dtype_promotion("standard"):  # whatever the user set for arithmetic
                return _choose(x.applied, cast(_sum(param, update), param.dtype), param), master
        wide = _sum(optimizer_input, update)
        if master is None:
            return _choose(x.applied, self._rounded(x, i, i, wide, leaf.param.dtype), param), None
        new = self._rounded(x, i, i, wide, master.dtype)
        return _choose(x.applied, round_to(new, param.dtype), param), _choose(x.applied, new, master)

    def _new_inner(self, j: int, x: Before[jax.Array], new: jax.Array) -> jax.Array:
        leaf, old = self.plan.inner_leaves[j], x.inner[j]
        if leaf.update_dtype is not None:
            new = self._rounded(x, leaf.owner, len(self.plan.leaves) + j, new, leaf.dtype)
        return _choose(x.applied, make_strongly_typed(new, leaf.dtype), old)

    def _rounded(
        self, x: Before[jax.Array], owner: int | None, leaf_number: int, wide: jax.Array, dtype: DType
    ) -> jax.Array:
        """Rounds a leaf, stochastically if the plan says so."""
        if x.number is None or dtype != jnp.bfloat16:
            return round_to(wide, dtype)
        at = None if owner is None else x.positions[owner]
        at = positions_of(wide.shape) if at is None or at.shape != wide.shape else at
        key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), x.number)
        return round_stochastically(wide, jax.random.fold_in(key, leaf_number), at)


def optimizer_view(param: jax.Array | None, leaf: LeafPlan) -> jax.Array:
    """Returns a parameter in natural shape as the optimizer sees it; random keys become zeros of their shape."""
    if param is None or is_key(leaf.param.dtype):
        return jnp.zeros(leaf.param.shape, leaf.update_dtype)
    return cast(param, leaf.update_dtype)


def _sum(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns `x + y`, traced faster if the types are equal."""
    return lax.add(x, y) if (x.shape, x.dtype) == (y.shape, y.dtype) else x + y


def _choose(applied: jax.Array | None, new: jax.Array, old: jax.Array) -> jax.Array:
    return new if applied is None else jnp.where(applied, new, old)


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
