"""What looks like a loss, a batch or a state, and is none: the error says what it is and what to write instead."""

import flax.jax_utils
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

import jzero
from tests import shared

PARAMS = {"w": jnp.ones((5, 3))}
X, Y = np.ones((16, 5), np.float32), np.zeros((16, 3), np.float32)
SHOWN = r"def loss_fn\(params, batch\):\n +x, y = batch\n"
MAKERS = pytest.mark.parametrize("make", [jzero.make_train_step, jzero.value_and_grad, jzero.make_eval_step])


def loss_fn(params, batch):
    x, y = batch
    return jnp.square(x @ params["w"] - y).mean()


def sharded(stage=3):
    return jzero.shard_train_state(jzero.TrainState.create(params=PARAMS, tx=shared.sgd(0.1)), stage=stage)


def pair():
    model = nnx.Linear(5, 3, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)


@MAKERS
def test_a_step_takes_one_batch(make):
    step, state = make(loss_fn), sharded()
    for call in (lambda: step(state, X, Y), lambda: step(state, X, jax.random.key(0)), lambda: step.lower(state, X, Y)):
        with pytest.raises(TypeError, match=rf"takes one batch: got 2 arguments after the state(.|\n)*{SHOWN}"):
            call()
    with pytest.raises(TypeError, match=r"got 3 arguments"):
        step(state, X, Y, Y)
    step(state, (X, Y))


def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads=grads), loss


def update_only(state, batch):
    return state.apply_gradients(grads=PARAMS)


def of_apply_fn(state, batch):
    return state.apply_fn(state, batch).mean()


@MAKERS
@pytest.mark.parametrize("fn", [train_step, jax.jit(train_step), update_only, of_apply_fn])
def test_a_function_of_a_state_is_no_loss(make, fn):
    with pytest.raises(TypeError, match=rf"The loss must take no train state: it asks for its `\w+`(.|\n)*{SHOWN}"):
        make(fn)(sharded(), (X, Y))


@MAKERS
def test_functions_of_other_arguments_are_no_losses(make):
    with pytest.raises(TypeError, match=rf"must not be a step itself: got(.|\n)*{SHOWN}"):
        make(jzero.make_train_step(loss_fn))
    with pytest.raises(TypeError, match=rf"third argument, 'y': pass a key(.|\n)*{SHOWN}"):
        make(lambda params, x, y: loss_fn(params, (x, y)))(sharded(), (X, Y))
    with pytest.raises(TypeError, match=rf"must take two arguments: it takes \['params'\](.|\n)*{SHOWN}"):
        make(lambda params: loss_fn(params, (X, Y)))(sharded(), (X, Y))


@MAKERS
def test_of_nnx_a_loss_takes_the_model(make):
    def of_optimizer(optimizer, batch):
        return loss_fn(optimizer.model, batch)

    def of_both(model, optimizer, batch):
        return loss_fn(model, batch)

    state = jzero.shard_train_state(pair(), stage=3)
    with pytest.raises(TypeError, match=rf"it asks for its `model`(.|\n)*{SHOWN}"):
        make(of_optimizer)(state, (X, Y))
    with pytest.raises(TypeError, match=rf"third argument, 'batch'(.|\n)*{SHOWN}"):
        make(of_both)(state, (X, Y))


@MAKERS
def test_other_faults_of_a_loss_are_its_own(make):
    """The batch lacks what a state has, too; and no state has what these parameters lack."""
    for fn in (lambda params, batch: batch.step + params["w"].sum(), lambda params, batch: params.kernel.sum()):
        with pytest.raises(AttributeError):
            make(fn)(sharded(), {"x": X, "y": Y})


STATES = {
    "flax": lambda tx: train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=tx),
    "jzero": lambda tx: jzero.TrainState.create(params=PARAMS, tx=tx),
}


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adam(0.1)], ids=["sgd", "adam"])
@pytest.mark.parametrize("take", [jzero.shard_train_state, jzero.plan_train_state, jzero.abstract_train_state])
def test_a_replicated_state_is_to_be_unreplicated(take, kind, tx):
    state = STATES[kind](tx)
    for devices in (jax.devices(), jax.devices()[:1]):  # of one, Flax's way back is none
        copies = flax.jax_utils.replicate(state, devices)
        with pytest.raises(ValueError, match=rf"has shape \({len(devices)},\).*`flax.jax_utils.unreplicate\(state\)`"):
            take(copies, stage=1)
        take(jax.tree.map(lambda x: x[0], copies), stage=1)
    take(flax.jax_utils.unreplicate(flax.jax_utils.replicate(state)), stage=1)


@jax.tree_util.register_pytree_with_keys_class
class Layer:
    """As Equinox has them: a pytree some of whose leaves are functions."""

    def __init__(self, weight, activation):
        self.weight, self.activation = weight, activation

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in ("weight", "activation")], None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adam(0.1)], ids=["sgd", "adam"])
def test_leaves_that_are_no_arrays_are_named_where_a_state_is_made(tx):
    layers = [Layer(jnp.ones((5, 5)), jax.nn.relu), Layer(jnp.ones((5, 3)), jnp.tanh)]
    for fields in ({"params": layers}, {"params": PARAMS, "extra": layers}):
        where = list(fields)[-1]
        named = rf"not:\n  {where}/0/activation: .*\n  {where}/1/activation: .*\n.*eqx.partition\(.*eqx.filter\("
        with pytest.raises(TypeError, match=named):
            jzero.TrainState.create(tx=tx, **fields)
    arrays = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else None, layers)
    jzero.shard_train_state(jzero.TrainState.create(params=arrays, tx=tx), stage=3)
    jax.eval_shape(lambda: jzero.TrainState.create(params=arrays, tx=tx))


def test_variables_of_hijax_mode_are_named():
    with nnx.var_defaults(hijax=True):
        of_mode, (model, _) = pair(), pair()
    one = nnx.Linear(5, 3, rngs=nnx.Rngs(0))
    one.kernel = nnx.Param(one.kernel[...], hijax=True)
    pairs = {
        "bias": of_mode,
        "model.bias": nnx.ModelAndOptimizer(model, optax.adam(0.1), wrt=nnx.Param),
        "kernel": (one, nnx.Optimizer(one, optax.adam(0.1), wrt=nnx.Param)),
    }
    for name, state in pairs.items():
        with pytest.raises(TypeError, match=rf"^`(0\.)?{name}` is a variable of Flax's hijax mode, [^\n]*$"):
            jzero.shard_train_state(state, stage=3)
    with nnx.var_defaults(hijax=True):  # which makes no difference to variables that are there
        state = jzero.shard_train_state(pair_without_mode(), stage=3)
        jzero.make_train_step(lambda model, batch: jnp.square(model(batch)).mean())(state, X)


def pair_without_mode():
    with nnx.var_defaults(hijax=False):
        return pair()
