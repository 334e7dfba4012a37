"""Models and optimizers with matrix work: layers one by one, stacks, experts; Muon, SOAP, GaLore."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers

import jzero
from tests.drawn import to_jax

WIDTH, HIDDEN, NUM_IN, NUM_OUT = 40, 56, 24, 3  # with 37 below: sizes that 8 does and does not divide


def params(kind, width=WIDTH, hidden=HIDDEN, scale=0.1):
    """Returns the parameters of a model: `unrolled`, a stack of so many layers (`stack11`), or `experts`."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: to_jax(scale * rng.normal(size=shape))
    found = {"in": normal(NUM_IN, width)}
    if kind == "unrolled":
        layer = lambda: {"a": normal(width, hidden), "b": normal(hidden, width), "s": jnp.ones(width)}
        found["layers"] = [layer() for _ in range(2)]
    elif kind == "experts":
        return found | {"stack": {"a": normal(3, 5, width, hidden), "b": normal(3, 5, hidden, width)}}
    else:
        num = int(kind.removeprefix("stack"))
        found["stack"] = {
            "a": normal(num, width, hidden),
            "b": normal(num, hidden, width),
            "s": jnp.ones((num, width)),
        }
    return found | {"odd": normal(width, 37), "out": normal(37, NUM_OUT)}


def few_params(kind):
    """Returns few kinds of matrices, as each takes time to compile: of a layer `a` and the scales; and `odd`."""
    drop = lambda layer: {name: x for name, x in layer.items() if name != "b"}
    found = params(kind, 16, 32, 0.3)
    layers = {"layers": [*map(drop, found["layers"])]} if kind == "unrolled" else {"stack": drop(found["stack"])}
    return layers | {name: found[name] for name in ("odd",) if name in found}


def grads(params, seed, dtype=None):
    """Returns a gradient of full rank for each parameter, no two of them equal, rounded to a dtype."""
    rng = np.random.default_rng(seed)
    rounded = lambda x, like: (x if dtype is None else x.astype(dtype)).astype(like.dtype)
    return jax.tree.map(lambda x: rounded(rng.normal(size=x.shape), x), params)


def dimension_numbers(params):
    """Returns what tells Muon which dimensions are those of matrices: the last two; none for stacks of vectors."""

    def of(path, x):
        in_stack = any(getattr(key, "key", "") == "stack" for key in path)
        return MuonDimensionNumbers(x.ndim - 2, x.ndim - 1) if x.ndim - in_stack >= 2 else None

    return jax.tree_util.tree_map_with_path(of, params)


def muon(**options):
    return optax.contrib.muon(1e-2, muon_weight_dimension_numbers=dimension_numbers, **options)


def _over_stack(fn, ndim):
    for _ in range(ndim - 2):
        fn = jax.vmap(fn)
    return fn


def _eye(x, side):
    return to_jax(np.broadcast_to(np.eye(x.shape[side]), (*x.shape[:-2], x.shape[side], x.shape[side])))


