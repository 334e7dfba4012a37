"""Rows of a published model for tokens that were added to its tokenizer."""

import contextlib
import json
import pathlib
import tempfile
from collections.abc import Iterator

import numpy as np
from safetensors.numpy import save_file

import jzero.hf
from jzero.weights.safetensors_files import find_tensors

INDEX = "model.safetensors.index.json"
ROWS = ("model.embed_tokens.weight", "lm_head.weight")  # [V, D]; a tied head is not in the files
NEW_FILE = "rows.safetensors"


@contextlib.contextmanager
def with_rows(folder: pathlib.Path, num_rows: int) -> Iterator[pathlib.Path]:
    """Yields a folder of the same model with `num_rows` rows in embedding and head, or `folder` if it has as many.

    Each new row is the mean of the published ones. The folder is temporary: it has these two tensors, and links to all
    other files.
    """
    if num_rows <= jzero.hf.read_config(folder).vocab_size:
        yield folder
        return
    config = {**json.loads((folder / "config.json").read_text()), "vocab_size": num_rows}
    tensors, _ = find_tensors(folder)
    where = {name: str(tensor.path.relative_to(folder)) for name, tensor in tensors.items()}
    rows = {name: _extended(tensors[name].view(...), num_rows) for name in ROWS if name in where}
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


def _extended(old: np.ndarray, num_rows: int) -> np.ndarray:
    """Returns a tensor [V, D] with more rows."""
    mean = old.astype(np.float32).mean(0, keepdims=True, dtype=np.float64)
    return np.concatenate([old, np.repeat(mean.astype(old.dtype), num_rows - len(old), 0)])
