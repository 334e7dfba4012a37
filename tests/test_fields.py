"""Fields that the loss reads and writes: what it is given is its own, in natural shapes, and keeps its own dtype.

The reference is plain optax on one device, or arithmetic.
"""

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from flax.training.train_state import TrainState

import jzero
from tests import shared
from tests.tiers import default_for

D, V, B = 5, 3, 32
WIDTH = 27  # which eight devices do not divide
FP16 = jzero.Precision(compute_dtype="float16", loss_scale=8.0)
close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6)


def batch_of(seed, size=D):
    draw = np.random.default_rng(seed).normal
    return {"x": draw(size=(B, size)).astype(np.float32), "y": draw(size=(B, V)).astype(np.float32)}


def square(params, batch):
    return jnp.square(batch["x"] @ params["w"] - batch["y"]).mean()


def square_state(extra, stage=3, **fields):
    return shared.sharded({"w": jnp.ones((D, V))}, shared.sgd(0.1), stage, extra=extra, **fields)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Counts:
    first: Any
    others: list[Any]


@struct.dataclass
class Struct:
    counts: dict[str, Any]


def containers():
    """A count in every kind of container that Python, Flax and jax change in place."""
    zero = lambda: jnp.zeros(())
    return {
        "count": zero(),
        "list": [zero(), {"deep": zero()}],
        "dataclass": Counts(zero(), [zero()]),
        "struct": Struct({"in": zero()}),
        "variable": nnx.Variable(zero()),
        "state": nnx.State({"norm": {"mean": nnx.BatchStat(zero())}}),
    }


def count_in_place(extra):
    extra["count"] += 1
    extra["list"][0] += 1
    extra["list"][1]["deep"] += 1
    extra["dataclass"].first += 1
    extra["dataclass"].others[0] += 1
    extra["struct"].counts["in"] += 1
    extra["variable"][...] += 1
    extra["state"]["norm"]["mean"][...] += 1


@pytest.mark.parametrize("stage", default_for([3], [0, 3]))
@pytest.mark.parametrize("precision", default_for(["bf16"], ["bf16", FP16]))
def test_what_the_loss_writes_in_place_is_kept(stage, precision):
    def loss(params, batch, extra):
        count_in_place(extra)
        return square(params, batch), {"extra": extra}

    options = {"has_aux": True, "mutable": ("extra",)}
    state = square_state(containers(), stage, precision=precision)
    step = jzero.make_train_step(loss, accumulate_steps=2, **options)
    for seed in range(2):
        state, _ = step(state, batch_of(seed))
    assert [float(x) for x in jax.tree.leaves(state.extra)] == [4] * 8
    (_, aux), _ = jzero.value_and_grad(loss, **options)(state, batch_of(0))
    assert [float(x) for x in jax.tree.leaves(aux["extra"])] == [5] * 8
    count = jzero.make_eval_step(lambda *args, extra: loss(*args, extra)[1]["extra"]["count"], mutable=("extra",))
    assert float(count(state, batch_of(0))) == float(count(state, batch_of(0))) == 5


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (lambda extra: extra.update(new=jnp.zeros(())), "extra/new: .* added"),
        (lambda extra: extra.pop("count"), "extra/count: .* deleted"),
        (lambda extra: extra["list"].append(jnp.zeros(())), "extra/list/0: .* added"),
    ],
)
def test_leaves_that_the_loss_adds_or_deletes_in_place_are_named(write, what):
    def loss(params, batch, extra):
        write(extra)
        return square(params, batch), {"extra": extra}

    step = jzero.make_train_step(loss, has_aux=True, mutable=("extra",))
    with pytest.raises(ValueError, match=what):
        step(square_state({"count": jnp.zeros(()), "list": []}), batch_of(0))


