"""Machines that are not there: their names, the facts about them, and that both compilers take them."""

import contextlib
import dataclasses
import math
import os
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jzero
from jzero.analysis.collectives import find_collectives
from jzero.machines import names, topologies
from jzero.machines.accelerators import GPUS, TPUS
from jzero.machines.machine import machine
from jzero.machines.topologies import target_config, topology_devices

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "kind", "num_devices", "devices_per_node", "devices_per_host"),
    [
        ("h200:8", "gpu", 8, 8, 8),
        ("h200:1", "gpu", 1, 1, 1),
        ("l40s:3", "gpu", 3, 3, 3),
        ("h100:16", "gpu", 16, 8, 8),
        ("a100-80:1024", "gpu", 1024, 8, 8),
        ("v5e:4x4", "tpu", 16, 16, 4),
        ("v6e:2x4", "tpu", 8, 8, 4),
        ("v5e:1x1", "tpu", 1, 1, 1),
        ("v5p:2x2x3", "tpu", 12, 12, 4),
        ("v4:2x2x2", "tpu", 8, 8, 4),
        ("v5e:2x4*3", "tpu", 24, 8, 4),
    ],
)
def test_a_name_says_how_many_devices_and_what_joins_them(name, kind, num_devices, devices_per_node, devices_per_host):
    found = machine(name)
    assert (found.name, found.kind) == (name, kind)
    assert (found.num_devices, found.devices_per_node) == (num_devices, devices_per_node)
    assert found.devices_per_host == devices_per_host


@pytest.mark.parametrize(
    "name", ["", "h200", "h300:8", "8", ":8", "h200:", "h200:-8", "h200:8 ", "v5e", "v5e:axb", "v5e:2x"]
)
@pytest.mark.parametrize("function", [machine, topology_devices])
def test_an_unknown_name_is_answered_with_the_known_ones(function, name):
    with pytest.raises(ValueError, match=re.escape(repr(name))) as caught:
        function(name)
    assert all(known in str(caught.value) for known in (*GPUS, *TPUS, "'h200:8'", "'v5e:2x4'"))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("a100:8", ["a100-80:8", "a100-40:8", "a100-pcie:8"]),
        ("8xA100", ["a100-80:8", "a100-40:8", "a100-pcie:8"]),
        ("h100-8", ["h100:8"]),
        ("v5e-8", ["v5e:2x4"]),
        ("v5litepod-16", ["v5e:4x4"]),
        ("v5p-32", ["v5p:2x2x4"]),  # Google Cloud counts its two cores
        ("TPU v5p-32", ["v5p:2x2x4"]),
        ("H100", ["h100:8"]),
    ],
)
def test_a_name_of_other_places_is_answered_with_the_one_here(name, meant):
    with pytest.raises(ValueError, match=f"got '{name}', which may mean {' or '.join(map(repr, meant))}\\. GPUs"):
        machine(name)
    assert all(map(machine, meant))


def test_names_as_people_write_them():
    same = {
        "h100:8": ("8xH100", "8 x H100", "H100x8", "NVIDIA H100:8", "p5.48xlarge", "a3-highgpu-8g", "DGX H100"),
        "h100:16": ("2x8xH100", "2xp5.48xlarge", "DGX H100 x 2", "h100-sxm5-80gb:16"),
        "a100-80:8": ("a100-80gb:8", "8xA100-80GB", "Standard_ND96amsr_A100_v4"),
        "rtx4090:2": ("2xRTX4090", "RTX 4090 x 2", "geforce rtx 4090:2"),
        "v5e:2x4": ("V5E:2x4", "TPU v5e:2x4"),
        "v5e:4x4*2": ("tpu v5e:4x4*2",),
    }  # fmt: skip
    for name, others in same.items():
        for other in others:
            assert dataclasses.replace(machine(other), name=name) == machine(name), other
    assert all(machine(x).num_devices == 8 for x in names.INSTANCES)


