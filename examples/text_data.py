"""Real text that every machine has: the sources of Python's standard library, as bytes, split by file."""

import dataclasses
import pathlib
import sysconfig

import numpy as np

MAX_BYTES = 4_000_000
HOLD_OUT_EVERY = 10  # every tenth file is held out for validation


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes of the training files and of the held-out files, each uint8 [num_bytes]."""

    train: np.ndarray
    validation: np.ndarray


def load_corpus(pattern: str = "*.py", *, max_bytes: int = MAX_BYTES) -> Corpus:
    """Reads files of the standard library (by default its top-level modules), sorted by name, up to `max_bytes`."""
    directory = pathlib.Path(sysconfig.get_path("stdlib"))
    texts = [path.read_bytes() for path in sorted(directory.glob(pattern))]
    ends = np.cumsum([len(text) for text in texts])
    texts = [text for text, end in zip(texts, ends, strict=True) if end <= max_bytes]
    if len(texts) < HOLD_OUT_EVERY:
        raise FileNotFoundError(
            f"The standard library must be there as source: found only {len(texts)} files {pattern!r} in {directory}."
        )
    held_out = texts[HOLD_OUT_EVERY - 1 :: HOLD_OUT_EVERY]
    kept = [text for index, text in enumerate(texts) if (index + 1) % HOLD_OUT_EVERY]
    return Corpus(train=_concatenate(kept), validation=_concatenate(held_out))


def sample_batch(text: np.ndarray, rng: np.random.Generator, *, batch_size: int, seq_len: int) -> np.ndarray:
    """Returns random windows of the text, int32 [batch_size, seq_len + 1]."""
    starts = rng.integers(len(text) - seq_len, size=batch_size)
    return text[starts[:, None] + np.arange(seq_len + 1)].astype(np.int32)


def _concatenate(texts: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(texts), np.uint8)
