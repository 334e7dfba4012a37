"""What is no value of a setting is refused with its name, what it is and what is allowed; whatever the setting."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
from tests import shared

loss_fn = lambda params, batch: jnp.square(batch @ params["w"]).mean()

CLASSES = (
    jzero.ZeroConfig,
    jzero.Offload,
    jzero.ZenFlow,
    jzero.LeafRule,
    jzero.Precision,
    jzero.DynamicLossScale,
)
STEP = "has_aux accumulate_steps clip_norm reduce remat mutable compiler_options"
NO_SETTINGS = [
    jnp.ones(2),
    np.array("fp32"),
    np.ones((2, 2), np.int32),
    "nonsense?",
    1j,
    [1.0],
    object(),
    float("nan"),
    -2,
]


@pytest.mark.parametrize("value", NO_SETTINGS, ids=lambda x: type(x).__name__)
def test_what_is_no_setting_is_named(value):
    made = [(field.name, cls) for cls in CLASSES for field in dataclasses.fields(cls)]
    made += [(name, lambda **kwargs: jzero.make_train_step(loss_fn, **kwargs)) for name in STEP.split()]
    for name, make in made:
        if name in ("axis", "node_axis", "context_axis", "replica_axis", "path") and isinstance(value, str):
            continue
        with pytest.raises((TypeError, ValueError), match=rf"`(\w+\.)?{name}` must"):
            make(**{name: value})


class Incomparable:
    """Without a hash; its comparisons are arrays, which are neither true nor false."""

    __hash__ = None

    def __eq__(self, other):
        return np.array([True, False])

    __ne__ = __eq__


CHOICES = {
    "fit": "stages remat topology hbm_bytes max_accumulate_steps confirm",
    "analyze": "topology",
    "estimate_step_memory": "topology",
    "shard_train_state": "stage donate check_processes",
    "apply_pending": "donate",
    "gather_params": "masters",
    "offload_train_state": "include",
    "load_params": "strict donate",
    "export_params": "dtype",
    "restore_checkpoint": "params_only strict donate",
    "CheckpointManager": "best_mode",
    "inspect_checkpoint": "verify",
    "Monitor": "every progress every_process",
    "estimate_zero2_model_states_mem_needs": "cpu_offload formulas",
    "estimate_zero3_model_states_mem_needs": "cpu_offload cpu_offload_params zero_init formulas",
    "estimate_zero3_model_states_mem_needs_all_cold": "verbose formulas",
    "make_train_step": "reduce remat has_aux",
    "make_eval_step": "check_processes",
}
"""Arguments that take one of several words, flags or kinds of numbers."""
ARRAYS = [jnp.ones(3), np.array([1, 2]), np.array("host"), [np.ones(2)], Incomparable(), {1: 2}, {"host"}, b"host"]


@pytest.mark.parametrize("function", CHOICES)
def test_whatever_an_argument_of_choices_is_given_it_says_what_it_takes(function):
    plain = jzero.TrainState.create(params={"w": jnp.ones((8, 8))}, tx=shared.sgd(0.1))
    state = jzero.shard_train_state(plain, stage=1)
    batch = np.ones((8, 8), np.float32)
    step = jzero.make_train_step(loss_fn)
    given = {
        "fit": (plain, loss_fn, batch),
        "analyze": (step, state, batch),
        "estimate_step_memory": (step, state, batch),
        "load_params": (state, "nowhere"),
        "export_params": (state, "nowhere"),
        "restore_checkpoint": ("nowhere", state),
        "CheckpointManager": ("nowhere",),
        "inspect_checkpoint": ("nowhere",),
        "Monitor": (),
        "make_train_step": (loss_fn,),
        "make_eval_step": (loss_fn,),
        "estimate_zero2_model_states_mem_needs": (10,),
        "estimate_zero3_model_states_mem_needs": (10, 10),
        "estimate_zero3_model_states_mem_needs_all_cold": (10, 10),
    }
    call = functools.partial(getattr(jzero, function), *given.get(function, (state,)))
    for name in CHOICES[function].split():
        for value in ARRAYS:
            with pytest.raises(ValueError, match=rf"`{name}` must .*: got "):
                call(**{name: value})


NUMBERS = "stage", "persistence_threshold", "prefetch_bytes"


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *((lambda name=name: jzero.ZeroConfig(**{name: True}), name) for name in NUMBERS),
        (lambda: jzero.Offload(optimizer="host", compute="host", delay=True), "Offload.delay"),
        (lambda: jzero.Offload(optimizer="host", ratio=True), "Offload.ratio"),
        (lambda: jzero.LeafRule(persistent=1), "LeafRule.persistent"),
        (lambda: jzero.DynamicLossScale(initial=True), "DynamicLossScale.initial"),
        (lambda: jzero.make_train_step(loss_fn, clip_norm=True), "clip_norm"),
        (lambda: jzero.make_train_step(loss_fn, remat=1), "remat"),
        (lambda: jzero.make_eval_step(loss_fn, mutable="batch_stats"), "mutable"),
        (lambda: jzero.value_and_grad(loss_fn, has_aux=1), "has_aux"),
        (lambda: jzero.Precision(compute_dtype=jnp.ones((), jnp.bfloat16)), "Precision.compute_dtype"),
    ],
)
def test_kinds_are_not_taken_for_each_other(make, name):
    with pytest.raises(ValueError, match=rf"`{name}` must be .*: got "):
        make()


@pytest.mark.parametrize("key", [7, "7", np.int32(7), np.zeros(2, np.float32), 1.5, [0, 1]], ids=repr)
def test_what_is_no_key_is_named(key):
    plain = jzero.TrainState.create(params={"w": jnp.ones((8, 8))}, tx=shared.sgd(0.1))
    state, batch = jzero.shard_train_state(plain, stage=1), np.ones((8, 8), np.float32)
    step = jzero.make_train_step(lambda params, batch, rng: loss_fn(params, batch) + jax.random.normal(rng))
    for call in (step, step.lower, jax.jit(lambda state, batch, rng: step(state, batch, rng=key))):
        rng = key if isinstance(call, type(step)) or call == step.lower else jax.random.key(0)
        with pytest.raises(ValueError, match="`rng` must be None or a PRNG"):
            call(state, batch, rng=rng)
    with pytest.raises(ValueError, match="`key` must be a PRNG key"):
        jzero.init_train_state(lambda key: plain, key, stage=1)
    with pytest.raises(TypeError, match="`make_state` must be a function"):
        jzero.init_train_state(key, jax.random.key(0), stage=1)


def test_keys_of_both_kinds_are_taken():
    plain = jzero.TrainState.create(params={"w": jnp.ones((8, 8))}, tx=shared.sgd(0.1))
    step = jzero.make_train_step(lambda params, batch, rng: loss_fn(params, batch) + jax.random.normal(rng))
    for key in (jax.random.key(0), jax.random.PRNGKey(0), np.asarray(jax.random.PRNGKey(0))):
        state = jzero.init_train_state(lambda key: plain, key, stage=1)
        step.eval_shape(state, np.ones((8, 8), np.float32), rng=key)
    step(state, np.ones((8, 8), np.float32), rng=key)


@pytest.mark.parametrize("devices", [[0, 1], 4, "cpu", [None], jax.Device], ids=repr)
def test_what_are_no_devices_is_named(devices):
    with pytest.raises(TypeError, match="`devices` must be a sequence"):
        jzero.make_mesh(devices=devices)


def test_scalars_of_other_libraries_are_numbers():
    for value in (1, 0.5, np.float32(0.5), np.int64(1), jnp.float32(0.5)):
        step = jzero.make_train_step(loss_fn, clip_norm=value)
        assert step.clip_norm == float(value)
        assert not isinstance(jzero.Offload(optimizer="host", ratio=value).ratio, jax.Array)  # which has no hash
    assert jzero.ZeroConfig(reduce_scatter=np.bool_(False)).reduce_scatter is False
    assert jzero.Precision(compute_dtype=jnp.bfloat16, master_dtype=np.dtype("float32")).compute_dtype == "bfloat16"
    assert jzero.make_train_step(loss_fn, has_aux=True, mutable=["batch_stats"]).mutable == ("batch_stats",)
