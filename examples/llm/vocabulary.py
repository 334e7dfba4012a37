"""Rows of a published model for tokens that were added to its tokenizer."""

import contextlib
import json
import pathlib
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

INDEX = "model.safetensors.index.json"
ROWS = ("model.embed_tokens.weight", "lm_head.weight")  # [V, D]; a tied head is not in the files
NEW_FILE = "rows.safetensors"


@contextlib.contextmanager
def with_rows(folder: pathlib.Path, num_rows: int) -> Iterator[pathlib.Path]:
    """Yields a folder of the same model with `num_rows` rows in embedding and head, or `folder` if it has as many.

    Each new row is the mean of the published ones. The folder is temporary: it has these two tensors, and links to all
    other files.
    """
    config = json.loads((folder / "config.json").read_text())
    sizes = config.get("text_config", config)
    if num_rows <= sizes["vocab_size"]:
        yield folder
        return
    sizes["vocab_size"] = num_rows
    where = _files_of_tensors(folder)
    rows = {name: _extended(folder / where[name], name, num_rows) for name in ROWS if name in where}
    index = {"metadata": {}, "weight_map": where | dict.fromkeys(rows, NEW_FILE)}
    with tempfile.TemporaryDirectory() as made:
        new = pathlib.Path(made)
        save_file(rows, new / NEW_FILE)
        for name, content in (("config.json", config), (INDEX, index)):
            (new / name).write_text(json.dumps(content, indent=2))
        for file in folder.iterdir():
            if not (new / file.name).exists():
                (new / file.name).symlink_to(file.resolve())
        yield new


def _files_of_tensors(folder: pathlib.Path) -> dict[str, str]:
    """Returns the file of each tensor."""
    if (folder / INDEX).exists():
        listed: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        return listed
    with safe_open(folder / "model.safetensors", "np") as file:
        return dict.fromkeys(file.keys(), "model.safetensors")


def _extended(file: pathlib.Path, name: str, num_rows: int) -> np.ndarray:
    """Returns a tensor [V, D] of a file with more rows."""
    with safe_open(file, "np") as tensors:
        old: Any = tensors.get_tensor(name)
    mean = old.astype(np.float32).mean(0, keepdims=True, dtype=np.float64)
    return np.concatenate([old, np.repeat(mean.astype(old.dtype), num_rows - len(old), 0)])
