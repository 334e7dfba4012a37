"""The reckoned seconds of a step, against hand arithmetic."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jzero
from jzero.estimate.step_time import step_time
from jzero.estimate.traced import trace_program
from jzero.machines.machine import machine

H200 = machine("h200:8")
ROWS, WIDTH, HIDDEN, LAYERS = 512, 2048, 8192, 4  # rows per device
BATCH = jax.ShapeDtypeStruct((8 * ROWS, WIDTH), jnp.float32)
MATRIX = WIDTH * HIDDEN


def time_of(loss, shapes, *, stage, tx=None, batch=BATCH, topology="h200:8", steps=1, **fields):
    make = lambda: jzero.TrainState.create(params=jax.tree.map(jnp.zeros, shapes, is_leaf=_is_shape), tx=tx or SGD)
    state = jax.eval_shape(make)
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0, **fields)
    step = jzero.make_train_step(loss, remat="as_written", accumulate_steps=steps)
    return jzero.estimate_step_memory(step, state, batch, config=config, topology=topology).time


SGD = optax.sgd(0.1)
_is_shape = lambda x: isinstance(x, tuple)
linear = lambda params, x: jnp.square(x @ params["w"]).mean()


def test_products_take_their_arithmetic_and_the_rest_its_bytes():
    """Of mean((x·w)²): the product, its square, the gradient of the product, and the gradient of w."""
    found = time_of(linear, {"w": (WIDTH, HIDDEN)}, stage=0)
    product = 2 * ROWS * MATRIX / H200.flops["tf32"]
    outputs = 4 * ROWS * HIDDEN / H200.hbm_bytes_per_s
    weights = 4 * MATRIX / H200.hbm_bytes_per_s
    assert found.update == pytest.approx((3 + 1) * weights, rel=0.01)  # w, gradient, new w; the norm of the gradient
    assert found.compute == pytest.approx(2 * product + (1 + 2) * outputs + found.update, rel=0.01)
    assert found.compute > 2 * product > 0.5 * found.compute


def test_the_peak_is_that_of_the_dtype():
    wide = time_of(linear, {"w": (WIDTH, HIDDEN)}, stage=0)
    exact = lambda params, x: jnp.square(jnp.dot(x, params["w"], precision="highest")).mean()
    slow = time_of(exact, {"w": (WIDTH, HIDDEN)}, stage=0)
    flops = 2 * 2 * ROWS * MATRIX
    assert slow.compute - wide.compute == pytest.approx(flops * (1 / H200.flops["f32"] - 1 / H200.flops["tf32"]))
    batch = jax.ShapeDtypeStruct(BATCH.shape, jnp.bfloat16)
    narrow = time_of(linear, {"w": (WIDTH, HIDDEN)}, stage=0, precision="bf16", batch=batch)
    saved = flops * (1 / H200.flops["tf32"] - 1 / H200.flops["bf16"])
    assert narrow.compute - narrow.update < wide.compute - wide.update - 0.9 * saved


@pytest.mark.parametrize(("stage", "passes", "after"), [(0, 2, 0), (1, 1, 1), (2, 1, 1), (3, 3, 0)])
def test_collectives_of_the_passes_and_of_the_update(stage, passes, after):
    found = time_of(linear, {"w": (WIDTH, HIDDEN)}, stage=stage)
    once = 4 * MATRIX * 7 / 8 / H200.intra_link_bytes_per_s
    kept = stage == 3  # one product: the backward pass does not need the matrix
    assert found.communication == pytest.approx((passes - kept) * once, rel=0.01)
    assert found.after_update == pytest.approx(after * once, rel=0.01, abs=1e-6)


def test_between_nodes_the_port_is_the_limit():
    batch = jax.ShapeDtypeStruct((16 * ROWS, WIDTH), jnp.float32)
    found = time_of(linear, {"w": (WIDTH, HIDDEN)}, stage=0, batch=batch, topology="h200:16")
    sent = 2 * 4 * MATRIX * 15 / 16
    assert found.communication == pytest.approx(sent * 2 / 16 / H200.inter_link_bytes_per_s, rel=0.01)


def scanned(params, x):
    layer = lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None)
    return jnp.square(jax.lax.scan(layer, x, params)[0]).mean()


def test_a_loop_takes_its_time_for_each_turn():
    shapes = lambda layers: {"up": (layers, WIDTH, HIDDEN), "down": (layers, HIDDEN, WIDTH)}
    one, two, four = (time_of(scanned, shapes(layers), stage=3) for layers in (LAYERS, 2 * LAYERS, 4 * LAYERS))
    assert four.compute - two.compute == pytest.approx(2 * (two.compute - one.compute), rel=0.01)
    arithmetic = 6 * 2 * ROWS * MATRIX / H200.flops["tf32"]  # two products forward, two for each of them backward
    assert LAYERS * arithmetic < two.compute - one.compute < 1.5 * LAYERS * arithmetic


def test_what_a_softmax_reduces_is_read_once():
    """The maximum and the sum of a row are part of the kernel that divides it, unless the backward pass reads them."""
    rows, weights = jnp.zeros((ROWS, HIDDEN)), jnp.zeros((HIDDEN, 1))
    forward = lambda x, w: (jax.nn.softmax(x) @ w).sum()
    seconds = lambda fn: step_time(trace_program(jax.jit(fn).trace(rows, weights).jaxpr, [1, 1]), [], H200, 1).compute
    once = 4 * ROWS * HIDDEN / H200.hbm_bytes_per_s
    assert seconds(forward) == pytest.approx(3 * once, rel=0.01)  # rows are read, shares are written, and read
    kept, recomputed = (seconds(jax.value_and_grad(fn)) for fn in (forward, jax.checkpoint(forward)))
    # If they are kept, either reads the rows by itself; if not, no exponentials are written and read for the gradient.
    assert kept - recomputed == pytest.approx((2 + 2) * once, rel=0.01)


@pytest.mark.parametrize("row", [1024, 1000, 1178, 768])
def test_rows_of_a_softmax_that_fill_no_tile_are_read_again(row):
    """By the kernels for H200: one computes the gradient of scores if rows fill seven eighths of a power of two."""
    x, keys, values = jnp.zeros((ROWS, 1)), jnp.zeros((1, row)), jnp.zeros((row, 1))
    attended = jax.checkpoint(lambda scores: (jax.nn.softmax(scores) @ values).sum())
    program = trace_program(jax.jit(jax.grad(lambda x: attended(x @ keys))).trace(x).jaxpr, [1])
    once = 4 * ROWS * row / H200.hbm_bytes_per_s
    products = 3  # write scores and the gradient of shares, and read that of scores
    last = 3  # reads scores, or exponentials, and the gradient of shares, and writes that of scores
    # Else exponentials are made of scores and written, read for their sum, and with the gradient for another.
    apart = 0 if row in (1000, 1024) else 2 + 1 + 2
    assert step_time(program, [], H200, 1).compute == pytest.approx((products + last + apart) * once, rel=0.02)


@pytest.mark.parametrize("rows", [4096, 4128])
@pytest.mark.parametrize("again", [False, True])
def test_what_a_divided_sum_needs_is_written_where_it_was_computed(rows, again):
    """As kernels for H200 write the `tanh` of a GELU whose bias gets a gradient; a sum of 4,096 rows is not divided."""
    params = {"up": jnp.zeros((1, WIDTH)), "bias": jnp.zeros((1, WIDTH)), "down": jnp.zeros((WIDTH, 1))}
    block = lambda p, x: jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"]
    loss = lambda p: (jax.checkpoint(block) if again else block)(p, jnp.zeros((rows, 1))).sum()
    program = trace_program(jax.jit(jax.value_and_grad(loss)).trace(params).jaxpr, [1] * 3)
    divided, once = rows > 4096, 4 * rows * WIDTH
    stored = divided or not again
    forward = 1 + 2 + (not again) + 1  # a product, the GELU of it, the other product
    recomputed = again * (1 + 2 + divided)
    backward = 1 + 1 + 3 + stored + (not divided) + 1  # two products, the gradient of the GELU, the bias, a product
    seconds = (forward + recomputed + backward) * once / H200.hbm_bytes_per_s
    assert step_time(program, [], H200, 1).compute == pytest.approx(seconds, rel=0.01)
    assert sum(x.name.endswith(":tanh") for x in program.buffers) == stored


def test_of_a_conditional_a_usual_step_counts():
    """The branch with one product in the loss, that with three in the update."""
    rows, weights = jnp.zeros((ROWS, WIDTH), jnp.bfloat16), jnp.zeros((WIDTH, WIDTH), jnp.bfloat16)

    def seconds(scope):
        def fn(x, w):
            with jax.named_scope(scope):
                return jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w @ w, lambda: x @ w)

        return step_time(trace_program(jax.jit(fn).trace(rows, weights).jaxpr, [1, 1]), [], H200, 1).compute

    product = 2 * ROWS * WIDTH**2 / H200.flops["bf16"]
    assert seconds("loss") == pytest.approx(product, rel=0.01)
    assert seconds("zero_update") == pytest.approx(3 * product, rel=0.01)


def test_figures_are_told():
    state = jax.eval_shape(lambda: jzero.TrainState.create(params={"w": jnp.zeros((WIDTH, HIDDEN))}, tx=SGD))
    step = jzero.make_train_step(linear)
    mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    options = {"config": jzero.ZeroConfig(stage=3), "mesh": mesh}
    unknown = jzero.estimate_step_memory(step, state, BATCH, **options)
    assert unknown.time is unknown.seconds is None
    assert "time of a step" not in str(unknown)
    found = jzero.estimate_step_memory(step, state, BATCH, config=options["config"], topology="h200:8")
    assert found.seconds == found.time.seconds == found.to_dict()["time"]["seconds"]
    assert f"time of a step: {1e3 * found.seconds:.3g} ms" in str(found)


def test_of_what_is_sliced_only_slices_are_read():
    """Rows looked up in a table, a slice that a sum reads, and an update in place."""

    def moved(fn, *shapes):
        args = [jax.ShapeDtypeStruct(shape, jnp.int32 if len(shape) == 1 else jnp.float32) for shape in shapes]
        program = trace_program(jax.jit(fn).trace(*args).jaxpr, [1] * len(args))
        return sum(x.num_bytes for x in program.operations) + program.result_bytes

    row = 4 * WIDTH
    assert moved(lambda table, i: table[i], (HIDDEN, WIDTH), (5,)) == pytest.approx(2 * 5 * row, rel=0.01)
    assert moved(lambda x: x[:, :5].sum(1), (HIDDEN, WIDTH)) == pytest.approx(4 * HIDDEN * (5 + 1))
    put = lambda x, y: jax.lax.dynamic_update_slice(x, y, (3, 0))
    assert moved(put, (HIDDEN, WIDTH), (1, WIDTH)) == pytest.approx(2 * row, rel=0.01)


def test_what_is_reduced_after_all_micro_batches_has_nothing_beside_it():
    found = time_of(linear, {"w": (WIDTH, HIDDEN)}, stage=1, steps=4)
    passes = found.compute - found.update
    assert found.communication > 0
    end = passes + found.communication + max(found.update, found.after_update)
    assert found.seconds == pytest.approx(end, rel=0.001)


def test_a_gather_between_the_passes_sends_and_neither_computes_nor_copies():
    mesh = jzero.make_mesh()
    whole = NamedSharding(mesh, PartitionSpec())
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(2 * x, whole))(jnp.ones((64, 8)))
    program = trace_program(jaxpr, [mesh.size], fuses_products=False)
    (sent,), (gather,) = program.transfers, [x for x in program.operations if x.is_transfer]
    assert (sent.kind, sent.num_bytes, sent.axes) == ("all-gather", 64 * 8 * 4, ("data",))
    assert gather.gathers
    assert not gather.may_wait
    assert gather.num_bytes == 0
