"""`config.json` of the families that jzero knows, in one spelling.

Fields that a file leaves out have the values that `transformers` gives them. What would change the model's numbers and
is not known here is an error: a model that is almost right trains, and its loss falls.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from etils import epath

from jzero.core.config.documents import parse
from jzero.core.config.settings import TEXT, block, check, optional, shown
from jzero.weights.model_types import (
    ACTIVATIONS,
    ALTERNATING,
    COMMON,
    FAMILIES,
    FULL,
    HEAD_DIM,
    ONLY,
    OWN,
    POST_NORMS,
    QK_NORMS,
    ROTARY,
    SIZE,
    SLIDING,
    inverse_frequencies,
)

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
PUBLISHED_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
OWN_MODEL = "For another model, pass `jzero.load_params` a `jzero.Mapping` of your own."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """The feed-forward blocks of a mixture of experts.

    Attributes:
      count: Experts per layer.
      per_token: Experts that each token goes to: those with the highest logits of the router.
      normalized: Whether the probabilities of these are divided by their sum.
      aux_coef: Factor on the router's load-balancing loss.
      router_bias: Whether the router has biases.
      packed: Whether one kernel holds gates and up projections, column by column in turn.
      clamp: Bound of gates and up projections, which are then multiplied as gpt-oss does,
        `(up + 1) · gate · sigmoid(gate_factor · gate)`; `None` for the activation of the model.
      gate_factor: See `clamp`.

    Example:
      >>> import jzero.hf
      >>> jzero.hf.Experts(count=8, per_token=2, normalized=True, aux_coef=0.001).packed
      False
    """

    count: int
    per_token: int
    normalized: bool
    aux_coef: float
    router_bias: bool = False
    packed: bool = False
    clamp: float | None = None
    gate_factor: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder, by its `config.json`.

    Attributes:
      model_type: The family, such as `"llama"`.
      vocab_size: Rows of the embedding.
      d_model: Width of the stream between layers.
      d_hidden: Width inside each feed-forward block, or inside each expert.
      num_layers: Number of layers.
      num_heads: Heads of queries per layer.
      num_kv_heads: Heads of keys and of values per layer.
      head_dim: Size of a head; not always `d_model / num_heads`.
      eps: Added to the mean square in norms.
      tied: Whether the embedding is also the head.
      gelu: Whether feed-forward blocks use GELU's tanh form, not SiLU.
      qkv_bias: Whether queries, keys and values have biases.
      o_bias: Whether the projection behind attention has one.
      mlp_bias: Whether feed-forward blocks have biases.
      qk_norm: Whether queries and keys are normalized: per head, or all heads at once.
      joint_qk_norm: Whether all heads at once.
      unit_norm: Whether norms multiply by `1 + scale`, as Gemma's do.
      post_norms: Whether attention and feed-forward blocks end with a norm.
      embed_scale: Factor on the embedded tokens.
      attn_scale: Factor on the products of queries and keys, that of their rotations included.
      sinks: Whether each head has a sink: a logit among those of a token's attention, without a value.
      attn_softcap: Bound of these products, `c · tanh(x / c)`; `None` if there is none.
      final_softcap: Bound of the logits, likewise.
      inverse_frequencies: Of each layer: the angles per position, one for each pair of dimensions of a head.
      windows: Of each layer: how many tokens a token sees, itself included; `None` if all before it.
      dtype: The dtype of the file's numbers, such as `"bfloat16"`.
      experts: Of a mixture of experts; `None` if each layer has one feed-forward block.
    """

    model_type: str
    vocab_size: int
    d_model: int
    d_hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    tied: bool
    gelu: bool
    qkv_bias: bool
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool
    joint_qk_norm: bool = False
    unit_norm: bool
    post_norms: bool
    embed_scale: float
    attn_scale: float
    sinks: bool = False
    attn_softcap: float | None
    final_softcap: float | None
    inverse_frequencies: tuple[tuple[float, ...], ...]
    windows: tuple[int | None, ...]
    dtype: str
    experts: Experts | None = None


def read_config(path: Any) -> ModelConfig:
    """Returns the sizes and kinds of a published model.

    Reads both spellings: `rope_theta` with `rope_scaling` or `rope_parameters`, `torch_dtype` or `dtype`.

    Args:
      path: A folder with a `config.json`, or such a file.

    Returns:
      The configuration.

    Raises:
      ValueError: There is no such file, it lacks a field, or one that its family reads has a value of a wrong type, out
        of range, or that jzero does not know: `model_type`, the kind of rotary embedding, `quantization_config`.

    Example:
      >>> import json
      >>> import jzero.hf
      >>> sizes = dict(vocab_size=61, hidden_size=36, intermediate_size=56, num_hidden_layers=3, num_attention_heads=6)
      >>> _ = (tmp / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
      >>> config = jzero.hf.read_config(tmp)
      >>> config.head_dim, config.tied, config.windows
      (6, False, (None, None, None))
    """
    config, refused = config_of(*read_fields(path))
    if refused:
        raise refused[0]
    return config


