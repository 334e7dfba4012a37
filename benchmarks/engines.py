"""One training step, by jzero and by what a user would write instead: AdamW, bf16 compute, fp32 masters.

Every engine trains the same loss on the same batch with the layout of parameters and optimizer state of jzero's plan
(but see `gspmd`), so that what differs is who decides about communication:

* `jzero`: `make_train_step`; `jzero as written` with `remat="as_written"`, which keeps what plain jax keeps of
  activations; `jzero, XLA ahead` with `prefetch_bytes=0` and `compiler_options="recommended"`, so that not jzero but
  the compiler gathers ahead in loops; `jzero tuned`, of unrolled models, with smaller buckets:
  `all_gather_bucket_bytes` of 4 MiB and `reduce_bucket_bytes` of 8 MiB.
* `replicated`: `jax.jit`, everything on every device. The stage does not matter.
* `gspmd`: `jax.jit` with jzero's layout as sharding constraints on parameters, gradients (from stage 2 on) and
  optimizer state, but for stacks of layers, which are cut on their largest dimension: with jzero's choice GSPMD takes
  a fifth more memory and sends more. Parameters are cast before they can be gathered.
* `map_variables`: stage 3 by hand: `shard_map`, every module gathers its own parameters (`nn.map_variables`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jzero
from benchmarks.gpt import AXIS, GPT, init_of, loss_of, placed

ENGINES = ("jzero", "jzero as written", "jzero, XLA ahead", "jzero tuned", "replicated", "gspmd", "map_variables")
TX = optax.adamw(1e-4)


class Engine(NamedTuple):
    """A jitted `step(state, batch) -> (state, loss)`, what makes its state from a key, and the state as shapes."""

    step: Any
    make: Callable[[jax.Array], Any]
    like: Any


class State(NamedTuple):
    """What the engines beside jzero train: bf16 parameters (none at stage 3), fp32 masters, optax's state."""

    params: Any
    masters: Any
    opt_state: Any


def make_engine(name: str, model: GPT, stage: int, mesh: Mesh) -> Engine:
    """Returns an engine."""
    if name == "jzero, XLA ahead":
        return _jzero(model, stage, mesh, "recommended", prefetch_bytes=0)
    if name == "jzero tuned":
        return _jzero(model, stage, mesh, all_gather_bucket_bytes=4 * 2**20, reduce_bucket_bytes=8 * 2**20)
    if name == "jzero as written":
        return _jzero(model, stage, mesh, remat="as_written")
    if name == "jzero":
        return _jzero(model, stage, mesh)
    if name == "map_variables":
        return _map_variables(model, mesh)
    return _jit(model, 0 if name == "replicated" else stage, mesh)


def _plain(model: GPT) -> Callable[[jax.Array], Any]:
    init = init_of(model)
    return lambda key: jzero.TrainState.create(params=init(key), tx=TX)


def _shapes(model: GPT) -> Any:
    shapes = jax.eval_shape(_plain(model), jax.random.key(0))
    return shapes.replace(params=placed(shapes.params, model.mesh))


def _jzero(
    model: GPT, stage: int, mesh: Mesh, compiler_options: Any = None, remat: Any = None, **fields: Any
) -> Engine:
    config = jzero.ZeroConfig(stage=stage, precision="bf16", **fields)
    step = jzero.make_train_step(loss_of(model), compiler_options=compiler_options, remat=remat)
    make = lambda key: jzero.init_train_state(_plain(model), key, config=config, mesh=mesh)
    shapes = _shapes(model)
    return Engine(step, make, jzero.abstract_train_state(shapes, config=config, mesh=mesh))