def soap(learning_rate=1e-2, decay=0.9, every=2):
    """SOAP: Adam in the eigenbases of Shampoo's statistics; every other step, a QR iteration turns the bases."""

    def init(params):
        is_matrix = lambda x: x.ndim >= 2
        sides = lambda x: {"l": _eye(x, -2), "r": _eye(x, -1)} if is_matrix(x) else None
        zeros = lambda: jax.tree.map(jnp.zeros_like, params)
        tree = lambda: jax.tree.map(sides, params)
        return {"count": jnp.zeros([], jnp.int32), "mu": zeros(), "nu": zeros(), "stats": tree(), "bases": tree()}

    def turned(stats, bases):
        return jax.tree.map(lambda s, q: _over_stack(lambda s, q: jnp.linalg.qr(s @ q)[0], s.ndim)(s, q), stats, bases)

    def update(updates, state, params=None):
        del params
        count = state["count"] + 1
        treedef = jax.tree.structure(updates)

        def one(g, mu, nu, stat, base):
            if stat is None:
                mu, nu = decay * mu + (1 - decay) * g, decay * nu + (1 - decay) * g * g
                return -learning_rate * mu / (jnp.sqrt(nu) + 1e-8), mu, nu, None

            def of_matrix(g, mu, nu, stat, base):
                stat = {"l": decay * stat["l"] + g @ g.T, "r": decay * stat["r"] + g.T @ g}
                into = lambda x: base["l"].T @ x @ base["r"]
                mu, nu = decay * mu + (1 - decay) * g, decay * nu + (1 - decay) * into(g) ** 2
                step = base["l"] @ (into(mu) / (jnp.sqrt(nu) + 1e-8)) @ base["r"].T
                return -learning_rate * step, mu, nu, stat

            return _over_stack(of_matrix, g.ndim)(g, mu, nu, stat, base)

        leaves = [treedef.flatten_up_to(x) for x in (updates, *(state[k] for k in ("mu", "nu", "stats", "bases")))]
        new = [one(*x) for x in zip(*leaves, strict=True)]
        made, mu, nu, stats = (treedef.unflatten(x) for x in zip(*new, strict=True))
        bases = jax.lax.cond(count % every == 0, turned, lambda stats, bases: bases, stats, state["bases"])
        return made, {"count": count, "mu": mu, "nu": nu, "stats": stats, "bases": bases}

    return optax.GradientTransformation(init, update)


def weighted_products(learning_rate=1e-2):
    """Between two products, each matrix has a weight of its parameter and of its layer, and one that all share."""

    def update(updates, state, params=None):
        leaves, treedef = jax.tree.flatten(updates)
        common = optax.tree.norm(updates)

        def one(k, g):
            if g.ndim < 2:
                return -learning_rate * g
            weights = jnp.arange(1.0, 1.0 + math.prod(g.shape[:-2])).reshape(*g.shape[:-2], 1, 1)
            own = 1 / (k + common) + jnp.asarray(leaves[k - 1].sum() > 0, g.dtype)  # of the leaf before, by one number
            inner = g @ jnp.swapaxes(g, -1, -2)
            inner = inner / jnp.linalg.norm(inner, axis=(-1, -2), keepdims=True)
            return -learning_rate * (inner * weights * own) @ g

        return treedef.unflatten([one(k, g) for k, g in enumerate(leaves)]), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def shampoo_one_for_all(learning_rate=1e-2):
    """One preconditioner of all matrices of the hidden layers: a product that takes several parameters."""

    def update(updates, state, params=None):
        del params
        layers = updates["layers"]
        total = sum(layer["a"] @ layer["b"] for layer in layers)
        changed = [{**layer, "a": total @ layer["a"]} for layer in layers]
        return jax.tree.map(lambda g: -learning_rate * g, {**updates, "layers": changed}), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _updated(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def update_alone(params, tx, steps, dtype=None):
    """Returns parameters and state after updates by given gradients, with plain optax on one device."""
    state, update = tx.init(params), jax.jit(functools.partial(_updated, tx))
    for seed in range(steps):
        params, state = update(grads(params, seed, dtype), state, params)
    return params, state


def update(params, tx, steps, dtype=None, mesh=None, **config):
    """Returns the sharded state after the same updates with jzero's transformation, and the text of the program."""
    config = jzero.ZeroConfig(**{"persistence_threshold": 0, **config})
    state = jzero.shard_train_state(jzero.TrainState.create(params=params, tx=tx), config=config, mesh=mesh)
    args = lambda seed: (grads(params, seed, dtype), state.opt_state, state.params)
    compiled = jax.jit(functools.partial(_updated, state.tx)).lower(*args(0)).compile()
    for seed in range(steps):
        new, opt_state = compiled(*args(seed))
        state = state.replace(params=new, opt_state=opt_state)
    return state, compiled.as_text()


def deviation(state, reference):
    """Returns how far parameters, and optimizer state, are from those of a reference; each leaf by its largest."""
    full = jzero.unshard_train_state(state)

    def largest(tree, other):
        pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
        arrays = [(np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs]
        each = [float(np.max(np.abs(x - y)) / (np.max(np.abs(y)) + 1e-9)) for x, y in arrays if x.size]
        return max(each, default=0.0)

    return largest(full.params, reference[0]), largest(full.opt_state, reference[1])
