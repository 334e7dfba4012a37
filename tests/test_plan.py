"""Plans: what is cut at each stage, who owns an optimizer leaf, bytes per device, and what stays whole."""

import dataclasses
import functools
import gc
import math
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from jzero.plan.plan import ZeroPlan
from jzero.plan.table import format_bytes
from jzero.state import inspect

STAGES = (0, 1, 2, 3)
SIZES = (1, 2, 5, 7, 8, 64, 511, 512)


def abstract_mesh(**sizes):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def abstract_state(params, tx):
    return jax.eval_shape(lambda p: jzero.TrainState.create(params=p, tx=tx), params)


def plan_for(params, *, num_shards=8, tx=None, **config):
    """The plan of an abstract state with these shapes: the mapping `{name: shape}` or any tree of abstract arrays."""
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x, jnp.float32) if isinstance(x, tuple) else x,
        params,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    state = abstract_state(params, tx or optax.adam(1e-3))
    return jzero.plan_train_state(state, config=jzero.ZeroConfig(**config), mesh=abstract_mesh(data=num_shards))


def rows(tree):
    """Returns `{path: leaf}`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, P))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def device_bytes(tree):
    """Bytes of the tree's arrays that live on the first device."""
    first = jax.devices()[0]
    shards = [s for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device == first]
    return sum(s.data.nbytes for s in shards)


def gpt_shapes(*, scanned, d_model=256, num_layers=6, vocab_size=50257, seq_len=1024):
    """The parameters of a GPT: each layer for itself, or all of them in one stack."""
    d, hidden = d_model, 4 * d_model
    layer = {
        "attention_norm": {"scale": (d,), "bias": (d,)},
        "qkv": {"kernel": (d, 3 * d), "bias": (3 * d,)},
        "attention_out": {"kernel": (d, d), "bias": (d,)},
        "mlp_norm": {"scale": (d,), "bias": (d,)},
        "mlp_in": {"kernel": (d, hidden), "bias": (hidden,)},
        "mlp_out": {"kernel": (hidden, d), "bias": (d,)},
    }
    stack = jax.tree.map(lambda s: (num_layers, *s), layer, is_leaf=lambda x: isinstance(x, tuple))
    layers = {"blocks": stack} if scanned else {f"block_{i}": layer for i in range(num_layers)}
    return {"embed": (vocab_size, d), "positions": (seq_len, d), **layers, "norm": {"scale": (d,), "bias": (d,)}}


# What is cut.


@pytest.mark.parametrize("num_shards", SIZES)
@pytest.mark.parametrize("stage", STAGES)
def test_specs_are_trees_like_the_state(stage, num_shards):
    tx = optax.adamw(1e-3)
    plan = plan_for(gpt_shapes(scanned=True), num_shards=num_shards, tx=tx, stage=stage, persistence_threshold=0)
    assert plan.num_shards == num_shards
    params = jax.tree.structure(gpt_shapes(scanned=True), is_leaf=lambda x: isinstance(x, tuple))
    assert jax.tree.structure(plan.params) == jax.tree.structure(plan.grads) == params
    assert jax.tree.structure(plan.padding) == params
    abstract = jax.eval_shape(tx.init, params.unflatten([jnp.zeros(())] * params.num_leaves))
    assert jax.tree.structure(plan.opt_state) == jax.tree.structure(abstract)
    specs = [*jax.tree.leaves(plan.params), *jax.tree.leaves(plan.opt_state)]
    leaves = [*(leaf.param for leaf in plan.leaves), *plan.opt_leaves]
    for spec, leaf in zip(specs, leaves, strict=True):
        assert isinstance(spec, P)
        assert len(spec) <= len(leaf.stored_shape)
        assert all(leaf.stored_shape[d] % num_shards == 0 for d, name in enumerate(spec) if name == "data")


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


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_params_are_never_padded_before_stage_3(stage):
    plan = plan_for({"odd": (37, 11), "tiny": (3,)}, num_shards=7, stage=stage, persistence_threshold=0)
    assert plan.params == {"odd": P(), "tiny": P()}
    assert plan.padding == {"odd": 0, "tiny": 0}
    assert [leaf.param.stored_shape for leaf in plan.leaves] == [(37, 11), (3,)]


