"""What is no value of a setting is refused with its name, what it is and what is allowed; whatever the setting."""

import dataclasses
import functools
import json
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero
import jzero.data
from jzero.core.config.settings import check_fields
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


@dataclasses.dataclass(frozen=True)
class Listed:
    """Fields whose types list their values, and two whose types do not."""

    place: Literal["none", "host", "disk"] = "none"
    flag: bool = False
    dtype: Literal["float32"] | None = None
    keeps: bool | Literal["cheap"] | None = None
    free: tuple[bool, ...] | str = ()
    number: int | None = None

    def __post_init__(self):
        check_fields(self, prefix="Listed.")


def test_a_field_takes_what_its_type_lists():
    assert Listed("disk", True, "float32", "cheap", 3, "x").place == "disk"
    assert Listed(flag=np.bool_(True)).flag is True
    for name, value in {"place": "device", "flag": 1, "dtype": "int8", "keeps": 0}.items():
        with pytest.raises(ValueError, match=rf"`Listed.{name}` must be .*: got {value!r}"):
            Listed(**{name: value})
    with pytest.raises(ValueError, match=r"one of \('none', 'host', 'disk'\)"):
        Listed("device")


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


def _loader(**kwargs):
    source = [{"x": i} for i in range(64)]
    loader = jzero.data.make_loader(source, **{"batch_size": 16, "num_epochs": 1, "shuffle": True, **kwargs})
    return len(loader), next(iter(loader))["x"].tolist()


def _manager(folder, **kwargs):
    manager = jzero.CheckpointManager(folder, **{"check_processes": False, **kwargs})
    plain = jzero.TrainState.create(params={"w": jnp.ones((8, 8))}, tx=shared.sgd(0.1))
    manager.save(jzero.shard_train_state(plain, stage=1), step=kwargs.get("keep_every_steps", 2))
    manager.close()
    return sorted(x.name for x in folder.iterdir() if x.is_dir())


def _stepped(folder, **kwargs):
    plain = jzero.TrainState.create(params={"w": jnp.ones((8, 8))}, tx=shared.sgd(0.1))
    step = jzero.make_train_step(loss_fn, **{"accumulate_steps": 2, **kwargs})
    state, metrics = step(jzero.shard_train_state(plain, stage=2), np.ones((16, 8), np.float32))
    return step.micro, metrics["loss"].tolist(), jzero.gather_params(state)["w"].tolist()


def _files(folder, **kwargs):
    source = jzero.data.FileSource(["a", "b"], open_file=lambda path: range(4), **kwargs)
    return source.fingerprint, [source[i] for i in range(8)]


def _logged(folder, **kwargs):
    sink = jzero.JsonLines(folder / "log.jsonl")
    with jzero.Monitor(sinks=[sink], progress=False, **{"every": 1, **kwargs}) as monitor:
        monitor.log({"loss": 1.0})
    row = json.loads((folder / "log.jsonl").read_text())
    return monitor.step, row["step"]


def _sunk(folder, step):
    for sink in (jzero.JsonLines(folder / "a"), jzero.Csv(folder / "b"), jzero.TensorBoard(folder / "c")):
        sink(step, {"loss": 1.0})
        sink.close()
    return json.loads((folder / "a").read_text())["step"], (folder / "b").read_text().splitlines()[1].split(",")[0]


DEEPSPEED = {"train_batch_size": "auto", "zero_optimization": {"stage": 2}}
INTEGERS = {
    **dict.fromkeys(
        [x for x in NUMBERS if x != "stage"], (lambda folder, **kwargs: jzero.ZeroConfig(axis="data", **kwargs), 7)
    ),
    "stage": (lambda folder, **kwargs: jzero.ZeroConfig(**kwargs), 2),
    "delay": (lambda folder, **kwargs: jzero.Offload(optimizer="host", compute="host", **kwargs), 1),
    "chunk_bytes": (lambda folder, **kwargs: jzero.Offload(optimizer="host", **kwargs), 2**20),
    "disk_threads": (lambda folder, **kwargs: jzero.Offload(optimizer="host", **kwargs), 3),
    "update_interval": (lambda folder, **kwargs: jzero.ZenFlow(**kwargs), 8),
    "dim": (lambda folder, **kwargs: jzero.LeafRule(**kwargs), 1),
    "scan_dim": (lambda folder, **kwargs: jzero.LeafRule(**kwargs), -1),
    "blocks": (lambda folder, **kwargs: jzero.Keep(**kwargs), 2),
    "window": (lambda folder, **kwargs: jzero.DynamicLossScale(**kwargs), 10),
    "accumulate_steps": (_stepped, 2),
    "check_processes": (_stepped, 60),
    "data": (lambda folder, **kwargs: jzero.make_mesh(model=2, **kwargs), 4),
    "model": (lambda folder, **kwargs: jzero.make_mesh(data=2, **kwargs), -1),
    **dict.fromkeys(("batch_size", "num_epochs", "shuffle_window"), (lambda f, **kwargs: _loader(**kwargs), 16)),
    "seed": (lambda f, **kwargs: _loader(**kwargs), 3),
    **dict.fromkeys(("prefetch", "num_workers"), (lambda f, **kwargs: _loader(**kwargs), 0)),
    "interleave": (_files, 2),
    "max_open_files": (_files, 1),
    **dict.fromkeys(("total_steps", "every", "tokens_per_step", "start_step"), (_logged, 5)),
    "step": (_sunk, 3),
    **dict.fromkeys(("max_to_keep", "save_interval_steps", "keep_every_steps"), (_manager, 2)),
    "preemption_exit_code": (lambda folder, **kwargs: jzero.CheckpointManager(folder, **kwargs)._exit_code, 0),
    "num_gpus_per_node": (lambda f, **kwargs: jzero.estimate_zero2_model_states_mem_needs(10**9, **kwargs), 8),
    "num_nodes": (lambda f, **kwargs: jzero.estimate_zero2_model_states_mem_needs(10**9, **kwargs), 8),
    "total_params": (lambda f, **kwargs: jzero.estimate_zero2_model_states_mem_needs(**kwargs), 10**9),
    "num_devices": (lambda f, **kwargs: repr(jzero.from_deepspeed({"train_batch_size": 64}, **kwargs)), 8),
    "gradient_accumulation_steps": (lambda f, **kwargs: repr(jzero.from_deepspeed(kwargs, num_devices=8)), 4),
}
"""How to use each setting that takes an integer, and one."""


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_of_other_libraries_are_integers(name, tmp_path):
    use, value = INTEGERS[name]
    made = []
    for i, kind in enumerate((int, np.int64, np.int32, np.array, jnp.asarray)):
        folder = tmp_path / str(i)
        folder.mkdir()
        made.append(use(folder, **{name: kind(value)}))
        assert repr(made[i]) == repr(made[0])
        assert made[i] == made[0]
