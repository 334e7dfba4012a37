"""Plans: what is cut at each stage, who owns an optimizer leaf, bytes per device, and what stays whole."""

import functools
import gc
import math
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jzero
from jzero.core.plan.table import format_bytes
from tests.plan_states import (
    OPTIMIZERS,
    PARAMS,
    RULES,
    STAGES,
    momentum_that_looks_into_the_parameters,
    plan_for,
)


def rows(tree):
    """Returns `{path: leaf}`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, P))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


@pytest.mark.smoke
@pytest.mark.parametrize("stage", STAGES)
def test_stage_says_what_is_cut(stage):
    plan = plan_for({"w": (512, 256), "b": (512,)}, num_shards=8, stage=stage, persistence_threshold=0)
    w, b = P("data"), P("data")
    whole = {"w": P(), "b": P()}
    cut = {"w": w, "b": b}
    assert plan.params == (cut if stage == 3 else whole)
    assert plan.opt_state[0].mu == plan.opt_state[0].nu == (cut if stage >= 1 else whole)
    assert plan.opt_state[0].count == P()
    # Stage 1 too hands cut gradients to the optimizer; what differs from stage 2 is when they are reduced.
    assert plan.grads == (cut if stage >= 1 else whole)


@pytest.mark.parametrize("stage", STAGES)
def test_replicated_lists_every_whole_leaf_with_a_reason(stage):
    params = {"w": jnp.ones((512, 257)), "small": jnp.ones(96), "tiny": jnp.ones(3), "s": jnp.ones(())}
    rules = {"ruled": jzero.LeafRule(replicated=True), "kept": jzero.LeafRule(persistent=True)}
    params |= {"ruled": jnp.ones((64, 64)), "kept": jnp.ones((64, 64))}
    state = jzero.TrainState.create(params=params, tx=optax.adam(1e-3))
    plan = jzero.plan_train_state(state, config=jzero.ZeroConfig(stage=stage, persistence_threshold=100, rules=rules))

    listed = {(whole.term, whole.path): whole for whole in plan.replicated}
    assert len(listed) == len(plan.replicated), "each once"
    terms = {
        "params": (plan.params, params),
        "grads": (plan.grads, params),
        "opt_state": (plan.opt_state, state.opt_state),
    }
    expected = {
        (term, path): rows(values)[path]
        for term, (specs, values) in terms.items()
        for path, spec in rows(specs).items()
        if "data" not in spec
    }
    expected["other", "step"] = state.step
    assert listed.keys() == expected.keys()
    for key, whole in listed.items():
        assert whole.reason, key
        assert whole.shape == expected[key].shape
        assert whole.num_bytes == expected[key].nbytes
    reasons = {path: listed["params", path].reason for term, path in listed if term == "params"}
    assert reasons["ruled"] == "by rule"
    if stage == 0:
        assert reasons["w"] == "stage 0"
    elif stage < 3:
        assert reasons["w"] == f"stage {stage} keeps parameters whole"
    else:
        assert "w" not in reasons
        assert "persistence_threshold" in reasons["small"]
        assert "100 elements" in reasons["small"]
        assert reasons["kept"] == "by rule"
        assert reasons["s"] == "scalar"
        assert "fewer elements than the 8 devices" in reasons["tiny"]


def test_persistence_threshold_counts_elements_and_includes_the_limit():
    params = {"at": (8, 100), "above": (8, 101)}
    plan = plan_for(params, stage=3, persistence_threshold=800)
    assert plan.params == {"at": P(), "above": P("data")}
    assert "data" in plan.grads["at"], "the gradient of a persistent parameter is cut"
    assert "data" in plan.opt_state[0].mu["at"], "and so are its moments"
    assert plan_for({"w": (250, 400)}, stage=3).params == {"w": P()}, "100,000 by default"
    assert plan_for({"w": (251, 400)}, stage=3).params == {"w": P(None, "data")}


@pytest.mark.smoke
def test_small_leaves_that_no_dimension_divides_are_whole_at_every_stage():
    params = {"even": (5, 8), "at": (9, 15), "above": (9, 17), "bias": (27,)}
    for threshold, whole in ((135, {"at", "bias"}), (27, {"bias"}), (0, set())):
        for stage in (1, 2, 3):
            plan = plan_for(params, stage=stage, persistence_threshold=0, padding_threshold=threshold)
            assert {x.path for x in plan.leaves if x.grad.cut is None} == whole
            listed = {(x.term, x.path.split("/")[-1]) for x in plan.replicated if "padding_threshold" in x.reason}
            assert listed >= {(term, name) for name in whole for term in ("params", "grads", "opt_state")}
            assert {name for term, name in listed if term == "opt_state"} == whole
    default = plan_for({"small": (128, 128), "large": (131, 131)}, num_shards=3, stage=2)
    assert {x.path for x in default.leaves if x.grad.cut is None} == {"small"}, "16,384 elements by default"
    few = plan_for({"small": (9, 11), "large": (9, 13)}, stage=3, persistence_threshold=99)
    assert {x.path for x in few.leaves if x.grad.cut is None} == {"small"}, "or persistence_threshold"
    rules = {"a": jzero.LeafRule(persistent=False), "b": jzero.LeafRule(dim=1)}
    ruled = plan_for({"a": (9, 11), "b": (9, 11), "c": (9, 11)}, stage=3, rules=rules)
    assert {x.path for x in ruled.leaves if x.grad.cut is None} == {"c"}, "rules decide first"


def test_model_persistence_threshold_keeps_the_smallest_first():
    params = {"large": (640,), "small": (160,), "middle": (320,), "huge": (6400,)}
    whole = {
        cap: {
            name
            for name, spec in plan_for(
                params, stage=3, persistence_threshold=1000, model_persistence_threshold=cap
            ).params.items()
            if "data" not in spec
        }
        for cap in (0, 159, 160, 479, 480, 1120, None)
    }
    assert whole == {
        0: set(),
        159: set(),
        160: {"small"},
        479: {"small"},
        480: {"small", "middle"},
        1120: {"small", "middle", "large"},
        None: {"small", "middle", "large"},
    }


def test_rules_decide_single_leaves():
    params = {
        "layer": {"dim": (64, 128), "persistent": (64, 128), "replicated": (64, 128), "cut": (8, 8), "free": (64, 128)}
    }
    rules = {
        "layer/dim": jzero.LeafRule(dim=0),
        "layer/persistent": jzero.LeafRule(persistent=True),
        "layer/repl.*": jzero.LeafRule(replicated=True),
        "layer/cut": jzero.LeafRule(persistent=False),
        "layer/(dim|free)": jzero.LeafRule(dim=1),  # the first that matches counts
    }
    plan = plan_for(params, stage=3, persistence_threshold=100, rules=rules)
    params_specs, grads, mu = plan.params["layer"], plan.grads["layer"], plan.opt_state[0].mu["layer"]
    assert params_specs["dim"] == P("data")
    assert params_specs["free"] == P(None, "data")
    assert params_specs["persistent"] == params_specs["replicated"] == P()
    assert "data" in grads["persistent"]
    assert "data" in mu["persistent"]
    assert grads["replicated"] == mu["replicated"] == P()
    assert "data" in params_specs["cut"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("threshold", [0, 10**6])
def test_stage_3_is_suggested_where_it_takes_less(stage, threshold):
    """Adam's moments are cut, and so are parameters then, unless all of them stay."""
    text = str(plan_for({"w": (512, 256), "b": (8, 128)}, stage=stage, persistence_threshold=threshold))
    size = 4 * (512 * 256 + 8 * 128)
    here, then = (format_bytes(params + 2 * size // 8 + 4) for params in (size, size // 8))
    hint = f"params and opt_state take {then} then, not {here}"
    assert (hint in text) == ("reshard_after_forward=False" in text) == (stage in (1, 2) and not threshold)


def test_rules_for_a_dimension_and_a_scanned_one_are_obeyed():
    shapes = {"w": (37, 64), "s": ()}
    plan = plan_for(shapes, stage=3, persistence_threshold=0, rules={"w": jzero.LeafRule(dim=0)})
    assert plan.params == {"w": P("data"), "s": P()}
    assert plan.padding == {"w": 3 * 64, "s": 0}
    rule = {"stack": jzero.LeafRule(scan_dim=1)}
    plan = plan_for({"stack": (16, 512, 8)}, stage=3, persistence_threshold=0, rules=rule)
    assert plan.params == {"stack": P("data")}
    assert plan.leaves[0].scan_dim == 1
    none = {"stack": jzero.LeafRule(scan_dim=-1)}
    assert [plan_for({"stack": (16, 512, 8)}, rules=x).leaves[0].scan_dim for x in ({}, none)] == [0, None]


def test_equal_layers_that_only_numbers_tell_apart_are_no_stacks():
    for names, dims in ((("layer_0", "layer_1"), [None, None]), (("encoder", "decoder"), [0, 0])):
        plan = plan_for({"model": {name: {"w": (16, 512, 8)} for name in names} | {"bias": (8,)}})
        assert [leaf.scan_dim for leaf in plan.leaves if leaf.path.endswith("w")] == dims


def test_a_mesh_axis_that_nothing_is_split_over_is_told():
    state = jzero.TrainState.create(params={"w": np.zeros((64, 64), np.float32)}, tx=optax.sgd(0.1, momentum=0.9))
    mesh = jax.sharding.AbstractMesh((2, 4), ("replica", "data"))
    idle = "neither batch nor state is split over 'replica' (2)"
    assert idle in str(jzero.plan_train_state(state, stage=3, mesh=mesh))
    config = jzero.ZeroConfig(stage=3, replica_axis="replica")
    assert "neither" not in str(jzero.plan_train_state(state, config=config, mesh=mesh))
    mesh = jzero.make_mesh(model=2, data=4)
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    params = {"w": jax.device_put(state.params["w"], split)}
    state = jzero.TrainState.create(params=params, tx=optax.sgd(0.1))
    assert "neither" not in str(jzero.plan_train_state(state, stage=3, mesh=mesh))


def test_equal_plans_are_one_object_as_long_as_one_is_held():
    config = {"stage": 3, "persistence_threshold": 10, "rules": {"w": jzero.LeafRule(dim=0)}}
    make = lambda **other: plan_for(**{"params": {"w": (64, 37), "b": (5,)}, **config, **other})
    first = make()
    assert make() is first
    others = [{"stage": 2}, {"params": {"w": (64, 37), "b": (6,)}}, {"num_shards": 7}, {"tx": optax.lion(1e-3)}]
    assert all(make(**other) != first for other in others)
    plain = jzero.TrainState.create(params={"w": np.zeros((64, 64), np.float32)}, tx=optax.sgd(0.1))
    planned = jzero.plan_train_state(plain, stage=3)
    assert jzero.plan_of(jzero.shard_train_state(plain, stage=3)) is planned
    gone = weakref.ref(make(num_shards=5))
    gc.collect()
    assert gone() is None


def test_on_one_device_the_plan_says_so():
    plain = jzero.TrainState.create(params={"w": np.ones((36, 61), np.float32)}, tx=optax.sgd(0.1))
    for num_devices, told in ((1, True), (2, False)):
        plan = jzero.plan_train_state(plain, stage=3, mesh=jax.sharding.AbstractMesh((num_devices,), ("data",)))
        assert ("nothing is partitioned" in str(plan)) == told


# Who owns a leaf of the optimizer, whatever it is named.


def owner_by_name(path):
    """The parameter that an optimizer leaf belongs to. All names here are unlike any of optax's own."""
    names = [name for name in path.split("/") if name in PARAMS]
    assert len(names) <= 1
    return names[0] if names else None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_leaf_is_cut_like_its_parameter(name):
    tx = OPTIMIZERS[name]()
    plan = plan_for(PARAMS, num_shards=8, tx=tx, stage=3, persistence_threshold=0, rules=RULES)
    grads = {leaf.path: leaf.grad for leaf in plan.leaves}
    owned = set()
    for leaf in plan.opt_leaves:
        owner = owner_by_name(leaf.path)
        assert (None if leaf.owner is None else plan.leaves[leaf.owner].path) == owner, leaf.path
        if owner is None:
            assert leaf.cut is None, leaf.path
        elif leaf.shape == PARAMS[owner]:
            owned.add(owner)
            assert leaf.spec == grads[owner].spec, leaf.path
            assert leaf.stored_shape == grads[owner].stored_shape, leaf.path
        else:  # such as adafactor's vectors
            expected = next((d for d, size in enumerate(leaf.shape) if size % 8 == 0 and leaf.size >= 8), None)
            assert leaf.cut is None if expected is None else leaf.cut.dim == expected, leaf.path
            assert leaf.stored_shape == leaf.shape, "never padded"
    assert owned, "some leaves have their parameter's shape"
    assert grads["first"].spec != grads["second"].spec


def test_an_optimizer_is_traced_for_one_parameter_of_each_kind():
    """Its state is told by the first of each, and one leaf that differs from its equals is found by tracing all."""
    seen = []
    adam = optax.adam(1e-3)
    tx = optax.GradientTransformation(
        lambda params: seen.append(sum(hasattr(x, "shape") for x in jax.tree.leaves(params))) or adam.init(params),
        adam.update,
    )
    params = {f"{name}{i}": np.ones(shape) for i in range(5) for name, shape in (("a", (16, 9)), ("b", (7,)))}
    state = jzero.TrainState.create(params=params, tx=tx)
    seen.clear()
    plan = jzero.plan_train_state(state, stage=3)
    assert max(seen) == 2
    assert [plan.leaves[leaf.owner].path for leaf in plan.opt_leaves if leaf.shape] == 2 * sorted(params)
    adam_state = state.opt_state[0]
    for mu in ({**adam_state.mu, "a3": np.ones((16, 8))}, {x: y for x, y in adam_state.mu.items() if x != "a3"}):
        bad = state.replace(opt_state=(adam_state._replace(mu=mu), *state.opt_state[1:]))
        with pytest.raises(ValueError, match=r"0/mu/a3: (missing|shape \(16, 8\), but \(16, 9\))"):
            jzero.plan_train_state(bad, stage=3)


@pytest.mark.parametrize("by_hand", [False, True])
def test_parameter_named_like_another_or_like_a_field_of_the_optimizer_is_not_confused(by_hand):
    params = {"w": (64, 128), "mu": {"w": (128, 64)}, "nu": {"w": (64, 64), "mu": (96,)}, "count": (64,)}
    tx = optax.chain(momentum_that_looks_into_the_parameters() if by_hand else optax.adam(1e-3))
    plan = plan_for(params, num_shards=8, tx=tx, stage=3, persistence_threshold=0)
    (state,) = plan.opt_state
    assert (state["mu"] if by_hand else state[0].mu) == plan.params
    if not by_hand:
        assert state[0].nu == plan.params
        assert state[0].count == P()


def test_parameters_may_be_one_array():
    plan = plan_for((64, 128), num_shards=8, stage=3, persistence_threshold=0)
    assert plan.params == P(None, "data")
    assert plan.opt_state[0].mu == plan.opt_state[0].nu == P(None, "data")


def device_bytes(tree):
    """Bytes of the tree's arrays that live on the first device."""
    first = jax.devices()[0]
    shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == first]
    return sum(s.data.nbytes for s in shards)


@pytest.mark.parametrize(
    ("name", "stage", "devices"), [("adamw", 3, 5), ("adafactor", 1, 8), ("masked by function", 3, 8)]
)
def test_bytes_per_device_are_those_of_the_live_buffers(name, stage, devices):
    tx = OPTIMIZERS[name]()
    params = {k: jnp.ones(shape) for k, shape in PARAMS.items()} | {"half": jnp.ones((24, 8), jnp.bfloat16)}
    state = jzero.TrainState.create(params=params, tx=tx)
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0, rules=RULES)
    mesh = jzero.make_mesh(devices=jax.devices()[:devices])
    plan = jzero.plan_train_state(state, config=config, mesh=mesh)
    sharded = jzero.shard_train_state(state, config=config, mesh=mesh)
    assert plan.bytes_per_device.params == device_bytes(sharded.params)
    assert plan.bytes_per_device.opt_state == device_bytes(sharded.opt_state)
    assert plan.bytes_per_device.total == sum(plan.bytes_per_device)


