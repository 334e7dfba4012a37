"""What processes tell each other, and that they agree before anything is placed: else a collective would hang."""

from __future__ import annotations

import hashlib

import jax
import numpy as np
from jax.experimental import multihost_utils

from jzero._plan import ZeroPlan

__all__ = ["check_processes_agree", "describe_plan", "gather_texts"]

MAX_REPORT_BYTES = 1 << 16


def describe_plan(plan: ZeroPlan) -> list[str]:
    """Returns everything that processes must agree on, as lines of text."""
    lines = [f"config: {plan.config}", f"mesh: {dict(plan.mesh.shape)}"]
    for leaf in plan.leaves:
        lines.append(f"params/{leaf.path}: {leaf.param.dtype}{list(leaf.param.shape)}")
    for other in (*plan.opt_leaves, *plan.other_leaves):
        lines.append(f"{other.path}: {other.dtype}{list(other.shape)}")
    return lines


def check_processes_agree(plan: ZeroPlan) -> None:
    """Raises in every process if one of them made another plan; lists what differs, by process."""
    if jax.process_count() == 1:
        return
    lines = describe_plan(plan)
    digest = np.frombuffer(hashlib.sha256("\n".join(lines).encode()).digest(), np.uint8)
    digests = np.asarray(multihost_utils.process_allgather(digest))
    if (digests == digests[0]).all():
        return
    # Fixed-size buffers, so that this second exchange cannot disagree about its own shape.
    text = "\n".join(lines).encode()[:MAX_REPORT_BYTES]
    buffer = np.zeros(MAX_REPORT_BYTES, np.uint8)
    buffer[: len(text)] = np.frombuffer(text, np.uint8)
    texts = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in multihost_utils.process_allgather(buffer)]
    raise ValueError(
        "The processes do not agree about the training state, so their first collective would hang:\n"
        + "\n".join(_differences(texts))
        + "\nStart every process with the same configuration, model and optimizer."
    )


def gather_texts(text: str) -> list[str]:
    """Returns the text of each process; each must call it."""
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.array(len(data), np.int32))).reshape(-1)
    buffer = np.zeros(int(sizes.max()), np.uint8)
    buffer[: len(data)] = data
    rows = np.asarray(multihost_utils.process_allgather(buffer)).reshape(len(sizes), -1)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def _differences(texts: list[str], max_lines: int = 20) -> list[str]:
    rows = [text.splitlines() for text in texts]
    common = set.intersection(*map(set, rows))
    found = [f"  process {i}: {line}" for i, lines in enumerate(rows) for line in lines if line not in common]
    return found[:max_lines] + ([f"  ... {len(found) - max_lines} more"] if len(found) > max_lines else [])
