"""What a step sends, by parameter: against counts by hand; and what is found where a compiler departs from that."""

import collections
import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero
from jzero.analysis import analyze as analysis
from jzero.analysis.collectives import program_collectives
from jzero.analysis.hlo import parse_hlo
from jzero.analysis.memory import Memory
from jzero.analysis.violations import MISSING, Compiled, find_violations
from jzero.estimate.traced import trace_program
from jzero.estimate.traced_collectives import Fate, traced_collectives
from tests import light_decoder, matrix_models, models
from tests.tiers import slow

LAYERS, VOCAB = 2, 253


def counts(fn, *args):
    """How often each parameter is gathered and reduced in a step."""
    found = collections.Counter()
    for x in traced_collectives(fn.trace(*args).jaxpr):
        found[x.path, "gathers" if x.gathers else "reductions"] += x.times
    return found


@pytest.mark.parametrize(
    ("scan", "remat", "options"),
    [
        (False, None, {"precision": "bf16"}),
        (True, "as_written", {"prefetch_bytes": 10**6}),
        slow(True, None, {"reshard_after_forward": False}),
    ],
)
@pytest.mark.filterwarnings("ignore:`prefetch_bytes=")
def test_each_parameter_travels_as_often_as_counted_by_hand(scan, remat, options):
    """Through functions that layers share, loops, and a tied embedding that both ends of the model use."""
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0, **options)
    make = functools.partial(light_decoder.make_state, scan=scan, tied=True)
    plain = jax.eval_shape(lambda: make(optax.adam(1e-3), layers=LAYERS, width=40, vocab=VOCAB))
    step, state = (
        jzero.make_train_step(light_decoder.loss_fn, remat=remat),
        jzero.abstract_train_state(plain, config=config),
    )
    found = counts(step, state, models.tokens(16, vocab=VOCAB))
    layers = ["layers"] * LAYERS if scan else [f"layer_{i}" for i in range(LAYERS)]
    passes = 2 if config.reshard_after_forward else 1
    for kind in ("up", "down"):
        names = collections.Counter(f"{layer}/{kind}/kernel" for layer in layers)
        for name, number in names.items():
            extra = found[name, "gathers"] - passes * number
            # A loop that gathers ahead does so once more in each pass.
            assert extra == 0 or (scan and "prefetch_bytes" in options and 0 < extra <= 2 * passes), name
            assert found[name, "reductions"] == number, name
    # Rows for the lookup, and the whole for the logits and, unless it stays, for the gradient of the last hidden state.
    assert found["embed", "gathers"] == (3 if config.reshard_after_forward else 2)
    assert found["embed", "reductions"] == 2  # of its rows, and of the whole


def test_micro_batches_and_replicas_count():
    mesh = jzero.make_mesh(replica=2, data=4)
    params = {"w": jnp.ones((63, 33)), "frozen": jnp.ones((33, 65))}
    plain = jzero.TrainState.create(params=params, tx=optax.sgd(0.1))
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0, replica_axis="replica", precision="bf16")
    state = jzero.shard_train_state(plain, config=config, mesh=mesh, trainable="w")
    step = jzero.make_train_step(lambda p, x: jnp.square(x @ p["w"] @ p["frozen"]).mean(), accumulate_steps=3)
    found = list(traced_collectives(step.trace(state, jnp.ones((24, 63))).jaxpr))
    by_name = {(x.path, x.gathers): x for x in found}
    assert counts(step, state, jnp.ones((24, 63))) == {
        ("w", "gathers"): 3,
        ("w", "reductions"): 3,
        ("frozen", "gathers"): 6,
    }
    (gather,), (scatter, over_groups) = by_name["w", True].collectives, by_name["w", False].collectives
    whole, shard = 64 * 33, 16 * 33  # 63 rows are stored as 64; in bf16
    assert (gather.kind, gather.num_bytes, gather.sent_bytes) == ("all-gather", 2 * whole, 2 * whole * 3 / 4)
    assert (scatter.kind, scatter.axes, scatter.sent_bytes) == ("reduce-scatter", ("data",), 2 * whole * 3 / 4)
    assert (over_groups.kind, over_groups.axes, over_groups.sent_bytes) == (
        "all-reduce",
        ("replica",),
        2 * 2 * shard / 2,
    )


