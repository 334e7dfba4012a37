"""States to plan for, most of them without arrays."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType

import jzero

STAGES = (0, 1, 2, 3)


def abstract_mesh(**sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def abstract_state(params, tx):
    return jax.eval_shape(lambda p: jzero.TrainState.create(params=p, tx=tx), params)


def plan_for(params, *, num_shards=8, tx=None, **config):
    """The plan of an abstract state with these shapes: the mapping `{name: shape}` or any tree of abstract arrays."""
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x, jnp.float32) if isinstance(x, tuple) else x,
        params,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    state = abstract_state(params, tx or optax.adam(1e-3))
    return jzero.plan_train_state(state, config=jzero.ZeroConfig(**config), mesh=abstract_mesh(data=num_shards))


# Who owns an optimizer leaf.

# Equal and swapped shapes, which the rules below cut on different dimensions.
PARAMS = {
    "first": (64, 128),
    "second": (64, 128),
    "third": (128, 64),
    "fourth": (128, 64),
    "bias": (64,),
    "odd": (37, 11),
}
RULES = {
    "first": jzero.LeafRule(dim=0),
    "second": jzero.LeafRule(dim=1),
    "third": jzero.LeafRule(dim=1),
    "fourth": jzero.LeafRule(dim=0),
}
MASK = {name: name != "second" for name in PARAMS}
LABELS = {name: "a" if name in ("first", "third", "odd") else "b" for name in PARAMS}
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=32),
    "masked": lambda: optax.masked(optax.adam(1e-3), MASK),
    "masked by function": lambda: optax.masked(optax.adam(1e-3), lambda p: {k: x.ndim > 1 for k, x in p.items()}),
    "multi_transform": lambda: optax.multi_transform({"a": optax.adam(1e-3), "b": optax.sgd(0.1, 0.9)}, LABELS),
    "multi_transform by function": lambda: optax.multi_transform(
        {"a": optax.adam(1e-3), "b": optax.sgd(0.1, 0.9)},
        lambda p: {k: "a" if x.ndim > 1 else "b" for k, x in p.items()},
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.ema(0.9), optax.adam(1e-3)),
    "lamb": lambda: optax.lamb(1e-3),
    "by hand": lambda: optax.chain(momentum_that_looks_into_the_parameters(), optax.scale(-0.1)),
    "lion": lambda: optax.lion(1e-3),
    "muon": lambda: optax.contrib.muon(1e-3),
}


def momentum_that_looks_into_the_parameters(decay=0.9):
    """Its `init` fails on what optax has for asking who owns what; then only key paths can tell."""

    def init(params):
        return {"mu": {name: jax.tree.map(jnp.zeros_like, value) for name, value in params.items()}}

    def update(updates, state, params=None):
        mu = jax.tree.map(lambda m, g: decay * m + g, state["mu"], updates)
        return mu, {"mu": mu}

    return optax.GradientTransformation(init, update)
