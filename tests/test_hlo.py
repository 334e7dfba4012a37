"""HLO as text becomes data; collectives in each of the ways that compilers write them; the model of a machine."""

import jax
import jax.numpy as jnp
import pytest

from jzero.analysis.collectives import find_collectives
from jzero.analysis.costs import flops_of
from jzero.analysis.hlo import HloArray, parse_hlo
from jzero.analysis.schedule import HostCalls, host_calls, simulate
from jzero.machines.machine import machine

HEADER = "HloModule step, is_scheduled=true, num_partitions=8\n\n"
ALL = "replica_groups=mesh['data'=8] {'data'}"

GPU = (
    HEADER
    + f"""%body (p.0: (s32[], bf16[128,256])) -> (s32[], bf16[128,256]) {{
  %p.0 = (s32[], bf16[128,256]{{1,0}}) parameter(0)
  %i.0 = s32[] get-tuple-element(%p.0), index=0
  %w.0 = bf16[128,256]{{1,0}} get-tuple-element(%p.0), index=1
  %b.0 = bf16[16]{{0}} constant({{...}})
  %ag = ((bf16[128,256]{{1,0}}, bf16[16]{{0}}), (bf16[1024,256]{{1,0}}, /*index=1*/bf16[128]{{0}})) \
all-gather-start(%w.0, %b.0), \
channel_id=1, {ALL}, dimensions={{0}}, metadata={{op_name="jit(step)/while/body/all_gather"}}
  %lhs = bf16[512,1024]{{1,0}} constant({{...}})
  %done = (bf16[1024,256]{{1,0}}, bf16[128]{{0}}) all-gather-done(%ag)
  %whole = bf16[1024,256]{{1,0}} get-tuple-element(%done), index=0
  %product = bf16[512,256]{{1,0}} dot(%lhs, %whole), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %t.0 = (s32[], bf16[128,256]{{1,0}}) tuple(%i.0, %w.0)
}}

%condition (p.1: (s32[], bf16[128,256])) -> pred[] {{
  %p.1 = (s32[], bf16[128,256]{{1,0}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %n = s32[] constant(7)
  ROOT %less = pred[] compare(%i.1, %n), direction=LT
}}

ENTRY %main (w: bf16[128,256]) -> f32[2] {{
  %w = bf16[128,256]{{1,0}} parameter(0)
  %zero = s32[] constant(2)
  %t.1 = (s32[], bf16[128,256]{{1,0}}) tuple(%zero, %w)
  %loop = (s32[], bf16[128,256]{{1,0}}) while(%t.1), condition=%condition, body=%body
  %two = f32[2]{{0}} constant({{1, 2}})
  %ar = ((f32[2]{{0}}), f32[2]{{0}}) all-reduce-start(%two), {ALL}, to_apply=%add
  ROOT %sum = f32[2]{{0}} all-reduce-done(%ar)
}}
"""
)


def test_program_as_data():
    program = parse_hlo(GPU)
    assert (program.entry, program.num_devices, set(program.computations)) == ("main", 8, {"main", "body", "condition"})
    body = program.computations["body"]
    assert body.by_name["ag"].result[1] == (HloArray("bf16", (1024, 256)), HloArray("bf16", (128,)))
    assert body.by_name["ag"].operands == ("w.0", "b.0")
    assert body.by_name["ag"].op_name == "jit(step)/while/body/all_gather"
    assert body.source("whole").name == "ag" or body.source("whole").opcode == "all-gather-done"
    assert body.root.name == "t.0"
    loop = program.computations["main"].by_name["loop"]
    assert loop.called == ("body",)
    assert program.trip_count(loop) == 5, "from 2 to below 7"


def test_pairs_count_once_with_all_their_arrays():
    gather, reduced = find_collectives(GPU)
    assert (gather.kind, gather.dtype, gather.shapes) == ("all-gather", "bf16", ((1024, 256), (128,)))
    assert (gather.times, gather.in_loop, gather.num_devices) == (5, True, 8)
    assert gather.elements == 5 * (1024 * 256 + 128)
    assert gather.sent_bytes == 2 * (1024 * 256 + 128) * 7 / 8
    assert (reduced.shapes, reduced.elements) == (((2,),), 4), "not the operands"


def test_unknown_trip_count_is_an_error_if_it_matters():
    with pytest.raises(ValueError, match="unknown trip count"):
        find_collectives(GPU.replace("direction=LT", "direction=NE"))