def test_stage_3_pads_where_nothing_divides():
    plan = plan_for({"odd": (37, 11)}, num_shards=8, stage=3, persistence_threshold=0)
    assert plan.params == {"odd": P("data")}
    assert plan.padding == {"odd": 3 * 11}
    assert plan.opt_leaves[1].stored_shape == (40, 11), "the moments likewise"


def test_concrete_and_abstract_states_have_the_same_plan():
    params = {"w": jnp.ones((512, 256)), "b": jnp.ones(512)}
    state = jzero.TrainState.create(params=params, tx=optax.adam(1e-3))
    mesh = abstract_mesh(data=512)
    assert jzero.plan_train_state(state, stage=3, mesh=mesh) == jzero.plan_train_state(
        jax.eval_shape(lambda: state), stage=3, mesh=mesh
    )


@pytest.mark.smoke
def test_mesh_of_a_machine_that_is_not_there_needs_no_more_than_names_and_sizes():
    state = abstract_state({"w": jnp.ones((512, 64))}, optax.adam(1e-3))
    plan = jzero.plan_train_state(state, stage=1, mesh=AbstractMesh((512,), ("data",)))
    assert plan.opt_state[0].mu == {"w": P("data")}


@pytest.mark.smoke
@pytest.mark.parametrize("stage", STAGES)
def test_sharded_state_carries_its_plan_and_every_value(stage):
    params = {"w": jnp.linspace(0, 1, 512 * 257).reshape(512, 257), "odd": jnp.arange(117.0), "b": jnp.arange(13)}
    state = jzero.TrainState.create(params=params, tx=optax.adam(1e-3))
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=0)
    before = jzero.plan_train_state(state, config=config)
    sharded = jzero.shard_train_state(state, config=config)
    assert jzero.plan_of(sharded) == before
    assert jzero.plan_train_state(sharded, config=config) == before, "an already sharded state is planned anew"
    for x, spec in zip(jax.tree.leaves(sharded.params), jax.tree.leaves(before.params), strict=True):
        assert x.sharding == NamedSharding(before.mesh, spec)
    jax.tree.map(np.testing.assert_array_equal, jzero.unshard_train_state(sharded), state)


def test_leaf_sharded_over_another_axis_keeps_that():
    mesh = jzero.make_mesh(data=4, model=2)
    w = jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, P("model", None)))
    state = jzero.TrainState.create(params={"w": w}, tx=optax.adam(1e-3))
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0)
    plan = jzero.plan_train_state(state, config=config, mesh=mesh)
    assert plan.params == {"w": P("model", "data")}
    assert plan.opt_state[0].mu == {"w": P("model", "data")}
    assert plan.bytes_per_device.params == 64 * 64 * 4 // 8


def test_replica_axis_holds_copies():
    mesh = abstract_mesh(replica=2, data=4)
    state = abstract_state({"w": jnp.ones((64, 64))}, optax.sgd(0.1))
    config = jzero.ZeroConfig(stage=3, replica_axis="replica", persistence_threshold=0)
    plan = jzero.plan_train_state(state, config=config, mesh=mesh)
    assert plan.params == {"w": P("data")}
    assert plan.num_shards == 4
    assert plan.bytes_per_device.params == 64 * 64 * 4 // 4


# Who owns an optimizer leaf.

