"""Published models loaded and written again: equal files; with torch, what `transformers` and PEFT make of them."""

import itertools
import json
import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from etils import epath
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

import jzero
import jzero.hf
import jzero.lora
from jzero import From
from jzero.cli import commands
from tests import hf_models, shared
from tests.checkpoint_states import mesh
from tests.test_hf_parity import SGD, born, decoder, logits, logits_alone
from tests.test_mapping import full, make_state, numbers
from tests.tiers import slow

LORA = decoder.Lora(rank=2, alpha=3.0)
NO_ADAPTERS = r"(?!.*/lora_[ab]).*"


def tensors_in(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        assert safe_open(file, "np").metadata()["format"] == "pt"
        found |= load_file(file)
    return found


@pytest.mark.parametrize(
    ("family", "stage", "num_devices"),
    [
        slow("gemma3_text", 3, 8),
        pytest.param("llama", 3, 3, marks=pytest.mark.smoke),
        ("qwen2", 1, 8),
        ("mixtral", 3, 3),
    ],
)
def test_what_was_loaded_is_written_again(family, stage, num_devices, tmp_path):
    config = hf_models.write_folder(tmp_path / "like", family, "old")
    (tmp_path / "like/tokenizer.json").write_text("{}")
    (tmp_path / "like/chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "like/README.md").write_text("not ours to give away")
    state, _ = born(config, num_devices, stage=stage)
    state = jzero.load_params(state, tmp_path / "like", mapping="auto")
    report = jzero.export_params(state, tmp_path / "out", mapping="auto", like=tmp_path / "like", max_file_bytes=30_000)
    assert report.files[-1].endswith("model.safetensors.index.json")
    there, ours = hf_models.tensors(config), tensors_in(tmp_path / "out")
    assert {name: x.tobytes() for name, x in ours.items()} == {name: x.tobytes() for name, x in there.items()}
    assert {name: x.shape for name, x in ours.items()} == {name: x.shape for name, x in there.items()}
    beside = {path.name for path in (tmp_path / "out").iterdir() if ".safetensors" not in path.name}
    assert beside == {"config.json", "tokenizer.json", "chat_template.jinja"}
    assert jzero.hf.read_config(tmp_path / "out") == config


def test_a_checkpoint_is_written_as_its_state_is(tmp_path):
    config = hf_models.write_folder(tmp_path / "like", "gemma2")
    state = jzero.load_params(born(config)[0], tmp_path / "like", mapping="auto")
    jzero.save_checkpoint(tmp_path / "checkpoint", state)
    jzero.export_checkpoint(tmp_path / "checkpoint", tmp_path / "out", mapping="auto", like=tmp_path / "like")
    ours, there = tensors_in(tmp_path / "out"), hf_models.tensors(config)
    assert {name: x.tobytes() for name, x in ours.items()} == {name: x.tobytes() for name, x in there.items()}
    command = f"export {tmp_path / 'checkpoint'} {tmp_path / 'short'} --like {tmp_path / 'like'} --dtype bfloat16"
    result = CliRunner().invoke(commands.app, command.split())
    assert result.exit_code == 0, result.output
    short = {name: x.astype(ml_dtypes.bfloat16).tobytes() for name, x in there.items()}
    assert {name: x.tobytes() for name, x in tensors_in(tmp_path / "short").items()} == short
    assert json.loads((tmp_path / "short/config.json").read_text())["dtype"] == "bfloat16"
    words = ["export", str(tmp_path / "checkpoint"), str(tmp_path / "alone"), "--mapping"]
    assert CliRunner().invoke(commands.app, [*words, "gemma2"]).exit_code == 0
    assert "model.layers.2.mlp.down_proj.weight" in tensors_in(tmp_path / "alone")
    refused = CliRunner().invoke(commands.app, [*words, "mistake"])
    assert refused.exit_code == 2
    assert "`--mapping` must be" in refused.stderr


def test_damage_is_noticed_while_a_checkpoint_is_written(tmp_path):
    config = hf_models.write_folder(tmp_path / "like", "llama3")
    state = jzero.load_params(born(config)[0], tmp_path / "like", mapping="auto")
    jzero.save_checkpoint(tmp_path / "checkpoint", state)
    part = np.asarray(jzero.get_full_param(state, "embed/embedding"))[1].tobytes()
    for path in (tmp_path / "checkpoint").rglob("d/*"):
        path.write_bytes(path.read_bytes().replace(part, part[::-1]))
    with pytest.raises(jzero.CheckpointError, match="embed/embedding"):
        jzero.export_checkpoint(tmp_path / "checkpoint", tmp_path / "out", mapping="llama")
    assert not list((tmp_path / "out").iterdir())


shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@st.composite
def reshapes(draw, sizes):
    """Draws a shape with as many elements as another one."""
    left, found = math.prod(sizes), []
    while left > 1:
        factor = draw(st.sampled_from([n for n in range(2, left + 1) if left % n == 0]))
        found.append(factor)
        left //= factor
    return tuple(found) or (1,)


@st.composite
def cases(draw):
    """Draws a file and a mapping of all of it: fused tensors, stacks, orders, shapes."""
    tensors, sources, paths, known = {}, {}, {}, 0
    for number in range(draw(st.integers(1, 3))):
        sizes = draw(shapes)
        stack = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
        name = f"t{number}" + ".*" * len(stack)
        dim = draw(st.integers(0, len(sizes) - 1))
        cuts = sorted({0, sizes[dim], *draw(st.lists(st.integers(0, sizes[dim]), max_size=2))})
        for i, (start, stop) in enumerate(itertools.pairwise(cuts)):
            section = [*sizes[:dim], stop - start, *sizes[dim + 1 :]]
            permute = tuple(draw(st.permutations(range(len(sizes)))))
            ordered = tuple(section[d] for d in permute)
            shape = draw(st.none() | reshapes(ordered))
            sources[f"p{number}_{i}"] = From(
                name, permute, shape, (dim, start, stop - start) if len(cuts) > 2 else None
            )
            paths[f"p{number}_{i}"] = (*stack, *(shape or ordered))
        for at in np.ndindex(*stack):
            known += math.prod(sizes)
            tensors[From(name).at(at)] = numbers(*sizes, start=known)
    if draw(st.booleans()):  # two tensors that make one parameter
        sizes, axis = draw(shapes), draw(st.integers(0, 2))
        axis = min(axis, len(sizes) - 1)
        tensors |= {x: numbers(*sizes, start=known) for x in ("left", "right")}
        sources["joined"] = (From("left", axis=axis), From("right", axis=axis))
        paths["joined"] = (*sizes[:axis], 2 * sizes[axis], *sizes[axis + 1 :])
    return tensors, sources, paths


TURNED = {"conv": numbers(2, 3, 4)}, {"kernel": From("conv", (1, 2, 0))}, {"kernel": (3, 4, 2)}
"""An order that is not its own inverse, always among the cases."""


@pytest.mark.parametrize("num_cases", [3, slow(20)])
def test_any_mapping_is_undone_by_its_export(tmp_path_factory, num_cases):
    settings(max_examples=num_cases)(given(cases())(example(TURNED)(undo)))(tmp_path_factory)


def undo(tmp_path_factory, case):
    tensors, sources, paths = case
    folder = tmp_path_factory.mktemp("case")
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "of nobody"}))
    mapping = jzero.Mapping(sources)
    params = {name: np.full(shape, -1, np.float32) for name, shape in paths.items()}
    state = jzero.load_params(shared.sharded(params, SGD, 3, mesh=mesh(3)), folder, mapping=mapping)
    jzero.export_params(state, folder / "out", mapping=mapping, like=folder)
    ours = load_file(folder / "out/model.safetensors")
    assert {name: x.tolist() for name, x in ours.items()} == {name: x.tolist() for name, x in tensors.items()}


