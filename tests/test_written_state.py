"""State that the loss writes: what the devices' values become, in each micro-batch, and what is refused.

The reference is a loop over the whole micro-batches, on one device.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jzero
from jzero.core.engine.merge import Merge
from tests import shared

D, DEVICES, STEPS, ROWS = 5, 3, 2, 2
B = DEVICES * ROWS  # of one micro-batch, on all devices
X = np.random.default_rng(0).normal(size=(DEVICES * STEPS * ROWS, D)).astype(np.float32)
LABELS = np.arange(len(X)) % 4
BATCH = {"x": X, "label": LABELS}


def micro_batches(x):
    """The micro-batches of a step: the i-th rows of each device's part."""
    parts = x.reshape(DEVICES, STEPS, ROWS, *x.shape[1:])
    return [parts[:, i].reshape(B, *x.shape[1:]) for i in range(STEPS)]


def mesh_of(n=DEVICES):
    return jzero.make_mesh(devices=jax.devices()[:n])


class Written(TrainState):
    value: jax.Array


def make_state(value, n=DEVICES, stage=3):
    params = {"w": jnp.ones((D, 7))}
    state = Written.create(apply_fn=None, params=params, tx=shared.sgd(0.1), value=jax.tree.map(jnp.asarray, value))
    return jzero.shard_train_state(state, config=shared.config(stage), mesh=mesh_of(n))


def loss_writing(new):
    """A loss that writes `new(batch, value)`."""
    return lambda params, batch, value: (jnp.square(batch["x"] @ params["w"]).mean(), {"value": new(batch, value)})


def make_step(new, word=None):
    merge = word if isinstance(word, dict) else {} if word is None else {"value": word}
    return jzero.make_train_step(
        loss_writing(new), has_aux=True, mutable=("value",), merge=merge, accumulate_steps=STEPS
    )


def histogram(batch, value):
    return value + jnp.bincount(batch["label"], length=4)


def queue(batch, value):
    """Rows of all devices, the newest first; plain jax has no others."""
    x = jax.lax.all_gather(batch["x"], "data", tiled=True) if len(batch["x"]) < B else batch["x"]
    return jnp.concatenate([x, value])[: 2 * B - 1]


def largest(batch, value):
    label = batch["label"].max()
    return jnp.maximum(value, jax.lax.pmax(label, "data") if len(batch["x"]) < B else label)


COVERED = {
    # name: (start, what the loss writes, the word)
    "count of calls": (np.int32(0), lambda batch, value: value + 1, None),
    "count of rows": (np.int32(0), lambda batch, value: value + len(batch["x"]), "summed"),
    "histogram": (np.zeros(4, np.int32), histogram, "summed"),
    "tokens in fp32": (np.float32(0.5), lambda batch, value: value + (batch["label"] > 1).sum(), "summed"),
    "statistics": (np.zeros(D, np.float32), lambda batch, value: 0.9 * value + 0.1 * batch["x"].mean(0), None),
    "statistics that later ones read": (
        np.zeros(D, np.float32),
        lambda batch, value: jnp.square(value) + batch["x"].mean(0),
        "mean",
    ),
    "rows": (np.zeros((B, D), np.float32), lambda batch, value: batch["x"], "per_example"),
    "rows of booleans": (np.zeros(B, bool), lambda batch, value: batch["x"][:, 0] > 0, "per_example"),
    "queue": (np.zeros((2 * B - 1, D), np.float32), queue, None),
    "largest label": (np.int32(-1), largest, None),
    "what the first device wrote": (np.zeros((2, D), bool), lambda batch, value: batch["x"][:ROWS] > 0, "equal"),
}


ALONE = "what the first device wrote"  # which holds for one number of rows, while others are looked at over more
TOGETHER = [name for name in COVERED if name != ALONE]