# Equal and swapped shapes, which the rules below cut on different dimensions.
PARAMS = {
    "first": (64, 128),
    "second": (64, 128),
    "third": (128, 64),
    "fourth": (128, 64),
    "bias": (64,),
    "odd": (37, 11),
}
RULES = {
    "first": jzero.LeafRule(dim=0),
    "second": jzero.LeafRule(dim=1),
    "third": jzero.LeafRule(dim=1),
    "fourth": jzero.LeafRule(dim=0),
}
MASK = {name: name != "second" for name in PARAMS}
LABELS = {name: "a" if name in ("first", "third", "odd") else "b" for name in PARAMS}
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=32),
    "masked": lambda: optax.masked(optax.adam(1e-3), MASK),
    "masked by function": lambda: optax.masked(optax.adam(1e-3), lambda p: {k: x.ndim > 1 for k, x in p.items()}),
    "multi_transform": lambda: optax.multi_transform({"a": optax.adam(1e-3), "b": optax.sgd(0.1, 0.9)}, LABELS),
    "multi_transform by function": lambda: optax.multi_transform(
        {"a": optax.adam(1e-3), "b": optax.sgd(0.1, 0.9)},
        lambda p: {k: "a" if x.ndim > 1 else "b" for k, x in p.items()},
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.ema(0.9), optax.adam(1e-3)),
    "lamb": lambda: optax.lamb(1e-3),
    "by hand": lambda: optax.chain(momentum_that_looks_into_the_parameters(), optax.scale(-0.1)),
    "lion": lambda: optax.lion(1e-3),
    "muon": lambda: optax.contrib.muon(1e-3),
}


def owner_by_name(path):
    """The parameter that an optimizer leaf belongs to. All names here are unlike any of optax's own."""
    names = [name for name in path.split("/") if name in PARAMS]
    assert len(names) <= 1
    return names[0] if names else None


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_leaf_is_cut_like_its_parameter(name, stage):
    tx = OPTIMIZERS[name]()
    plan = plan_for(PARAMS, num_shards=8, tx=tx, stage=stage, persistence_threshold=0, rules=RULES)
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


def momentum_that_looks_into_the_parameters(decay=0.9):
    """Its `init` fails on what optax has for asking who owns what; then only key paths can tell."""

    def init(params):
        return {"mu": {name: jax.tree.map(jnp.zeros_like, value) for name, value in params.items()}}

    def update(updates, state, params=None):
        mu = jax.tree.map(lambda m, g: decay * m + g, state["mu"], updates)
        return mu, {"mu": mu}

    return optax.GradientTransformation(init, update)


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


# Bytes.


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_per_device_are_those_of_the_live_buffers(name):
    tx = OPTIMIZERS[name]()
    params = {k: jnp.ones(shape) for k, shape in PARAMS.items()} | {"half": jnp.ones((24, 8), jnp.bfloat16)}
    if name in ("masked", "multi_transform"):  # their masks name the parameters
        del params["half"]
    state = jzero.TrainState.create(params=params, tx=tx)
    for stage in STAGES:
        config = jzero.ZeroConfig(stage=stage, persistence_threshold=0, rules=RULES)
        plan = jzero.plan_train_state(state, config=config)
        sharded = jzero.shard_train_state(state, config=config)
        assert plan.bytes_per_device.params == device_bytes(sharded.params)
        assert plan.bytes_per_device.opt_state == device_bytes(sharded.opt_state)
        assert plan.bytes_per_device.total == sum(plan.bytes_per_device)


