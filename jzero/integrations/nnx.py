"""Flax NNX: presents a model and its optimizer as a train state.

A step runs the Python code of a loss once, when it is traced, and keeps the variables that the model was sharded with.
So it keeps the values of these variables, but not new variables, new shapes or Python attributes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.nnx.training.optimizer import OptArray
from jax.tree_util import SequenceKey

from jzero.core.base.text import path_str
from jzero.core.base.types import PyTree
from jzero.core.engine.written_variables import Changed, WrittenShape, WrittenVariable, by_field, by_path, pair_written
from jzero.core.layout.padded import is_padded, unbox
from jzero.core.state.adapter import Loss, StateAdapter, adapter_of, call_loss, plan_if_sharded
from jzero.core.state.model_size import Params, register_model_view, state_params
from jzero.core.state.train_state import TrainState, write_fields

FROZEN = "frozen"
"""The field of parameters outside the optimizer."""
WRITABLE = ("params", FROZEN, "rest")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NnxTrainState:
    """The state of a model and its optimizer, as arrays that cross `jit`.

    Attributes:
      step: The optimizer's step.
      params: The trained variables of the model, as arrays; tied ones once.
      opt_state: The optimizer's state, as arrays.
      frozen: Parameters (`nnx.Param`) outside the optimizer, as arrays.
      rest: All other variables of the model (batch statistics, random streams …), as arrays.
      tx: The optax transformation; static.
      graphdef: The structure of the model; static.
      wrt: The filter that selects trained variables; static.
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    frozen: PyTree = dataclasses.field(metadata={"holds_params": True})
    rest: PyTree
    tx: Any = dataclasses.field(metadata={"static": True})
    graphdef: Any = dataclasses.field(metadata={"static": True})
    wrt: Any = dataclasses.field(metadata={"static": True})

    apply_gradients = TrainState.apply_gradients  # one step, as `nnx.Optimizer.update` makes it

    def replace(self, **changes: Any) -> NnxTrainState:
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **changes)


@adapter_of.register(NnxTrainState)
class NnxStateAdapter(StateAdapter):
    """Presents an `NnxTrainState`, as programs have it."""

    state: NnxTrainState

    def compared_fields(self, mutable: Sequence[str]) -> Sequence[str]:
        """Returns the variables beside the parameters."""
        return ("rest",)

    def bind_loss(
        self, loss_fn: Loss, mutable: Sequence[str], written_shape: WrittenShape | None
    ) -> tuple[Loss, dict[str, PyTree]]:
        """Returns the loss as a function of arrays, and the model's state that it carries."""
        if mutable:
            raise ValueError(f"`mutable={mutable}` is for Linen states; NNX models carry their own state.")
        state = self.state

        def call(params: PyTree, batch: PyTree, *rng: jax.Array, rest: PyTree, frozen: PyTree) -> Any:
            before = by_field({"params": params, FROZEN: frozen, "rest": rest})
            model = nnx.merge(state.graphdef, params, frozen, rest)
            attributes = python_attributes(model)
            result = call_loss(loss_fn, (*dir(state), "model", "update"), model, batch, *rng)
            if written_shape is None:
                return result, {}
            parts: Any = nnx.split(model, state.wrt, nnx.Param, ...)
            after = dict(zip(WRITABLE, map(nnx.as_pure, parts[1:]), strict=True))
            changed = find_written(before, after, _stored_dtypes(state), written_shape)
            check_attributes(attributes, python_attributes(model))
            return result, changed

        return call, {"rest": state.rest, FROZEN: state.frozen}


def _stored_dtypes(state: NnxTrainState) -> dict[str, dict[str, Any]]:
    """Returns the dtype in which each variable is kept; for a parameter with a master, the master's."""
    trees = {"params": state.params, FROZEN: state.frozen, "rest": state.rest}
    dtypes = {name: {path: x.dtype for path, x in by_path(tree).items()} for name, tree in trees.items()}
    if (plan := plan_if_sharded(state)) is not None:
        dtypes["params"] = {leaf.path: leaf.updated.dtype for leaf in plan.leaves}
        dtypes[FROZEN] = dict(zip(dtypes[FROZEN], (leaf.dtype for leaf in plan.leaves_of(FROZEN)), strict=True))
    return dtypes


