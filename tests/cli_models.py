"""A module as users write it for the command line; copied to the directory that the tests run in."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jzero

print("a module that prints")

LAYERS, WIDTH, BATCH = 4, 128, 16
PARAMS = LAYERS * 2 * WIDTH * 4 * WIDTH
NOT_A_FUNCTION = 3
ADAM = optax.adam(1e-3)


def make_state(key):
    shapes = {"up": (LAYERS, WIDTH, 4 * WIDTH), "down": (LAYERS, 4 * WIDTH, WIDTH)}
    params = {name: jnp.full(shape, 0.05) for name, shape in shapes.items()}
    return jzero.TrainState.create(params=params, tx=ADAM)


def loss_fn(params, batch):
    layer = lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None)
    return jnp.square(jax.lax.scan(layer, batch, params)[0]).mean()


def factory():
    return make_state, loss_fn, jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)


def concrete():
    return [make_state(jax.random.key(0)), loss_fn, jnp.ones((BATCH, WIDTH))]


def make_nnx(key):
    model = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=nnx.Rngs(params=key))
    return model, nnx.Optimizer(model, ADAM, wrt=nnx.Param)


def nnx_pair():
    return make_nnx, lambda model, batch: jnp.square(model(batch)).mean(), jnp.ones((BATCH, WIDTH))


# What goes wrong.


def raises():
    raise KeyError("lost")


def leaves():
    raise SystemExit("usage: ...")


SOME = jnp.ones((8, WIDTH))
two_values = lambda: (make_state, loss_fn)
no_tuple = lambda: None
takes_one = lambda size: size
no_loss = lambda: (make_state, "loss", SOME)
no_state = lambda: ({"w": jnp.ones(3)}, loss_fn, SOME)
bad_maker = lambda: (lambda key: 1 / 0, loss_fn, SOME)
bad_maker_arguments = lambda: (lambda: 0, loss_fn, SOME)
uneven_batch = lambda: (make_state, loss_fn, jnp.ones((13, WIDTH)))
bad_loss = lambda: (make_state, lambda params, batch: params["typo"], SOME)