TPU = (
    HEADER
    + f"""%start (p.0: bf16[32,256]) -> (bf16[32,256], bf16[256,256], u32[]) {{
  %p.0 = bf16[32,256]{{1,0:T(8,128)(2,1)S(1)}} parameter(0)
  %ag.0 = bf16[256,256]{{1,0:T(8,128)(2,1)}} all-gather(%p.0), {ALL}, dimensions={{0}}
  ROOT %c.0 = (bf16[32,256]{{1,0}}, bf16[256,256]{{1,0}}, u32[]{{:S(2)}}) custom-call(%ag.0), \
custom_call_target="AsyncCollectiveStart"
}}

%async_collective_fusion.1 (p.1: bf16[32,256], q.1: f32[8]) -> (f32[8], bf16[256,256]) {{
  %p.1 = bf16[32,256]{{1,0}} parameter(0)
  %q.1 = f32[8]{{0}} parameter(1)
  %ag.1 = bf16[256,256]{{1,0}} all-gather(%p.1), {ALL}, dimensions={{0}}
  %negated = f32[8]{{0}} negate(%q.1)
  ROOT %t.1 = (f32[8]{{0}}, bf16[256,256]{{1,0}}) tuple(%negated, %ag.1)
}}

%done (p.2: bf16[256,256]) -> bf16[256,256] {{
  %p.2 = bf16[256,256]{{1,0}} parameter(0)
  %ag.2 = bf16[256,256]{{1,0}} all-gather(%p.2), {ALL}, dimensions={{0}}
  ROOT %c.2 = bf16[256,256]{{1,0}} custom-call(%ag.2), custom_call_target="AsyncCollectiveDone"
}}

%all-reduce-scatter.3 (p.3: bf16[1024,256]) -> bf16[128,256] {{
  %p.3 = bf16[1024,256]{{1,0}} parameter(0)
  %ar = bf16[1024,256]{{1,0}} all-reduce(%p.3), {ALL}, to_apply=%add
  %at = s32[] constant(0)
  ROOT %slice = bf16[128,256]{{1,0}} dynamic-slice(%ar, %at, %at), dynamic_slice_sizes={{128,256}}
}}

ENTRY %main (w: bf16[32,256], g: bf16[1024,256], x: f32[8]) -> bf16[256,256] {{
  %w = bf16[32,256]{{1,0}} parameter(0)
  %g = bf16[1024,256]{{1,0}} parameter(1)
  %x = f32[8]{{0}} parameter(2)
  %async-collective-start = (bf16[32,256]{{1,0}}, bf16[256,256]{{1,0}}, u32[]{{:S(2)}}) fusion(%w), kind=kCustom, \
calls=%start
  %part = bf16[32,256]{{1,0}} get-tuple-element(%async-collective-start), index=0
  %fusion.1 = (f32[8]{{0}}, bf16[256,256]{{1,0}}) fusion(%part, %x), kind=kOutput, calls=%async_collective_fusion.1
  %whole = bf16[256,256]{{1,0}} get-tuple-element(%fusion.1), index=1
  %scattered = bf16[128,256]{{1,0}} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.3
  ROOT %async-collective-done = bf16[256,256]{{1,0}} fusion(%whole), kind=kCustom, calls=%done
}}
"""
)


def test_chains_of_fusions_count_once():
    gather, scatter = find_collectives(TPU)
    assert (gather.kind, gather.shapes, gather.elements) == ("all-gather", ((256, 256),), 256 * 256)
    assert (scatter.kind, scatter.shapes, scatter.elements) == ("reduce-scatter", ((128, 256),), 1024 * 256)
    assert parse_hlo(TPU).computations["start"].by_name["p.0"].results[0].memory_space == 1