class Net(nnx.Module):
    def __init__(self, rngs, axis="data"):
        self.first = nnx.Linear(D, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, axis_name=axis, rngs=rngs)
        self.last = nnx.Linear(WIDTH, V, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def loss(self, batch):
        self.calls[...] += 1
        return jnp.square(self.last(jnp.tanh(self.norm(self.first(batch["x"])))) - batch["y"]).mean()


class OfNnx(TrainState):
    rest: Any


@pytest.mark.parametrize("copy", [False, True])
def test_an_nnx_state_in_a_linen_state(copy):
    """The loss merges it with or without a copy of its variables; the reference is NNX's own loop on one device."""
    graphdef, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, batch, rest):
        model = nnx.merge(graphdef, params, rest, copy=copy)
        value = model.loss(batch)
        return value, {"rest": nnx.state(model, nnx.Not(nnx.Param)) if copy else rest}

    state = OfNnx.create(apply_fn=None, params=params, rest=rest, tx=shared.sgd(0.1))
    state = jzero.shard_train_state(state, config=shared.config(3))
    step = jzero.make_train_step(loss, has_aux=True, mutable=("rest",))
    plain = Net(nnx.Rngs(0), axis=None)
    optimizer = nnx.Optimizer(plain, optax.sgd(0.1), wrt=nnx.Param)
    for seed in range(3):
        state, _ = step(state, batch_of(seed))
        optimizer.update(plain, nnx.jit(nnx.grad(Net.loss))(plain, batch_of(seed)))
    whole = jzero.unshard_train_state(state)
    want = nnx.to_pure_dict(nnx.state(plain))
    for found in (whole.params, whole.rest):
        for path, x in nnx.to_flat_state(found):
            value = functools.reduce(lambda tree, key: tree[key], path, want)
            close(x.get_value(), value, rtol=1e-4, atol=1e-5, err_msg=str(path))


# Fields of the shapes of the parameters.


def params_of(seed, width=WIDTH):
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 3, jnp.float32)
    rng = np.random.default_rng(seed)
    return {"up": draw(D, width), "layers": draw(2, width, width), "bias": draw(width), "down": draw(width, V)}


def predict(params, x):
    x = jnp.tanh(x @ params["up"] + params["bias"][None])
    x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, params["layers"])
    return x @ params["down"]


def distance(params, batch, target=None):
    goal = batch["y"] if target is None else batch["y"] + 0.5 * predict(target, batch["x"])
    return jnp.square(predict(params, batch["x"]) - jax.lax.stop_gradient(goal)).mean()


def soft(params, target, count):
    return jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, target, params)


def in_place(params, target, count):
    target["up"] = 0.5 * (target["up"] + params["up"])
    target["layers"] = target["layers"].at[1].set(params["layers"][0])
    return target


UPDATES = {
    "hard": lambda params, target, count: params,
    "soft": soft,
    "parameters first": lambda params, target, count: jax.tree.map(lambda p, t: 0.1 * p + 0.9 * t, params, target),
    "optax": lambda params, target, count: optax.incremental_update(params, target, 0.1),
    "every second": lambda params, target, count: jax.lax.cond(count % 2 == 0, lambda: params, lambda: target),
    "periodic": lambda params, target, count: optax.periodic_update(params, target, count, 2),
    "some": lambda params, target, count: target | {"up": params["up"]},
    "none": lambda params, target, count: target,
    "in place": in_place,
}


class WithTarget(TrainState):
    target: Any
    count: Any


def states_with_target(width=WIDTH, stage=3, **fields):
    """A plain and a sharded state."""

    def make():
        fields = {"target": params_of(1, width), "count": jnp.int32(0)}
        return WithTarget.create(apply_fn=None, params=params_of(0, width), tx=shared.adamw(1e-2), **fields)

    return make(), jzero.shard_train_state(make(), config=shared.config(stage, **fields))


def loss_with(update):
    def loss(params, batch, target, count):
        value = distance(params, batch, target)
        new = jax.lax.stop_gradient(update(params, target, count + 1))
        return value, {"target": new, "count": count + 1}

    return loss