class NnxAdapter(NnxStateAdapter):
    """Presents an `nnx.ModelAndOptimizer`, or a `(model, optimizer)` pair, as an `NnxTrainState`."""

    def __init__(self, pair: Any, model: nnx.Module, optimizer: nnx.Optimizer[Any]) -> None:
        self.model = model
        if plan_if_sharded(optimizer) is None:
            _check_mode(pair)
        self._pair, padded = nnx.split(pair), {}
        if any(path[-1] == "" for path, _ in nnx.to_flat_state(self._pair[1])):  # the name of the array in a node
            # A raw array of the model, which Flax takes for one more level of names, is one leaf here.
            padded = {path: x for path, x in nnx.iter_graph(model) if is_padded(x)}
            pair = nnx.recursive_map(lambda _, x: unbox(x), pair)
            self._pair, (model, optimizer) = nnx.split(pair), _parts(pair)
        parts: Any = nnx.split(model, nnx.Any(lambda path, _: path in padded, optimizer.wrt), nnx.Param, ...)
        graphdef, params, frozen, rest = parts
        params = nnx.map_state(padded.get, params)
        self._params = params
        super().__init__(
            NnxTrainState(
                step=optimizer.step.get_value(),
                params=nnx.as_pure(params),
                opt_state=nnx.as_pure(optimizer.opt_state),
                frozen=nnx.as_pure(frozen),
                rest=nnx.as_pure(rest),
                tx=optimizer.tx,
                graphdef=graphdef,
                wrt=optimizer.wrt,
            )
        )

    def rebuild(self, state: NnxTrainState) -> Any:
        """Returns a new pair, or a new `ModelAndOptimizer`."""
        # New variables around plain arrays: those of a state factory belong to a trace that has ended.
        pair = nnx.merge(self._pair[0], nnx.as_pure(self._pair[1]))
        model, optimizer = _parts(pair)
        for variables in (state.params, state.frozen, state.rest):
            nnx.update(model, variables)
        # Stored arrays: NNX would take a node inside of the optimizer's state for one more level of names.
        opt_state = jax.tree.map(lambda x: OptArray(unbox(x)), state.opt_state, is_leaf=is_padded)
        optimizer.opt_state = nnx.data(opt_state)
        optimizer.step.set_value(state.step)
        optimizer.tx = state.tx
        return pair

    def wrap_grads(self, grads: PyTree) -> Any:
        """Returns the gradients as the variables of a model have them."""
        leaves = jax.tree.leaves(grads, is_leaf=is_padded)
        return jax.tree.unflatten(jax.tree.structure(self._params, is_leaf=is_padded), leaves)

    def update_model(self, changed: Changed) -> None:
        """Writes what a loss changed to the variables of the model."""
        new = write_fields(self.state, changed)
        for name in changed:
            nnx.update(self.model, getattr(new, name))

    def ties(self) -> dict[str, tuple[str, ...]]:
        """Returns the other names of each shared variable, by the name under which the state holds it."""
        in_state = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(self.model))}
        others = {}
        for paths in nnx.find_duplicates(self.model):
            names = [".".join(map(str, path)) for path in paths]
            first = next(name for name in names if name in in_state)
            others[first] = tuple(name for name in names if name != first)
        return others


def _check_mode(pair: Any) -> None:
    """Raises a `TypeError` if a variable is of Flax's hijax mode, and so no array for programs."""
    for path, x in nnx.iter_graph(pair):
        if isinstance(x, nnx.Variable) and getattr(x, "hijax", False):
            raise TypeError(
                f"`{'.'.join(map(str, path))}` is a variable of Flax's hijax mode, whose programs jzero cannot cut: "
                "make model and optimizer without it, `nnx.var_defaults(hijax=False)`."
            )


@adapter_of.register(nnx.Module)
def _refuse_model(model: nnx.Module) -> StateAdapter:
    raise TypeError(
        f"{type(model).__name__} alone has no optimizer: pass the pair `(model, optimizer)` or an "
        "`nnx.ModelAndOptimizer`."
    )


@adapter_of.register(nnx.Optimizer)
@adapter_of.register(tuple)
@adapter_of.register(list)
def _adapt_pair(pair: Any) -> StateAdapter:
    model, optimizer = _parts(pair)
    return adapter_of.dispatch(object)(pair) if optimizer is None else NnxAdapter(pair, model, optimizer)


def _parts(state: Any) -> tuple[Any, Any]:
    """Returns the model and the optimizer, or two `None`s."""
    if isinstance(state, nnx.ModelAndOptimizer):
        return state.model, state
    if isinstance(state, nnx.Optimizer):
        raise TypeError(
            "An `nnx.Optimizer` does not hold its model: pass the pair `(model, optimizer)` or a `ModelAndOptimizer`."
        )
    if isinstance(state, tuple | list) and len(state) == 2 and isinstance(state[0], nnx.Optimizer):
        raise TypeError("The order of the pair is `(model, optimizer)`: got the optimizer first.")
    if not (isinstance(state, tuple | list) and len(state) == 2 and isinstance(state[1], nnx.Optimizer)):
        return None, None
    model, optimizer = state
    if isinstance(optimizer, nnx.ModelAndOptimizer):
        raise ValueError(
            "An `nnx.ModelAndOptimizer` holds its model already: pass it alone, not in a pair, or use `nnx.Optimizer`."
        )
    return model, optimizer


