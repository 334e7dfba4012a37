"""Repeated blocks that do the same are traced once; what differs between them stays different."""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero.core.base import compat
from jzero.core.jaxpr.structure import CanonicalJaxpr, Structures
from tests import jax_functions, shared

LAYERS, WIDTH = 3, 32
SGD = optax.sgd(1.0)


def layer(w, x):
    return x + jnp.tanh(x @ w)


def make_params(layers=LAYERS):
    rng = np.random.default_rng(0)
    return {f"layer_{i:02}": (rng.normal(size=(WIDTH, WIDTH)) / 6).astype(np.float32) for i in range(layers)}


def make_batch():
    return np.random.default_rng(1).normal(size=(16, WIDTH)).astype(np.float32)


def unrolled(layers):
    """The loss of a model whose layers are functions of `(w, x)`, each in a scope of its own."""

    def loss(params, batch):
        x = batch
        for (name, w), fn in zip(sorted(params.items()), layers, strict=True):
            with jax.named_scope(name):
                x = fn(w, x)
        return jnp.square(x).mean()

    return loss


class Way(NamedTuple):
    """How a step goes about layers: recomputed by default, by the loss, or not at all."""

    wrap: Any = lambda fn: fn
    stage: int = 3
    remat: str | None = None


BY_DEFAULT = Way()
WAYS = {
    "by default": BY_DEFAULT,
    "by the loss": Way(jax.checkpoint),
    "as written": Way(remat="as_written"),
    "stage 2": Way(stage=2),
}


@pytest.fixture(autouse=True)
def short_layers_are_shared(monkeypatch):
    monkeypatch.setattr("jzero.core.jaxpr.structure.FEWEST", 1)


def sharded(params, way=BY_DEFAULT):
    return jzero.shard_train_state(jzero.TrainState.create(params=params, tx=SGD), config=shared.config(way.stage))


def lowered(loss, params, way=BY_DEFAULT):
    return jzero.make_train_step(loss, remat=way.remat).lower(sharded(params, way), make_batch())


def num_functions(loss, params, way=BY_DEFAULT):
    return functions_in(lowered(loss, params, way).as_text())


def functions_in(text):
    """How many functions the layers of a step have become, those of the backward pass among them."""
    return len(re.findall(r"func\.func private @(block|layer)\w*\(", text))


@pytest.mark.smoke
@pytest.mark.parametrize("way", [*WAYS.values()][:3], ids=[*WAYS][:3])
def test_a_program_grows_by_a_call_per_layer(way):
    deep = way.wrap(lambda w, x: x + jnp.sin(jnp.sin(jnp.sin(x @ w))))
    texts = [lowered(unrolled([deep] * n), make_params(n), way).as_text() for n in (3, 4)]
    assert len({text.count("stablehlo.sine") for text in texts}) == 1, "nothing of what a layer does"
    assert texts[0].count("stablehlo.sine") > 0
    assert len({text.count("stablehlo.cosine") for text in texts}) == 1, "nor of its backward pass"


def test_short_layers_are_no_calls(monkeypatch):
    """A call takes as long to trace as a few equations."""
    way, loss = WAYS["stage 2"], unrolled([layer] * LAYERS)
    assert num_functions(loss, make_params(), way) > 0
    monkeypatch.undo()
    assert num_functions(loss, make_params(), way) == 0
    long = lambda w, x: functools.reduce(lambda x, _: jnp.sin(x), range(20), layer(w, x))
    assert num_functions(unrolled([long] * LAYERS), make_params(), way) > 0


def test_a_bound_on_gathers_sees_every_use():
    """Where `prefetch_bytes` bounds what is gathered ahead, layers are no calls: the bound goes across them."""
    step = jzero.make_train_step(unrolled([layer] * LAYERS), remat="as_written")
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0, prefetch_bytes=4 * WIDTH * WIDTH)
    state = jzero.shard_train_state(jzero.TrainState.create(params=make_params(), tx=SGD), config=config)
    assert "@layer" not in step.lower(state, make_batch()).as_text()


def with_rule(factor):
    """A function whose derivative is not its own, but for `factor` the same in each."""

    @jax.custom_jvp
    def fn(x):
        return jnp.sin(x)

    fn.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), factor * tangents[0]))
    return fn


def with_backward_rule(factor):
    @jax.custom_vjp
    def fn(x):
        return jnp.sin(x)

    fn.defvjp(lambda x: (jnp.sin(x), None), lambda _, g: (factor * g,))
    return fn


CONSTANTS = np.random.default_rng(2).normal(size=(LAYERS, 1, WIDTH)).astype(np.float32)


