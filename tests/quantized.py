"""Rounding by the definition, in NumPy, and states whose parameters and gradients travel as integers."""

import numpy as np

import jzero

WIDTH, STEPS = 61, 8
BATCH = np.random.default_rng(1).normal(size=(96, WIDTH)).astype(np.float32)


def short(x):
    """A number of fp32 to 16 bits of its mantissa, the hidden one included, half to even."""
    bits = int(np.float32(x).view(np.uint32))
    kept, rest = bits >> 8, bits & 0xFF
    kept += rest > 0x80 or (rest == 0x80 and kept & 1)
    return np.uint32(kept << 8).view(np.float32)


# As published with QLoRA.
NF4 = """-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334
    -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
    0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0"""
NF4 = np.array(NF4.split(), np.float32)
MOST = {"int8": 127, "int4": 7, "nf4": 1}


def nearest(z, kind):
    if kind == "nf4":
        return NF4[np.abs(z[:, None] - NF4[None]).argmin(1)]
    return np.clip(np.round(z), -MOST[kind], MOST[kind]).astype(np.float32)


def numpy_rounded(x, dim, kind="int8", num_stacked=0):
    """The blocks of the definition, in NumPy: every index of a stack and of the cut dimension by itself."""
    top = np.float32(MOST[kind])
    y = np.moveaxis(np.asarray(x, np.float32), dim, num_stacked)
    rows = y.reshape(int(np.prod(y.shape[: num_stacked + 1])), -1)
    n = -(-rows.shape[1] // (64 if kind == "nf4" else 256))
    b = -(-rows.shape[1] // n)
    b += b % 2
    out = np.zeros_like(rows)
    for row, new in zip(rows, out, strict=True):
        for start in range(0, rows.shape[1], b):
            block = row[start : start + b]
            scale = min(short(np.max(np.abs(block)) * np.float32(1 / top)), np.float32(2.0**128 - 2.0**112))
            if np.max(np.abs(block)) > 1e-30:
                new[start : start + b] = nearest(block * (np.float32(1) / scale), kind) * scale
    return np.moveaxis(out.reshape(y.shape), num_stacked, dim)


def config_of(stage=3, gather="none", reduce="none", frozen="none", **fields):
    kinds = jzero.Quantization(gather=gather, reduce=reduce, frozen=frozen)
    return jzero.ZeroConfig(stage=stage, persistence_threshold=0, quantization=kinds, **fields)


FLAT, TWO = {"data": 8}, {"node": 2, "data": 4}
TWO_HOPS = {"node_axis": "node"}
SECONDARY = {**TWO_HOPS, "secondary_params": True}