def test_what_cannot_be_written_is_said_before(tmp_path):
    config = hf_models.write_folder(tmp_path / "like", "llama")
    state, _ = born(config)
    other = tmp_path / "other"
    hf_models.write_folder(other, "llama", intermediate_size=64, num_hidden_layers=2)
    listed = r"as those of .*other are:(?s:.*)layers/down/kernel: makes model\.layers\.2\..*, but that model has none"
    with pytest.raises(ValueError, match=listed):
        jzero.export_params(state, tmp_path / "out", mapping="auto", like=other)
    hf_models.write_folder(other, "llama", intermediate_size=64)
    with pytest.raises(ValueError, match=r"down/kernel: \[3, 56, 36\] in"):
        jzero.export_params(state, tmp_path / "out", mapping="auto", like=other)
    for file in other.glob("model*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"down/kernel: .*model\.layers\.0"):
        jzero.export_params(state, tmp_path / "out", mapping="auto", like=other)
    wide = hf_models.write_folder(other, "llama", num_hidden_layers=4) and other
    with pytest.raises(ValueError, match=r"\(9\):\n    model\.layers\.3"):
        jzero.export_params(state, tmp_path / "out", mapping="auto", like=wide)
    with pytest.raises(ValueError, match=r"`mapping='auto'` goes by .*`like`"):
        jzero.export_params(state, tmp_path / "out", mapping="auto")
    with pytest.raises(ValueError, match="`like` needs a `mapping`"):
        jzero.export_params(state, tmp_path / "out", like=tmp_path / "like")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="`like` makes a folder"):
        jzero.export_params(state, tmp_path / "like", mapping="auto", like=tmp_path / "like")
    adapted, _ = born(config, lora=LORA)
    with pytest.raises(ValueError, match=r"`rank` .* 2: got 3"):
        jzero.hf.export_peft(adapted, tmp_path / "out", like=tmp_path / "like", rank=3, alpha=1)
    with pytest.raises(ValueError, match=r"no adapter of model\.layers\.2"):
        jzero.hf.export_peft(
            adapted,
            tmp_path / "out",
            like=hf_models.write_folder(other, "llama", num_hidden_layers=2) and other,
            rank=2,
            alpha=1,
        )
    with pytest.raises(ValueError, match="There are no adapters to export"):
        jzero.hf.export_peft(state, tmp_path / "out", like=tmp_path / "like", rank=3, alpha=1)
    with pytest.raises(ValueError, match="layers/q/lora_a: no key"):
        jzero.export_params(adapted, tmp_path / "out", mapping="auto", like=tmp_path / "like")