@pytest.mark.parametrize(
    ("groups", "first"),
    [
        ("replica_groups={{0,2},{1,3}}", (0, 2)),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("replica_groups=mesh['a'=2, 'b'=4] {'b'}", (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=2, 'b'=4] {'a'}", (0, 4)),
        ("replica_groups={}", tuple(range(8))),
    ],
)
def test_groups(groups, first):
    entry = f"ENTRY %m (p: f32[4]) -> f32[4] {{\n  ROOT %a = f32[4]{{0}} all-reduce(%p), {groups}, to_apply=%add\n}}\n"
    (found,) = find_collectives(HEADER + entry)
    assert found.group == first


def test_what_no_computation_covers_is_exposed():
    """The gather ends after the product before it is waited for: by hand."""
    h200 = machine("h200:8")
    gather = 2 * (1024 * 256 + 128) * 7 / 8 / h200.intra_link_bytes_per_s
    product = max(
        2 * 512 * 1024 * 256 / h200.flops["bf16"], 2 * (512 * 1024 + 1024 * 256 + 512 * 256) / h200.hbm_bytes_per_s
    )
    reduced = 2 * 8 * 7 / 8 / h200.intra_link_bytes_per_s
    timeline, _ = simulate(parse_hlo(GPU), h200)
    assert timeline.communication == pytest.approx(5 * gather + reduced)
    assert timeline.compute == pytest.approx(5 * product)
    assert timeline.exposed == pytest.approx(timeline.communication), "the product waits for it"
    assert timeline.exposed_share == pytest.approx(1)
    assert timeline.seconds == pytest.approx(timeline.compute + timeline.communication)
    lines = GPU.splitlines()
    moved = next(line for line in lines if "%product =" in line)
    lines.remove(moved)
    at = next(i for i, line in enumerate(lines) if "%done =" in line)
    covered, _ = simulate(parse_hlo("\n".join([*lines[:at], moved.replace("%whole", "%w.0"), *lines[at:]])), h200)
    assert covered.exposed == pytest.approx(5 * max(0, gather - covered.compute / 5) + reduced)
    assert covered.seconds < timeline.seconds


def test_collectives_between_hosts_take_the_network():
    text = GPU.replace("'data'=8", "'data'=16")
    one, _ = simulate(parse_hlo(GPU), machine("h200:8"))
    two, _ = simulate(parse_hlo(text), machine("h200:16"))
    h200 = machine("h200:16")
    slower = h200.intra_link_bytes_per_s / (8 * h200.inter_link_bytes_per_s)
    assert two.communication == pytest.approx(one.communication * slower * (15 / 16) / (7 / 8))


CHOICE = (
    HEADER
    + f"""%small (p.0: bf16[512,512]) -> bf16[512,512] {{
  %p.0 = bf16[512,512]{{1,0}} parameter(0)
  ROOT %d.0 = bf16[512,512]{{1,0}} dot(%p.0, %p.0), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

%idle (p.1: bf16[512,512]) -> bf16[512,512] {{
  ROOT %p.1 = bf16[512,512]{{1,0}} parameter(0)
}}

%sends (p.2: bf16[512,512]) -> bf16[512,512] {{
  %p.2 = bf16[512,512]{{1,0}} parameter(0)
  ROOT %ar = bf16[512,512]{{1,0}} all-reduce(%p.2), {ALL}, to_apply=%add
}}

%both (p.3: bf16[512,512]) -> bf16[512,512] {{
  %p.3 = bf16[512,512]{{1,0}} parameter(0)
  %k.3 = s32[] constant(1)
  %d.3 = bf16[512,512]{{1,0}} dot(%p.3, %p.3), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %c.3 = bf16[512,512]{{1,0}} conditional(%k.3, %d.3, %d.3), branch_computations={{%small, %idle}}
}}

ENTRY %main (k: s32[], x: bf16[512,512]) -> bf16[512,512] {{
  %k = s32[] parameter(0)
  %x = bf16[512,512]{{1,0}} parameter(1)
  ROOT %y = bf16[512,512]{{1,0}} conditional(%k, %x, %x, %x), branch_computations={{%small, %BRANCH, %idle}}
}}
"""
)


def test_of_branches_the_longest_counts():
    """Two products in a row, one of them in a branch of a branch, and not the three that there are in all branches."""
    h200 = machine("h200:8")
    product = max(2 * 512**3 / h200.flops["bf16"], 2 * 3 * 512 * 512 / h200.hbm_bytes_per_s)
    timeline, _ = simulate(parse_hlo(CHOICE.replace("%BRANCH", "%both")), h200)
    assert timeline.compute == pytest.approx(2 * product)
    assert timeline.seconds == pytest.approx(2 * product)
    reduced = 2 * 2 * 512 * 512 * 7 / 8 / h200.intra_link_bytes_per_s
    timeline, _ = simulate(parse_hlo(CHOICE.replace("%BRANCH", "%sends")), h200)
    assert reduced > product
    assert (timeline.compute, timeline.exposed) == (0, pytest.approx(reduced))


def test_the_shortest_branches_tell_the_least_time():
    """Of a step that may do nothing, of one with a product in either branch, and of one without branches."""
    h200 = machine("h200:8")
    product = max(2 * 512**3 / h200.flops["bf16"], 2 * 3 * 512 * 512 / h200.hbm_bytes_per_s)
    timeline, (note,) = simulate(parse_hlo(CHOICE.replace("%BRANCH", "%both")), h200)
    assert (timeline.least, timeline.seconds) == (0, pytest.approx(2 * product))
    assert note.startswith("A usual step, whose loss takes the shortest branch of each conditional, takes 0 ms")
    timeline, _ = simulate(parse_hlo(CHOICE.replace("{%small, %BRANCH, %idle}", "{%both, %both}")), h200)
    assert (timeline.least, timeline.seconds) == pytest.approx((product, 2 * product))
    without = CHOICE.replace("conditional(%k, %x, %x, %x), branch_computations={%small, %BRANCH, %idle}", "copy(%x)")
    timeline, notes = simulate(parse_hlo(without), h200)
    assert (timeline.least, notes) == (timeline.seconds, [])


def test_of_an_update_the_longest_branch_is_usual():
    """Of three branches: with owned matrices, each device runs its own, and all wait for the longest."""
    h200 = machine("h200:8")
    name = ', metadata={op_name="jit(step)/zero_update/cond"}\n}\n'
    timeline, notes = simulate(parse_hlo(CHOICE.replace("%BRANCH", "%small").removesuffix("\n}\n") + name), h200)
    assert timeline.least == timeline.seconds > 0
    assert not notes


def test_of_branches_those_collectives_count_that_send_most():
    text = CHOICE.replace("%BRANCH", "%sends")
    assert [c.name for c in find_collectives(text)] == ["ar"]
    gathers = """%gathers (p.4: bf16[512,512]) -> bf16[512,512] {
  %p.4 = bf16[512,512]{1,0} parameter(0)
  %s.4 = bf16[64,512]{1,0} slice(%p.4), slice={[0:64], [0:512]}
  ROOT %ag.4 = bf16[512,512]{1,0} all-gather(%s.4), ALL, dimensions={0}
}

ENTRY""".replace("ALL", ALL)
    more = text.replace("ENTRY", gathers).replace("branch_computations={%small", "branch_computations={%gathers")
    assert [c.name for c in find_collectives(more)] == ["ar"], "it sends twice as much"


@pytest.mark.parametrize(
    "lines",
    [
        "%a = bf16[8,16,64]{2,1,0} all-to-all(%x), GROUPS, dimensions={0}",
        "%s = ((bf16[8,16,64]), bf16[8,16,64]) all-to-all-start(%x), GROUPS, dimensions={0}\n"
        "  %a = bf16[8,16,64]{2,1,0} all-to-all-done(%s)",
        "%s = ((bf16[8,16,64]), bf16[8,16,64], u32[]) async-start(%x), calls=%wrapped\n"
        "  %a = bf16[8,16,64]{2,1,0} async-done(%s)",
        "%t = (bf16[4,16,64], bf16[4,16,64]) all-to-all(%x, %x), GROUPS",
    ],
)
def test_an_all_to_all_sends_all_but_its_own_part(lines):
    """In each of the ways that compilers write it; between two nodes half of it crosses, over all ports of a node."""
    wrapped = """%wrapped (p: bf16[8,16,64]) -> bf16[8,16,64] {
  %p = bf16[8,16,64]{2,1,0} parameter(0)
  ROOT %w = bf16[8,16,64]{2,1,0} all-to-all(%p), GROUPS, dimensions={0}
}

"""
    entry = f"ENTRY %m (x: bf16[8,16,64]) -> bf16[8,16,64] {{\n  %x = bf16[8,16,64] parameter(0)\n  {lines}\n}}\n"
    (found,) = find_collectives(HEADER + (wrapped + entry).replace("GROUPS", ALL))
    assert (found.kind, found.elements, found.num_devices) == ("all-to-all", 8 * 16 * 64, 8)
    assert found.sent_bytes == 2 * 8 * 16 * 64 * 7 / 8
    assert found.nic_bytes(8) == 0
    assert found.nic_bytes(4) == 2 * 8 * 16 * 64 * 4 / 8


def flops(fn, *args):
    program = parse_hlo(jax.jit(fn).lower(*args).compile().as_text())
    entry = program.computations[program.entry]
    return sum(flops for x in entry.instructions for flops, _, _ in flops_of(program, entry, x))


def test_operations_of_products():
    assert flops(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), jnp.ones((3, 4, 5)), jnp.ones((3, 5, 6))) == 2 * 360
    image, kernel = jnp.ones((2, 3, 8, 8)), jnp.ones((4, 3, 3, 3))
    valid = jax.jit(lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "VALID"))
    assert flops(valid, image, kernel) == 2 * 2 * 4 * 3 * (6 * 3) ** 2
    same = jax.jit(lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME"))
    assert flops(same, image, kernel) == 2 * 2 * 4 * 3 * (8 * 3 - 2) ** 2, "products with padding are none"


@pytest.mark.parametrize(
    ("target", "result", "operands", "groups"),
    [("Forward", "y", "%x, %k", 2), ("BackwardInput", "x", "%y, %k", 1), ("BackwardFilter", "k", "%x, %y", 1)],
)
def test_both_passes_of_a_convolution_count_alike(target, result, operands, groups):
    """With stride 2 and padding; on GPUs both have the labels of the forward pass."""
    shapes = {"x": "bf16[2,9,9,3]", "k": "bf16[4,3,3,3]", "y": "bf16[2,5,5,4]"}
    text = "\n".join(f"  %{name} = {shape} parameter({i})" for i, (name, shape) in enumerate(shapes.items()))
    text += f"""
  ROOT %done = ({shapes[result]}, u8[0]) custom-call({operands}), window={{size=3x3 pad=1_1x1_1 stride=2x2}}, \
dim_labels=b01f_o01i->b01f, batch_group_count={groups}, custom_call_target="__cudnn$conv{target}"
"""
    program = parse_hlo(f"HloModule m, is_scheduled=true\n\nENTRY %main (x: bf16[1]) -> bf16[1] {{\n{text}}}\n")
    entry = program.computations["main"]
    (found,) = [flops for x in entry.instructions for flops, _, _ in flops_of(program, entry, x)]
    meetings = 2 + 3 + 3 + 3 + 2  # of each output with elements of the input, in one dimension
    assert found == 2 * (2 * 3 * 4) * meetings**2 / groups


def test_calls_of_the_host_and_what_is_beside_them():
    call = 'async_execution_thread="host", custom_call_target="HostExecute"'
    text = (
        HEADER
        + f"""ENTRY %main (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  %a.start = ((f32[8,8]{{1,0}}), f32[8,8]{{1,0}}, u32[]) custom-call-start(%x), {call}
  %y = f32[8,8]{{1,0}} dot(%x, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %a = f32[8,8]{{1,0}} custom-call-done(%a.start)
  %b.start = ((f32[8,8]{{1,0}}), f32[8,8]{{1,0}}, u32[]) custom-call-start(%y), {call}
  %z = f32[8,8]{{1,0}} bitcast(%y)
  %b = f32[8,8]{{1,0}} custom-call-done(%b.start)
  ROOT %sum = f32[8,8]{{1,0}} add(%a, %b)
}}
"""
    )
    assert host_calls(parse_hlo(text)) == HostCalls(total=2, covered=1)
    assert host_calls(parse_hlo(GPU)) == HostCalls(total=0, covered=0)


@pytest.mark.parametrize(
    ("kind", "shape", "target", "group", "nic_bytes"),
    [
        ("ALL_GATHER", "[512,8]", '"{1,2}x{0:3}"', (0, 4), 4096),  # half of the result comes from the other slice
        ("REDUCE_SCATTER", "[512,8]", '"{1,2,3}x{0:3}"', (0, 4, 8), 16384),
        ("ALL_TO_ALL", "[2,64]", "{{100000,200000},{100001,200001}}", (0, 2), 128),
    ],
)
def test_hosts_exchange_between_slices(kind, shape, target, group, nic_bytes):
    """A collective over slices is a `send` and a `recv`, which counts."""
    attributes = (
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
        f'_xla_host_transfer_rendezvous="x.1",_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"}}'
    )
    text = (
        HEADER
        + f"""ENTRY %m (p: bf16[8]) -> bf16{shape} {{
  %p = bf16[8]{{0}} parameter(0)
  %token = token[] after-all()
  %send.1 = (bf16[8]{{0}}, u32[]{{:S(2)}}, token[]) send(%p, %token), channel_id=1, {attributes}
  %recv.1 = (bf16{shape}, u32[]{{:S(2)}}, token[]) recv(%token), channel_id=2, {attributes}
  %recv-done.1 = (bf16{shape}, token[]) recv-done(%recv.1), channel_id=2
  ROOT %whole = bf16{shape} get-tuple-element(%recv-done.1), index=0
}}
"""
    )
    (found,) = find_collectives(text)
    assert found.kind == kind.lower().replace("_", "-")
    assert found.group == group
    assert found.is_between_slices
    assert found.nic_bytes(group[1]) == nic_bytes