@pytest.mark.parametrize("names", [TOGETHER, [ALONE]])
def test_written_state_is_what_a_loop_over_the_micro_batches_leaves(names):
    """Of all kinds of state in one program. One device writes the same, of the whole micro-batch."""
    expected = {name: COVERED[name][0] for name in names}
    write = lambda batch, value: {name: COVERED[name][1](batch, value[name]) for name in names}
    words = {f"value/{name}": COVERED[name][2] for name in names if COVERED[name][2]}
    state, step, alone = make_state(expected), make_step(write, words), jax.jit(write)
    for _ in range(2):
        state, _ = step(state, BATCH)
        for x, label in zip(micro_batches(X), micro_batches(LABELS), strict=True):
            expected = alone({"x": x, "label": label}, expected)
    for name in names:
        found = np.asarray(state.value[name])
        assert found.dtype == np.asarray(COVERED[name][0]).dtype
        # Summed in another order.
        np.testing.assert_allclose(found, expected[name], rtol=1e-6, atol=1e-6, err_msg=name)


REFUSED = {
    "count of rows": (np.int32(0), lambda batch, value: value + len(batch["x"]), "the number of rows"),
    "count of rows in fp32": (np.float32(0), lambda batch, value: value + len(batch["x"]), "the number of rows"),
    "elements": (np.int32(0), lambda batch, value: value + batch["x"].size, "the number of rows"),
    "rows of ones": (
        np.int32(0),
        lambda batch, value: value + jnp.ones(len(batch["x"]), int).sum(),
        "the number of rows",
    ),
    "function of the rows": (
        np.float32(0),
        lambda batch, value: value + jnp.log(len(batch["x"])),
        "the number of rows",
    ),
    "decay by rows": (np.float32(1), lambda batch, value: 0.9 ** len(batch["x"]) * value, "the number of rows"),
    "last index": (np.int32(0), lambda batch, value: jnp.arange(len(batch["x"]))[-1], "the number of rows"),
    "loop over rows": (
        np.int32(0),
        lambda batch, value: functools.reduce(lambda total, _: total + 1, range(len(batch["x"])), value),
        "the number of rows",
    ),
    "histogram": (np.zeros(4, np.int32), histogram, "depends on the rows"),
    "maximum": (np.int32(0), lambda batch, value: jnp.maximum(value, batch["label"].max()), "depends on the rows"),
    "tokens in fp32": (np.float32(0), lambda batch, value: value + (batch["label"] > 1).sum(), "adds up the rows"),
    "queue": (
        np.zeros((9, D), np.float32),
        lambda batch, value: jnp.concatenate([batch["x"], value])[:9],
        "dimension 0 holds rows",
    ),
    "ring": (
        np.zeros((D, 9), np.float32),
        lambda batch, value: jax.lax.dynamic_update_slice(value, batch["x"].T, (0, 3)),
        "dimension 1 holds rows",
    ),
}


@pytest.mark.filterwarnings("ignore:The mesh has one device")
@pytest.mark.parametrize("name", REFUSED)
def test_values_of_one_devices_rows_are_refused_by_name(name):
    start, new, why = REFUSED[name]
    with pytest.raises(ValueError, match=f"(?s)one device's.* value: .*{why}"):
        make_step(new).eval_shape(make_state(start), BATCH)
    make_step(new).eval_shape(make_state(start, n=1), BATCH)  # all rows are there


@pytest.mark.parametrize(
    ("word", "start", "message"),
    [
        ("summed", np.zeros((ROWS, D), bool), "cannot be 'summed'"),
        ("mean", np.zeros((ROWS, D), bool), "cannot be 'mean'"),
        ("per_example", np.zeros((B + 1, D), bool), r"bool\[7, 5\], then bool\[2, 5\]"),
        ("sum", np.zeros((ROWS, D), bool), "`merge` must be"),
        ({"vale": "summed"}, np.zeros((ROWS, D), bool), r"\['vale'\].* It writes \['value'\]"),
    ],
)
def test_a_word_that_does_not_fit_is_refused(word, start, message):
    with pytest.raises(ValueError, match=message):
        make_step(lambda batch, value: batch["x"] > 0, word).eval_shape(make_state(start), BATCH)