@pytest.mark.parametrize(
    ("update", "width", "stage", "fields"),
    default_for(
        [("in place", 27, 3, ()), ("every second", 27, 3, ()), ("soft", 27, 3, (("reshard_after_forward", False),))],
        [
            *((update, 27, 3, ()) for update in UPDATES),
            *(("soft", width, stage, ()) for width in (24, 27) for stage in (1, 3) if (width, stage) != (27, 3)),
            ("soft", 27, 3, (("reshard_after_forward", False),)),
            ("soft", 27, 3, (("offload", jzero.Offload(optimizer="host", params="host")),)),
        ],
    ),
)
def test_a_target_network_that_the_loss_moves(update, width, stage, fields):
    loss = loss_with(UPDATES[update])
    plain, state = states_with_target(width, stage, **dict(fields))
    step = jzero.make_train_step(loss, has_aux=True, mutable=("target", "count"))
    grad = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for seed in range(3):
        state, _ = step(state, batch_of(seed))
        (_, aux), grads = grad(plain.params, batch_of(seed), plain.target, plain.count)
        plain = plain.apply_gradients(grads=grads).replace(**aux)
    whole = jzero.unshard_train_state(state)
    jax.tree.map(close, (whole.params, whole.target, whole.count), (plain.params, plain.target, plain.count))
    part = lambda x: x.addressable_shards[0].data.shape
    if stage == 3:  # it is stored as before, and never whole
        assert jax.tree.map(part, state.target) == jax.tree.map(part, states_with_target(width)[1].target)
    (_, aux), _ = jzero.value_and_grad(loss, has_aux=True, mutable=("target", "count"))(state, batch_of(0))
    assert jax.tree.structure(aux["target"]) == jax.tree.structure(state.target)


def test_an_evaluation_sees_natural_shapes():
    plain, state = states_with_target()
    evaluate = jzero.make_eval_step(distance, mutable=("target",))
    close(evaluate(state, batch_of(0)), distance(plain.params, batch_of(0), plain.target))