def _layouts(model: GPT, stage: int, mesh: Mesh, *, largest: bool = False) -> tuple[Any, Any, Any]:
    """Returns the shardings of parameters, masters (and gradients), and optimizer state.

    With `largest` stacks of layers are cut on their largest dimension, not on the first.
    """
    shapes = _shapes(model)
    plan = jzero.plan_train_state(shapes, config=jzero.ZeroConfig(stage=stage), mesh=mesh)
    if largest:
        stacks = [leaf.param for leaf in plan.leaves if leaf.scan_dim == 0]
        largest_free = lambda x: max(
            (d for d in range(1, len(x.shape)) if not any(x.base[d : d + 1])), key=lambda d: x.shape[d]
        )
        rules = {re.escape(x.path): jzero.LeafRule(dim=largest_free(x), scan_dim=0) for x in stacks}
        plan = jzero.plan_train_state(shapes, config=jzero.ZeroConfig(stage=stage, rules=rules), mesh=mesh)
    named = lambda tree: jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), tree, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    if any(jax.tree.leaves(plan.padding)):
        raise ValueError("The engines beside jzero do not pad: choose sizes that the number of devices divides.")
    return named(plan.params), named(plan.grads), named(plan.opt_state)


def _started(model: GPT, stage: int, layouts: tuple[Any, Any, Any]) -> tuple[Callable[[jax.Array], Any], Any]:
    param_layout, layout, opt_layout = layouts

    def start(key: jax.Array) -> State:
        masters = init_of(model)(key)
        params = None if stage in (0, 3) else jax.tree.map(lambda x: x.astype(jnp.bfloat16), masters)
        return State(params, masters, TX.init(masters))

    shardings = State(None if stage in (0, 3) else param_layout, layout, opt_layout)
    shapes = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        jax.eval_shape(start, jax.random.key(0)),
        shardings,
    )
    return jax.jit(start, out_shardings=shardings), shapes


def _jit(model: GPT, stage: int, mesh: Mesh) -> Engine:
    loss_fn, layouts = loss_of(model), _layouts(model, stage, mesh, largest=True)
    param_layout, layout, opt_layout = layouts
    make, like = _started(model, stage, layouts)
    fixed = lambda tree, layout: jax.tree.map(lax.with_sharding_constraint, tree, layout)
    narrow = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)

    def step(state: State, batch: jax.Array) -> tuple[State, jax.Array]:
        params = state.params
        if params is None:
            params = fixed(narrow(state.masters), layout)
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        if stage >= 2:
            grads = fixed(grads, layout)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, opt_state = TX.update(grads, state.opt_state, state.masters)
        masters = fixed(optax.apply_updates(state.masters, updates), layout)
        new = None if state.params is None else fixed(fixed(narrow(masters), layout), param_layout)
        return State(new, masters, fixed(opt_state, opt_layout)), loss

    out = jax.tree.map(lambda x: x.sharding, like)
    return Engine(jax.jit(step, donate_argnums=0, out_shardings=(out, None)), make, like)


def _map_variables(model: GPT, mesh: Mesh) -> Engine:
    layouts = _layouts(model, 3, mesh)
    _, layout, opt_layout = layouts
    make, like = _started(model, 3, layouts)
    hand = GPT(model.size, model.scan, model.remat, fsdp=True)
    loss_fn = loss_of(hand)
    names = lambda x, s: nn.Partitioned(x, names=(*s.spec, *[None] * (x.ndim - len(s.spec))))

    def local(masters: Any, batch: jax.Array) -> Any:
        boxed = jax.tree.map(names, masters, layout)
        loss, grads = jax.value_and_grad(loss_fn)(boxed, batch)

        def reduced(box: nn.Partitioned) -> jax.Array:  # the transpose of a gather has summed what was cut
            total = box.value if AXIS in box.names else lax.psum(box.value, AXIS)
            return total / lax.axis_size(AXIS)

        grads = jax.tree.map(reduced, grads, is_leaf=lambda x: isinstance(x, nn.Partitioned))
        return lax.pmean(loss, AXIS), grads

    specs = jax.tree.map(lambda s: s.spec, layout)
    value_and_grad = jax.shard_map(
        local, mesh=mesh, in_specs=(specs, PartitionSpec(AXIS)), out_specs=(PartitionSpec(), specs), check_vma=False
    )

    def step(state: State, batch: jax.Array) -> tuple[State, jax.Array]:
        loss, grads = value_and_grad(state.masters, batch)
        updates, opt_state = TX.update(grads, state.opt_state, state.masters)
        return State(None, optax.apply_updates(state.masters, updates), opt_state), loss

    out = State(None, layout, opt_layout)
    return Engine(jax.jit(step, donate_argnums=0, out_shardings=(out, None)), make, like)