@pytest.mark.parametrize("name", ["h200:0", "h200:9", "h200:12", "b200:2x4"])
@pytest.mark.parametrize("function", [machine, topology_devices])
def test_a_count_that_no_hosts_have(function, name):
    with pytest.raises(ValueError, match=f"{name}'.* 1 to 8 .*'{name[:4]}:16'"):
        function(name)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("v5e:8", "v5e:2x4"),
        ("v5e:0x4", "v5e:2x2"),
        ("v5e:3x4", "v5e:2x6"),
        ("v6e:2x2x2", "v6e:2x4"),
        ("v5p:2x2", "v5p:2x2x1"),
        ("v5p:2x3x2", "v5p:2x2x3"),
        ("v4:2x2x0", "v4:2x2x4"),
    ],
)
@pytest.mark.parametrize("function", [machine, topology_devices])
def test_a_slice_of_a_shape_that_there_is_not(function, name, instead):
    with pytest.raises(ValueError, match=rf"{name}'.* dimensions, .* Ask for '{instead}'"):
        function(name)
    machine(instead)


@pytest.mark.parametrize("name", GPUS)
def test_gpu_facts_agree_with_each_other(name):
    facts = GPUS[name]
    units = facts.num_sms * facts.sm.fp32_units
    assert math.isclose(facts.flops["f32"], 2 * units * facts.clock_hz, rel_tol=0.01)
    assert math.isclose(facts.flops["bf16"], 2 * facts.flops["tf32"], rel_tol=0.02)
    per_link = {8: 25e9, 9: 25e9, 10: 50e9}[facts.compute_capability[0]]
    assert facts.intra_link_bytes_per_s == (facts.num_nvlinks * per_link or 32e9)
    found = machine(f"{name}:8")
    assert found.inter_link_bytes_per_s < found.intra_link_bytes_per_s < found.hbm_bytes_per_s
    assert found.flops["bf16"] == facts.flops["bf16"]


# Gigabits that one chip can send per second over all links together, and GB of memory.
@pytest.mark.parametrize(
    ("name", "gigabits", "memory"), [("v4", 2400, 32), ("v5e", 1600, 16), ("v5p", 4800, 96), ("v6e", 3200, 32)]
)
def test_tpu_facts(name, gigabits, memory):
    facts = TPUS[name]
    found = machine(f"{name}:{'x'.join('2' * facts.num_dims)}")
    assert found.intra_link_bytes_per_s == gigabits * 1e9 / 8
    assert found.num_links == {2: 4, 3: 6}[facts.num_dims]
    assert 0.95 * memory * GIB < found.hbm_bytes < memory * GIB
    assert found.inter_link_bytes_per_s is None
    assert 1e14 < found.flops["bf16"] < 1e15


def fields(text):
    """Returns the numbers of a protocol buffer in text form by the names of their fields."""
    return {key: float(value) for key, value in re.findall(r"(\w+): ([\d.]+)", text)}


# As XLA reads them off real GPUs (its `target_config/specs`); memory and bandwidth differ a little by driver.
COMMON = """
threads_per_core_limit: 2048 threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
registers_per_core_limit: 65536 registers_per_block_limit: 65536
"""
REAL = {
    "h100": """core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 major: 9 active_links: 18
        memory_bandwidth: 3352320000000 device_memory_size: 84942979072 l2_cache_size: 52428800
        shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448""",
    "a100-80": """core_count: 108 fpus_per_core: 64 clock_rate_ghz: 1.41
        memory_bandwidth: 2039040000000 device_memory_size: 85100068864 l2_cache_size: 41943040
        shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912""",
    "b200": """core_count: 148 fpus_per_core: 128 clock_rate_ghz: 1.965 active_links: 18
        memory_bandwidth: 7672320000000 device_memory_size: 191514411008 l2_cache_size: 132644864
        shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448""",
}


@pytest.mark.parametrize("name", REAL)
def test_target_config_says_what_the_real_gpu_reports(name):
    found = fields(target_config(GPUS[name]))
    for key, value in fields(COMMON + REAL[name]).items():
        tolerance = 0.01 if key in ("memory_bandwidth", "device_memory_size") else 0
        assert math.isclose(found[key], value, rel_tol=tolerance), key


@pytest.mark.parametrize("name", GPUS)
def test_target_config_is_well_formed(name):
    text = target_config(GPUS[name])
    assert text.count("{") == text.count("}")
    assert 'platform_name: "CUDA"' in text
    assert f'device_description_str: "{GPUS[name].name}"' in text
    major, minor = GPUS[name].compute_capability
    assert f"major: {major} minor: {minor} feature_extension: {'ACC' if major >= 9 else 'NONE'}" in text


# Names that no other test asks for: devices are kept.
@pytest.mark.parametrize(("name", "extra"), [("l40s:7", "gpu"), ("v6e:8x8", "tpu")])
def test_a_missing_compiler_names_its_extra(name, extra, monkeypatch):
    monkeypatch.setattr(topologies, "_is_installed", lambda package: False)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(ImportError, match=rf"{name}.*pip install 'jzero\[{extra}\]'"):
        topology_devices(name)


