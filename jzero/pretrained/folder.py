"""What lies in a published folder beside the weights."""

from __future__ import annotations

import json
from typing import Any

from jzero.pretrained.config import FAMILIES, read_fields, read_sizes
from jzero.pretrained.presets import tensor_shapes

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


def known_shapes(folder: Any) -> dict[str, tuple[int, ...]] | None:
    """Returns the shapes of a published model's tensors by its `config.json`; `None` for an unknown family."""
    _, fields = read_fields(folder)
    return tensor_shapes(read_sizes(folder)) if fields.get("model_type") in FAMILIES else None
