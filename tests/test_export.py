"""Parameters as safetensors: exported, read by the safetensors package itself, and loaded into shards."""

import contextlib
import json
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

import jzero
from jzero.checkpoint.parts import read_parts
from jzero.weights import safetensors_files
from jzero.weights.safetensors_files import TensorSpec, write_tensors
from tests import shared
from tests.checkpoint_states import linen_state, sharded
from tests.export_states import ODD, odd_state


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (3, "fp32")])
def test_exported_parameters_are_read_by_safetensors(stage, precision, tmp_path):
    plain, _ = odd_state()
    state = sharded(plain, stage, 8, precision=precision)
    report = jzero.export_params(state, tmp_path / "x.safetensors")
    found = load_file(tmp_path / "x.safetensors")
    assert report.files == (str(tmp_path / "x.safetensors"),)
    assert report.num_tensors == len(found) == len(plain.params)
    for name, x in plain.params.items():
        assert found[name].dtype == x.dtype
        np.testing.assert_array_equal(found[name], x)


def test_dtype_of_choice(tmp_path):
    plain, _ = odd_state()
    for dtype, expected in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16), (jnp.float32, np.float32)):
        jzero.export_params(sharded(plain, 3), tmp_path / f"{expected.__name__}.safetensors", dtype=dtype)
        found = load_file(tmp_path / f"{expected.__name__}.safetensors")
        assert found["whole"].dtype == np.int32, "integers stay"
        for name in ODD:
            np.testing.assert_array_equal(found[name], np.asarray(plain.params[name]).astype(expected))
            assert found[name].dtype == expected
    for bad in ("foo", "complex128", "int8", object):
        with pytest.raises(ValueError, match="`dtype` must be"):
            jzero.export_params(sharded(plain, 3), tmp_path / "bad", dtype=bad)


DTYPES = """float4_e2m1fn float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float16 bfloat16
int8 uint8 int16 uint16 int32 uint32 bool complex64""".split()


def params_of_every_dtype(value):
    numbers = (value * np.arange(1, 33).reshape(8, 4)) % 2 ** (np.arange(4) % 2)  # whole parts: nothing is compiled
    params = {d: numbers.astype(jnp.dtype(d)) for d in DTYPES}
    return {**params, "w": np.ones(8, "f"), "empty": np.zeros((0, 5), "f"), "scalar": np.int8(value)}


@pytest.mark.slow
def test_every_dtype_is_read_as_it_was_written(tmp_path):
    make = lambda value: sharded(jzero.TrainState.create(params=params_of_every_dtype(value), tx=shared.sgd(0.1)), 3)
    jzero.export_params(make(1), tmp_path, max_file_bytes=100)
    loaded = jzero.unshard_train_state(jzero.load_params(make(0), tmp_path)).params
    for name, x in params_of_every_dtype(1).items():
        assert loaded[name].dtype == x.dtype, name
        assert np.asarray(loaded[name]).tobytes() == x.tobytes(), name


@pytest.mark.parametrize("dtype", ["uint4", "int4", "float8_e3m4", "float8_e4m3"])
def test_other_dtypes_are_named(dtype, tmp_path):
    plain = jzero.TrainState.create(params={"w": jnp.ones(8), "q": jnp.ones((16, 8), dtype)}, tx=shared.sgd(0.1))
    state = sharded(plain, 3)
    with pytest.raises(ValueError, match=f"q: {dtype}, which safetensors"):
        jzero.export_params(state, tmp_path / "x")
    jzero.export_params(state, tmp_path / "x", paths="w")
    if dtype == "float8_e4m3":
        with pytest.raises(ValueError, match=r"Orbax .*\n  params/q: float8_e4m3\n"):
            jzero.save_checkpoint(tmp_path / "checkpoint", state)


def test_numbers_that_the_dtype_does_not_hold(tmp_path):
    state = sharded(jzero.TrainState.create(params={"w": jnp.full(8, 1e5)}, tx=shared.sgd(0.1)), 3)
    jzero.save_checkpoint(tmp_path / "checkpoint", state)
    for export, source in ((jzero.export_params, state), (jzero.export_checkpoint, tmp_path / "checkpoint")):
        with pytest.raises(ValueError, match=r"w cannot be exported: .* 100000"):
            export(source, tmp_path / "x", dtype="float16")


