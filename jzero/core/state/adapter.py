"""Adapters that present the objects of each library as train states; integrations subclass `StateAdapter`."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from jzero.core.base.types import PyTree, State, TrainStateLike
from jzero.core.engine.written_variables import Changed, WrittenShape
from jzero.core.plan.plan import ZeroPlan
from jzero.core.plan.state_fields import missing_fields, other_fields
from jzero.core.state.train_state import TrainState
from jzero.core.update.transformation import ZeroTransformation

Loss = Callable[..., Any]
"""A function of parameters or a model, a batch, perhaps a key, and fields by name."""

Metrics = dict[str, PyTree]
"""What a step reports, by name; numbers as 0-d arrays."""


A_LOSS = (
    "A loss takes the parameters (of NNX the model) and one batch, and returns a scalar; the step differentiates it "
    "and updates the state:\n"
    "    def loss_fn(params, batch):\n"
    "        x, y = batch\n"
    "        return jnp.square(predict(params, x) - y).mean()\n"
    "    step = jzero.make_train_step(loss_fn)\n"
    "    state, metrics = step(state, (x, y))  # and `rng=key` for a loss that takes a third argument"
)
"""What a message shows where something else was passed."""


class StateAdapter:
    """Presents an object as a train state. This class serves objects that are one: dataclasses, of users or of jzero.

    Attributes:
      state: The train state: a dataclass pytree with `params`, `opt_state`, `tx`, `replace` and `apply_gradients`.
    """

    def __init__(self, state: TrainStateLike) -> None:
        self.state = state

    def rebuild(self, state: State) -> State:
        """Turns a train state of the same structure back into an object of the library."""
        return state

    def wrap_grads(self, grads: PyTree) -> PyTree:
        """Turns a tree of gradients into the form that the library's own `update` takes."""
        return grads

    def update_model(self, changed: Changed) -> None:
        """Writes what a loss changed in a model to the user's model, if losses change models in place."""

    def ties(self) -> dict[str, tuple[str, ...]]:
        """Returns the other names (keys joined by dots) of each parameter that a model holds in several places."""
        return {}

    @property
    def has_own_update(self) -> bool:
        """Whether `apply_gradients` may do more than count the step, call the optimizer and add its updates."""
        return type(self.state).apply_gradients is not TrainState.apply_gradients

    def compared_fields(self, mutable: Sequence[str]) -> Sequence[str]:
        """Returns the fields that a loss changes and `check_equivalence` compares, beside the parameters."""
        return mutable

    def bind_loss(
        self, loss_fn: Loss, mutable: Sequence[str], written_shape: WrittenShape | None
    ) -> tuple[Loss, dict[str, PyTree]]:
        """Returns `fn(params, batch, *rng, **carried) -> (result, changed)`, and the fields that it carries.

        Args:
          loss_fn: The user's loss, in the form of the library.
          mutable: The fields that it changes, if losses do not change a model in place.
          written_shape: The shape that one device writes to a variable of a model. The results then are
            `WrittenVariable`s by field and path, and those that a step cannot keep raise an error; with `None`, there
            are none.
        """
        fields = {"opt_state", *other_fields(self.state)}
        missing = [name for name in mutable if name not in fields]
        if missing:
            raise ValueError(
                f"`mutable` names fields that {type(self.state).__name__} does not have: {missing}. Those with arrays "
                f"are {sorted(fields)}, beside the parameters, which are the loss's first argument."
            )
        carried = {name: getattr(self.state, name) for name in mutable}
        return lambda *args, **kwargs: (call_loss(loss_fn, dir(self.state), *args, **kwargs), {}), carried


def call_loss(loss_fn: Loss, of_state: Collection[str], params: PyTree, *args: Any, **kwargs: Any) -> PyTree:
    """Returns the result of a user's loss; shows one if this function asks its parameters for what a state has."""
    try:
        return loss_fn(params, *args, **kwargs)
    except AttributeError as error:
        is_params = type(error.obj) is type(params) and jax.tree.structure(error.obj) == jax.tree.structure(params)
        if is_params and error.name in of_state:
            raise TypeError(f"The loss must take no train state: it asks for its `{error.name}`. {A_LOSS}") from error
        raise


@functools.singledispatch
def adapter_of(state: State) -> StateAdapter:
    """Returns the adapter of an object; integrations register theirs for the types of their library."""
    missing = missing_fields(state)
    if not missing and dataclasses.is_dataclass(type(state)):
        return StateAdapter(state)
    raise TypeError(
        f"Expected a Flax `TrainState`, an `nnx.Optimizer` with its model, or a `jzero.TrainState`: got "
        f"{type(state).__name__}, which lacks {missing or 'dataclass fields'}. For a plain pytree of parameters "
        "use `jzero.TrainState.create(params=..., tx=...)`."
    )


_INTEGRATIONS = {  # by the module of the objects; those that are not imported yet
    "flax.nnx": "jzero.integrations.nnx",
    "flax.training.train_state": "jzero.integrations.flax_state",
}


def load_integrations() -> None:
    """Imports the integrations of libraries that the program has imported; others cannot have made any objects."""
    for package in [name for name in _INTEGRATIONS if name in sys.modules]:
        importlib.import_module(_INTEGRATIONS[package])
        _INTEGRATIONS.pop(package, None)


def adapt(state: State) -> StateAdapter:
    """Returns any object that jzero can train as a train state."""
    load_integrations()
    return adapter_of(state)


def adapt_sharded(state: State) -> StateAdapter:
    """Returns a sharded state as a train state; raises a `TypeError` if it has no plan."""
    adapted = adapt(state)
    if plan_if_sharded(adapted.state) is None:
        raise TypeError(
            f"This {type(state).__name__} has no ZeRO plan: its optimizer is not wrapped. Call "
            "`state = jzero.shard_train_state(state, stage=...)` first."
        )
    return adapted


def plan_of(state: State) -> ZeroPlan:
    """Returns the plan that a sharded train state carries.

    Args:
      state: A state returned by `shard_train_state` or `init_train_state`, or by a step.

    Returns:
      Its `ZeroPlan`; `print` it for a table.

    Raises:
      TypeError: The state was not sharded by jzero.

    Example:
      >>> jzero.plan_of(state).config.stage
      3
    """
    return adapt_sharded(state).state.tx.plan


def plan_if_sharded(state: State) -> ZeroPlan | None:
    """Returns the plan of anything that holds an optimizer as `tx`; `None` if jzero has not wrapped that."""
    return state.tx.plan if isinstance(state.tx, ZeroTransformation) else None