def test_other_words_than_the_mean_for_fields_that_are_cut():
    """Fisher information, the sum of squared gradients of each device's rows, and its maximum."""
    grad = jax.grad(distance)

    def loss(params, batch, extra):
        squares = jax.tree.map(jnp.square, grad(params, batch))
        largest = jax.tree.map(jnp.maximum, extra["largest"], squares)
        new = {"sum": jax.tree.map(jnp.add, extra["sum"], squares), "largest": largest}
        return distance(params, batch), {"extra": new}

    params = params_of(0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = shared.sharded(params, shared.sgd(0.0), 3, extra={"sum": params, "largest": zeros})
    words = {"extra/sum/.*": "summed", "extra/largest/.*": "max"}
    step = jzero.make_train_step(
        loss, has_aux=True, mutable=("extra",), merge=words, accumulate_steps=2, check_rows=False
    )
    state, _ = step(state, batch_of(0))
    parts = jax.tree.map(lambda x: x.reshape(16, B // 16, -1), batch_of(0))
    squares = jax.tree.map(jnp.square, jax.vmap(jax.jit(grad), (None, 0))(params, parts))
    found = jzero.unshard_train_state(state).extra
    jax.tree.map(lambda x, start, all_of: close(x, start + all_of.sum(0)), found["sum"], params, squares)
    jax.tree.map(lambda x, all_of: close(x, all_of.max(0)), found["largest"], squares)


def test_parameters_are_no_field_to_name():
    step = jzero.make_train_step(lambda p, batch, params: (square(p, batch), {}), has_aux=True, mutable=("params",))
    with pytest.raises(ValueError, match=r"\['params'\].* arrays are \['extra', 'opt_state', 'step'\], beside the"):
        step(square_state(None), batch_of(0))


# Teachers.

SIZES = (64, 67)  # large enough to travel in blocks
teacher_batch = functools.partial(batch_of, size=SIZES[0])


class Pair(nnx.Module):
    def __init__(self, rngs):
        self.student, self.teacher = nnx.Linear(*SIZES, rngs=rngs), nnx.Linear(*SIZES, rngs=rngs)

    def loss(self, batch):
        """Moves the teacher by less than half of the precision of bf16."""
        goal = jax.lax.stop_gradient(self.teacher(batch["x"]))
        value = jnp.square(self.student(batch["x"]) - goal).mean()
        old, new = self.teacher.kernel, jax.lax.stop_gradient(self.student.kernel[...])
        old[...] = 0.999 * old[...] + 0.001 * new
        return value


def pair_of(way, **fields):
    """A teacher outside of `wrt`, one that the optimizer does not train, and one outside of `trainable`."""
    model = Pair(nnx.Rngs(0))
    of_student = lambda path, _: path[0] == "student"
    label = lambda params: jax.tree_util.tree_map_with_path(lambda path, _: path[0].key, params)
    parts = optax.multi_transform({"student": optax.sgd(0.0), "teacher": optax.set_to_zero()}, label)
    optimizer = nnx.Optimizer(
        model,
        parts if way == "optimizer" else optax.sgd(0.0),
        wrt=nnx.All(nnx.Param, of_student) if way == "wrt" else nnx.Param,
    )
    keywords = {"trainable": "student/.*"} if way == "trainable" else {}
    return (model, optimizer), functools.partial(
        jzero.shard_train_state,
        (model, optimizer),
        config=jzero.ZeroConfig(persistence_threshold=0, **fields),
        **keywords,
    )


BF16_BY_RULE = {"teacher/.*": jzero.LeafRule(compute_dtype="bfloat16")}
TEACHERS = [
    ("wrt", {"stage": 3, "precision": "bf16"}),
    ("optimizer", {"stage": 3, "precision": "bf16", "quantization": jzero.Quantization(gather="int8")}),
    ("trainable", {"stage": 1, "precision": FP16}),
    ("wrt", {"stage": 0, "precision": "bf16"}),
    ("optimizer", {"stage": 1, "precision": "bf16"}),
    ("trainable", {"stage": 3, "precision": "bf16", "rules": BF16_BY_RULE}),
    ("wrt", {"stage": 3, "quantization": jzero.Quantization(gather="int8")}),
]


@pytest.mark.parametrize(("way", "fields"), default_for(TEACHERS[:3], TEACHERS))
def test_a_teacher_that_the_loss_moves_keeps_its_own_dtype(way, fields):
    (model, _), shard = pair_of(way, **fields)
    first, aim = np.array(model.teacher.kernel[...]), np.array(model.student.kernel[...])
    pair, step = shard(), jzero.make_train_step(Pair.loss, accumulate_steps=2)
    for seed in range(10):
        pair, _ = step(pair, teacher_batch(seed))
    jzero.value_and_grad(Pair.loss)(pair, teacher_batch(0))
    found = jzero.unshard_train_state(pair)[0].teacher.kernel[...]
    # The student is rounded, whose share is 2 %.
    np.testing.assert_allclose(found, aim + 0.999**21 * (first - aim), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("precision", "warns"), [("bf16", True), ("fp32", False)])
def test_a_teacher_that_is_trained_without_a_gradient_is_named(precision, warns):
    """Masters are out of the loss's reach. Weights with a gradient, as those of `nnx.SpectralNorm`, are fine."""
    _, shard = pair_of("none", stage=3, precision=precision)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jzero.make_train_step(Pair.loss)(shard(), teacher_batch(0))
    assert ["'teacher/kernel'" in str(x.message) for x in caught if "no gradient" in str(x.message)] == [True] * warns


def test_the_reference_and_the_plan_know_of_a_teacher():
    fields = {"stage": 3, "precision": "bf16", "quantization": jzero.Quantization(gather="int8")}
    pair, shard = pair_of("wrt", **fields)
    config = shared.config(**fields | {"quantization": jzero.Quantization()})
    report = jzero.check_equivalence(Pair.loss, pair, [teacher_batch(0)] * 2, config=config)
    report.check(grad_norm=1e-2)
    step = jzero.make_train_step(Pair.loss)
    assert not jzero.analyze(step, shard(), teacher_batch(0)).violations
    plan = step.plan(shard(), teacher_batch(0))
    exact = {x.path: x.reason for x in plan.unquantized}
    assert exact["frozen/teacher/kernel"] == "written by the loss"
    (row,) = (line for line in str(plan).splitlines() if line.startswith("frozen/teacher/kernel") and "none:" in line)
    assert row.rstrip().endswith("none: not trained")


def test_a_teacher_in_a_few_bits_is_refused():
    _, shard = pair_of("wrt", stage=3, quantization=jzero.Quantization(frozen="int8"))
    with pytest.raises(ValueError, match=r"stored in a few bits .*'teacher/kernel'.* LeafRule\(quantize=False\)"):
        jzero.make_train_step(Pair.loss)(shard(), teacher_batch(0))
