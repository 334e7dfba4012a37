"""Parameters of files are loaded into shards: each device reads its part, and tied leaves stay tied."""

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import jzero
from jzero.weights import safetensors_files
from tests import shared
from tests.checkpoint_states import natural, nnx_state, sharded
from tests.export_states import ODD, leaves, numbers, odd_state


@pytest.mark.parametrize(
    ("stage", "precision", "dtype"),
    [(0, "fp32", np.float32), (2, "bf16", ml_dtypes.bfloat16), (3, "bf16", np.float32)],
)
def test_files_of_another_program_are_loaded_into_shards(stage, precision, dtype, tmp_path):
    plain, _ = odd_state()
    tensors = {name: np.asarray(x).astype(dtype) if name in ODD else np.asarray(x) for name, x in plain.params.items()}
    save_file(tensors, tmp_path / "x.safetensors")
    state = sharded(odd_state(5)[0], stage, 8, precision=precision)
    loaded = jzero.load_params(state, tmp_path / "x.safetensors")
    found = numbers(loaded)
    for name, x in tensors.items():
        np.testing.assert_array_equal(found[name], x.astype(plain.params[name].dtype))
    for before, after in zip(leaves(state), leaves(loaded), strict=True):
        assert before == after
    if precision == "bf16" and stage < 3:
        np.testing.assert_array_equal(loaded.params["c"], tensors["c"].astype(ml_dtypes.bfloat16))
    inner = loaded.opt_state.inner if precision == "bf16" else loaded.opt_state
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(inner)), "the optimizer's state stays"
    if stage == 3:
        grads = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), jzero.natural_params(loaded))
        assert int(jax.jit(lambda state: state.apply_gradients(grads=grads))(loaded).step) == 1


def test_each_device_reads_its_part_only(tmp_path, monkeypatch):
    sizes = []
    view = safetensors_files.TensorFile.view

    def spy(self, index):
        part = view(self, index)
        sizes.append(part.size)
        return part

    monkeypatch.setattr(safetensors_files.TensorFile, "view", spy)
    params = {"w": np.ones((1000, 64), np.float32), "odd": np.ones((1003, 61), np.float32)}
    state = sharded(jzero.TrainState.create(params=params, tx=shared.sgd(0.1)), 3)
    jzero.export_params(state, tmp_path / "x.safetensors")
    jzero.load_params(state, tmp_path / "x.safetensors")
    assert max(sizes) == 125 * 64
    assert sum(sizes) == 1000 * 64 + 1003 * 61