def abstract_state(shapes, tx, trainable=None, **options):
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x, jnp.float32), shapes, is_leaf=lambda x: type(x) is tuple)
    plain = jax.eval_shape(lambda params: jzero.TrainState.create(params=params, tx=tx), params)
    config = jzero.ZeroConfig(**{"stage": 3, "persistence_threshold": 0, **options})
    return jzero.abstract_train_state(plain, config=config, trainable=trainable)


def stack_loss(params, batch):
    return jnp.square(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), batch, params["w"])[0]).mean()


def normalized_before_the_loop(params, batch):
    return stack_loss({"w": params["w"] / jnp.linalg.norm(params["w"], axis=-2, keepdims=True)}, batch)


@pytest.mark.parametrize(
    ("loss", "options", "fate"),
    [
        (stack_loss, {}, Fate.USED),
        (stack_loss, {"reshard_after_forward": False}, Fate.STACKED),
        (stack_loss, {"rules": {"w": jzero.LeafRule(dim=0, scan_dim=-1)}}, Fate.SCANNED),
        (normalized_before_the_loop, {}, Fate.SCANNED),
    ],
)
def test_the_fate_of_what_a_loop_gathers(loss, options, fate):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the engine says so too
        state = abstract_state({"w": (8, 48, 48)}, optax.sgd(0.1), **options)
        step = jzero.make_train_step(loss)
        found = [x.fate for x in traced_collectives(step.trace(state, jnp.ones((16, 48))).jaxpr) if x.gathers]
    assert fate in found
    assert set(found) <= {fate, Fate.USED}


