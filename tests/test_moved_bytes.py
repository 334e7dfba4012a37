"""What instructions of a compiled program move to and from main memory, by their text and by hand."""

import pytest

from jzero.analysis.costs import _bytes
from jzero.analysis.hlo import parse_hlo

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