def test_arrays_that_differ_are_arguments_of_the_call():
    layers = [lambda w, x, i=i: x + jnp.tanh(x @ w) * CONSTANTS[i] for i in range(LAYERS)]
    loss, params, way = unrolled(layers), make_params(), WAYS["stage 2"]
    assert num_functions(loss, params, way) > 0
    value, grads = jzero.value_and_grad(loss)(sharded(params, way), make_batch())
    want = jax.jit(jax.value_and_grad(loss))(params, make_batch())
    np.testing.assert_allclose(value, want[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, want[1])


def test_layers_with_calls_that_hold_other_arrays_are_no_calls():
    """What else may differ is told apart where it is compared (`test_what_is_the_same`)."""
    layers = [lambda w, x, i=i: x + jax.jit(lambda y: jnp.tanh(y) * CONSTANTS[i])(x @ w) for i in range(2)]
    assert num_functions(unrolled(layers), make_params(2), WAYS["stage 2"]) == 0


POLICIES = [jax.checkpoint_policies.save_only_these_names(f"kept_{i}") for i in range(LAYERS)]


@functools.cache
def recomputing(*options):
    """How many functions layers of one jaxpr become that are recomputed so."""
    named = lambda w, x: x + jnp.tanh(jax.ad_checkpoint.checkpoint_name(x @ w, "kept_1"))
    return num_functions(unrolled([jax.checkpoint(named, **dict([option])) for option in options]), make_params())


@pytest.mark.parametrize(("name", "values"), [("policy", POLICIES), ("prevent_cse", [True, False, True])])
def test_what_is_kept_and_what_is_fenced_may_differ(name, values):
    assert recomputing(*((name, value) for value in values)) > recomputing(*[("prevent_cse", True)] * LAYERS)


def test_barriers_for_some_inputs_alone():
    """jax hands `prevent_cse` on for each input; here parameters have become several."""
    assert recomputing(*[("prevent_cse", (True, False))] * LAYERS) > 0


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="jax 0.12 takes what waits for other blocks for a leak")
def test_nothing_of_a_loop_outlives_it():
    step = jzero.make_train_step(unrolled([layer] * LAYERS), accumulate_steps=2)
    with jax.checking_leaks():
        step.trace(sharded(make_params()), make_batch())


def common(fn, *args):
    return CanonicalJaxpr.of(compat.open_jaxpr(jax.make_jaxpr(fn)(*args))[0])


def named(name, fn):
    return jax.named_scope(name)(fn)


def scoped(name):
    return lambda x: named(name, jnp.sin)(x) + x


def looped(fn, x):
    return jax.lax.scan(lambda c, y: (fn(c, y), y), x[0], x)[0]


def times_random(number, x):
    return jax.random.uniform(jax.random.fold_in(jax.random.key(0), number)) * x


def branch(other, x):
    return jax.lax.cond(x[0, 0] > 0, jnp.sin, other, x)


X = jnp.ones((3, 4))


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (lambda x: jnp.sin(x) * 2, lambda y: jnp.sin(y) * 2, True),
        (named("one", jnp.sin), named("two", jnp.sin), True),
        (named("one", scoped("in")), named("two", scoped("in")), True),
        (named("one", scoped("in")), named("two", scoped("of")), False),
        (lambda x: jnp.sin(x) * 2, lambda x: jnp.sin(x) * 3, False),
        (lambda x: x * jnp.float32(0.0), lambda x: x * jnp.float32(-0.0), False),
        (lambda x: x - 2 * x, lambda x: 2 * x - x, False),
        (lambda x: jax.lax.integer_pow(x, 2), lambda x: jax.lax.integer_pow(x, 3), False),
        (lambda x: x.astype(jnp.bfloat16), lambda x: x.astype(jnp.float16), False),
        (lambda x: 1 + jax.jit(lambda y: y * 2)(x), lambda x: 1 + jax.jit(lambda y: y * 2)(x), True),
        (lambda x: 1 + jax.jit(lambda y: y * 2)(x), lambda x: 1 + jax.jit(lambda y: y * 3)(x), False),
        (lambda x: looped(jnp.add, x), lambda x: looped(jnp.subtract, x), False),
        (lambda x: jax.lax.map(jnp.sin, x), lambda x: jax.lax.map(jnp.sin, x), True),
        (lambda x: times_random(3, x), lambda x: times_random(4, x), True),
        (lambda x: x + x.shape[0], lambda x: x + x.shape[1], False),
        (lambda x: (x, x + 1), lambda x: (x + 1, x), False),
        (lambda x: branch(jnp.cos, x), lambda x: branch(jnp.tanh, x), False),
        (with_rule(1.0), with_rule(2.0), False),
        (with_backward_rule(1.0), with_backward_rule(2.0), False),
    ],
)
def test_what_is_the_same(a, b, same):
    structures = Structures()
    first, second = common(a, X), common(b, X)
    assert (structures(first) == structures(second)) == same
    assert structures(common(a, X)) == structures(first)
    assert structures(common(a, X[:2])) != structures(first), "another shape"


@pytest.mark.smoke
def test_two_traces_of_the_same_function_are_the_same():
    """But for functions with rules that each trace makes anew."""
    x = jnp.ones((jax_functions.ROWS, jax_functions.WIDTH))
    structures = Structures()
    made = {name: [structures(common(fn, x)) for _ in range(2)] for name, fn in jax_functions.FUNCTIONS.items()}
    different = {name for name, (first, second) in made.items() if first != second}
    assert different <= {"jax.custom_vjp", "jax.experimental.ode.odeint", "jax.lax.custom_root"}


def test_calls_of_calls_are_compared_once():
    """Each level calls the next twice: 2^40 equations if every call were looked into."""

    def nested(depth, x):
        return jnp.sin(x) if not depth else call(depth - 1, x) + call(depth - 1, x)

    call = jax.jit(nested, static_argnums=0)
    structures = Structures()
    assert structures(common(lambda x: call(40, x), X)) == structures(common(lambda x: call(40, x), X))


@pytest.mark.parametrize(("stage", "shape"), [(3, (WIDTH, 5)), (3, (3, 5)), (1, (3, 5))])
def test_parameters_of_a_kind_are_gathered_and_reduced_by_one_function(stage, shape):
    state = shared.sharded({name: jnp.ones(shape) for name in "abcd"}, SGD, stage)
    loss_fn = lambda params, batch: jnp.square(sum(batch[:, : shape[0]] @ w for w in params.values())).mean()
    text = jzero.make_train_step(loss_fn).lower(state, make_batch()).as_text()
    assert (text.count("stablehlo.all_gather"), text.count("stablehlo.reduce_scatter")) == (1, 1)
