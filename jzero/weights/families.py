"""The families that jzero knows: parameters of a scanned decoder, their tensors, and what lies beside the weights.

The decoder is the one of `examples/llm/decoder.py`; a model of one's own has the same paths, or a mapping of its own.
"""

from __future__ import annotations

import json
from typing import Any

from jzero.weights.config import ModelConfig, read_fields, read_sizes
from jzero.weights.entries import Shape, rule_of, shapes_made
from jzero.weights.mapping import From, Mapping
from jzero.weights.model_types import FAMILIES, POST_NORMS

TRANSPOSED = (1, 0)
ADAPTERS = {"lora_a": "lora_A", "lora_b": "lora_B"}
"""The names of adapters here, and in PEFT's files."""
WEIGHT = ".weight"
OF_EXPERTS = (".gate_up_proj", ".down_proj")
"""What ends the names of kernels of all experts. PEFT wraps the module of both first for one, then for the other."""
LAYER = "model.layers.*."
FEED_FORWARD = ("gate", "up", "down")
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""What goes with a model whatever its weights are."""


def _dense() -> dict[str, From]:
    """Returns the sources of feed-forward blocks."""
    kernels = {f"layers/{x}/kernel": From(f"{LAYER}mlp.{x}_proj.weight", TRANSPOSED) for x in FEED_FORWARD}
    return kernels | {f"layers/{x}/bias": From(f"{LAYER}mlp.{x}_proj.bias") for x in FEED_FORWARD}


def _experts(block: str, names: tuple[str, ...]) -> dict[str, From]:
    """Returns the sources of experts, each with tensors of its own; `names` are those of gate, up and down."""
    kernels = {
        f"layers/{x}/kernel": From(f"{LAYER}{block}.experts.*.{name}.weight", TRANSPOSED)
        for x, name in zip(FEED_FORWARD, names, strict=True)
    }
    return {"layers/router/kernel": From(f"{LAYER}{block}.gate.weight", TRANSPOSED), **kernels}


def _decoder(norms: dict[str, str], feed_forward: dict[str, From]) -> Mapping:
    """Returns the mapping of a family.

    Args:
      norms: The names of a layer's norms over its stream, by parameter.
      feed_forward: The sources of its feed-forward blocks.
    """
    return Mapping(
        {
            "embed/embedding": From("model.embed_tokens.weight"),
            "norm/scale": From("model.norm.weight"),
            "head/kernel": From("lm_head.weight", TRANSPOSED),
            **{f"layers/{x}/kernel": From(f"{LAYER}self_attn.{x}_proj.weight", TRANSPOSED) for x in "qkvo"},
            **{f"layers/{x}/bias": From(f"{LAYER}self_attn.{x}_proj.bias") for x in "qkvo"},
            **{f"layers/{x}_norm/scale": From(f"{LAYER}self_attn.{x}_norm.weight") for x in "qk"},
            **feed_forward,
            **{f"layers/{x}/scale": From(f"{LAYER}{name}.weight") for x, name in norms.items()},
        },
        ignore=(r".*\.rotary_emb\.inv_freq",),
        same={"lm_head.weight": "model.embed_tokens.weight"},
    )


TWO_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
FOUR_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_EXPERTS = _experts("mlp", ("gate_proj", "up_proj", "down_proj"))
FEED_FORWARDS = {
    "mixtral": _experts("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": _EXPERTS,
    "olmoe": _EXPERTS,
    "gpt_oss": {
        "layers/sinks": From(f"{LAYER}self_attn.sinks"),
        "layers/router/kernel": From(f"{LAYER}mlp.router.weight", TRANSPOSED),
        "layers/router/bias": From(f"{LAYER}mlp.router.bias"),
        **{f"layers/{x}/kernel": From(f"{LAYER}mlp.experts.{x}_proj") for x in ("gate_up", "down")},
        **{f"layers/{x}/bias": From(f"{LAYER}mlp.experts.{x}_proj_bias") for x in ("gate_up", "down")},
    },
}
"""The feed-forward blocks of families that have experts."""
PRESETS = {
    name: _decoder(FOUR_NORMS if name in POST_NORMS else TWO_NORMS, FEED_FORWARDS.get(name, _dense()))
    for name in FAMILIES
}


def resolve_mapping(mapping: Any, folder: Any) -> Mapping | None:
    """Returns the mapping that an argument `mapping` means.

    Args:
      mapping: A `Mapping`, the name of a preset, `"auto"` for the one of a folder's `model_type`, or `None`.
      folder: A folder with a `config.json`, for `"auto"`.
    """
    if mapping is None or isinstance(mapping, Mapping):
        return mapping
    if mapping == "auto":
        file, fields = read_fields(folder)
        kind = fields.get("model_type")
        if kind not in PRESETS:
            raise ValueError(
                f"`mapping='auto'` goes by `model_type`, which in {file} is {kind!r}; jzero knows "
                f"{', '.join(PRESETS)}. Pass a `jzero.Mapping` of your own."
            )
        return PRESETS[kind]
    if not isinstance(mapping, str) or mapping not in PRESETS:
        raise ValueError(
            f"`mapping` must be a `jzero.Mapping`, 'auto' or a preset ({', '.join(PRESETS)}): got {mapping!r}."
        )
    return PRESETS[mapping]


def peft_mapping(folder: Any, mapping: Mapping | str = "auto", *, rank: int | None = None) -> Mapping:
    """Returns the mapping of adapters `lora_a`, `lora_b` beside kernels, as PEFT keeps them in its files.

    Args:
      folder: The folder of the published model.
      mapping: Of the kernels, as for `load_params`.
      rank: That of the adapters, which tells the experts of gpt-oss apart; without it, theirs are left out.

    Raises:
      ValueError: As for `load_params`: the family is not known.

    Example:
      >>> import jzero.hf
      >>> jzero.hf.peft_mapping(None, "llama").of("layers/q/lora_a")[0].name
      'base_model.model.model.layers.*.self_attn.q_proj.lora_A.weight'
    """
    kernels = resolve_mapping(mapping, folder)
    sources: dict[str, From | tuple[From, ...]] = {}
    for key, source in kernels.sources.items() if kernels is not None else ():
        if not isinstance(source, From) or not key.endswith("/kernel"):
            continue
        for ours, theirs in ADAPTERS.items():
            path = f"{key.removesuffix('kernel')}{ours}"
            if source.name.endswith(WEIGHT):
                name = f"base_model.model.{source.name.removesuffix(WEIGHT)}.{theirs}.weight"
                sources[path] = From(name, TRANSPOSED)
            elif rank is not None and source.name.endswith(OF_EXPERTS):
                shapes = param_shapes(read_sizes(folder), rank=rank)
                sources |= {path: _of_experts(source.name, theirs, shapes[path])} if path in shapes else {}
    return Mapping(sources)


def _of_experts(kernel: str, theirs: str, shape: Shape) -> tuple[From, ...]:
    """Returns the sources of adapters in one tensor for all experts: A lies there by expert, B by place in the rank."""
    _, count, rows, columns = shape
    inner = ".base_layer" if kernel.endswith(OF_EXPERTS[0]) else ""
    name = f"base_model.model.{kernel.rpartition('.')[0]}{inner}.{theirs}.weight"
    if theirs == ADAPTERS["lora_a"]:
        return tuple(From(name, TRANSPOSED, (1, rows, columns), (0, e * columns, columns)) for e in range(count))
    return tuple(From(name, TRANSPOSED, (count, 1, columns), (1, k * count, count), axis=1) for k in range(rows))


def param_shapes(config: ModelConfig, *, rank: int = 0) -> dict[str, Shape]:
    """Returns the shapes of the decoder's parameters, by path.

    Args:
      config: The sizes.
      rank: Rank of the adapters beside each kernel of a layer; 0 for none.
    """
    width, layers, hidden, head_dim = config.d_model, config.num_layers, config.d_hidden, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    sides: dict[str, Shape] = {"q": (width, q), "k": (width, kv), "v": (width, kv), "o": (q, width)}
    experts = config.experts
    stack = () if experts is None else (experts.count,)
    packed = experts is not None and experts.packed
    gates = {"gate_up": 2 * hidden} if packed else {"gate": hidden, "up": hidden}
    inner = {**{x: (*stack, width, size) for x, size in gates.items()}, "down": (*stack, hidden, width)}
    sides |= inner
    norms = {"attention_norm": width, "mlp_norm": width}
    norms |= {"attention_post_norm": width, "mlp_post_norm": width} if config.post_norms else {}
    qk = {"q_norm": q, "k_norm": kv} if config.joint_qk_norm else {"q_norm": head_dim, "k_norm": head_dim}
    norms |= qk if config.qk_norm else {}
    layer: dict[str, Shape] = {f"{x}/kernel": sizes for x, sizes in sides.items()}
    biases = [*("qkv" * config.qkv_bias), *("o" * config.o_bias), *(inner if config.mlp_bias else ())]
    layer |= {f"{x}/bias": (*sides[x][:-2], sides[x][-1]) for x in biases}
    layer |= {f"{x}/lora_a": (*lead, size, rank) for x, (*lead, size, _) in sides.items() if rank}
    layer |= {f"{x}/lora_b": (*lead, rank, size) for x, (*lead, _, size) in sides.items() if rank}
    if experts is not None:
        layer |= {"router/kernel": (width, *stack), **({"router/bias": stack} if experts.router_bias else {})}
    layer |= {"sinks": (config.num_heads,)} if config.sinks else {}
    layer |= {f"{x}/scale": (size,) for x, size in norms.items()}
    outer: dict[str, Shape] = {"embed/embedding": (config.vocab_size, width), "norm/scale": (width,)}
    outer |= {} if config.tied else {"head/kernel": (width, config.vocab_size)}
    return outer | {f"layers/{path}": (layers, *shape) for path, shape in layer.items()}


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Returns the tensors of a published model, by name, with their shapes in the file."""
    mapping = PRESETS[config.model_type]
    return shapes_made((shape, rule_of(mapping.of(path), shape)) for path, shape in param_shapes(config).items())


def known_shapes(folder: Any) -> dict[str, Shape] | None:
    """Returns the shapes of a published model's tensors by its `config.json`; `None` for an unknown family."""
    _, fields = read_fields(folder)
    return tensor_shapes(read_sizes(folder)) if fields.get("model_type") in FAMILIES else None


def companions(folder: Any, dtype: str | None) -> dict[str, bytes]:
    """Returns the files to put beside weights, by name: `config.json`, tokenizer, chat template.

    Args:
      folder: The folder of the model.
      dtype: The dtype of the weights, for `config.json`; `None` if they have several.
    """
    file, fields = read_fields(folder)
    if dtype is not None:
        fields["dtype" if "dtype" in fields else "torch_dtype"] = dtype
    files = {file.name: (json.dumps(fields, indent=2) + "\n").encode()}
    beside = file.parent
    return files | {name: (beside / name).read_bytes() for name in COMPANIONS if (beside / name).exists()}
