"""Finds the parameters that an optimizer trains, and restricts an optimizer to some parameters.

[Note: Frozen parameters]
A parameter is frozen if its optimizer never reads its gradient and always returns a zero update, such as
`optax.set_to_zero` in `multi_transform` or behind `masked`. jzero reads both off the jaxpr of the update. A zero is a
literal zero, or the result of cheap operations on zeros; a gradient is read if any other output depends on it. An
optimizer that clips by the norm of all gradients, and then freezes some parameters, does read their gradients. So
jzero computes them, and the numbers stay those of one device. If an update cannot be traced without further arguments
(`value=`, `obj_fn=`), its parameters count as trained, as the plan shows. `trainable=` works with any optimizer, which
then sees only the trained parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.tree_util import PyTreeDef

from jzero.core.base import compat
from jzero.core.base.text import path_str
from jzero.core.base.types import DType, PyTree
from jzero.core.config.precision import is_key
from jzero.core.jaxpr.equations import find_needed
from jzero.core.jaxpr.interpret import propagate
from jzero.core.jaxpr.primitives import CALLS, Trait, called_jaxpr, primitives_with
from jzero.core.layout.padded import is_padded


@dataclasses.dataclass(frozen=True)
class MaskedTransformation:
    """An optax transformation of some parameters, which leaves the others as they are. A frozen value.

    Attributes:
      inner: The transformation of the trained parameters.
      mask: For each parameter leaf, whether it is trained.
    """

    inner: optax.GradientTransformation
    mask: tuple[bool, ...]

    def init(self, params: PyTree) -> PyTree:
        """Returns the state of the inner transformation, without frozen parameters."""
        return self._mask(params).init(params)

    def update(
        self, updates: PyTree, state: PyTree, params: PyTree | None = None, **extra_args: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Returns the updates of the trained parameters, zeros for the others, and the new state."""
        updates, state = self._mask(updates).update(updates, state, params, **extra_args)
        leaves, treedef = jax.tree.flatten(updates)
        leaves = [x if trained else jnp.zeros_like(x) for x, trained in zip(leaves, self.mask, strict=True)]
        return treedef.unflatten(leaves), state

    def _mask(self, tree: PyTree) -> optax.GradientTransformationExtraArgs:
        return optax.masked(self.inner, jax.tree.structure(tree).unflatten(self.mask))


Optimizer: TypeAlias = optax.GradientTransformation | MaskedTransformation
Update: TypeAlias = Callable[..., tuple[PyTree, PyTree]]
Shape: TypeAlias = tuple[tuple[int, ...], DType, bool]
"""Shape, dtype, and whether the type is weak."""


def trainable_mask(trainable: PyTree | str, params: PyTree) -> tuple[bool, ...]:
    """Returns for each parameter leaf whether `trainable` selects it.

    Args:
      trainable: A regular expression over whole key paths, or a tree of booleans whose structure is a prefix of that
        of `params`.
      params: The parameters.

    Raises:
      ValueError: It is neither, or selects nothing.
    """
    paths = [path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    if isinstance(trainable, str):
        try:
            mask = [re.fullmatch(trainable, path) is not None for path in paths]
        except re.error as error:
            raise ValueError(f"`trainable` {trainable!r} is not a regular expression: {error}.") from error
    else:
        bad = [
            f"  {path_str(path)}: {x!r:.60}"
            for path, x in jax.tree_util.tree_leaves_with_path(trainable)
            if not isinstance(x, bool) and (np.shape(x) != () or getattr(x, "dtype", None) != np.dtype(bool))
        ]
        if bad:
            raise ValueError(
                "`trainable` must be a regular expression over whole paths or a tree of booleans; these leaves are "
                "neither:\n" + "\n".join(bad[:10])
            )
        try:
            tree = jax.tree.map(lambda on, below: jax.tree.map(lambda _: bool(on), below), trainable, params)
        except ValueError as error:
            raise ValueError(f"`trainable` must have the structure of the parameters: {error}") from error
        mask = jax.tree.leaves(tree)
    if not any(mask):
        some = ", ".join(map(repr, paths[:5]))
        raise ValueError(f"`trainable` selects no parameter. The first paths are {some}.")
    return tuple(mask)


def restrict_optimizer(tx: Optimizer, trainable: PyTree | str | None, params: PyTree) -> Optimizer:
    """Returns `tx`, restricted to the parameters that `trainable` selects. Random keys are never trained.

    Raises:
      ValueError: `trainable` is malformed, or `tx` is already restricted to other parameters.
    """
    numbers = [not (hasattr(x, "dtype") and is_key(x.dtype)) for x in jax.tree.leaves(params)]
    if trainable is None and (all(numbers) or isinstance(tx, MaskedTransformation)):
        return tx
    chosen = numbers if trainable is None else trainable_mask(trainable, params)
    mask = tuple(a and b for a, b in zip(chosen, numbers, strict=True))
    if isinstance(tx, MaskedTransformation):
        if tx.mask != mask:
            raise ValueError(
                "`trainable` differs from what this state was sharded with, and its optimizer keeps no state for the "
                "parameters that were frozen. Make a new state for the new choice."
            )
        return tx
    return tx if all(mask) else MaskedTransformation(tx, mask)


def restrict_opt_state(tx: Optimizer, params: PyTree, opt_state: PyTree) -> PyTree:
    """Returns the state of `tx`, made from the state of its inner transformation for all parameters.

    Copies every leaf that `tx` needs from `opt_state`, by key path.
    """
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x)), params)
    initialised = jax.eval_shape(tx.init, abstract)
    have = {path_str(path): x for path, x in jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=is_padded)}
    paths = [path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(initialised.inner_state)]
    missing = [path for path in paths if path not in have]
    if missing:
        raise ValueError(
            f"`opt_state` lacks what the optimizer needs for the trained parameters: {missing[:5]}. Make it with "
            "`tx.init(params)` for all parameters."
        )
    return jax.tree.unflatten(jax.tree.structure(initialised), [have[path] for path in paths])


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizerUpdate:
    """The update of an optimizer, traced when a rule of the plan first reads it: optax takes 1 ms per leaf.

    Attributes:
      params: The parameters as it sees them, as shapes.
    """

    tx: Optimizer
    params: PyTree

    @functools.cached_property
    def opt_state(self) -> PyTree:
        """The state that it makes, as shapes."""
        return jax.eval_shape(self.tx.init, self.params)

    @functools.cached_property
    def jaxpr(self) -> ClosedJaxpr | None:
        """The closed jaxpr of gradients, state and parameters; `None` if it needs further arguments."""
        treedef, shapes = _flat_shapes(self.params, self.opt_state)
        update: Update = self.tx.update
        try:
            return _traced_once(update, treedef, shapes, jnp.result_type(float))
        except TypeError:  # an optimizer without a hash
            return _traced(update, treedef, shapes)

    def jaxpr_of(self, chosen: Sequence[int]) -> ClosedJaxpr | None:
        """Returns the jaxpr as if only some parameters existed, given by index; `None` if that cannot be traced."""
        some = self.restricted(chosen)
        return None if some is None else _traced(some.tx.update, *_flat_shapes(some.params, some.opt_state))

    def restricted(self, chosen: Sequence[int]) -> OptimizerUpdate | None:
        """Returns the update as if only some parameters existed, given by index; `None` if it takes no such tree."""
        leaves, treedef = jax.tree.flatten(self.params)
        params = [optax.MaskedNode()] * len(leaves)  # as `optax.masked` leaves parameters out
        for i in chosen:
            params[i] = leaves[i]
        tx = self.tx
        if isinstance(tx, MaskedTransformation):
            tx = dataclasses.replace(tx, mask=tuple(tx.mask[i] for i in chosen))
        some = OptimizerUpdate(tx, treedef.unflatten(params))
        try:
            _ = some.opt_state
        except Exception:  # it may say so by any exception
            return None
        return some