def analyzed(*args):
    """Returns the report about a compiled step, which keeps the plan, and the facts that it is made from."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(analysis, "find_violations", lambda *args: found.append(args) or find_violations(*args))
        report = jzero.analyze(*args)
    report.verify()
    return report, found[0]


@pytest.fixture(scope="module")
def facts():
    """The facts about a compiled step that keeps the plan, and the plan."""
    shapes = {"embed": (32, 40), "layers": {"up": (LAYERS, 40, 160), "down": (LAYERS, 160, 40)}, "head": (40, VOCAB)}

    def loss(params, batch):
        block = lambda h, w: (h + jnp.tanh(h @ w["up"]) @ w["down"], None)
        h = lax.scan(block, jnp.tanh(batch @ params["embed"]), params["layers"])[0]
        return jnp.square(h @ params["head"]).mean()

    return analyzed(
        jzero.make_train_step(loss), abstract_state(shapes, optax.adam(1e-3)), np.ones((16, 32), np.float32)
    )[1]


def all_reduced(c):
    if c.kind != "reduce-scatter":
        return [c]
    whole = [x._replace(shape=(8 * x.shape[0], *x.shape[1:])) for x in c.results]
    return [dataclasses.replace(c, kind="all-reduce", results=tuple(whole))]


def out_of_loops(c):
    if c.kind != "all-gather" or not c.in_loop:
        return [c]
    stacks = [x._replace(shape=(LAYERS, *x.shape)) for x in c.results]
    return [dataclasses.replace(c, times=1, in_loop=False, results=tuple(stacks))]


def in_update(kind):
    """Plants an exchange of each reduced parameter in the update, of whole ones or between parts."""

    def change(c):
        if c.kind != "reduce-scatter":
            return [c]
        whole = [x._replace(shape=(8 * x.shape[0], *x.shape[1:])) for x in c.results]
        return [c, dataclasses.replace(c, kind=kind, results=tuple(whole), op_name="jit(step)/zero_update/sub")]

    return change


FAULTS = {
    "merges gathers": (lambda c: [] if "transpose(" in c.op_name and c.kind == "all-gather" else [c], "were merged"),
    "sums gradients whole": (all_reduced, "summed whole, by all-reduce"),
    "widens": (lambda c: [c, c] if c.kind == "all-gather" else [c], "wider than planned, or exchanged whole"),
    "moves gathers out of loops": (out_of_loops, "out of its loop"),
    "gathers in the update": (in_update("all-gather"), "by all-gather"),
    "exchanges in the update": (in_update("all-to-all"), "by all-to-all"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_compiler_breaks_is_found(name, facts):
    """On GPUs; CPUs merge gathers, which is a remark, and TPUs may choose all-reduce for their torus."""
    change, text = FAULTS[name]
    compiled, plan = facts
    compiled = dataclasses.replace(compiled, platform="gpu")
    changed = dataclasses.replace(compiled, collectives=tuple(y for x in compiled.collectives for y in change(x)))
    before = find_violations(compiled, plan)[0]
    found = [x for x in find_violations(changed, plan)[0] if x not in before]
    assert any(text in x for x in found), found


def test_gathers_of_the_loss_may_have_the_name_of_the_update(facts):
    """XLA for GPUs merges them with gathers of the update, under the name of one."""
    compiled, plan = facts
    compiled = dataclasses.replace(compiled, platform="gpu")
    largest = max((c for c in compiled.collectives if c.kind == "all-gather"), key=lambda c: c.full_size)
    renamed = dataclasses.replace(largest, op_name="jit(step)/zero_update/sharding_constraint")
    collectives = tuple(renamed if c is largest else c for c in compiled.collectives)
    assert largest.full_size > MISSING * sum(leaf.param.size for leaf in plan.leaves)
    before = find_violations(compiled, plan)
    assert find_violations(dataclasses.replace(compiled, collectives=collectives), plan) == before


def hlo_of(gathers):
    """A program that gathers a matrix that often and reduces its gradient once."""
    groups = "replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
    lines = [f"  %g.{i} = f32[64,64] all-gather(%w), {groups}" for i in range(gathers)]
    return "\n".join(
        [
            "HloModule jit_step, num_partitions=8",
            "%add (a: f32[], b: f32[]) -> f32[] {",
            "  %a = f32[] parameter(0)",
            "  %b = f32[] parameter(1)",
            "  ROOT %sum = f32[] add(%a, %b)",
            "}",
            "ENTRY %main (w: f32[8,64], dw: f32[64,64]) -> f32[8,64] {",
            "  %w = f32[8,64] parameter(0)",
            "  %dw = f32[64,64] parameter(1)",
            *lines,
            f"  ROOT %r = f32[8,64] reduce-scatter(%dw), {groups}, to_apply=%add",
            "}",
        ]
    )


@pytest.mark.parametrize(("gathers", "text"), [(4, ""), (3, ""), (2, ""), (1, "were merged"), (5, "wider than")])
def test_gathers_of_one_pass_may_be_merged_but_not_those_of_both(gathers, text):
    """Layers share a matrix, so that each pass gathers it several times."""
    loss = lambda params, x: jnp.square(functools.reduce(lambda x, _: jnp.tanh(x @ params["w"]), range(4), x)).mean()
    state = abstract_state({"w": (64, 64)}, optax.sgd(1e-3))
    jaxpr = jzero.make_train_step(loss).trace(state, np.ones((16, 64), np.float32)).jaxpr
    sent = tuple(traced_collectives(jaxpr))
    assert sum(x.times for x in sent if x.gathers) == 4
    sent = tuple(x if x.gathers else x._replace(times=4) for x in sent)  # at each use; compiled: their sum
    program, plan = parse_hlo(hlo_of(gathers)), state.tx.plan
    transfers = tuple(trace_program(jaxpr, [1] * len(jaxpr.in_avals)).transfers)
    memory = Memory(**dict.fromkeys((x.name for x in dataclasses.fields(Memory)), plan.bytes_per_device.total))
    facts = (program,), tuple(program_collectives(program)), sent, transfers, "gpu", memory
    found, _ = find_violations(Compiled(*facts, returns_state=True, micro_batches=1), plan)
    assert len(found) == bool(text), found
    assert all(text in x for x in found)


def by_row(name="w"):
    """An optimizer that needs rows of one parameter: their largest elements."""
    scaled = lambda x: x / jnp.abs(x).max(1, keepdims=True)
    return optax.chain(optax.trace(0.9), optax.stateless(lambda updates, _: {**updates, name: scaled(updates[name])}))


MOMENTUM = optax.sgd(1e-3, momentum=0.9)


@pytest.mark.parametrize(
    ("stage", "tx", "rules", "times"),
    [
        (1, optax.lamb(1e-3), {}, 1),
        (3, MOMENTUM, {}, 1),
        (1, by_row(), {}, 3),
        (1, MOMENTUM, {"w": jzero.LeafRule(dim=1)}, 1),
    ],
)
def test_updates_gather_what_is_flattened_only_if_they_need_more_than_elements_and_sums(stage, tx, rules, times):
    """By default (21, 35) is flattened: to pad either dimension to a multiple of 8 adds a seventh."""
    state = abstract_state({"w": (21, 35)}, tx, stage=stage, rules=rules)
    loss = lambda params, x: jnp.square(x @ params["w"]).mean()
    report = jzero.analyze(jzero.make_train_step(loss), state, np.ones((16, 21), np.float32))
    gathered = sum(x.elements for x in report.collectives if x.kind == "all-gather")
    assert gathered == times * (736 if not rules else 21 * 40)
    assert ["flattened leaves" in x for x in report.violations] == ([True] if times > 1 else []), report.violations


def test_padding_may_be_gathered_with_new_parameters_but_not_exchanged():
    state = abstract_state({"w": (21, 35)}, optax.sgd(1e-3), stage=1, rules={"w": jzero.LeafRule(dim=1)})
    loss = lambda params, x: jnp.square(x @ params["w"]).mean()
    _, (compiled, plan) = analyzed(jzero.make_train_step(loss), state, np.ones((16, 21), np.float32))
    (gather,) = (x for x in compiled.collectives if x.kind == "all-gather")
    padding = dataclasses.replace(gather, results=(gather.results[0]._replace(shape=(21, 5)),))
    for kind in ("reduce-scatter", "all-to-all"):
        collectives = (*compiled.collectives, dataclasses.replace(padding, kind=kind))
        violations, _ = find_violations(dataclasses.replace(compiled, collectives=collectives), plan)
        assert any(kind in x for x in violations), kind


def test_flattened_leaves_on_the_host_and_frozen_ones_are_not_gathered():
    shapes = dict.fromkeys(("far", "frozen", "near"), (21, 35))
    options = {"offload": jzero.Offload(optimizer="host"), "rules": {"near": jzero.LeafRule(offload=False)}}
    state = abstract_state(shapes, by_row("near"), trainable="far|near", stage=1, **options)
    loss = lambda params, x: sum(jnp.square(x @ w).mean() for w in params.values())
    violations = jzero.analyze(jzero.make_train_step(loss), state, np.ones((16, 21), np.float32)).violations
    assert any("flattened leaves" in x and "sum: near. " in x for x in violations), violations


@functools.cache
def analyzed_muon():
    state = abstract_state({"w": (15, 40, 40)}, matrix_models.muon())
    return analyzed(jzero.make_train_step(stack_loss), state, np.ones((16, 40), np.float32))


def test_the_exchange_of_matrices_is_expected_and_named():
    """Each matrix goes to a device and back in parts: 2/N of its elements per device, plus slots that are not full."""
    report, (_, plan) = analyzed_muon()
    exchanged = [row for row in report.collectives if row.use == "matrices"]
    assert {row.kind for row in exchanged} == {"all-to-all"}
    matrices = sum(leaf.param.size for leaf in plan.leaves)
    least, found = 2 * matrices / 8, sum(row.elements for row in exchanged)
    assert least <= found <= 1.25 * least
    assert sum(row.sent_bytes for row in exchanged) == pytest.approx(4 * found * 7 / 8)
    assert "matrices" in str(report)
    sent_bytes = sum(row.sent_bytes for row in report.collectives)
    assert report.estimated.sent_bytes == pytest.approx(sent_bytes, rel=0.01)


def test_more_than_the_exchange_of_matrices_is_found():
    _, (compiled, plan) = analyzed_muon()
    assert any(c.kind == "all-to-all" and "zero_update" in c.op_name for c in compiled.collectives)
    collectives = (*compiled.collectives, *(c for c in compiled.collectives if c.kind == "all-to-all"))
    violations, _ = find_violations(dataclasses.replace(compiled, collectives=collectives), plan)
    assert any("by all-to-all" in x for x in violations)


def test_matrix_work_that_is_not_divided_is_found(facts):
    """The plan of a step with Muon, the program of one with Adam."""
    compiled, plan = facts
    plain = jzero.TrainState.create(params=matrix_models.params("unrolled"), tx=matrix_models.muon())
    work = jzero.plan_train_state(plain, config=plan.config, mesh=plan.mesh).matrices
    before = find_violations(compiled, plan)[0]
    (found,) = set(find_violations(compiled, dataclasses.replace(plan, matrices=work))[0]) - set(before)
    assert "none that is divided" in found
    assert "odd" in found or "layers/0/a" in found