def view_nnx(model: Any) -> Params | None:
    """Finds the parameters of a module, of its state, or of a pair; `None` for anything else."""
    if isinstance(model, nnx.State):  # of variables, or of plain arrays
        flat = nnx.to_flat_state(model)
        return _by_name({path: x for path, x in flat if isinstance(x, nnx.Param) or not isinstance(x, nnx.Variable)})
    if isinstance(model, nnx.Module):
        return _by_name(_variables_by_path(model, nnx.Param))
    module, optimizer = _parts(model)
    if optimizer is None:
        return None
    if plan_if_sharded(optimizer) is not None:
        return state_params(NnxAdapter(model, module, optimizer).state)
    return _by_name(_variables_by_path(module, nnx.Any(optimizer.wrt, nnx.Param)))


def _variables_by_path(module: nnx.Module, only: Any) -> dict[tuple[Any, ...], Any]:
    """Returns the variables of a module by path; a shared variable is under the path of each of its modules."""
    variables = dict(nnx.to_flat_state(nnx.state(module, only)))
    for paths in nnx.find_duplicates(module, only=only):
        shared = [variables[path] for path in paths if path in variables]
        variables |= dict.fromkeys(paths, shared[0]) if shared else {}
    return variables


def _by_name(by_keys: dict[tuple[Any, ...], Any]) -> Params:
    return {tuple(map(str, path)): x for path, x in by_keys.items()}


register_model_view(view_nnx)


def python_attributes(model: nnx.Module) -> dict[str, Any]:
    """Returns the Python attributes of a model, by path: those that neither are nor contain variables or arrays."""
    in_state = {path for path, _ in nnx.to_flat_state(nnx.state(model))}
    return {
        "/".join(map(str, path)): x
        for path, x in nnx.iter_graph(model)
        if path and path not in in_state and not str(path[-1]).startswith(("_pytree__", "__"))  # which are Flax's own
        if not isinstance(x, nnx.Variable) and not nnx.graph.is_node(x)
    }


def check_attributes(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raises a `ValueError` that names each Python attribute that the loss changed."""
    names = sorted({*before, *after})
    changed = [name for name in names if not _same(before.get(name), after.get(name))]
    if changed:
        listed = "\n".join(f"  {name}: {before.get(name)!r:.60}, then {after.get(name)!r:.60}" for name in changed[:10])
        raise ValueError(
            "The loss changes Python attributes of the model. A compiled step runs Python once, when it is traced, so "
            f"it would not keep them:\n{listed}\nHold what changes in an `nnx.Variable` (a counter: "
            "`nnx.Variable(jnp.zeros((), jnp.int32))`), or set attributes outside of the loss, as `model.train()` does."
        )


def _same(x: Any, y: Any) -> bool:
    if x is y:
        return True
    try:
        return type(x) is type(y) and bool(x == y)
    except (TypeError, ValueError):  # not comparable, or compared by elements
        return False


def find_written(
    before: Mapping[str, Mapping[str, jax.Array]],
    after: Mapping[str, PyTree],
    dtypes: Mapping[str, Mapping[str, Any]],
    written_shape: WrittenShape,
) -> dict[str, dict[str, WrittenVariable]]:
    """Returns the variables that the loss may have written, by field and path.

    The loss can read what it appends to a tuple, as `sow` does, but the state does not keep it.

    Args:
      before: The variables of each field, as arrays by path, before the loss.
      after: The trees of the same after the loss.
      dtypes: The dtype in which the state keeps each variable, by field and path.
      written_shape: The shape that one device writes to a variable.

    Raises:
      ValueError: Variables were added or deleted, or changed shape or dtype; the message names them.
    """
    bad: list[str] = []
    written: dict[str, dict[str, WrittenVariable]] = {}
    for field, old in before.items():
        appended = {path_str(p) for p, _ in jax.tree_util.tree_leaves_with_path(after[field]) if _in_tuple(p)}
        new = {path: x for path, x in by_path(after[field]).items() if path in old or path not in appended}
        written[field], wrong = pair_written(old, new, dtypes[field], written_shape)
        bad += wrong
    if bad:
        raise ValueError(
            "The loss changes which variables the model has, or their shape or dtype. A step keeps the values of the "
            "variables that the model was sharded with, and no others:\n"
            + "\n".join(sorted(bad)[:10])
            + "\nAdd and delete variables before `shard_train_state`, and write values of the same shape and dtype. "
            "What the loss adds for its own use it can take out again: `nnx.pop(model, nnx.Intermediate)`."
        )
    return written


def _in_tuple(path: tuple[Any, ...]) -> bool:
    return any(isinstance(key, SequenceKey) for key in path)