@pytest.mark.parametrize(("stage", "num_shards"), [(0, 8), (1, 64), (2, 8), (3, 64)])
def test_bytes_agree_with_the_arithmetic_of_zero(stage, num_shards):
    shapes = {"embed": (50257, 256), "blocks": {"kernel": (6, 256, 768), "bias": (6, 768)}}
    plan = plan_for(shapes, num_shards=num_shards, stage=stage, persistence_threshold=0)
    psi = sum(math.prod(leaf.param.shape) for leaf in plan.leaves)
    assert psi > 10_000_000
    expected = {
        "params": 4 * psi / (num_shards if stage == 3 else 1),
        "grads": 4 * psi / (num_shards if stage >= 2 else 1),
        "opt_state": 8 * psi / (num_shards if stage >= 1 else 1),
    }
    assert plan.bytes_per_device._asdict() == pytest.approx(expected, rel=0.02)
    assert plan.bytes_per_device.total == pytest.approx(sum(expected.values()), rel=0.02)
    assert plan.replicated_bytes._asdict() == pytest.approx(
        {"params": 4 * psi, "grads": 4 * psi, "opt_state": 8 * psi}, rel=1e-6
    )


def test_gathered_bytes_by_hand():
    params = {"w": (512, 256), "v": (256, 64), "b": (512,)}
    w, v, b = (4 * math.prod(shape) for shape in params.values())
    gathered = {
        0: 0,
        1: w + v + b,  # once, after the update
        2: w + v + b,
        3: 2 * (w + v) + b,  # forward and backward; `b` stays whole between updates
    }
    for stage, expected in gathered.items():
        assert plan_for(params, stage=stage, persistence_threshold=512).gathered_bytes == expected, stage
    kept = plan_for(params, stage=3, persistence_threshold=512, reshard_after_forward=False)
    assert kept.gathered_bytes == w + v + b
    assert kept.traffic.bytes_gathered_in(micro_batches=3) == 3 * (w + v) + b
    assert plan_for({"scalar": ()}, stage=3).gathered_bytes == 0, "what is not cut is never gathered"
    assert plan_for({"odd": (129, 3)}, stage=3, persistence_threshold=0).gathered_bytes == 2 * 4 * 136 * 3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_plans_of_whole_parameters_tell_what_stage_3_would_hold(stage, precision):
    rules = {"kept": jzero.LeafRule(persistent=True), "shared": jzero.LeafRule(replicated=True)}
    params = {"w": (512, 256), "odd": (129, 3), "b": (512,), "kept": (64, 64), "shared": (64, 64)}
    make = functools.partial(plan_for, params, precision=precision, persistence_threshold=512, rules=rules)
    other = make(stage=3, reshard_after_forward=False)
    held = lambda plan: format_bytes(plan.bytes_per_device.params + plan.bytes_per_device.opt_state)
    plan = make(stage=stage)
    said = f"params and opt_state take {held(other)} then, not {held(plan)}"
    assert (said in str(plan)) == (stage in (1, 2))
    assert ("reshard_after_forward" in str(plan)) == (stage in (1, 2))
    if stage in (1, 2):
        assert plan.gathered_bytes == other.gathered_bytes


def test_text_counts_the_rows_that_it_hides():
    plan = plan_for({f"w{i:02}": (64, 64) for i in range(50)}, stage=3, persistence_threshold=0)
    assert "w49" not in str(plan)
    assert "... 10 more (plan.table(max_rows=None))" in str(plan)
    assert "w49" in plan.table(max_rows=None)
    assert "more" not in plan.table(max_rows=None)


def test_the_text_says_of_each_parameter_what_becomes_of_it():
    square = jnp.ones((64, 64))
    params = {"trained": square, "frozen": square, "narrow": square[:, :2], "tiny": square[0, :2]}
    config = jzero.ZeroConfig(stage=3, persistence_threshold=2, quantization=jzero.Quantization(gather="int8"))
    state = jzero.TrainState.create(params=params, tx=optax.sgd(1))
    plan = jzero.plan_train_state(state, config=config, trainable="(?!frozen).*")
    lines = {line.split()[0]: line for line in reversed(str(plan).splitlines()) if line}
    assert {name: "not trained" in lines[name] for name in params} == {name: name == "frozen" for name in params}
    assert all(x.reason in str(plan) for x in (*plan.replicated, *plan.unquantized))
