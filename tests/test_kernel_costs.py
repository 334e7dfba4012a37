"""The operations of kernels, in estimates and in modelled steps."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

import jzero
from jzero.analysis.hlo import parse_hlo
from jzero.analysis.schedule import simulate
from jzero.estimate.traced import trace_alone
from jzero.machines.machine import machine
from tests import shared

ROWS, HEADS, SIZE, WIDTH, BLOCK = 2, 3, 512, 128, 128
PRODUCT = 2 * BLOCK * BLOCK * WIDTH


def kernels_of(fn, *args):
    found = trace_alone(jax.make_jaxpr(fn)(*args)).kernels
    return {name: None if x is None else x.flops for (name, _), (x, *_) in found.items()}


def gradient(attend):
    return jax.grad(lambda *args: attend(*args).astype(jnp.float32).sum(), (0, 1, 2))


def arrays(*shape):
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 3


@pytest.mark.parametrize(
    ("mask", "blocks"),
    [
        (masks.CausalMask((SIZE, SIZE)), 4 + 3 + 2 + 1),
        (masks.LocalMask((SIZE, SIZE), (BLOCK, 0), 0), 4 + 3),
        (masks.FullMask((SIZE, SIZE)), 16),
    ],
)
def test_blocks_that_a_mask_hides_do_not_count(mask, blocks):
    """In a loop, too, which gets the numbers of the blocks as a constant."""
    attend = jax.vmap(splash.make_splash_mha_single_device(masks.MultiHeadMask([mask] * HEADS)))

    def twice(q, k, v):
        return jax.lax.scan(lambda q, none: (attend(q, k, v), None), q, None, length=2)[0]

    for fn in (attend, twice):
        found = kernels_of(gradient(fn), *arrays(ROWS, HEADS, SIZE, WIDTH))
        each = ROWS * HEADS * blocks * PRODUCT
        names = ("fwd_residuals", "dkv_no_residuals", "dq_no_residuals")
        assert [found[f"splash_mha_{name}"] for name in names] == [2 * each, 4 * each, 3 * each]


def test_numbers_of_the_grid_are_known():
    """Flash attention for TPUs leaves out blocks by their place alone, and says what its forward pass takes."""
    attend = lambda causal: lambda q, k, v: flash_attention(q, k, v, causal=causal)
    causal, whole = (
        trace_alone(jax.make_jaxpr(gradient(attend(x)))(*arrays(ROWS, HEADS, SIZE, WIDTH))).kernels
        for x in (True, False)
    )
    each = ROWS * HEADS * PRODUCT
    assert sorted(x.flops for (x,) in whole.values())[-2:] == [3 * 16 * each, 4 * 16 * each]
    assert sorted(x.flops for (x,) in causal.values())[-1] == 4 * 10 * each


def call(kernel, x, **options):
    out = jax.ShapeDtypeStruct((len(x), len(x)), x.dtype)
    return pl.pallas_call(kernel, out_shape=out, interpret=True, name="mine", **options)(x)


def of_unknown_length(x_ref, out_ref):
    out_ref[...] = jnp.zeros_like(out_ref)
    count = jax.lax.convert_element_type(x_ref[0, 0], jnp.int32)

    @pl.loop(0, count)
    def _(i):
        out_ref[...] += x_ref[...] @ x_ref[...].T


def test_loops_branches_and_what_the_user_says():
    x = jnp.ones((24, 5))

    def loops(x_ref, out_ref):
        @pl.when(pl.program_id(0) % 2 == 0)
        def _():
            turns = pl.program_id(0)
            add = lambda i, y: y + x_ref[...] @ x_ref[...].T
            out_ref[...] = jax.lax.fori_loop(0, turns, add, jnp.zeros_like(out_ref))

    each = 2 * 24 * 24 * 5
    assert kernels_of(lambda x: call(loops, x, grid=(5,)), x) == {"mine": (0 + 2 + 4) * each}
    said = pl.CostEstimate(flops=123, bytes_accessed=1, transcendentals=1)
    assert kernels_of(lambda x: call(of_unknown_length, x, cost_estimate=said), x) == {"mine": 123}
    assert kernels_of(lambda x: call(of_unknown_length, x), x) == {"mine": None}


def test_estimates_name_kernels_of_unknown_arithmetic():
    attend = jax.custom_vjp(lambda x: call(of_unknown_length, x))
    attend.defvjp(lambda x: (attend(x), x), lambda x, ct: (ct @ x,))
    loss = lambda params, batch: jnp.square(attend(batch @ params["w"])).mean()
    plain = jzero.TrainState.create(params={"w": jnp.eye(5)}, tx=shared.sgd(0.1))
    arguments = (jzero.make_train_step(loss), plain, jnp.ones((24, 5)))
    memory = jzero.estimate_step_memory(*arguments, config=shared.config(3), topology="h200:8")
    assert memory.unknown_kernels == ("mine",)
    assert "unknown arithmetic, which count by their bytes: mine" in str(memory)


HLO = """HloModule m, entry_computation_layout={()->f32[8]{0}}

ENTRY %main () -> f32[8] {
  %x = bf16[4,1024]{1,0} constant({...})
  ROOT %k = bf16[4,1024]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={km={
"xprof_metadata":"{\\"block_q\\": 128}"
}}, metadata={op_name="f/NAME/call"}
}
"""


def test_modelled_steps_take_the_arithmetic_of_kernels_from_the_trace():
    x = jnp.ones((4, 1024), jnp.bfloat16)

    def kernel(x_ref, out_ref):
        out_ref[...] = ((x_ref[...].T @ x_ref[...])[:4]).astype(out_ref.dtype)

    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, name="mine")
    kernels = trace_alone(jax.make_jaxpr(call)(x)).kernels
    v5p = machine("v5p:2x2x2")
    timeline, notes = simulate(parse_hlo(HLO.replace("NAME", "mine")), v5p, kernels)
    assert timeline.seconds == pytest.approx(2 * 4 * 1024**2 / v5p.flops["bf16"])
    assert notes == []
    timeline, (note,) = simulate(parse_hlo(HLO.replace("NAME", "other")), v5p, kernels)
    assert "counted by its bytes" in note
    assert timeline.seconds == pytest.approx(2 * 4 * 1024 * 2 / v5p.hbm_bytes_per_s)