def test_a_missing_assembler_names_its_wheel(monkeypatch):
    monkeypatch.setattr(topologies, "_is_installed", lambda package: package == "jax_plugins.xla_cuda13")
    monkeypatch.setattr(topologies, "_has_ptxas", lambda: False)
    with pytest.raises(ImportError, match=r"ptxas.*pip install nvidia-cuda-nvcc`"):
        topology_devices("l40s:7")


def test_the_environment_is_the_users(monkeypatch):
    monkeypatch.setenv("JZERO_SET", "theirs")
    monkeypatch.delenv("JZERO_UNSET", raising=False)
    with contextlib.suppress(KeyError), topologies._environment({"JZERO_SET": "ours", "JZERO_UNSET": "ours"}):
        assert (os.environ["JZERO_SET"], os.environ["JZERO_UNSET"]) == ("theirs", "ours")
        raise KeyError
    assert os.environ["JZERO_SET"] == "theirs"
    assert "JZERO_UNSET" not in os.environ


def compile_gather(name):
    """Compiles a product with a gathered matrix: `x [256, 1024] @ w [1024, 512]`, both cut over all devices."""
    mesh = jzero.make_mesh(devices=topology_devices(name))
    spec = PartitionSpec("data")
    function = jax.shard_map(
        lambda w, x: jnp.tanh(x @ jax.lax.all_gather(w, "data", tiled=True)),
        mesh=mesh,
        in_specs=(spec, spec),
        out_specs=spec,
    )
    abstract = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
    return jax.jit(function).lower(abstract(1024, 512), abstract(256, 1024)).compile()


def check_compiled(name):
    before, num_devices = dict(os.environ), machine(name).num_devices
    assert len(topology_devices(name)) == num_devices
    compiled = compile_gather(name)
    (gather,) = find_collectives(compiled.as_text())
    assert (gather.kind, gather.dtype, gather.num_devices) == ("all-gather", "bf16", num_devices)
    assert gather.elements == 1024 * 512
    memory = compiled.memory_analysis()
    assert memory.argument_size_in_bytes == 2 * (1024 * 512 + 256 * 1024) // num_devices
    assert memory.output_size_in_bytes == 2 * 256 * 512 // num_devices
    assert memory.peak_memory_in_bytes < 16 * 2**20
    assert [d.platform for d in jax.devices()] == ["cpu"] * 8
    assert float(jnp.arange(4.0).sum()) == 6.0
    assert dict(os.environ) == before


# With the compiler in place; they fail where it is missing. GPU:
#   pip install -e '.[test,gpu]' nvidia-cuda-nvcc && pytest tests/test_topologies.py -m slow -k gpu
# TPU:
#   pip install -e '.[test,tpu]' && pytest tests/test_topologies.py -m slow -k tpu


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(f"{gpu}:8" for gpu in GPUS), "h200:16"])
def test_gpu_compiler(name):
    devices = topology_devices(name)
    assert [d.id for d in devices] == list(range(machine(name).num_devices))
    assert [d.process_index for d in devices] == [i // 8 for i in range(len(devices))]
    assert {d.device_kind for d in devices} == {GPUS[name.split(":")[0]].name}
    check_compiled(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e:4x4", "v6e:2x4", "v5p:2x2x2", "v4:2x2x2"])
def test_tpu_compiler(name):
    assert {d.platform for d in topology_devices(name)} == {"tpu"}
    check_compiled(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", TPUS)
def test_tpu_memory_is_what_the_compiler_allows(name):
    shape = "x".join("2" * TPUS[name].num_dims)
    mesh = jzero.make_mesh(devices=topology_devices(f"{name}:{shape}"))
    whole = NamedSharding(mesh, PartitionSpec())
    too_much = jax.ShapeDtypeStruct((200_000, 200_000), jnp.float32, sharding=whole)
    with pytest.raises(jax.errors.JaxRuntimeError, match="memory") as caught:
        jax.jit(lambda x: x @ x, out_shardings=whole).lower(too_much).compile()
    available = float(re.search(r"available HBM \(([\d.]+)G\)", str(caught.value))[1])
    assert math.isclose(machine(f"{name}:{shape}").hbm_bytes / GIB, available, abs_tol=0.015)
