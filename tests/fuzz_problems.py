"""A drawn case as a train state and a loss, for jzero and for plain jax."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training import train_state

import jzero
from tests import (
    conftest,  # noqa: F401  # the devices, in the long run too
    models,
)
from tests.fuzz_cases import (
    FROZEN,
    OPTIMIZERS,
    TRAINABLE,
    WRITERS,
    Case,
    forward,
    make_batch,
    make_params,
    reduced,
)

STEPS, WIDTH = 3, 7


class Problem(NamedTuple):
    """A case for either side.

    Attributes:
      state: A train state of the framework.
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
    if case.framework.startswith("nnx") or not set(case.extras) & set(FROZEN):
        return tx
    label = lambda p: jax.tree_util.tree_map_with_path(lambda at, _: "none" if is_frozen(path_str(at)) else "train", p)
    if case.frozen_by == "trainable":
        return optax.masked(tx, lambda p: jax.tree.map(lambda x: x == "train", label(p)))
    return optax.multi_transform({"train": tx, "none": optax.set_to_zero()}, label)


class Group(nnx.Module):
    """The parameters of one layer."""

    def __init__(self, leaves: dict[str, Any]):
        for name, x in leaves.items():
            setattr(self, name, nnx.Variable(x) if name in FROZEN else nnx.Param(x))


class Model(nnx.Module):
    """An NNX layer (twice, if it is tied) before what was drawn."""

    def __init__(self, case: Case, params: dict[str, Any]):
        self.front = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(case.seed))
        self.again = self.front if case.framework == "nnx_tied" else nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0))
        for name, leaves in params.items():
            setattr(self, name, Group(leaves))


def _nnx_problem(case: Case) -> Problem:
    params, _ = make_params(case, WIDTH)

    def loss_fn(model, batch):
        read = {name: {x: getattr(getattr(model, name), x)[...] for x in leaves} for name, leaves in params.items()}
        h = model.again(jnp.tanh(model.front(batch["x"])))
        return reduced(case, read, forward(case, read, h, batch), batch)

    model = Model(case, params)
    graph, own, rest = nnx.split(model, nnx.Param, ...)
    leaves, treedef = jax.tree.flatten(own)
    names = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(own)]

    def plain_loss(flat, batch):
        state = jax.tree.unflatten(treedef, [flat[name] for name in names])
        return loss_fn(nnx.merge(graph, state, rest), batch)

    pair = (Model(case, params), nnx.Optimizer(model, _tx(case), wrt=nnx.Param))
    return Problem(pair, loss_fn, dict(zip(names, leaves, strict=True)), plain_loss)


def _linen_apply(case: Case, params: dict[str, Any]) -> Any:
    """Returns the module: Linen's own layers before what was drawn."""

    class Dense(nn.Module):
        @nn.compact
        def __call__(self, h, _=None):
            return jnp.tanh(nn.Dense(WIDTH, name="dense")(h)), None

    class Whole(nn.Module):
        @nn.compact
        def __call__(self, batch):
            own = {name: self.param(name, lambda _, leaves=leaves: leaves) for name, leaves in params.items()}
            layer = nn.remat(Dense) if case.framework == "linen_remat" else Dense
            if case.framework == "linen_scan":
                layer = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
            h, _ = layer(name="front")(batch["x"], None)
            h = nn.LayerNorm(name="norm")(h) if case.framework == "linen" else h
            return reduced(case, own, forward(case, own, h, batch), batch)

    return Whole()


def make_problem(case: Case) -> Problem:
    if case.framework.startswith("nnx"):
        return _nnx_problem(case)
    params, _ = make_params(case, WIDTH)
    if case.framework.startswith("linen"):
        module = _linen_apply(case, params)
        shapes = jax.eval_shape(module.init, jax.random.key(0), make_batch(case, WIDTH, 0))["params"]
        own = {name: x for name, x in shapes.items() if name not in params}
        params = {**models.draw_like(own, case.seed), **params}
        loss_fn = lambda params, batch: module.apply({"params": params}, batch)
    else:
        loss_fn = lambda params, batch: reduced(case, params, forward(case, params, batch["x"], batch), batch)
    create = jzero.TrainState.create if case.framework == "plain" else train_state.TrainState.create
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    flat = {path_str(path): x for path, x in leaves}
    plain_loss = lambda flat, batch: loss_fn(jax.tree.unflatten(treedef, list(flat.values())), batch)
    return Problem(create(apply_fn=None, params=params, tx=_tx(case)), loss_fn, flat, plain_loss)


def is_real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


class WithFields(train_state.TrainState):
    """A state whose field `written` the loss writes."""

    written: Any


def add_written(case: Case, problem: Problem) -> tuple[Any, Any, dict[str, Any]]:
    """Returns a state and a loss that writes into it, and the arguments of a step for both."""
    kwargs = {"has_aux": case.aux, "check_rows": not case.depends_on_slices, **dict(case.step)}
    if not case.written:
        return problem.state, problem.loss_fn, kwargs
    start = {name: WRITERS[name].start(case.num_devices * case.rows, WIDTH) for name in case.written}
    write = {name: WRITERS[name].write for name in case.written}
    kwargs["merge"] = {f"written/{name}": word for name in case.written if (word := WRITERS[name].word)}
    if case.framework.startswith("nnx"):
        problem.state[0].written = nnx.Dict({name: nnx.Variable(jnp.asarray(x)) for name, x in start.items()})

        def nnx_loss(model, batch):
            for name, variable in model.written.items():
                variable.set_value(write[name](batch, variable.get_value()))
            return problem.loss_fn(model, batch)

        return problem.state, nnx_loss, kwargs

    def loss_fn(params, batch, written):
        result = problem.loss_fn(params, batch)
        loss, aux = result if case.aux else (result, {})
        return loss, {**aux, "written": {name: write[name](batch, x) for name, x in written.items()}}

    state = WithFields(**vars(problem.state), written=start)
    return state, loss_fn, {**kwargs, "has_aux": True, "mutable": ("written",)}


def written_into(state: Any) -> dict[str, np.ndarray]:
    """What the loss wrote into a state."""
    if isinstance(state, tuple):
        return {name: np.asarray(x.get_value()) for name, x in getattr(state[0], "written", {}).items()}
    return jax.tree.map(np.asarray, getattr(state, "written", {}))