def test_mappings_that_have_no_way_back(tmp_path):
    state = make_state({"q": (4, 8), "k": (4, 8), "both": (6, 8)})
    fused = lambda start, size: From("qk", section=(0, start, size))
    for sources, message in (
        ({"q": fused(0, 4), "k": fused(5, 4), "both": From("b")}, r"makes qk of \[9, 8\], but sections .*leave a gap"),
        ({"q": From("w"), "k": From("w"), "both": From("b")}, r"k: makes w of \[4, 8\], but q makes it, too"),
        ({"q": From("q", shape=(4, 8)), "k": From("k"), "both": From("b")}, r"q: makes q, but its shape .*pass `like`"),
        ({"q": From("q"), "k": From("k"), "both": (From("a"), From("b"))}, r"both: makes a, but its shape"),
    ):
        with pytest.raises(ValueError, match=message):
            jzero.export_params(state, tmp_path / "out", mapping=jzero.Mapping(sources))
    mapping = jzero.Mapping({"q": fused(0, 4), "k": fused(4, 4), "both": From("b", (1, 0))})
    jzero.export_params(state, tmp_path / "out", mapping=mapping)
    assert load_file(tmp_path / "out/model.safetensors")["qk"].shape == (8, 8)


def lora_state(folder, **options):
    """Returns a model with adapters that are not zero, over the weights of a folder."""
    state, model = born(jzero.hf.read_config(folder), lora=LORA, trainable=r".*/lora_[ab]", **options)
    state = jzero.load_params(state, folder, mapping="auto", paths=NO_ADAPTERS)
    for i, leaf in enumerate(jzero.plan_of(state).leaves):
        if "lora" in leaf.path:
            x = 0.1 * np.random.default_rng(i).normal(size=leaf.param.shape).astype(np.float32)
            state = jzero.set_full_param(state, leaf.path, value=x)
    return state, model


