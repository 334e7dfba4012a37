"""States to save and restore, of sizes that hardly any number of devices divides, and comparisons to the bit."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state as flax_train_state

import jzero
from tests.drawn import to_jax

STAGES = (0, 1, 2, 3)


class StateWithStats(flax_train_state.TrainState):
    batch_stats: dict


class Net(nn.Module):
    """Sizes that hardly any number of devices divides."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(17, name="first")(x)
        x = nn.BatchNorm(use_running_average=False, name="norm")(x)
        x = nn.Dense(3, name="second", use_bias=False)(jnp.tanh(x))
        return nn.Dense(40, name="third")(x)


def linen_state(seed=0):
    """A plain state whose every leaf holds numbers of its own, drawn by NumPy, which compiles nothing."""

    def make():
        variables = Net().init(jax.random.key(0), jnp.ones((2, 9)))
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
        return StateWithStats.create(apply_fn=Net().apply, tx=tx, **variables)

    return _drawn(jax.eval_shape(make), seed)


def _drawn(shapes, seed):
    rng = np.random.default_rng(seed)

    def draw(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(seed)
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return to_jax(abs(rng.normal(size=x.shape)) if is_float else np.ones(x.shape), x.dtype)

    return jax.tree.map(draw, shapes)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(33, 17, rngs=rngs)
        self.first = nnx.Linear(17, 13, rngs=rngs)
        self.norm = nnx.BatchNorm(13, rngs=rngs)
        self.tied = nnx.Linear(17, 13, use_bias=False, rngs=rngs)
        self.tied.kernel = self.first.kernel
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        return self.dropout(self.norm(self.first(x)) + self.tied(x))


def nnx_state(seed=0):
    """A plain pair whose every array holds numbers of its own, drawn by NumPy, which compiles nothing."""

    def make():
        model = NnxNet(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

    graph, shapes = nnx.split(nnx.eval_shape(make))
    return nnx.merge(graph, _drawn(shapes, seed))


def mesh(num):
    return jzero.make_mesh(devices=jax.devices()[:num])


def sharded(state, stage, num=8, **options):
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=10, **options)
    return jzero.shard_train_state(state, config=config, mesh=mesh(num))


def like(state, stage, num=8, **options):
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=10, **options)
    return jzero.abstract_train_state(state, config=config, mesh=mesh(num))


def arrays(tree):
    """Returns the leaves by path; PRNG keys as their words."""
    found = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        found[jax.tree_util.keystr(path)] = np.asarray(jax.random.key_data(x) if is_key else x)
    return found


def whole(state):
    """Returns parameters and optimizer state in their natural shapes, by path."""
    plain = jzero.unshard_train_state(state)
    return {**arrays(plain.params), **arrays(plain.opt_state)}


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for path, x in expected.items():
        assert found[path].dtype == x.dtype, path
        assert found[path].tobytes() == x.tobytes(), path


def natural(stored, shape):
    """Returns a stored array without padding, which must be zero; by hand, not by jzero's own functions."""
    if stored.shape == shape:
        return stored
    if all(kept >= size for kept, size in zip(stored.shape, shape, strict=True)):  # not flattened
        inside = tuple(slice(0, size) for size in shape)
        rest = stored.copy()
        rest[inside] = 0
        assert not rest.any()
        return stored[inside]
    flat, size = stored.reshape(-1), int(np.prod(shape))
    assert not flat[size:].any()
    return flat[:size].reshape(shape)


def assert_holds(state, expected):
    """A sharded state (without masters) holds the numbers of a plain one, and nothing else but zeros."""
    found = arrays(state)
    assert found.keys() == expected.keys()
    assert_same_bits({path: natural(x, expected[path].shape) for path, x in found.items()}, expected)


ONE_DEVICE = pytest.mark.filterwarnings("ignore:The mesh has one device")


def pointers(tree):
    return {shard.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for shard in x.addressable_shards}


def numbered(state, step):
    return state.replace(step=jnp.zeros_like(state.step) + step)


class Numbers:
    """An iterator as Grain's: `get_state`, `set_state`."""

    def __init__(self):
        self.position = 0

    def __next__(self):
        self.position += 1
        return self.position

    def get_state(self):
        return {"position": self.position, "raw": b"\x00\xff"}

    def set_state(self, state):
        assert state["raw"] == b"\x00\xff"
        self.position = state["position"]
