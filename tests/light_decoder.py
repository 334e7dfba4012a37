"""A decoder without attention, whose norms only scale: few equations, so that its programs compile fast."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jzero
from tests.drawn import to_jax


def make_state(
    tx: optax.GradientTransformation, *, layers: int, width: int, vocab: int, scan: bool = True, tied: bool = False
) -> jzero.TrainState:
    """Returns a plain state: its layers in one stack, or each for itself; its head, or the embedding in its place."""
    stack = (layers,) if scan else ()
    layer = {
        "norm": {"scale": (*stack, width)},
        "up": {"kernel": (*stack, width, 4 * width), "bias": (*stack, 4 * width)},
        "down": {"kernel": (*stack, 4 * width, width), "bias": (*stack, width)},
    }
    shapes = {"embed": (vocab, width), **({"layers": layer} if scan else {f"layer_{i}": layer for i in range(layers)})}
    shapes |= {} if tied else {"head": {"kernel": (width, vocab)}}
    rng = np.random.default_rng(0)
    draw = lambda shape: to_jax(rng.normal(size=shape) / np.sqrt(width), jnp.float32)
    params = jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))
    return jzero.TrainState.create(params=params, tx=tx)


def apply_layer(x: jax.Array, w: Any) -> jax.Array:
    hidden = (x * w["norm"]["scale"][None, None]) @ w["up"]["kernel"] + w["up"]["bias"][None, None]
    return x + jnp.tanh(hidden) @ w["down"]["kernel"] + w["down"]["bias"][None, None]


def loss_with(layer: Any) -> Any:
    """Returns the loss of a decoder whose layers are applied by a function, such as `jax.checkpoint(apply_layer)`."""

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        x = params["embed"][tokens[:, :-1]]
        if "layers" in params:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])
        for name in sorted(x for x in params if x.startswith("layer_")):
            x = layer(x, params[name])
        logits = x @ (params["head"]["kernel"] if "head" in params else params["embed"].T)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss_fn


loss_fn = loss_with(apply_layer)