def test_any_name_is_read_as_it_was_written(tmp_path):
    names = ["__metadata__", "__metadata___", "", "a.b", "a/c", "d'\"\n", "ü→☃", "format", "w"]
    make = lambda *values: sharded(
        jzero.TrainState.create(
            params={n: jnp.full(8, x) for n, x in zip(names, values, strict=True)}, tx=shared.sgd(0.1)
        ),
        2,
    )
    jzero.export_params(make(*range(9)), tmp_path)
    loaded = jzero.unshard_train_state(jzero.load_params(make(*[9] * 9), tmp_path)).params
    assert [int(loaded[name][0]) for name in names] == list(range(9))
    assert load_file(tmp_path / "model.safetensors")["w"][0] == 8
    surrogate = jzero.TrainState.create(params={"\ud800": jnp.ones(8)}, tx=shared.sgd(0.1))
    with pytest.raises(ValueError, match="no valid Unicode"):
        jzero.export_params(sharded(surrogate, 2), tmp_path / "x")


def test_the_index_says_which_file_holds_a_tensor(tmp_path):
    save_file({"w": np.ones(8, np.float32)}, tmp_path / "a.safetensors")
    save_file({"w": np.zeros(8, np.float32), "more": np.zeros(3)}, tmp_path / "b.safetensors")
    state = sharded(jzero.TrainState.create(params={"w": jnp.full(8, 2.0)}, tx=shared.sgd(0.1)), 1)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"w": "a.safetensors"}}')
    assert float(jzero.load_params(state, tmp_path).params["w"][0]) == 1
    for wrong, message in (
        ('{"w": "a.safetensors", "b": "b.safetensors"}', r"b.safetensors lacks tensors .*\['b'\]"),
        ('{"w": "c.safetensors"}', "c.safetensors"),
        ('{"w": 3}', "no index of safetensors files"),
    ):
        index.write_text(f'{{"weight_map": {wrong}}}')
        with pytest.raises(jzero.CheckpointError, match=message):
            jzero.load_params(state, tmp_path)


def test_a_file_beside_an_index_of_other_files(tmp_path):
    state = sharded(jzero.TrainState.create(params={"w": jnp.full(8, 2.0)}, tx=shared.sgd(0.1)), 1)
    for name, value in (("model-00001-of-00001", 0), ("model", 1)):
        save_file({"w": np.full(8, value, np.float32)}, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"w": "model-00001-of-00001.safetensors"}}')
    with pytest.raises(jzero.CheckpointError, match=r" model\.safetensors, .*\.index\.json"):
        jzero.load_params(state, tmp_path)
    named = {tmp_path / "model.safetensors": 1, index: 0}
    assert all(float(jzero.load_params(state, path).params["w"][0]) == value for path, value in named.items())
    index.write_text('{"weight_map": {"w": "model.safetensors"}}')
    assert float(jzero.load_params(state, tmp_path).params["w"][0]) == 1
    # Whatever lies beside the names that `transformers` reads.
    (tmp_path / "consolidated.safetensors.index.json").write_text("[]")
    assert float(jzero.load_params(state, tmp_path).params["w"][0]) == 1
    index.unlink()
    assert float(jzero.load_params(state, tmp_path).params["w"][0]) == 1


