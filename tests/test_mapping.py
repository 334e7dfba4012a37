"""Mappings between names, layouts and stacks: what they make, what they refuse."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

import jzero
from jzero import From
from tests import shared


def make_state(shapes, stage=3, num_devices=8, **options):
    params = {}
    for path, shape in shapes.items():
        *outer, last = path.split("/")
        inner = params
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = jnp.full(shape, -1.0)
    return shared.sharded(params, shared.sgd(0.1, momentum=0.9), stage, mesh=num_devices, **options)


def numbers(*shape, start=0):
    return np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)


def full(state, path):
    return np.asarray(jzero.get_full_param(state, path))


@pytest.mark.smoke
@pytest.mark.parametrize(("stage", "num_devices"), [(3, 3), (1, 8)])
def test_sections_orders_shapes_and_stacks(stage, num_devices, tmp_path):
    width, heads, size, experts = 10, 6, 4, 5
    fused = {f"h.{i}.qkv.weight": numbers(3 * heads * size, width, start=1000 * i) for i in range(2)}
    up = {f"h.{i}.experts.{j}.up": numbers(7, width, start=100 * i + 10 * j) for i in range(2) for j in range(experts)}
    gates = {f"h.{i}.{name}": numbers(7, width, start=i + k) for i in range(2) for k, name in enumerate(("gate", "in"))}
    save_file({**fused, **up, **gates, "rotary": numbers(3)}, tmp_path / "model.safetensors")
    rows = heads * size
    mapping = jzero.Mapping(
        {
            "layers/k": From("h.*.qkv.weight", (1, 0), section=(0, rows, rows)),
            r"unrolled_(\d+)/v": From(r"h.\1.qkv.weight", (1, 0), (width, heads, size), section=(0, 2 * rows, rows)),
            "layers/experts": From("h.*.experts.*.up", (1, 0)),
            "layers/both": (From("h.*.gate", (1, 0), axis=1), From("h.*.in", (1, 0), axis=1)),
            "layers/q": From("h.*.qkv.weight", section=(0, 0, rows)),
        },
        ignore=("rot.*",),
    )
    shapes = {
        "layers/k": (2, width, rows),
        "unrolled_0/v": (width, heads, size),
        "unrolled_1/v": (width, heads, size),
        "layers/experts": (2, experts, width, 7),
        "layers/both": (2, width, 14),
        "layers/q": (2, rows, width),
    }
    state = jzero.load_params(make_state(shapes, stage, num_devices), tmp_path, mapping=mapping)
    q, k, v = (np.stack([x[i * rows : (i + 1) * rows] for x in fused.values()]) for i in range(3))
    np.testing.assert_array_equal(full(state, "layers/q"), q)
    np.testing.assert_array_equal(full(state, "layers/k"), k.transpose(0, 2, 1))
    np.testing.assert_array_equal(full(state, "unrolled_1/v"), v[1].T.reshape(width, heads, size))
    expected = np.stack([[up[f"h.{i}.experts.{j}.up"].T for j in range(experts)] for i in range(2)])
    np.testing.assert_array_equal(full(state, "layers/experts"), expected)
    both = [np.concatenate([gates[f"h.{i}.gate"].T, gates[f"h.{i}.in"].T], axis=1) for i in range(2)]
    np.testing.assert_array_equal(full(state, "layers/both"), np.stack(both))


def test_a_table_of_another_library(tmp_path):
    table = {
        r"model\.layers\.([0-9]+)\.q_proj\.weight": (r"layers.\1.attn.q.w", ((1, 0), (10, 6, 4))),
        r"lm_head\.weight": ("head.w", None),
    }
    save_file(
        {"model.layers.3.q_proj.weight": numbers(24, 10), "lm_head.weight": numbers(5, 10)}, tmp_path / "x.safetensors"
    )
    state = make_state({"layers/3/attn/q/w": (10, 6, 4), "head/w": (5, 10)})
    state = jzero.load_params(state, tmp_path, mapping=jzero.Mapping.from_sources(table))
    np.testing.assert_array_equal(full(state, "layers/3/attn/q/w"), numbers(24, 10).T.reshape(10, 6, 4))
    with pytest.raises(ValueError, match="must hold each group"):
        jzero.Mapping.from_sources({r"a\.(\d+)": ("b", None)})


def test_one_error_lists_all_that_does_not_match(tmp_path):
    tensors = {f"h.{i}.w": numbers(8, 4) for i in (0, 2)} | {
        "odd": numbers(8, 4),
        "more": numbers(3),
        "h.3.w": numbers(2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    state = make_state({"layers/w": (3, 4, 8), "odd": (4, 9), "other": (8,), "lora": (8,)})
    mapping = jzero.Mapping({"layers/w": From("h.*.w", (1, 0)), "odd": From("odd", (1, 0)), "other": From("gone")})
    with pytest.raises(ValueError, match="not those of the state") as caught:
        jzero.load_params(state, tmp_path, mapping=mapping)
    message = str(caught.value)
    for line in (
        "odd: [4, 9] in the state, but [4, 8] from odd: [8, 4]",
        "layers/w: there is no h.1.w",
        "other: there is no gone",
        "lora: no key of the mapping matches it",
        "more: float32[3]",
        "h.3.w: float32[2]",
    ):
        assert f"    {line}\n" in message, line
    assert not any(name in message for name in ("h.0.w", "h.2.w"))
    assert all(word in message for word in ("`mapping`", "`ignore`", "`paths`", "`strict=False`"))
    with pytest.raises(ValueError, match=r"other shapes \(1\):\n    odd"):
        jzero.load_params(state, tmp_path, mapping=mapping, strict=False)
    with pytest.warns(UserWarning, match="(?s)params/other.*more"):
        loaded = jzero.load_params(state, tmp_path, mapping=mapping, strict=False, paths="(?!odd).*")
    np.testing.assert_array_equal(full(loaded, "layers/w"), full(state, "layers/w"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (From("w", (1, 0, 2)), r"permute \(1, 0, 2\) .*\[8, 4\]"),
        (From("w", section=(0, 6, 4)), r"section \(0, 6, 4\) .*\[8, 4\]"),
        (From("w", shape=(5, 5)), r"shape \(5, 5\) .*of elements"),
        ((From("w"), From("w", (1, 0))), r"\[8, 4\] and \[4, 8\] from w: "),
        (From("*.*.*"), r"w: there is no 0\.0\.\*, nor 31 more"),
    ],
)
def test_sources_that_do_not_fit_a_tensor(source, message, tmp_path):
    save_file({"w": numbers(8, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        jzero.load_params(make_state({"w": (8, 4)}), tmp_path, mapping=jzero.Mapping({"w": source}))


def test_mappings_that_say_nothing(tmp_path):
    for make, error, message in (
        (lambda: From(""), ValueError, "`From.name` must be the name of a tensor"),
        (lambda: From("w", permute=(0, 2)), ValueError, "`From.permute` of 'w' must hold each dimension once"),
        (lambda: From("w", section=(0, 1)), ValueError, "`From.section` of 'w' must be a dimension, a start"),
        (lambda: From("w", shape=(2, -1)), ValueError, "`From.shape` of 'w' must be a tuple of whole numbers"),
        (lambda: From("w", axis=-1), ValueError, "`From.axis` of 'w' must be a dimension"),
        (lambda: jzero.Mapping({}), ValueError, "`Mapping` must map paths of parameters"),
        (lambda: jzero.Mapping({"(": From("w")}), ValueError, r"`Mapping` key '\(' is not a regular expression"),
        (lambda: jzero.Mapping({"w": "w"}), TypeError, "must have a `From` or a tuple of them"),
        (lambda: jzero.Mapping({"w": (From("w.*"), From("w"))}), ValueError, "different numbers of stars"),
        (lambda: jzero.Mapping({"w": From(r"\1.w")}), ValueError, "has fewer groups"),
        (lambda: jzero.Mapping({"w": From("w")}, ignore="w"), ValueError, "`Mapping.ignore` must be a tuple"),
    ):
        with pytest.raises(error, match=message):
            make()


def test_what_an_argument_names(tmp_path):
    state = make_state({"w": (8, 4)})
    save_file({"w": numbers(8, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"`mapping` must .*'bert'"):
        jzero.load_params(state, tmp_path, mapping="bert")
    with pytest.raises(ValueError, match=r"there is no .*config\.json"):
        jzero.load_params(state, tmp_path, mapping="auto")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ValueError, match=r"'auto'` goes by .*'bert'"):
        jzero.load_params(state, tmp_path, mapping="auto")
    mapping = jzero.Mapping({"w": From("w")})
    with pytest.raises(ValueError, match=r"`rename=.*` contradicts"):
        jzero.load_params(state, tmp_path, mapping=mapping, rename={"w": "v"})
    np.testing.assert_array_equal(full(jzero.load_params(state, tmp_path, mapping=mapping), "w"), numbers(8, 4))


class Tied(nnx.Module):
    def __init__(self):
        self.first = self.second = nnx.Param(jnp.zeros((8, 4)))


def test_a_tied_parameter_is_known_by_each_of_its_names(tmp_path):
    model = Tied()
    pair = jzero.shard_train_state((model, nnx.Optimizer(model, shared.sgd(0.1), wrt=nnx.Param)), stage=3)
    save_file({"w": numbers(4, 8), "again": numbers(8, 4)}, tmp_path / "model.safetensors")
    for sources in ({"second": From("w", (1, 0))}, {"first": From("w", (1, 0))}):
        loaded = jzero.load_params(pair, tmp_path, mapping=jzero.Mapping(sources, ignore=("again",)))
        np.testing.assert_array_equal(full(loaded, "first"), numbers(4, 8).T)
        out = tmp_path / next(iter(sources))
        jzero.export_params(loaded, out, mapping=jzero.Mapping(sources))
        np.testing.assert_array_equal(load_file(out / "model.safetensors")["w"], numbers(4, 8))
    both = jzero.Mapping({"first": From("w", (1, 0)), "second": From("again")})
    with pytest.raises(ValueError, match="'w' and 'again' are one"):
        jzero.load_params(pair, tmp_path, mapping=both)
