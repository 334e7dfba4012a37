"""Counts the parameters of a model of any library, and those of its largest layer."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping

import jax
import numpy as np

from jzero.core.base.text import key_names
from jzero.core.base.types import PyTree, TrainStateLike
from jzero.core.config.zero import LeafRule
from jzero.core.plan.choice import find_scan_dims
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.state_fields import frozen_fields, missing_fields
from jzero.core.state.adapter import adapt, load_integrations
from jzero.core.update.transformation import ZeroTransformation

Params = Mapping[tuple[str, ...], PyTree]
"""Parameters (arrays, numbers or shapes) by key path; a shared one is the same object under each of its paths."""

ModelView = Callable[[object], Params | None]
_MODEL_VIEWS: list[ModelView] = []


def register_model_view(view: ModelView) -> None:
    """Registers a function that finds the parameters of another library's models.

    Args:
      view: Takes an object; returns its parameters by key path, or `None` if the object is not of that library. A
        shared parameter is the same object under each of its paths.
    """
    _MODEL_VIEWS.append(view)


def state_params(state: TrainStateLike) -> Params:
    """Returns the parameters of a train state by key path, including frozen ones; as shapes if it is sharded."""
    if isinstance(state.tx, ZeroTransformation):
        plan: ZeroPlan = state.tx.plan
        state = plan.view.rebuilt(state, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in plan.view.leaves])
    fields = ("params", *frozen_fields(state))
    return {path: x for name in fields for path, x in _tree_params(getattr(state, name)).items()}


def _tree_params(tree: PyTree) -> Params:
    def is_box(x: object) -> bool:  # Linen wraps leaves that carry axis names
        return hasattr(x, "replace_boxed")

    params: dict[tuple[str, ...], PyTree] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_box):
        params[key_names(path)] = jax.tree.leaves(x)[0] if is_box(x) else x
    return params


def _params(model: PyTree) -> Params:
    load_integrations()
    for view in _MODEL_VIEWS:
        params = view(model)
        if params is not None:
            return params
    if not {"params", "opt_state"}.intersection(missing_fields(model)):
        return state_params(adapt(model).state)
    is_variables = isinstance(model, Mapping) and isinstance(model.get("params"), Mapping)
    return _tree_params(model["params"] if is_variables else model)


def count_params(model: PyTree) -> tuple[int, int]:
    """Returns the number of parameters of a model, and that of its largest layer."""
    params = _params(model)
    _check_leaves(params)
    total: dict[tuple[str, ...] | int, int] = {}
    layers: dict[tuple[str, ...], dict[tuple[str, ...] | int, int]] = {}
    shapes = [tuple(getattr(x, "shape", ())) for x in params.values()]
    for (path, x), shape, in_stack in zip(params.items(), shapes, _in_stack(list(params), shapes), strict=True):
        # Shapes and numbers have no identity: one object may stand for two parameters.
        key = path if isinstance(x, jax.ShapeDtypeStruct | numbers.Number) else id(x)
        total[key] = math.prod(shape)
        layers.setdefault(path[:-1], {})[key] = math.prod(shape) // max(1, shape[0]) if in_stack else math.prod(shape)
    return sum(total.values()), max(sum(layer.values()) for layer in layers.values())


def _in_stack(paths: list[tuple[str, ...]], shapes: list[tuple[int, ...]]) -> list[bool]:
    """Returns for each leaf whether it stacks the layers of a scan.

    `find_scan_dims` also takes a single leaf for a stack if its leading dimension is not its largest, which costs a
    layout little. Here that would divide convolutions and attention projections, so siblings must agree.
    """
    dims = find_scan_dims(paths, shapes, [LeafRule()] * len(paths))
    below: dict[tuple[str, ...], list[int | None]] = {}
    for path, shape, dim in zip(paths, shapes, dims, strict=True):
        for depth in range(len(path)):
            below.setdefault(path[:depth], []).append(None if dim is None else shape[dim])
    stacks = {prefix for prefix, sizes in below.items() if len(sizes) > 1 and None not in sizes and len({*sizes}) == 1}
    return [any(path[:depth] in stacks for depth in range(len(path))) for path in paths]


def _check_leaves(params: Params) -> None:
    if not params:
        raise ValueError("`model` must have parameters: got none.")
    bad = []
    for path, x in params.items():
        is_array = hasattr(x, "shape") and hasattr(x, "dtype") and x.dtype != np.dtype(object)
        if not is_array and not isinstance(x, numbers.Number):
            bad.append(f"  {'/'.join(path) or 'model'}: {type(x).__name__}")
    if bad:
        raise TypeError(
            "Every leaf of `model` must be an array or its shape; these are not:\n"
            + "\n".join(bad)
            + "\nOf a Linen module pass the variables, e.g. `jax.eval_shape(module.init, key, inputs)`; of an Equinox "
            "module the arrays, `eqx.filter(module, eqx.is_array)`."
        )
