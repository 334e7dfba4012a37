"""The inputs of an update as a split sees them: arrays in natural shape, and fields.

A field is an array of a parameter with state on the host or on disk, or of a flattened one; it stays as it is stored
until a pass reads it. The natural shape of a flattened parameter has no part that a device holds: in that shape each
operation of the optimizer would gather its operands.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import jax
import jax.numpy as jnp

from jzero._types import PyTree
from jzero.layout.leaves import StateLeaf
from jzero.layout.on_disk import OnDisk, Stored
from jzero.layout.placement import memory_of
from jzero.plan.plan import ZeroPlan
from jzero.update.whole import Before, Grad

BY_PARAMETER = ("grads", "params", "masters", "positions")
"""The fields of `Before` with an entry per parameter."""


Input: TypeAlias = "jax.Array | Field"


@dataclasses.dataclass(frozen=True, eq=False)
class Field:
    """An array of a parameter that an update reads as it is stored.

    Attributes:
      number: The parameter.
      leaf: The layout of the parameter's gradient, in which all its fields are stored.
      array: The array as stored, or its place on disk; `None` for the positions of its elements.
      before_name: The field of `Before` that holds this very array; empty if it was laid out anew.
    """

    number: int
    leaf: StateLeaf
    array: Stored | None
    before_name: str = ""

    @property
    def stored(self) -> Stored:
        """The array as stored; positions have none."""
        assert self.array is not None
        return self.array

    @property
    def in_memory(self) -> jax.Array:
        """The array as stored, of a field that is in memory."""
        assert isinstance(self.array, jax.Array)
        return self.array

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Its natural shape, and its dtype."""
        return jax.ShapeDtypeStruct(self.leaf.shape, jnp.uint32 if self.array is None else self.array.dtype)


def grad_field(inputs: Before[Input], i: int) -> Field:
    """Returns the gradient of a parameter with state on the host or on disk."""
    grad = inputs.grads[i]
    assert grad is not None
    assert isinstance(grad.reduced, Field)
    return grad.reduced


def param_field(inputs: Before[Input], i: int) -> Field:
    """Returns a parameter with state on the host or on disk."""
    param = inputs.params[i]
    assert isinstance(param, Field)
    return param


def far_params(plan: ZeroPlan) -> frozenset[int]:
    """Returns the parameters whose state is not all on the devices; a number is no array to stream."""
    return frozenset(i for i in plan.offloaded if plan.leaves[i].param.shape)


def params_as_stored(plan: ZeroPlan) -> frozenset[int]:
    """Returns the parameters whose arrays an update reads as they are stored."""
    grads = [leaf.grad.cut for leaf in plan.leaves]
    return far_params(plan) | {i for i, cut in enumerate(grads) if cut is not None and cut.flat}


def placed_fields(plan: ZeroPlan, stored: Before[Stored]) -> Before[Input]:
    """Returns the inputs of an update: arrays in natural shape, and the fields of `params_as_stored`."""
    kept = params_as_stored(plan)

    def place(x: Stored, i: int | None, leaf: StateLeaf, name: str = "") -> Input:
        leaf.check_shape(x)
        if i not in kept or leaf.shape != plan.leaves[i].param.shape:
            return leaf.load(x)
        grad = plan.leaves[i].grad
        if memory_of(x) != "device" or (i in plan.disk_fields and name and tuple(x.shape) == grad.stored_shape):
            before_name = "" if isinstance(x, OnDisk) else name  # a record has it
            return Field(i, grad, x, before_name)  # a constraint would make a copy of what a program only passes on
        return Field(i, grad, leaf.relayout(x, grad))

    def of_param(i: int, x: Stored | None, name: str = "") -> Input | None:
        leaf = plan.leaves[i]
        shares_cut = leaf.param.cut == leaf.grad.cut
        if x is None or i in plan.keys:
            return None
        return place(x, i, leaf.grad if leaf.trained else leaf.param, name if shares_cut else "")

    grads = [
        None if g is None else Grad(place(g.reduced, i, plan.leaves[i].grad, "grads"), g.factors)
        for i, g in enumerate(stored.grads)
    ]
    inner = [place(x, leaf.owner, leaf) for x, leaf in zip(stored.inner, plan.inner_leaves, strict=True)]
    rounds = stored.number is not None
    return Before(
        grads,
        [of_param(i, x, "params") for i, x in enumerate(stored.params)],
        [of_param(i, x) for i, x in enumerate(stored.masters)],
        inner,
        [Field(i, x.grad, None) if rounds and i in kept else None for i, x in enumerate(plan.leaves)],
        stored.number,
        stored.applied,
        stored.value,
        stored.extra,
    )


def owners_of_inputs(plan: ZeroPlan, inputs: Before[Input]) -> list[int | None]:
    """Returns the parameter that each input belongs to."""

    def marked(i: int | None, x: PyTree) -> PyTree:
        return jax.tree.map(lambda _: -1 if i is None else i, x)

    marks = marked(None, inputs)._replace(
        **{name: list(map(marked, range(len(plan.leaves)), getattr(inputs, name))) for name in BY_PARAMETER},
        inner=[marked(leaf.owner, x) for leaf, x in zip(plan.inner_leaves, inputs.inner, strict=True)],
    )
    return [None if i < 0 else i for i in jax.tree.leaves(marks)]
