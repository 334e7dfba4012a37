"""Loads models named on the command line as `module:function`, which returns a state, a loss, a batch, and more."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jzero.core.state.adapter import adapt

PyTree = Any
RETURNS = "`(state, loss_fn, batch)` or `(state, loss_fn, batch, trainable)`"


class UserModel(NamedTuple):
    """A model, with all inputs for planning and compiling its training step.

    Attributes:
      state: A train state, concrete or abstract; abstract if the user gave a function of a key.
      loss_fn: As for `make_train_step`.
      batch: The global batch, concrete or abstract.
      trainable: Which parameters are trained, as for `shard_train_state`.
    """

    state: Any
    loss_fn: Callable[..., Any]
    batch: PyTree
    trainable: PyTree | str | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """Step arguments other than state and batch: an abstract `rng` if the loss takes a third argument."""
        try:
            parameters = inspect.signature(self.loss_fn).parameters.values()
        except (TypeError, ValueError):  # some callables have no signature
            return {}
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        required = [p for p in parameters if p.kind in positional and p.default is p.empty]
        return {"rng": jax.eval_shape(_key)} if len(required) == 3 else {}


def load_model(name: str) -> UserModel:
    """Imports and calls the function `name`. A state given as a function of a key is not allocated.

    Args:
      name: `module:function`. The function takes no arguments and returns `(state, loss_fn, batch)`, and perhaps
        `trainable`. The state may also be a function that makes a state from a PRNG key, as for `init_train_state`.

    Raises:
      ValueError: The name does not have this form, the function does not exist, or it fails.
      TypeError: The function takes arguments or returns other values.
      ImportError: The module cannot be imported.

    Example:
      >>> from jzero.cli.user_model import load_model
      >>> load_model("decoder_models:gpt_124m").batch.shape  # doctest: +SKIP
      (64, 1025)
    """
    function = _find(name)
    returned = _call(f"`{name}`", function)
    if not isinstance(returned, tuple | list) or len(returned) not in (3, 4):
        returned_type = f"{len(returned)} values" if isinstance(returned, tuple | list) else type(returned).__name__
        raise TypeError(f"`{name}` must return {RETURNS}: got {returned_type}.")
    state, loss_fn, batch, *trainable = returned
    if not callable(loss_fn):
        raise TypeError(f"`{name}` must return {RETURNS}, where `loss_fn` is a function: got {type(loss_fn).__name__}.")
    return UserModel(_state_of(name, state), loss_fn, batch, *trainable)


def _find(name: str) -> Callable[[], Any]:
    module_name, colon, function_name = name.partition(":")
    if not colon or not module_name or not function_name:
        raise ValueError(
            f"A model must be given as `module:function`, such as 'decoder_models:gpt_124m': got {name!r}."
        )
    function = getattr(_import(module_name), function_name, None)
    if not callable(function):
        problem = f"{module_name!r} has no such name" if function is None else f"got {type(function).__name__}"
        raise ValueError(f"`{name}` must be a function that takes no arguments: {problem}.")
    return function


def _import(module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ImportError(f"Module {module_name!r} cannot be imported: {error}.") from error
        raise ImportError(
            f"Module {error.name!r} was not found: it must be installed, or be in the current directory."
        ) from error
    except (Exception, SystemExit) as error:
        raise ImportError(f"Module {module_name!r} cannot be imported: {_say(error)}.") from error


def _call(subject: str, function: Callable[..., Any], *args: Any) -> Any:
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        expected = "that takes no arguments" if not args else "of one argument, a PRNG key"
        raise TypeError(f"{subject} must be a function {expected}: {error}.") from error
    except ValueError:
        pass  # some callables have no signature: the call itself will say what they take
    try:
        return function(*args)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{subject} failed: {_say(error)}.") from error


def _state_of(name: str, state: Any) -> Any:
    """Returns a state unchanged, and the abstract state of a function that makes one."""
    try:
        adapt(state)
    except TypeError:
        if not callable(state) or isinstance(state, type):
            raise
    else:
        return state
    maker = f"The state of `{name}`"
    # NNX objects cannot hold abstract arrays, so `adapt` turns them into a train state.
    return jax.eval_shape(lambda: adapt(_call(maker, state, _key())).state)


def _key() -> jax.Array:
    return jax.random.key(0)


def _say(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(".")