@pytest.mark.parametrize("devices", [1, 3, 5, 8])
def test_bytes_are_those_of_the_live_buffers_on_any_number_of_devices(devices):
    mesh = jzero.make_mesh(devices=jax.devices()[:devices])
    params = {"odd": jnp.ones((37, 11)), "flat": jnp.ones((11, 9)), "w": jnp.ones((120, 7)), "tiny": jnp.ones(3)}
    state = jzero.TrainState.create(params=params, tx=optax.adam(1e-3))
    config = jzero.ZeroConfig(stage=3, persistence_threshold=0)
    if devices == 1:
        with pytest.warns(UserWarning, match="one device"):
            sharded = jzero.shard_train_state(state, config=config, mesh=mesh)
    else:
        sharded = jzero.shard_train_state(state, config=config, mesh=mesh)
    plan = jzero.plan_of(sharded)
    assert plan.bytes_per_device.params == device_bytes(sharded.params)
    assert plan.bytes_per_device.opt_state == device_bytes(sharded.opt_state)


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("num_shards", [8, 64])
@pytest.mark.parametrize("stage", STAGES)
def test_bytes_agree_with_the_arithmetic_of_zero(stage, num_shards, scanned):
    plan = plan_for(gpt_shapes(scanned=scanned), num_shards=num_shards, stage=stage, persistence_threshold=0)
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


# What stays whole.


@pytest.mark.parametrize("stage", STAGES)
def test_replicated_lists_every_whole_leaf_with_a_reason(stage):
    params = {"w": jnp.ones((512, 257)), "small": jnp.ones(96), "tiny": jnp.ones(3), "s": jnp.ones(())}
    rules = {"ruled": jzero.LeafRule(replicated=True), "kept": jzero.LeafRule(persistent=True)}
    params |= {"ruled": jnp.ones((64, 64)), "kept": jnp.ones((64, 64))}
    state = jzero.TrainState.create(params=params, tx=optax.adam(1e-3))
    config = jzero.ZeroConfig(stage=stage, persistence_threshold=100, rules=rules)
    plan = jzero.plan_train_state(state, config=config)

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


def test_rule_for_a_dimension_pads_it():
    plan = plan_for({"w": (37, 64)}, stage=3, persistence_threshold=0, rules={"w": jzero.LeafRule(dim=0)})
    assert plan.params == {"w": P("data")}
    assert plan.padding == {"w": 3 * 64}


def test_rule_for_a_scanned_dimension_is_obeyed():
    rule = {"stack": jzero.LeafRule(scan_dim=1)}
    plan = plan_for({"stack": (16, 512, 8)}, stage=3, persistence_threshold=0, rules=rule)
    assert plan.params == {"stack": P("data")}
    assert plan.leaves[0].scan_dim == 1


# Text.


def test_text_shows_every_section(capsys):
    params = {
        "embed": (1000, 64),
        "odd": (37, 129),
        "flat": (11, 9),
        "bias": (64,),
        "stack": {"w": (6, 64, 64), "s": (6, 64)},
    }
    plan = plan_for(params, stage=3, persistence_threshold=64)
    print(plan)  # noqa: T201  # this is how people read it
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0].startswith("ZeRO stage 3 over 'data' (N=8)")
    assert "data=8" in lines[0]
    for heading in ("bytes per device", "parameter", "whole on every device", "gathered per step"):
        assert any(line.startswith(heading) for line in lines), heading
    for term in ("params", "grads", "opt_state", "total", "this plan", "replicated"):
        assert term in text
    row = {line.split()[0]: line for line in lines if line}
    assert "cut on dim 0" in row["embed"]
    assert "(1000, 64)" in row["embed"]
    assert "padded 129->136" in row["odd"]
    assert "flattened, padded 99->104" in row["flat"]
    assert "dim 0" in row["stack/w"].split("cut on dim")[-1], "the scanned dimension"
    assert "whole" in row["bias"]
    assert any(line.startswith("params") and "bias" in line and "(persistence_threshold)" in line for line in lines)
    assert any(line.startswith("other") and "step" in line for line in lines)
    assert f"{plan.gathered_bytes / 1024:.2f} KiB" in lines[-1]


def test_text_counts_the_rows_that_it_hides():
    plan = plan_for({f"w{i:02}": (64, 64) for i in range(50)}, stage=3, persistence_threshold=0)
    assert "w49" not in str(plan)
    assert "... 10 more (plan.table(max_rows=None))" in str(plan)
    assert "w49" in plan.table(max_rows=None)
    assert "more" not in plan.table(max_rows=None)