def test_a_loss_that_holds_for_one_number_of_rows_says_that_its_counts_were_not_seen():
    write = lambda batch, value: value + batch["x"].reshape(ROWS, D).shape[0]
    with pytest.warns(UserWarning, match=r"\['value'\].* cannot reshape"):
        make_step(write).eval_shape(make_state(0), BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_step(write, "equal").eval_shape(make_state(0), BATCH)


@pytest.mark.filterwarnings("ignore:The loss closes over arrays")
def test_what_has_no_rows_is_equal_whatever_the_loss_does_with_their_number():
    """The loss, beside it, is made by as many equations as there are rows, and a table is made anew in each trace."""

    def loss_fn(params, batch, value):
        each = [jnp.square(x @ params["w"]).mean() for x in batch["x"]]
        return sum(each) / len(each), {"value": {"calls": value["calls"] + 1, "table": np.arange(9000, dtype=np.int32)}}

    step = jzero.make_train_step(loss_fn, has_aux=True, mutable=("value",))
    state, _ = step(make_state({"calls": np.int32(0), "table": np.zeros(9000, np.int32)}), BATCH)
    assert state.value["calls"] == 1
    np.testing.assert_array_equal(state.value["table"], np.arange(9000))


def batches_of(seed):
    x = np.random.default_rng(seed).normal(size=(24, D)).astype(np.float32)
    return {"x": x, "label": (7 * x[:, 0]).astype(np.int32)}


def extremes(batch, value):
    """Maxima and minima as programs keep them: a history, one that goes on, one of the last batch, in a few bits."""
    size = jnp.abs(batch["x"])
    return {
        "history": jnp.roll(value["history"], 1, 0).at[0].set(size.max(0)),
        "largest": jnp.maximum(value["largest"], batch["label"].max()),
        "least": batch["x"].min(0),
        "fp8": size.max().astype(jnp.float8_e4m3fn),
    }


@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        ({"data": 3}, {}),
        ({"replica": 2, "data": 2}, {"replica_axis": "replica"}),
    ],
)
def test_maxima_are_those_of_the_whole_batch(sizes, axes):
    """The reference is one device without jzero, which takes the batch as a whole."""
    expected = {
        "history": jnp.zeros((3, D)),
        "largest": jnp.int32(-100),
        "least": jnp.full(D, -9.0),
        "fp8": jnp.float8_e4m3fn(400),
    }
    mesh = jzero.make_mesh(**sizes, devices=jax.devices()[: np.prod(list(sizes.values()))])
    state = Written.create(apply_fn=None, params={"w": jnp.ones((D, 7))}, tx=shared.sgd(0.1), value=expected)
    state = jzero.shard_train_state(state, config=jzero.ZeroConfig(stage=3, persistence_threshold=0, **axes), mesh=mesh)
    step = make_step(extremes, {"value/least": "min", ".*": "max"})
    for seed in range(2):
        state, _ = step(state, batches_of(seed))
        expected = jax.jit(extremes)(batches_of(seed), expected)
    for name, want in expected.items():
        assert state.value[name].dtype == want.dtype
        np.testing.assert_array_equal(state.value[name], want, err_msg=name)


@functools.partial(jax.jit, static_argnames="rows")
def draw(value, rows):
    """Numbers from a key that goes on, and from one that stays beside a count; what the state holds then."""
    now, later = jax.random.split(value["stream"])
    fixed = jax.random.fold_in(value["fixed"], value["count"])
    return [jax.random.normal(key, (rows,)) for key in (now, fixed)], {
        **value,
        "stream": later,
        "count": value["count"] + 1,
    }