def test_parts_need_their_index_and_an_index_its_parts(tmp_path):
    state = sharded(jzero.TrainState.create(params={"w": jnp.full(8, 2.0)}, tx=shared.sgd(0.1)), 1)
    part = tmp_path / "model-00001-of-00002.safetensors"
    save_file({"w": np.zeros(8, np.float32)}, part)
    with pytest.raises(jzero.CheckpointError, match=r"parts .* with their index, .*: it has \['model-00001-of-00002"):
        jzero.load_params(state, tmp_path)
    where = {"w": part.name, "v": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(jzero.CheckpointError, match=r"not there: \['model-00002-of-00002\.safetensors'\]"):
        jzero.load_params(state, tmp_path)


def test_only_some_parameters(tmp_path):
    state = sharded(linen_state(), 3)
    jzero.export_params(state, tmp_path / "x.safetensors", paths="(first|third)/.*")
    assert sorted(load_file(tmp_path / "x.safetensors")) == ["first.bias", "first.kernel", "third.bias", "third.kernel"]
    with pytest.raises(ValueError, match="`paths` 'nothing' matches no parameter"):
        jzero.export_params(state, tmp_path / "y.safetensors", paths="nothing")


TRANSPOSED = jzero.Mapping({"a": jzero.From("x", (1, 0)), r"([bc])": jzero.From(r"\1")})


@pytest.mark.parametrize(
    ("dtype", "mapping"), [(None, None), ("bfloat16", None), ("float4_e2m1fn", None), (None, TRANSPOSED)]
)
def test_leaves_in_parts_are_exported_as_those_in_one(dtype, mapping, tmp_path, monkeypatch):
    """With parts of odd sizes, several of them under way, and some larger than the limit."""
    shapes = {"a": (61, 26), "b": (18,)} | ({} if dtype == "float4_e2m1fn" else {"c": ()})
    rng = np.random.default_rng(0)
    params = {name: rng.choice(np.float32([-6, -3, 0.5, 1.5, 4]), shape) for name, shape in shapes.items()}
    state = shared.sharded(params, shared.sgd(0.1), 3)
    jzero.save_checkpoint(tmp_path / "c", state)
    jzero.export_params(state, tmp_path / "state.safetensors", dtype=dtype, mapping=mapping)
    expected = (tmp_path / "state.safetensors").read_bytes()
    for part, limit in ((1, 1), (1, 3000), (3000, 2000)):
        monkeypatch.setattr("jzero.checkpoint.parts.PART_BYTES", part)
        monkeypatch.setattr("jzero.checkpoint.parts.LEAVES_BYTES", limit)
        found = tmp_path / f"{part}_{limit}.safetensors"
        jzero.export_checkpoint(tmp_path / "c", found, dtype=dtype, mapping=mapping)
        assert found.read_bytes() == expected


def test_a_checkpoint_is_exported_as_safetensors_would_write_it(tmp_path):
    """Of chunks that end with rows and of others, by jzero and by Orbax, larger and smaller than a part."""
    rng, shapes = np.random.default_rng(0), {"a": (61, 26), "b": (18,), "c": (8, 6, 40), "d": (4, 2000, 1000)}
    params = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    mesh, spread = jax.make_mesh((2, 4), ("x", "y")), {"c": PartitionSpec("x", None, "y"), "d": PartitionSpec("y", "x")}
    placed = {x: jax.device_put(params[x], NamedSharding(mesh, spec)) for x, spec in spread.items()}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "orbax", {"params": params | placed})
    jzero.save_checkpoint(tmp_path / "jzero", shared.sharded(params, shared.sgd(0.1), 3))
    save_file(params, tmp_path / "expected.safetensors", {"format": "flax"})

    def content(name):
        file = (tmp_path / f"{name}.safetensors").read_bytes()
        end = 8 + int.from_bytes(file[:8], "little")
        return json.loads(file[8:end]), file[end:]

    for name in ("orbax", "jzero"):
        jzero.export_checkpoint(tmp_path / name, tmp_path / f"{name}.safetensors")
        assert content(name) == content("expected")


class Part:
    """A part of some numbers, all the same, which are there at once; notes that it was asked for."""

    def __init__(self, number, asked, size=1):
        self.number, self.asked, self.num_bytes = number, asked, 4 * size

    def read(self, memory):
        self.asked.append(self.number)
        values = memory.view(np.float32)
        values[:] = self.number
        return types.SimpleNamespace(result=lambda: None), values


CONTENTS = types.SimpleNamespace(errors=contextlib.nullcontext)


@pytest.mark.parametrize(("limit", "asked"), [(1, [1, 2, 3, 4, 5, 5]), (12, [2, 3, 4, 5, 5, 5]), (999, [5] * 6)])
def test_while_a_part_is_in_use_the_next_is_under_way(limit, asked):
    """Also of parts larger than the limit, else one thread would read, check and write by turns."""
    noted = []
    values = read_parts(CONTENTS, [Part(i, noted) for i in range(6)], limit)
    assert [(float(x[0]), noted[-1]) for x in values] == [*enumerate(asked)]


def numbered(sizes):
    return [Part(i, [], size) for i, size in enumerate(sizes)]


def test_memory_is_used_again_unless_parts_are_kept():
    """And no small part keeps the memory of a large one."""
    sizes = [16, 16, 15, 16, 16, 16, 4, 4, 4, 4]
    kept = [*read_parts(CONTENTS, numbered(sizes), 128)]
    assert [(*x,) for x in kept] == [(i,) * size for i, size in enumerate(sizes)]
    values = read_parts(CONTENTS, numbered(sizes), 128, reuse=True)
    used = [(x.ctypes.data, x.base.nbytes, float(x[-1])) for x in values]
    assert [number for *_, number in used] == [*range(len(sizes))]
    assert len({place for place, *_ in used[:6]}) == 2
    assert max(num_bytes for _, num_bytes, _ in used[6:]) == 16
    two_at_once = read_parts(CONTENTS, numbered([16, 16, 16, 10]), 168, reuse=True)  # of which one takes old memory
    assert [float(x[0]) for x in two_at_once] == [0, 1, 2, 3]


