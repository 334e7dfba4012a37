"""What instructions of a compiled program move to and from main memory, by their text and by hand."""

import pytest

from jzero.analysis.costs import _bytes
from jzero.analysis.hlo import parse_hlo
from jzero.analysis.schedule import simulate
from jzero.machines.machine import machine

BIG, SMALL, INDEX = 4 * 1024, 4 * 16, 4
PROGRAM = """HloModule m, is_scheduled=true

%add (a: f32[1024], b: f32[1024]) -> f32[1024] {{
  %a = f32[1024]{{0}} parameter(0)
  %b = f32[1024]{{0}} parameter(1)
  ROOT %sum = f32[1024]{{0}} add(%a, %b)
}}

%two (c: f32[1024]) -> (f32[1024], f32[16]) {{
  %c = f32[1024]{{0}} parameter(0)
  %twice = f32[1024]{{0}} add(%c, %c)
  %first = f32[16]{{0}} slice(%c), slice={{[0:16]}}
  ROOT %both = (f32[1024]{{0}}, f32[16]{{0}}) tuple(%twice, %first)
}}

ENTRY %main (x: f32[1024], y: f32[1024], u: f32[16], i: s32[]) -> f32[1024] {{
  %x = f32[1024]{{0}} parameter(0)
  %y = f32[1024]{{0}} parameter(1)
  %u = f32[16]{{0}} parameter(2)
  %i = s32[] parameter(3)
  %fast = f32[1024]{{0:S(1)}} copy(%x)
  ROOT %done = {}
}}
"""
MOVED = {
    "f32[1024]{0} add(%x, %y)": 3 * BIG,
    "f32[1024]{0:S(1)} add(%x, %y)": 2 * BIG,
    "f32[1024]{0} add(%x, %fast)": 2 * BIG,
    "f32[1024]{0} copy(%x)": 2 * BIG,
    "f32[1024]{0} copy(%fast)": BIG,
    "f32[16]{0} slice(%x), slice={[0:16]}": 2 * SMALL,
    "f32[16]{0} dynamic-slice(%x, %i), dynamic_slice_sizes={16}": 2 * SMALL,
    "f32[1024]{0} dynamic-update-slice(%x, %u, %i)": 2 * SMALL,
    "f32[1024]{0} scatter(%x, %i, %u), to_apply=%add": INDEX + 2 * SMALL,
    "f32[1024]{0} fusion(%x, %y), kind=kLoop, calls=%add": 3 * BIG,
    "f32[1024]{0:S(1)} fusion(%x, %y), kind=kLoop, calls=%add": 2 * BIG,
    "f32[1024]{0} fusion(%x, %fast), kind=kLoop, calls=%add": 2 * BIG,
    "(f32[1024]{0}, f32[16]{0}) fusion(%x), kind=kLoop, calls=%two": 2 * BIG + SMALL,
}


@pytest.mark.parametrize("text", MOVED)
def test_bytes_that_an_instruction_moves(text):
    program = parse_hlo(PROGRAM.format(text))
    main = program.computations[program.entry]
    assert _bytes(program, main, main.root) == MOVED[text]


NESTED = """HloModule m, is_scheduled=true

%slice (s.0: f32[64,32,32], i.0: s32[]) -> f32[32,32] {
  %s.0 = f32[64,32,32]{2,1,0} parameter(0)
  %i.0 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %row = f32[1,32,32]{2,1,0} dynamic-slice(%s.0, %i.0, %zero, %zero), dynamic_slice_sizes={1,32,32}
  ROOT %flat = f32[32,32]{1,0} bitcast(%row)
}

%update (s.1: f32[64,32,32], u.1: f32[32,32], i.1: s32[]) -> f32[64,32,32] {
  %s.1 = f32[64,32,32]{2,1,0} parameter(0)
  %u.1 = f32[32,32]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  %one = f32[1,32,32]{2,1,0} bitcast(%u.1)
  ROOT %new = f32[64,32,32]{2,1,0} dynamic-update-slice(%s.1, %one, %i.1, %zero.1, %zero.1)
}

%outer (s.2: f32[64,32,32], i.2: s32[]) -> f32[64,32,32] {
  %s.2 = f32[64,32,32]{2,1,0} parameter(0)
  %i.2 = s32[] parameter(1)
  %part = f32[32,32]{1,0} fusion(%s.2, %i.2), kind=kLoop, calls=%slice
  %twice = f32[32,32]{1,0} add(%part, %part)
  ROOT %written = f32[64,32,32]{2,1,0} fusion(%s.2, %twice, %i.2), kind=kLoop, calls=%update
}

ENTRY %main (s: f32[64,32,32], i: s32[]) -> f32[64,32,32] {
  %s = f32[64,32,32]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %done = f32[64,32,32]{2,1,0} fusion(%s, %i), kind=kLoop, calls=%outer
}
"""


def test_of_a_stack_a_fusion_in_a_fusion_moves_a_slice():
    """TPU compilers slice the stack of activations inside of the fusion that multiplies them."""
    device = machine("v5p:2x2x2")
    timeline, _ = simulate(parse_hlo(NESTED), device)
    # One slice is read, one written; 4 bytes of the index.
    assert timeline.seconds == pytest.approx((2 * 32 * 32 * 4 + 4) / device.hbm_bytes_per_s, rel=1e-3)