def test_devices_draw_different_numbers_from_keys_in_the_state():
    """The reference goes through devices and micro-batches one by one: a device's key has its index folded in."""

    def loss(params, batch, value):
        numbers, new = draw(value, len(batch["x"]))
        aux = {"value": new, "numbers": jzero.PerExample(jnp.stack(numbers, 1))}
        return jnp.square(batch["x"] @ params["w"]).mean(), aux

    start = {"stream": jax.random.key(1), "fixed": jax.random.key(2), "count": jnp.int32(0)}
    state = make_state(start)
    step = jzero.make_train_step(loss, has_aux=True, mutable=("value",), accumulate_steps=STEPS)
    value = start
    for _ in range(2):
        state, metrics = step(state, BATCH)
        found = np.asarray(metrics["aux"]["numbers"]).reshape(DEVICES, STEPS, ROWS, 2)
        assert len(np.unique(found)) == found.size
        for i in range(STEPS):
            for device in reversed(range(DEVICES)):  # the first one's key is kept
                keys = {name: jax.random.fold_in(value[name], device) for name in ("stream", "fixed")}
                numbers, new = draw({**value, **keys}, ROWS)
                np.testing.assert_allclose(found[device, i], np.stack(numbers, 1), rtol=1e-6)
            value = {**new, "fixed": value["fixed"]}
    for name in ("stream", "fixed"):
        np.testing.assert_array_equal(*(jax.random.key_data(x[name]) for x in (state.value, value)))


def test_a_key_without_its_dtype_is_refused_by_name():
    write = lambda batch, value: jax.random.split(value)[1]
    with pytest.raises(ValueError, match=r"key .*'value': uint32\[2\].* pass `rng=`"):
        make_step(write).eval_shape(make_state(jax.random.PRNGKey(0)), BATCH)
    make_step(write, "equal").eval_shape(make_state(jax.random.PRNGKey(0)), BATCH)


class Online(nnx.Module):
    """A network, an exponential average of it that no optimizer has, and a stream of random numbers."""

    def __init__(self, rngs):
        self.online = nnx.Linear(D, 7, rngs=rngs)
        self.target = nnx.Linear(D, 7, rngs=rngs)
        self.noise = nnx.Dropout(0.5, rngs=rngs)

    def loss(self, x):
        loss = jnp.square(self.online(x) - self.target(x)).mean()
        for name in ("kernel", "bias"):
            old, new = getattr(self.target, name), getattr(self.online, name)
            old[...] = 0.5 * old[...] + 0.5 * new[...] + old[...].sum()
        return loss


def test_frozen_parameters_that_the_loss_writes_go_from_micro_batch_to_micro_batch():
    wrt = nnx.All(nnx.Param, nnx.PathContains("online"))
    make = lambda: Online(nnx.Rngs(0))
    model = make()
    pair = jzero.shard_train_state(
        (model, nnx.Optimizer(model, optax.sgd(0.1), wrt=wrt)), config=shared.config(3), mesh=mesh_of()
    )
    step = jzero.make_train_step(lambda model, batch: model.loss(batch["x"]), accumulate_steps=STEPS)
    plain = make()
    optimizer = nnx.Optimizer(plain, optax.sgd(0.1), wrt=wrt)

    @nnx.jit
    def step_on_one_device(model, optimizer, parts):
        grads = [nnx.grad(Online.loss, argnums=nnx.DiffState(0, wrt))(model, x) for x in parts]
        optimizer.update(model, jax.tree.map(lambda *g: sum(g) / STEPS, *grads))

    for _ in range(2):
        pair, _ = step(pair, BATCH)
        step_on_one_device(plain, optimizer, micro_batches(X))
    whole, _ = jzero.unshard_train_state(pair)
    for name in ("online", "target"):
        np.testing.assert_allclose(
            getattr(whole, name).kernel[...], getattr(plain, name).kernel[...], rtol=1e-5, atol=1e-6
        )


def test_value_and_grad_returns_the_merged_state():
    loss_and_grads = jzero.value_and_grad(loss_writing(histogram), True, mutable=("value",), merge={"value": "summed"})
    (_, aux), _ = loss_and_grads(make_state(np.ones(4, np.int32)), BATCH)
    np.testing.assert_array_equal(aux["value"], 1 + np.bincount(LABELS))


def test_words_are_for_whole_names():
    """`seen` is no word for `seen_max`."""
    merge = Merge({"seen": "summed", r"layers/\d+": "mean"}, DEVICES)
    assert [merge.word(x) for x in ("seen", "seen_max", "un/seen", "layers/12", "layers/1/x")] == [
        *("summed", None, None, "mean", None)
    ]