def test_what_paths_leaves_out_is_copied(tmp_path):
    """From a state and from a checkpoint, to the byte, whatever the state has there."""
    hf_models.write_folder(tmp_path / "like", "llama")
    state, _ = born(jzero.hf.read_config(tmp_path / "like"))  # with other numbers
    jzero.save_checkpoint(tmp_path / "checkpoint", state)
    how = {"mapping": "auto", "like": tmp_path / "like", "paths": "layers/(up|down)/kernel", "max_file_bytes": 30_000}
    jzero.export_params(state, tmp_path / "out", dtype="bfloat16", **how)
    jzero.export_checkpoint(tmp_path / "checkpoint", tmp_path / "again", dtype="bfloat16", **how)
    published, out, again = (tensors_in(tmp_path / name) for name in ("like", "out", "again"))
    assert published.keys() == out.keys() == again.keys()
    for name, x in published.items():
        assert again[name].tobytes() == out[name].tobytes()
        assert (out[name].tobytes() == x.tobytes()) == (".up_" not in name and ".down_" not in name), name
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "float32", "there are two"
    for file in (tmp_path / "like").glob("model*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"embed_tokens"):
        jzero.export_params(state, tmp_path / "x", **how)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A folder, a state with adapters over its weights, and the model."""
    like = tmp_path_factory.mktemp("qwen3")
    hf_models.write_folder(like, "qwen3")
    return like, *lora_state(like)


def test_merged_adapters_are_those_of_the_model(tmp_path, adapted):
    like, state, model = adapted
    merge = jzero.lora.merged(LORA.rank, LORA.alpha)
    jzero.export_params(state, tmp_path / "out", mapping="auto", like=like, decode=merge)
    name = "model.layers.1.self_attn.q_proj.weight"
    added = LORA.alpha / LORA.rank * full(state, "layers/q/lora_a")[1] @ full(state, "layers/q/lora_b")[1]
    before, after = (tensors_in(folder)[name] for folder in (like, tmp_path / "out"))
    np.testing.assert_allclose(after, before + added.T, rtol=0, atol=1e-6)
    config = jzero.hf.read_config(tmp_path / "out")
    plain = jzero.load_params(born(config)[0], tmp_path / "out", mapping="auto")
    wanted, found = logits_alone(state, model), logits_alone(plain, decoder.Decoder(config))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    assert np.abs(wanted - np.load(hf_models.LOGITS)["qwen3"]).max() > 0.1, "the adapters do something"
    with pytest.raises(ValueError, match=r"`rank` .*/kernel, 2: got 4"):
        jzero.export_params(state, tmp_path / "x", mapping="auto", like=like, decode=jzero.lora.merged(4, 1))
    assert not list((tmp_path / "x").iterdir()), "nothing is left"


def test_adapters_are_named_as_peft_does_and_written_whole_or_not_at_all(tmp_path, monkeypatch, adapted):
    like, state, _ = adapted
    how = {"like": like, "rank": LORA.rank, "alpha": LORA.alpha}
    jzero.hf.export_peft(state, tmp_path / "adapter", **how)
    found = tensors_in(tmp_path / "adapter")
    assert len(found) == 2 * 7 * 3
    a = found["base_model.model.model.layers.2.mlp.down_proj.lora_A.weight"]
    np.testing.assert_array_equal(a, full(state, "layers/down/lora_a")[2].T)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (2, 3.0, "LORA")
    assert config["target_modules"] == [f"{x}_proj" for x in ("down", "gate", "k", "o", "q", "up", "v")]
    monkeypatch.setattr(type(epath.Path(tmp_path)), "write_text", shared.raising(OSError("No space left on device")))
    with pytest.raises(jzero.CheckpointError, match=r"adapters .*\(No space"):
        jzero.hf.export_peft(state, tmp_path / "half", **how)
    assert not [*(tmp_path / "half").iterdir()]


def reference(folder):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    how = {"attn_implementation": "eager", "output_loading_info": True, "dtype": "auto"}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, **how)
    assert not any(info.values()), info
    return torch, model


@pytest.mark.slow
@pytest.mark.parametrize(("family", "stage", "num_devices"), [("qwen3", 3, 8), ("gemma2", 2, 3)])
def test_four_steps_are_those_of_torch(family, stage, num_devices, tmp_path):
    torch, there = reference(hf_models.write_folder(tmp_path / "like", family) and tmp_path / "like")
    config = jzero.hf.read_config(tmp_path / "like")
    state, model = born(config, num_devices, stage=stage, tx=optax.adamw(1e-3, eps=1e-6, weight_decay=0.1))
    state = jzero.load_params(state, tmp_path / "like", mapping="auto", donate=True)
    data = np.random.default_rng(0).integers(1, 61, (4, 24, 17))  # torch does not train the row of padding, Gemma's 0

    def loss(params, batch):
        logits = model.apply({"params": params}, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    step = jzero.make_train_step(loss, clip_norm=1.0)
    optimizer = torch.optim.AdamW(there.train().parameters(), lr=1e-3, eps=1e-6, weight_decay=0.1)
    for batch in data:
        state, metrics = step(state, jnp.asarray(batch))
        tokens = torch.tensor(batch)
        found = there(tokens[:, :-1]).logits
        value = torch.nn.functional.cross_entropy(found.reshape(-1, 61), tokens[:, 1:].reshape(-1))
        optimizer.zero_grad()
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(there.parameters(), 1.0)
        optimizer.step()
        np.testing.assert_allclose(float(metrics["loss"]), value.item(), rtol=1e-5)
        assert float(norm) > 1, "it is clipped"
    jzero.export_params(state, tmp_path / "out", mapping="auto", like=tmp_path / "like")
    ours = tensors_in(tmp_path / "out")
    for name, x in there.state_dict().items():
        if name in ours:
            np.testing.assert_allclose(ours[name], x.numpy(), rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # by PEFT, of transformers
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")  # of stacks, which it sets
@pytest.mark.parametrize("family", ["mistral", "mixtral", "gpt_oss"])
def test_peft_reads_adapters(family, tmp_path):
    peft = pytest.importorskip("peft")
    torch, there = reference(hf_models.write_folder(tmp_path / "like", family) and tmp_path / "like")
    state, model = lora_state(tmp_path / "like")
    jzero.hf.export_peft(state, tmp_path / "adapter", like=tmp_path / "like", rank=LORA.rank, alpha=LORA.alpha)
    adapted = peft.PeftModel.from_pretrained(there, tmp_path / "adapter").eval()
    tokens = torch.tensor(hf_models.TOKENS)
    with torch.no_grad():
        found = adapted(tokens).logits.numpy()
        merged = adapted.merge_and_unload()
    np.testing.assert_allclose(logits(state, model), found, rtol=0, atol=1e-5)
    merge = jzero.lora.merged(LORA.rank, LORA.alpha)
    jzero.export_params(state, tmp_path / "out", mapping="auto", like=tmp_path / "like", decode=merge)
    ours = tensors_in(tmp_path / "out")
    for name, x in merged.state_dict().items():
        if ".experts." not in name:  # of which `transformers` makes stacks
            ours_name = name.replace("mlp.gate", "block_sparse_moe.gate") if family == "mixtral" else name
            np.testing.assert_allclose(ours[ours_name], x.numpy(), rtol=0, atol=1e-6, err_msg=name)
