"""Optimizers that ask for more than gradients and parameters, or for gradients of another form."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from optax import contrib

import jzero
from jzero.core.update.whole import call_update
from tests.drawn import to_jax

W = np.random.default_rng(0).normal(size=(5, 23)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(16, 5)).astype(np.float32)


def loss(params, x):
    return jnp.square(jnp.tanh(x @ params["w"]) - 1).mean()


def sharded(tx, create=jzero.TrainState.create, stage=3, **kwargs):
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0, **kwargs)
    return jzero.shard_train_state(create(params={"w": to_jax(W)}, tx=tx), config=config)


def sees():
    """An optimizer that adds up the losses and the norms of gradients that it is handed."""

    def init(params):
        return {"losses": jnp.zeros(()), "norms": jnp.zeros(())}

    def update(updates, state, params=None, *, value, grad, **extra):
        return updates, {"losses": state["losses"] + value, "norms": state["norms"] + optax.tree.norm(grad)}

    return optax.chain(optax.GradientTransformationExtraArgs(init, update), optax.sgd(0.1))


class Counted(TrainState):
    """A state with an `apply_gradients` of its own."""

    calls: jax.Array = dataclasses.field(default_factory=lambda: jnp.zeros((), jnp.int32))

    def apply_gradients(self, *, grads):
        return super().apply_gradients(grads=grads).replace(calls=self.calls + 1)


def create_counted(**kwargs):
    return Counted.create(apply_fn=None, **kwargs)


PLATEAU = optax.chain(optax.sgd(0.3), contrib.reduce_on_plateau(patience=0, factor=0.5, accumulation_size=2, rtol=0.9))
SAM = contrib.sam(optax.adam(1e-2), optax.chain(contrib.normalize(), optax.sgd(0.05)), sync_period=2, reset_state=False)
CASES = {  # stage, settings of the state, settings of the step, where the state comes from
    "plateau": (PLATEAU, 2, {}, {}, jzero.TrainState.create),
    "momo_clip_own_update": (contrib.momo(0.1), 3, {}, {"clip_norm": 0.1}, create_counted),
    "polyak_micro_batches": (optax.polyak_sgd(1.0), 1, {}, {"accumulate_steps": 2}, jzero.TrainState.create),
    "fp16": (sees(), 3, {"precision": "fp16"}, {"clip_norm": 0.1}, jzero.TrainState.create),
    "takes_neither": (optax.chain(optax.clip(1.0), SAM), 3, {}, {}, jzero.TrainState.create),
}


@pytest.mark.parametrize("case", CASES)
def test_a_train_step_hands_over_the_loss_and_the_gradients(case):
    tx, stage, settings, options, create = CASES[case]
    state, step = sharded(tx, create, stage, **settings), jzero.make_train_step(loss, **options)
    params, opt_state = {"w": jnp.asarray(W)}, tx.init({"w": jnp.asarray(W)})

    @jax.jit
    def plain_step(params, opt_state):
        value, grads = jax.value_and_grad(loss)(params, X)
        if "clip_norm" in options:
            grads = jax.tree.map(lambda g: g * jnp.minimum(1, 0.1 / optax.tree.norm(grads)), grads)
        extra = {} if case == "takes_neither" else {"value": value, "grad": grads}
        updates, opt_state = tx.update(grads, opt_state, params, **extra)
        return optax.apply_updates(params, updates), opt_state

    for _ in range(4):
        state, _ = step(state, X)
        params, opt_state = plain_step(params, opt_state)
    tolerance = {"rtol": 5e-3} if settings else {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(jzero.gather_params(state, masters=True)["w"], params["w"], **tolerance)
    found = jzero.unshard_train_state(state).opt_state
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), found, opt_state)


def scaled(updates, state, params=None, *, value=1.0):
    """An update that names the argument that it takes; it scales by that."""
    return jax.tree.map(lambda g: g * value, updates), state


def decorated(updates, state, params=None, **extra):
    return scaled(updates, state, params, **extra)


INIT = lambda params: optax.EmptyState()
SCALED = optax.GradientTransformationExtraArgs(INIT, scaled)
PARTS = {
    "alone": SCALED,
    "partial": SCALED._replace(update=functools.partial(scaled)),
    "wraps": SCALED._replace(update=functools.wraps(scaled)(decorated)),
    "passes_all_on": SCALED._replace(update=decorated),
    "not_declared": optax.GradientTransformation(INIT, scaled),
    "nested": optax.chain(optax.clip(9.0), optax.named_chain(("inner", optax.chain(SCALED)))),
    "masked": optax.masked(SCALED, {"w": True}),
    "partition": optax.partition({"one": SCALED}, {"w": "one"}),
    "injected": optax.inject_hyperparams(lambda rate: optax.chain(SCALED, optax.scale(rate)))(rate=1.0),
    "if_finite": optax.apply_if_finite(SCALED, 2),
    "multi_steps": optax.MultiSteps(SCALED, 1),
    "takes_all": SCALED._replace(update=lambda g, s, p=None, **extra: scaled(g, s, p, value=extra["value"])),
}


@pytest.mark.parametrize("case", PARTS)
def test_a_part_of_an_optimizer_gets_the_arguments_that_it_takes(case):
    tx, w = PARTS[case], {"w": np.float32([1, 2, 3])}
    updates, _ = call_update(tx, {"value": 2.0, "grad": w}, w, tx.init(w), w)
    np.testing.assert_array_equal(updates["w"], [2, 4, 6])
    updates, _ = call_update(tx, {"value": 2.0, "grad": w}, w, tx.init(w), w, value=3.0)
    np.testing.assert_array_equal(updates["w"], [3, 6, 9])


def test_what_a_step_does_not_have_is_refused_with_the_way_out():
    ways = r"asks for \['{}'\].*`state.tx.update\(grads, state.opt_state, state.params, {}=...\)`"
    with pytest.raises(TypeError, match=ways.format("value_fn", "value_fn")):
        jzero.make_train_step(loss).eval_shape(sharded(optax.lbfgs()), X)
    with pytest.raises(TypeError, match=ways.format("value", "value")):
        sharded(PLATEAU).apply_gradients(grads={"w": W})
    with pytest.raises(TypeError, match=ways.format("obj_fn", "obj_fn")):  # sophia says so by a `ValueError`
        jzero.make_train_step(loss).eval_shape(sharded(contrib.sophia(0.1)), X)
    with pytest.raises(TypeError, match=r"asks for \['value'\].*another does not take \['value'.*`\*\*extra_args`"):
        jzero.make_train_step(loss).eval_shape(sharded(optax.chain(SAM, PLATEAU)), X)


@pytest.mark.parametrize(
    "tx",
    [optax.chain(tx, optax.scale_by_backtracking_linesearch(5)) for tx in (optax.scale_by_lbfgs(2), contrib.muon(0.1))],
)
def test_a_function_for_a_line_search_may_close_over_traced_values(tx):
    """Without and with products over whole matrices, which run by themselves."""

    def step(value_and_grad):
        @jax.jit
        def step(state, x):
            value, grads = value_and_grad(state, x)
            updates, opt_state = state.tx.update(
                grads, state.opt_state, state.params, value=value, grad=grads, value_fn=lambda p: loss(p, x)
            )
            return state.replace(params=optax.apply_updates(state.params, updates), opt_state=opt_state)

        return step

    state = sharded(tx)
    plain = jzero.TrainState.create(params={"w": jnp.asarray(W)}, tx=tx)
    for _ in range(2):
        state = step(jzero.value_and_grad(loss))(state, X)
        plain = step(lambda state, x: jax.value_and_grad(loss)(state.params, x))(plain, X)
    np.testing.assert_allclose(jzero.gather_params(state)["w"], plain.params["w"], rtol=1e-3, atol=1e-4)


def test_gradients_that_are_not_like_parameters_are_refused():
    tx = optax.lookahead(optax.sgd(0.1), 2, 0.5)
    pair = optax.LookaheadParams.init_synced({"w": jnp.asarray(W)})
    state = jzero.shard_train_state(jzero.TrainState.create(params=pair, tx=tx), stage=3)
    with pytest.raises(ValueError, match=r"`optax.lookahead`, cannot"):
        state.tx.update({"w": W}, state.opt_state, state.params)
    with pytest.raises(ValueError, match="different types") as caught:
        jzero.make_train_step(lambda params, x: loss(params.fast, x)).eval_shape(state, X)
    assert "Raised in the state's optimizer (`tx`)" in caught.value.__notes__[0]


def test_an_error_of_an_optimizer_that_has_nothing_to_do_with_its_arguments_is_its_own():
    of_two_dtypes = lambda g, params: jax.lax.cond(params["w"].sum() > 0, lambda: g["w"], lambda: jnp.int8(g["w"]))
    tx = optax.stateless(lambda g, params: {"w": of_two_dtypes(g, params)})
    with pytest.raises(TypeError, match="int8") as caught:
        jzero.make_train_step(loss).eval_shape(sharded(tx), X)
    assert not any("`tx`" in note for note in getattr(caught.value, "__notes__", []))


def test_gradients_of_each_example_are_refused_and_aggregated_as_the_message_says():
    of_row = jax.grad(lambda params, row: loss(params, row[None]))
    each = jax.jit(jax.vmap(of_row, in_axes=(None, 0)))({"w": W}, X)
    aggregate = contrib.differentially_private_aggregate(0.1, 0.0, 0)
    with pytest.raises(ValueError, match=r"'w' has shape \(16, 5, 23\)"):
        sharded(optax.chain(aggregate, optax.sgd(0.1))).apply_gradients(grads=each)
    state = sharded(optax.sgd(0.1))
    grads, _ = jax.jit(aggregate.update)(each, aggregate.init({"w": W}))
    clipped = each["w"] * np.minimum(1, 0.1 / np.linalg.norm(each["w"].reshape(16, -1), axis=1))[:, None, None]
    found = jzero.gather_params(state.apply_gradients(grads=grads))["w"]
    np.testing.assert_allclose(found, W - 0.1 * np.mean(clipped, axis=0), rtol=1e-5, atol=1e-6)