# Plans are values.


def all_opt_indices(plan):
    return [inspect._opt_index(plan, leaf.path, "mu") for leaf in tuple(plan.leaves)]


class Counted(tuple):
    """A tuple that counts how many of its items are taken."""

    taken = 0

    def __iter__(self):
        Counted.taken += len(self)
        return super().__iter__()

    def __getitem__(self, key):
        found = super().__getitem__(key)
        Counted.taken += len(found) if isinstance(key, slice) else 1
        return Counted(found) if isinstance(key, slice) else found


@pytest.mark.parametrize("look", [str, ZeroPlan.to_json, all_opt_indices])
def test_looking_at_a_plan_takes_time_in_proportion_to_its_leaves(look):
    config = {"stage": 3, "persistence_threshold": 0, "precision": "bf16", "offload": jzero.Offload(optimizer="host")}
    plan = plan_for({f"w{i}": (64, 8) for i in range(150)}, **config)
    plan = dataclasses.replace(plan, leaves=Counted(plan.leaves), opt_leaves=Counted(plan.opt_leaves))
    Counted.taken = 0
    look(plan)
    num_leaves = len(plan.leaves) + len(plan.opt_leaves)
    assert num_leaves <= Counted.taken <= 20 * num_leaves  # every leaf for each parameter: 150 times as many


@pytest.mark.parametrize("stage", STAGES)
def test_plans_are_values(stage):
    config = {"persistence_threshold": 10, "rules": {"w": jzero.LeafRule(dim=0)}}
    first, second = (plan_for({"w": (64, 37), "b": (5,)}, stage=stage, **config) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert len({first, second}) == 1
    others = [
        plan_for({"w": (64, 37), "b": (5,)}, stage=(stage + 1) % 4, **config),
        plan_for({"w": (64, 37), "b": (6,)}, stage=stage, **config),
        plan_for({"w": (64, 37), "b": (5,)}, stage=stage, num_shards=7, **config),
        plan_for({"w": (64, 37), "b": (5,)}, stage=stage, tx=optax.lion(1e-3), **config),
    ]
    assert all(other != first for other in others)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.mesh = None


def test_plan_touches_no_device():
    huge = {"w": (1 << 20, 1 << 20)}  # four terabytes
    plan = plan_for(huge, num_shards=512, stage=3)
    assert plan.bytes_per_device.params == 4 * (1 << 40) // 512


def test_numbers_and_numpy_arrays_are_leaves_too():
    params = {"w": np.ones((64, 64), np.float32)}
    state = jzero.TrainState.create(params=params, tx=optax.sgd(0.1)).replace(step=0)
    plan = jzero.plan_train_state(state, config=jzero.ZeroConfig(stage=3, persistence_threshold=0))
    assert plan.params == {"w": P("data")}
    assert [leaf.path for leaf in plan.other_leaves] == ["step"]


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
    make = lambda size: jzero.TrainState.create(params={"w": np.zeros((size, 64), np.float32)}, tx=optax.sgd(0.1))
    first, second = (jzero.plan_train_state(make(64), stage=3) for _ in range(2))
    assert first is second
    assert jzero.plan_of(jzero.shard_train_state(make(64), stage=3)) is first
    assert jzero.plan_train_state(make(72), stage=3) != first
    gone = weakref.ref(jzero.plan_train_state(make(80), stage=3))
    gc.collect()
    assert gone() is None


def test_on_one_device_the_plan_says_so():
    plain = jzero.TrainState.create(params={"w": np.ones((36, 61), np.float32)}, tx=optax.sgd(0.1))
    for num_devices, told in ((1, True), (2, False)):
        plan = jzero.plan_train_state(plain, stage=3, mesh=jax.sharding.AbstractMesh((num_devices,), ("data",)))
        assert ("nothing is partitioned" in str(plan)) == told