def test_tied_leaves_are_tied_again(tmp_path):
    pair = sharded(nnx_state(), 3)
    jzero.export_params(pair, tmp_path / "x.safetensors")
    tensors = load_file(tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", "np") as file:
        assert file.metadata()["tied.kernel"] == "first.kernel", "as safetensors' own `save_model` notes it"
    assert "tied.kernel" not in tensors
    both = {**tensors, "tied.kernel": tensors["first.kernel"]}
    alone = {("tied.kernel" if name == "first.kernel" else name): x for name, x in tensors.items()}
    other = sharded(nnx_state(5), 1, 5)
    for number, stored in enumerate((tensors, both, alone)):
        save_file(stored, tmp_path / f"{number}.safetensors")
        model, optimizer = jzero.load_params(other, tmp_path / f"{number}.safetensors")
        assert model.tied.kernel is model.first.kernel
        np.testing.assert_array_equal(jzero.get_full_param((model, optimizer), "first/kernel"), tensors["first.kernel"])
    save_file({**tensors, "tied.kernel": tensors["first.kernel"] + 1}, tmp_path / "y.safetensors")
    with pytest.raises(ValueError, match=r"params/first/kernel, .* the same"):
        jzero.load_params(pair, tmp_path / "y.safetensors")


def test_other_names_and_missing_tensors(tmp_path):
    plain, _ = odd_state()
    tensors = {f"model.{name}": np.asarray(x) for name, x in plain.params.items()}
    save_file(tensors, tmp_path / "x.safetensors")
    state = sharded(odd_state(5)[0], 3)
    with pytest.raises(ValueError, match=r"(?s)\(6\):\n    a\n.*\(6\):\n    mod"):
        jzero.load_params(state, tmp_path / "x.safetensors")
    loaded = jzero.load_params(state, tmp_path / "x.safetensors", rename={r"model\.(.*)": r"\1"})
    found = numbers(loaded)
    assert all((found[name] == np.asarray(x)).all() for name, x in plain.params.items())
    tensors["model.more"] = tensors.pop("model.e")
    save_file(tensors, tmp_path / "y.safetensors")
    rename = {r"model\.(.*)": r"\1"}
    listed = r"`rename`(?s:.*)without tensors \(1\):\n    e\n  tensors without .* \(1\):\n    more: float32\[16, 8\]\n"
    with pytest.raises(ValueError, match=listed):
        jzero.load_params(state, tmp_path / "y.safetensors", rename=rename)
    with pytest.warns(UserWarning, match="(?s)params/e.*params/more"):
        loaded = jzero.load_params(state, tmp_path / "y.safetensors", rename=rename, strict=False)
    np.testing.assert_array_equal(numbers(loaded)["e"], numbers(state)["e"])
    np.testing.assert_array_equal(numbers(loaded)["a"], plain.params["a"])
    save_file(
        {**{name: np.asarray(x) for name, x in plain.params.items()}, "extra": np.ones(3)}, tmp_path / "z.safetensors"
    )
    with pytest.raises(ValueError, match=r"extra: float64\[3\]\n"):
        jzero.load_params(state, tmp_path / "z.safetensors")


@pytest.mark.parametrize("wrt", [nnx.LoRAParam, nnx.Param])
def test_some_parameters_are_loaded_and_others_stay(wrt, tmp_path):
    """Where adapters are added to a model whose file has none, and the other way round."""

    def make(layer, **options):
        model = nnx.Dict(layer=layer(17, 13, rngs=nnx.Rngs(len(options)), **options))
        return sharded((model, nnx.Optimizer(model, shared.sgd(0.1, momentum=0.9), wrt=wrt)), 3)

    without_adapters = r"(?!.*/lora_[ab]).*"
    saved = nnx.Dict(layer=nnx.Linear(17, 13, rngs=nnx.Rngs(5)))
    kernel = np.asarray(saved.layer.kernel[...])
    tensors = {"layer.kernel": kernel, "layer.bias": np.ones(13, np.float32)}
    save_file(tensors, tmp_path / "x.safetensors")
    state = make(nnx.LoRALinear, lora_rank=2)
    with pytest.raises(ValueError, match=r"(?s)without tensors.*lora_a"):
        jzero.load_params(state, tmp_path / "x.safetensors")
    before = np.asarray(state[0].layer.lora.lora_a[...])
    loaded, _ = jzero.load_params(state, tmp_path / "x.safetensors", paths=without_adapters)
    np.testing.assert_array_equal(natural(np.asarray(loaded.layer.kernel[...]), (17, 13)), kernel)
    np.testing.assert_array_equal(loaded.layer.lora.lora_a[...], before)
    bias, _ = jzero.load_params(state, tmp_path / "x.safetensors", paths="layer/bias")
    np.testing.assert_array_equal(natural(np.asarray(bias.layer.bias[...]), (13,)), np.ones(13))
    assert not (natural(np.asarray(bias.layer.kernel[...]), (17, 13)) == kernel).any(), "stays, though it is there"

    save_file({**tensors, "layer.more": np.ones(3, np.float32)}, tmp_path / "y.safetensors")
    with pytest.raises(ValueError, match=r"parameters \(1\):\n    layer\.m"):
        jzero.load_params(state, tmp_path / "y.safetensors", paths=without_adapters)
    with pytest.raises(ValueError, match=r"matches no .*'layer/"):
        jzero.load_params(state, tmp_path / "x.safetensors", paths="kernel")
    with pytest.raises(ValueError, match="is not a regular expression"):
        jzero.load_params(state, tmp_path / "x.safetensors", paths="(")


def test_files_that_cannot_be_loaded(tmp_path):
    state = sharded(odd_state()[0], 3)
    with pytest.raises(jzero.CheckpointError, match="There is no file"):
        jzero.load_params(state, tmp_path / "no.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(jzero.CheckpointError, match="must hold one safetensors file"):
        jzero.load_params(state, tmp_path / "empty")
    jzero.export_params(state, tmp_path / "x.safetensors")
    data = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(jzero.CheckpointError, match="it is damaged, or cut short"):
        jzero.load_params(state, tmp_path / "x.safetensors")
    (tmp_path / "x.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(jzero.CheckpointError, match=r"x\.safetensors .*Git LFS"):
        jzero.load_params(state, tmp_path / "x.safetensors")
    (tmp_path / "empty/pytorch_model.bin").touch()
    with pytest.raises(jzero.CheckpointError, match=r"\['pytorch_model\.bin'\]"):
        jzero.load_params(state, tmp_path / "empty")
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(jzero.CheckpointError, match="is no index of safetensors files"):
        jzero.load_params(state, tmp_path / "model.safetensors.index.json")
    save_file({"a": np.ones((3, 17), np.float32)}, tmp_path / "t.safetensors")
    with pytest.raises(ValueError, match=r"a: \[17, 3\] in .*\[3, 17\] in"):
        jzero.load_params(state, tmp_path / "t.safetensors", strict=False)