def _flat_shapes(params: PyTree, opt_state: PyTree) -> tuple[PyTreeDef, tuple[Shape, ...]]:
    leaves, treedef = jax.tree.flatten((params, opt_state))
    return treedef, tuple((x.shape, x.dtype, getattr(x, "weak_type", False)) for x in leaves)


def _traced(update: Update, treedef: PyTreeDef, shapes: Sequence[Shape]) -> ClosedJaxpr | None:
    leaves = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in shapes]
    params, opt_state = treedef.unflatten(leaves)
    try:
        with jax.numpy_dtype_promotion("standard"):  # what is found must not depend on what was set when
            return jax.make_jaxpr(update)(params, opt_state, params)
    except Exception:  # it may say so by any exception
        return None


# `fit` makes a plan of one optimizer for each candidate. Not more than one: a closure may hold arrays.
@functools.lru_cache(maxsize=1)
def _traced_once(
    update: Update, treedef: PyTreeDef, shapes: Sequence[Shape], default_dtype: DType
) -> ClosedJaxpr | None:
    del default_dtype  # a part of the key
    return _traced(update, treedef, shapes)


def find_frozen(update: OptimizerUpdate, has_state: Sequence[bool]) -> list[bool]:
    """Returns for each parameter leaf whether it is frozen, see [Note: Frozen parameters].

    Args:
      update: The update of the optimizer.
      has_state: For each parameter leaf, whether the optimizer keeps state of its shape; if so, it is trained.
    """
    num, tx = len(has_state), update.tx
    left_out = [not trained for trained in tx.mask] if isinstance(tx, MaskedTransformation) else [False] * num
    if all(has or out for has, out in zip(has_state, left_out, strict=True)) or (jaxpr := update.jaxpr) is None:
        return left_out
    opened, _ = compat.open_jaxpr(jaxpr)
    zero = _zeros(opened, [False] * len(opened.invars))
    candidates = [not has and is_zero for has, is_zero in zip(has_state, zero[:num], strict=True)]
    others = [
        v for v, is_zero in zip(jaxpr.outvars, candidates + [False] * len(jaxpr.outvars), strict=False) if not is_zero
    ]
    live = find_needed(jaxpr, others).variables
    params_start = len(jaxpr.invars) - num
    return [
        out or (zero_update and jaxpr.invars[i] not in live and jaxpr.invars[params_start + i] not in live)
        for i, (out, zero_update) in enumerate(zip(left_out, candidates, strict=True))
    ]


def _zeros(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Returns for each output whether it is zero for all inputs; `inputs` says which of these are zero."""

    def apply(eqn: JaxprEqn, zero: list[bool]) -> list[bool]:
        name = eqn.primitive.name
        if name in CALLS:
            return _zeros(compat.open_jaxpr(called_jaxpr(eqn))[0], zero)
        keeps = name in primitives_with(Trait.KEEPS_ZERO) and all(zero[1:] if name == "select_n" else zero)
        return [keeps or (name == "mul" and any(zero) and _finite_elsewhere(eqn, zero))] * len(eqn.outvars)

    constants = [False] * len(jaxpr.constvars)
    return propagate(jaxpr, [*constants, *inputs], apply, lambda literal: not np.any(literal.val))


def _finite_elsewhere(eqn: JaxprEqn, is_zero: Sequence[bool]) -> bool:
    """Whether all other factors are finite literals: zero times anything else may be NaN."""
    return all(
        z or (compat.is_literal(v) and np.all(np.isfinite(v.val))) for v, z in zip(eqn.invars, is_zero, strict=True)
    )
