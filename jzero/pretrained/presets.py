"""The tensors of the families that jzero knows, and the parameters of a scanned decoder that they make.

The decoder is the one of `examples/llm/decoder.py`; a model of one's own has the same paths, or a mapping of its own.
"""

from __future__ import annotations

from typing import Any

from jzero.pretrained.config import FAMILIES, ModelConfig, read_fields
from jzero.pretrained.mapping import From, Mapping

TRANSPOSED = (1, 0)
ADAPTERS = {"lora_a": "lora_A", "lora_b": "lora_B"}
"""The names of adapters here, and in PEFT's files."""
LAYER = "model.layers.*."


def _decoder(norms: dict[str, str]) -> Mapping:
    """Returns the mapping of a family; `norms` are the names of a layer's norms over its stream, by parameter."""
    return Mapping(
        {
            "embed/embedding": From("model.embed_tokens.weight"),
            "norm/scale": From("model.norm.weight"),
            "head/kernel": From("lm_head.weight", TRANSPOSED),
            **{f"layers/{x}/kernel": From(f"{LAYER}self_attn.{x}_proj.weight", TRANSPOSED) for x in "qkvo"},
            **{f"layers/{x}/bias": From(f"{LAYER}self_attn.{x}_proj.bias") for x in "qkvo"},
            **{f"layers/{x}/bias": From(f"{LAYER}mlp.{x}_proj.bias") for x in ("gate", "up", "down")},
            **{f"layers/{x}_norm/scale": From(f"{LAYER}self_attn.{x}_norm.weight") for x in "qk"},
            **{f"layers/{x}/kernel": From(f"{LAYER}mlp.{x}_proj.weight", TRANSPOSED) for x in ("gate", "up", "down")},
            **{f"layers/{x}/scale": From(f"{LAYER}{name}.weight") for x, name in norms.items()},
        },
        ignore=(r".*\.rotary_emb\.inv_freq",),
        same={"lm_head.weight": "model.embed_tokens.weight"},
    )


TWO_NORMS = _decoder({"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"})
FOUR_NORMS = _decoder(
    {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
)
PRESETS = {name: FOUR_NORMS if name in ("gemma2", "gemma3_text") else TWO_NORMS for name in FAMILIES}


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


def peft_mapping(folder: Any, mapping: Mapping | str = "auto") -> Mapping:
    """Returns the mapping of adapters `lora_a`, `lora_b` beside kernels, as PEFT keeps them in its files.

    Args:
      folder: The folder of the published model.
      mapping: Of the kernels, as for `load_params`.

    Raises:
      ValueError: As for `load_params`: the family is not known.

    Example:
      >>> import jzero.hf
      >>> jzero.hf.peft_mapping(None, "llama").of("layers/q/lora_a")[0].name
      'base_model.model.model.layers.*.self_attn.q_proj.lora_A.weight'
    """
    kernels = resolve_mapping(mapping, folder)
    sources = {}
    for key, source in kernels.sources.items() if kernels is not None else ():
        if key.endswith("/kernel") and isinstance(source, From) and source.name.endswith(".weight"):
            for ours, theirs in ADAPTERS.items():
                name = f"base_model.model.{source.name.removesuffix('.weight')}.{theirs}.weight"
                sources[f"{key.removesuffix('kernel')}{ours}"] = From(name, TRANSPOSED)
    return Mapping(sources)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of a published model, by name, with their shapes in the file."""
    width, hidden, head_dim = config.d_model, config.d_hidden, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    outer = {"model.embed_tokens.weight": (config.vocab_size, width), "model.norm.weight": (width,)}
    if not config.tied:
        outer["lm_head.weight"] = (config.vocab_size, width)
    layer: dict[str, tuple[int, ...]] = {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
    layer |= {"self_attn.q_proj": (q, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width)}
    layer |= {"self_attn.o_proj": (width, q), "mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width)}
    layer |= {"mlp.down_proj": (width, hidden)}
    if config.post_norms:
        layer |= {"pre_feedforward_layernorm": (width,), "post_feedforward_layernorm": (width,)}
    if config.qk_norm:
        layer |= {"self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,)}
    tensors = {f"{name}.weight": shape for name, shape in layer.items()}
    if config.qkv_bias:
        tensors |= {f"self_attn.{x}_proj.bias": (q if x == "q" else kv,) for x in "qkv"}
    if config.o_bias:
        tensors["self_attn.o_proj.bias"] = (width,)
    if config.mlp_bias:
        tensors |= {f"mlp.{x}_proj.bias": (width if x == "down" else hidden,) for x in ("gate", "up", "down")}
    layers = range(config.num_layers)
    return outer | {f"model.layers.{i}.{name}": shape for i in layers for name, shape in tensors.items()}