def test_what_decode_is_given_stays_as_it_is(tmp_path, monkeypatch):
    """Whatever is read after it, into memory that is used again."""
    rng, given = np.random.default_rng(0), {}
    params = {x: {y: rng.standard_normal((61, 26), np.float32) for y in ("kernel", "more")} for x in "abcd"}
    jzero.save_checkpoint(tmp_path / "c", shared.sharded(params, shared.sgd(0.1), 3))
    monkeypatch.setattr("jzero.checkpoint.parts.LEAVES_BYTES", 1)

    def decode(path, leaves):
        given[path[0]] = leaves
        return leaves["kernel"] + leaves["more"]

    mapping = jzero.Mapping({r"(.)/kernel": jzero.From(r"\1")})
    jzero.export_checkpoint(tmp_path / "c", tmp_path / "x.safetensors", mapping=mapping, decode=decode)
    for name, x in load_file(tmp_path / "x.safetensors").items():
        np.testing.assert_array_equal(x, params[name]["kernel"] + params[name]["more"])
        assert all((given[name][y] == params[name][y]).all() for y in ("kernel", "more"))


def test_names_that_are_the_same(tmp_path):
    params = {"a": {"b": jnp.ones(3)}, "a.b": jnp.ones(3)}
    state = sharded(jzero.TrainState.create(params=params, tx=shared.sgd(0.1)), 1)
    with pytest.raises(ValueError, match=r"told apart on disk.*params\.a\.b"):
        jzero.export_params(state, tmp_path / "x.safetensors")


# The files of an export: of one program, whole or not there, whoever else writes and whatever fails.


ROOT = pathlib.Path(jzero.__file__).parents[1]
EXPORT_SLOWLY = """
import sys
from etils import epath
from tests.test_export import export

def wait(tensor):
    if tensor == 2:
        print("writing", flush=True)
        sys.stdin.readline()

export(epath.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), wait)
"""


def export(path, value, max_bytes, before=lambda tensor: None):
    """Writes four tensors, in one file or in several; calls `before` with the number of each."""
    specs = [TensorSpec(str(i), (25,), np.float32) for i in range(4)]
    arrays = ([np.full(25, value, np.float32)] for i in range(4) if before(i) is None)
    write_tensors(path, specs, arrays, max_bytes, {})


def test_of_two_programs_that_export_to_one_path_one_is_told(tmp_path):
    """It has touched no file of the other; and once that is killed, what it leaves is in nobody's way."""
    path = epath.Path(tmp_path / "out")
    first = subprocess.Popen(
        [sys.executable, "-c", EXPORT_SLOWLY, path, "1", "100"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert first.stdout.readline() == "writing\n"
    content = lambda: {str(file): file.read_bytes() for file in path.iterdir()}
    before = content()
    with pytest.raises(jzero.CheckpointError, match=f"process {first.pid} on"):
        export(path, 2, 10_000)
    assert content() == before
    first.kill()
    first.communicate()
    export(path, 2, 100)
    tensors, _ = safetensors_files.find_tensors(path)
    assert {float(x) for tensor in tensors.values() for x in tensor.view((slice(None),))} == {2.0}
    assert all(file.name.endswith((".safetensors", ".json")) for file in path.iterdir())
    with pytest.raises(ValueError, match="never replaces files"):
        export(path, 2, 10_000)


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    rename = type(epath.Path(tmp_path)).rename

    def fails_at_the_index(self, target):
        if target.name.endswith(".json"):
            raise OSError("no space")
        return rename(self, target)

    monkeypatch.setattr(type(epath.Path(tmp_path)), "rename", fails_at_the_index)
    params = {name: np.ones(200, np.float32) for name in "ab"}
    state = jzero.shard_train_state(jzero.TrainState.create(params=params, tx=optax.sgd(0.1)), stage=3)
    with pytest.raises(jzero.CheckpointError, match=r"could not be written to .*no space"):
        jzero.export_params(state, tmp_path / "out", max_file_bytes=1000)
    assert not list((tmp_path / "out").iterdir())


def test_four_bits_come_in_pairs_the_first_in_the_lower_half(tmp_path):
    """In parts of an odd number of elements, too."""
    codes = np.arange(15, dtype=np.uint8)
    x, file = codes.view(ml_dtypes.float4_e2m1fn), epath.Path(tmp_path / "x.safetensors")
    parts = [x[:3], x[3:8], x[8:9], x[9:14]]
    write_tensors(file, [TensorSpec("x", (2, 7), x.dtype)], [parts], max_bytes=2**20, notes={})
    assert file.read_bytes()[-7:] == bytes.fromhex("1032547698badc")
    tensors, _ = safetensors_files.find_tensors(file)
    np.testing.assert_array_equal(tensors["x"].view(np.s_[:, 1:]).view(np.uint8), codes[:14].reshape(2, 7)[:, 1:])
