"""Devices with pieces of the same rows exchange only what is in a window, and see what one device sees."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jzero.analysis.collectives import program_collectives
from jzero.analysis.hlo import parse_hlo
from jzero.attention import own_part, whole_rows
from jzero.attention.causal import attend_in_parts
from jzero.attention.plain import Places, Scores, attend_plainly
from tests.tiers import default_for

HEADS, KV_HEADS, SIZE, ROWS = 4, 2, 32, 2
CASES = [
    # devices, tokens of a piece, window, packed rows, kernel
    (4, 7, 5, True, "plain"),
    (4, 7, 1, False, "plain"),
    (4, 7, 8, True, "plain"),
    (4, 7, 18, True, "plain"),  # two pieces and a half
    (3, 5, 9, False, "plain"),
    (2, 9, 6, True, "plain"),
    (3, 128, 77, True, "splash"),
    (4, 128, 300, True, "splash"),
    (2, 256, 201, False, "splash"),
]


def operands(tokens, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(ROWS, tokens, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in [*shapes, (HEADS,)]]


def places_of(tokens, *, packed):
    """Three examples of odd lengths and padding, or one."""
    sizes = [tokens // 5, tokens // 2 + 1, tokens // 6] if packed else [tokens]
    rest = tokens - sum(sizes)
    positions = np.concatenate([np.arange(n) for n in sizes] + [np.zeros(rest, int)])
    segments = np.repeat([*range(len(sizes)), -1], [*sizes, rest])
    return Places(*(jnp.asarray(np.broadcast_to(x[None], (ROWS, tokens))) for x in (positions, segments)))


def scores(window, sinks):
    return Scores(window, None, sinks, SIZE**-0.5)


def of_devices(count, window, kernel, places, *, joins=True):
    """Returns attention of devices with pieces of rows, of whole rows."""
    mesh = jax.make_mesh((count,), ("context",), devices=jax.devices()[:count])

    def run(q, k, v, sinks):
        own = [own_part(x, "context") for x in (q, k, v)]
        here = Places(*(own_part(x, "context") for x in places))
        attended = attend_in_parts(kernel, *own, here, places, scores(window, sinks), "context")
        return whole_rows(attended, "context") if joins else attended

    out = P() if joins else P(None, "context")
    return jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=out, check_vma=False)


@pytest.mark.parametrize(("count", "piece", "window", "packed", "kernel"), default_for(CASES[3:7:3], CASES))
def test_windows_see_what_one_device_sees(count, piece, window, packed, kernel):
    tokens = 2 * count * piece
    places = places_of(tokens, packed=packed)
    own = places.segments >= 0  # what padding sees is of no account

    def one(q, k, v, sinks):
        return attend_plainly(q, k, v, places, places, scores(window, sinks))

    several = of_devices(count, window, kernel, places)
    wanted, found = (
        jax.jit(jax.value_and_grad(lambda *x, f=f: jnp.sin(f(*x) * own[..., None, None]).sum(), range(4)))
        for f in (one, several)
    )
    (want, wants), (value, grads) = wanted(*operands(tokens)), found(*operands(tokens))
    np.testing.assert_allclose(value, want, rtol=3e-6, atol=5e-4)
    for x, y in zip(grads, wants, strict=True):
        np.testing.assert_allclose(x, y, atol=3e-6 * max(1, np.abs(y).max()))


def sent(count, piece, window):
    """Returns the bytes that a device sends for attention of one layer, by kind of collective, as compiled."""
    tokens = 2 * count * piece
    attend = of_devices(count, window, "plain", places_of(tokens, packed=True), joins=False)
    program = parse_hlo(jax.jit(attend).lower(*operands(tokens)).compile().as_text())
    found = collections.Counter()
    for x in program_collectives(program):
        found[x.kind] += x.sent_bytes * x.times
    return found


def test_windows_alone_are_sent():
    """Twice, of keys and of values: to the next early piece, to the next late one, and from the one to the other."""
    token = ROWS * KV_HEADS * SIZE * 4
    assert sent(4, 35, 18) == {"collective-permute": 2 * 3 * 17 * token}
    assert sent(4, 35, None) == sent(4, 35, 106) == {"all-gather": 2 * 6 * 35 * token}