def read_sizes(path: Any) -> ModelConfig:
    """Returns the sizes of a published model, even if `read_config` refuses what its numbers are computed by.

    Kinds of rotary embeddings, activations and attention that jzero does not know change no shape; here they are those
    of the family.
    """
    return config_of(*read_fields(path))[0]


def config_of(file: object, raw: Mapping[str, Any]) -> tuple[ModelConfig, list[ValueError]]:
    """Returns the configuration, and an error for each field whose value would change the model's numbers.

    Args:
      file: Where the fields are from, for errors.
      raw: The fields of a `config.json`.
    """
    kind = raw.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(
            f"`model_type` in {file} must be one of {', '.join(FAMILIES)}: got {kind!r}. {OWN_MODEL} "
            "Commands take it as MODULE:FUNCTION."
        )
    own = FAMILIES[kind]
    fields = _Fields(file, {**own, **{name: value for name, value in raw.items() if name in own or name in COMMON}})
    fields.check_known()
    num_layers, d_model = fields.size("num_hidden_layers"), fields.size("hidden_size")
    num_heads = fields.size("num_attention_heads")
    num_kv_heads = fields.get("num_key_value_heads") or num_heads
    fields.check_divides("num_key_value_heads", num_kv_heads, "num_attention_heads", num_heads)
    if (head_dim := fields.get("head_dim")) is None:
        fields.check_divides("num_attention_heads", num_heads, "hidden_size", d_model)
        head_dim = d_model // num_heads
    check("head_dim", head_dim, HEAD_DIM, file=file)
    types = fields.layer_types(num_layers)
    frequencies = {name: fields.frequencies(name, head_dim) for name in dict.fromkeys(types)}
    turned = frequencies[types[0]][1]
    if any(factor != turned for _, factor in frequencies.values()):
        fields.refuse("rope_parameters", fields.get("rope_parameters"), "rotations that scale equally in all layers")
    window = fields.get("sliding_window") if fields.get("use_sliding_window", True) else None
    gemma = kind.startswith("gemma")
    attention_bias = fields.get("attention_bias", False)
    config = ModelConfig(
        model_type=kind,
        vocab_size=fields.size("vocab_size"),
        d_model=d_model,
        d_hidden=fields.size("moe_intermediate_size" if "moe_intermediate_size" in own else "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        eps=fields.get("rms_norm_eps", 1e-6),
        tied=fields.get("tie_word_embeddings", False),
        gelu=fields.gelu(),
        qkv_bias=attention_bias or kind == "qwen2",
        o_bias=attention_bias,
        mlp_bias=fields.get("mlp_bias", False) or kind == "gpt_oss",
        qk_norm=kind in QK_NORMS,
        joint_qk_norm=kind == "olmoe",
        unit_norm=gemma,
        post_norms=kind in POST_NORMS,
        embed_scale=d_model**0.5 if gemma else 1.0,
        attn_scale=(fields.get("query_pre_attn_scalar") or head_dim) ** -0.5 * turned**2,  # of queries and of keys
        sinks=kind == "gpt_oss",
        attn_softcap=fields.get("attn_logit_softcapping"),
        final_softcap=fields.get("final_logit_softcapping"),
        inverse_frequencies=tuple(frequencies[name][0] for name in types),
        windows=tuple(window if name == SLIDING else None for name in types),
        dtype=fields.get("dtype") or fields.get("torch_dtype") or "float32",
        experts=fields.experts(),
    )
    return config, fields.refused


def read_fields(path: Any) -> tuple[epath.Path, dict[str, Any]]:
    """Returns the file `config.json`, given it or its folder, and its fields as they are."""
    folder = epath.Path(path).expanduser()
    file = folder if folder.name.endswith(".json") else folder / CONFIG
    try:
        fields = parse(file.read_bytes(), file)
    except OSError as error:
        raise ValueError(f"Pass a model's folder: there is no {file} ({error}). {_way_out(folder)}") from error
    check("model_type", fields.get("model_type"), optional(TEXT), file=file)
    return file, fields


def _way_out(folder: epath.Path) -> str:
    """Returns what to do about a folder without a configuration."""
    if (folder / ADAPTER_CONFIG).exists():
        return (
            "It has adapters alone: pass their model's folder here, and this one as `--adapter` to "
            "`examples/llm/generate.py`, or to PEFT. `finetune.py --merge` writes whole models."
        )
    if PUBLISHED_NAME.fullmatch(name := str(folder)) and not folder.exists():
        fetch = f"`hf download {name} --local-dir {folder.name}`"
        return f"If this is the name of a published model, fetch its folder, {fetch}, and pass that."
    return f"Put the model's {CONFIG} there, or pass `jzero.load_params` a `jzero.Mapping`."


class _Fields:
    """The fields of a file, each of its type and within its range, and how errors name them."""

    def __init__(self, file: object, fields: Mapping[str, Any]) -> None:
        self.file, self.given = file, check("", fields, block(COMMON | OWN), file=file)
        self.kind: str = fields["model_type"]
        self.refused: list[ValueError] = []

    def get(self, name: str, default: Any = None) -> Any:
        return self.given.get(name, default)

    def size(self, name: str) -> int:
        return check(name, self.get(name), SIZE, file=self.file)

    def check_divides(self, name: str, number: int, whole: str, size: int) -> None:
        """Raises if one field does not divide another."""
        if size % number:
            raise ValueError(f"`{name}` in {self.file} must divide `{whole}`, {size}: got {number}.")

    def refuse(self, name: str, value: Any, allowed: str) -> None:
        text = f"`{name}` in {self.file} is {shown(value)}, but of {self.kind} jzero knows {allowed}. {OWN_MODEL}"
        self.refused.append(ValueError(text))

    def check_known(self) -> None:
        """Refuses what `ModelConfig` cannot say."""
        if (value := self.get("quantization_config")) is not None:
            self.refuse("quantization_config", value, "weights of floating-point numbers only: fetch those")
        for name, known in ONLY.items():
            if (value := self.get(name)) not in (None, known):
                self.refuse(name, value, f"{known} only")

    def experts(self) -> Experts | None:
        """Returns what a mixture of experts has; `None` for other families."""
        if "num_experts" not in FAMILIES[self.kind]:
            return None
        count = self.size("num_local_experts" if self.get("num_local_experts") else "num_experts")
        per_token = self.size("num_experts_per_tok")
        if per_token > count:
            raise ValueError(
                f"`num_experts_per_tok` in {self.file} must be at most the {count} experts: got {per_token}."
            )
        return Experts(
            count=count,
            per_token=per_token,
            normalized=self.get("norm_topk_prob", True),  # of the families that always do, no field
            aux_coef=self.get("router_aux_loss_coef"),
            router_bias=self.kind == "gpt_oss",
            packed=self.kind == "gpt_oss",
            clamp=self.get("swiglu_limit"),
            gate_factor=self.get("swiglu_alpha", 1.0),
        )

    def gelu(self) -> bool:
        name = "hidden_act" if "hidden_act" in self.given else "hidden_activation"
        value = self.get(name)
        if value == "gelu" and self.kind == "gemma":  # the first releases said so, and meant the other one
            return True
        if value not in ACTIVATIONS:
            self.refuse(name, value, " and ".join(ACTIVATIONS))
        return ACTIVATIONS.get(value, False)

    def layer_types(self, num_layers: int) -> list[str]:
        """Returns which kind of attention each layer has."""
        if "sliding_window" not in self.given:
            return [FULL] * num_layers
        if (types := self.get("layer_types")) is not None:
            if len(types) == num_layers and {*types} <= {FULL, SLIDING}:
                return list(types)
            self.refuse("layer_types", types, f"{num_layers} layers, each {FULL} or {SLIDING}")
        first = self.get("max_window_layers", 0)
        period = 2 if self.kind in ALTERNATING else self.get("sliding_window_pattern", num_layers + 1)
        return [SLIDING if i >= first and (i + 1) % period else FULL for i in range(num_layers)]

    def frequencies(self, layer_type: str, head_dim: int) -> tuple[tuple[float, ...], float]:
        """Returns the angles per position in layers of a kind, `[head_dim / 2]`, and the factor on what they turn."""
        name, rotary = self._rotary(layer_type)
        if (part := rotary.get("partial_rotary_factor", self.get("partial_rotary_factor")) or 1.0) != 1.0:
            self.refuse("partial_rotary_factor", part, "1.0")
        own = {"rope_theta": 1e4, "original_max_position_embeddings": self.get("max_position_embeddings")}
        own |= {key: value for key in own if (value := self.get(key)) is not None}
        said = own | {key: value for key, value in rotary.items() if value is not None}
        kind = said.get("rope_type", said.get("type", "default"))
        if kind not in ROTARY:
            self.refuse(f"{name}.rope_type", kind, f"{', '.join(ROTARY)}")
            kind = "default"
        elif missing := [key for key in ROTARY[kind] if said.get(key) is None]:
            text = f"`{name}` in {self.file} lacks {', '.join(missing)}, which its kind {kind!r} needs."
            self.refused.append(ValueError(text))
            kind = "default"
        elif kind == "llama3" and said["low_freq_factor"] >= said["high_freq_factor"]:
            self.refuse(f"{name}.low_freq_factor", said["low_freq_factor"], "those below `high_freq_factor`")
            kind = "default"
        return inverse_frequencies(kind, said, head_dim)

    def _rotary(self, layer_type: str) -> tuple[str, Mapping[str, Any]]:
        """Returns the name and the value of the field about rotary embeddings, of layers of a kind."""
        local = {"rope_theta": self.get("rope_local_base_freq")} if layer_type == SLIDING else {}  # Gemma 3's
        parameters = self.get("rope_parameters") or {}
        if FULL in parameters or SLIDING in parameters:
            return f"rope_parameters.{layer_type}", local | (parameters.get(layer_type) or {})
        if local.get("rope_theta"):
            return "rope_local_base_freq", local
        scaling = self.get("rope_scaling")
        return ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters)
