"""Files in the safetensors format: written tensor by tensor, read slice by slice.

The safetensors package writes only whole models in memory, which may be too large. The format is simple enough to
stream: eight bytes with the length of a JSON header, the header, the numbers. The package also checks the files that
jzero reads, but it cannot return NumPy arrays of 8-bit floats, so the numbers come from a memory map of the file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np
from etils import epath
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open

from jzero.checkpoint.damage import CheckpointError
from jzero.checkpoint.lock import only_writer
from jzero.core.base.text import Part, Report
from jzero.core.base.types import DType
from jzero.core.config.documents import parse
from jzero.core.config.settings import TEXT, block, block_of, check, shown
from jzero.core.layout.box import Index
from jzero.core.plan.table import format_bytes

DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F4": ml_dtypes.float4_e2m1fn,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
    "C64": np.complex64,
}
FOUR_BITS = np.dtype(ml_dtypes.float4_e2m1fn)
"""A file packs two of these into one byte, the first in its lower half; NumPy uses a byte for each."""
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth")
PART = re.compile(r"-\d+-of-(?!0*1\.)\d+\.safetensors$")
"""What the names of parts end with, if there are several."""
_INDEX = block({"weight_map": block_of(TEXT)}, required=["weight_map"])
LFS_POINTER = b"version https://git-lfs"
METADATA = "__metadata__"
"""The key of the header that no tensor may use."""


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def num_bytes(self) -> int:
        """Its bytes in the file."""
        size = math.prod(self.shape)
        return -(-size // 2) if self.dtype == FOUR_BITS else size * int(np.dtype(self.dtype).itemsize)


@dataclasses.dataclass(frozen=True)
class ExportReport(Report):
    """The result of an export.

    Attributes:
      files: The files that were written; with several, the index is the last.
      num_tensors: Number of tensors in them.
      num_bytes: Bytes of the tensors.

    Example:
      >>> report = jzero.export_params(state, f"{tmp}/reported.safetensors", dtype="bfloat16")
      >>> report.num_tensors, report.num_bytes
      (1, 524288)
    """

    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int

    def parts(self) -> list[Part]:
        """Returns the files and their size."""
        return [*self.files, f"{self.num_tensors} tensors, {format_bytes(self.num_bytes)}"]


def as_dtype(dtype: DTypeLike) -> DType:
    """Returns a floating-point dtype of the format; raises a `ValueError` for any other."""
    try:
        if not isinstance(dtype, str | np.dtype | type):  # an array would count as its own dtype
            raise TypeError
        parsed = np.dtype(getattr(ml_dtypes, dtype) if isinstance(dtype, str) and hasattr(ml_dtypes, dtype) else dtype)
    except TypeError as error:
        raise ValueError(f"`dtype` must be a dtype such as 'bfloat16': got {dtype!r}.") from error
    supported = [x for x in CODES if jax.numpy.issubdtype(x, np.floating)]
    if parsed not in supported:
        raise ValueError(
            f"`dtype` must be a floating-point one that safetensors knows ({', '.join(map(str, supported))}): "
            f"got {parsed}."
        )
    return parsed


def is_known(dtype: DType) -> bool:
    """Whether the format has a dtype."""
    return dtype in CODES


def write_tensors(
    path: epath.Path,
    specs: Sequence[TensorSpec],
    tensors: Iterable[Iterable[np.ndarray]] | None,
    max_bytes: int,
    notes: Mapping[str, str],
) -> ExportReport:
    """Writes one file, or several with an index if the tensors are larger than `max_bytes` together.

    Files get their final names once all are complete, the index last.

    Args:
      path: The file, or else a directory for `model.safetensors`.
      specs: The tensors, in order.
      tensors: The consecutive parts of each, in this order, taken one at a time. `None` in a process that writes
        nothing.
      max_bytes: Most bytes of tensors in a file; a larger tensor gets its own file.
      notes: Texts by name, to note in each file.
    """
    files = _split(specs, max_bytes)
    stem = path.name.removesuffix(SUFFIX) if path.name.endswith(SUFFIX) else "model"
    directory = path.parent if path.name.endswith(SUFFIX) else path
    count = len(files)
    names = [f"{stem}-{i + 1:05d}-of-{count:05d}{SUFFIX}" for i in range(count)] if count > 1 else [stem + SUFFIX]
    targets = [directory / name for name in (names if count == 1 else [*names, stem + INDEX_SUFFIX])]
    report = ExportReport(tuple(map(str, targets)), len(specs), sum(spec.num_bytes for spec in specs))
    logging.getLogger("jzero").info("Writing %s to %s.", format_bytes(report.num_bytes), path)
    if tensors is None:
        return report
    source = iter(tensors)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with only_writer(directory / (stem + SUFFIX)), _named_last(targets) as unfinished:
            patterns = (stem + SUFFIX, f"{stem}-*-of-*{SUFFIX}", stem + INDEX_SUFFIX)
            taken = [str(file) for pattern in patterns for file in directory.glob(pattern)]
            if taken:
                raise ValueError(
                    f"An export never replaces files, and these are there: {taken}. Export to another path."
                )
            for file, held in zip(unfinished, files, strict=False):
                _write_file(file, held, source, notes)
            if count > 1:
                where = {spec.name: name for name, held in zip(names, files, strict=True) for spec in held}
                index = {"metadata": {"total_size": report.num_bytes}, "weight_map": where}
                unfinished[-1].write_text(json.dumps(index, indent=1))
    except OSError as error:
        raise CheckpointError(f"The parameters could not be written to {directory} ({error}).") from error
    return report


@contextlib.contextmanager
def _named_last(targets: Sequence[epath.Path]) -> Iterator[list[epath.Path]]:
    """Gives paths to write to, and the files there their final names at the end; removes all after an error."""
    temporary = [path.with_name(f"{path.name}.incomplete") for path in targets]
    try:
        yield list(temporary)
        for i, path in enumerate(targets):
            temporary[i] = temporary[i].rename(path)
        temporary.clear()
    finally:
        for path in temporary:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _split(specs: Sequence[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    files: list[list[TensorSpec]] = [[]]
    held = 0
    for spec in specs:
        if files[-1] and held + spec.num_bytes > max_bytes:
            files.append([])
            held = 0
        files[-1].append(spec)
        held += spec.num_bytes
    return files


def _write_file(
    path: epath.Path, specs: Sequence[TensorSpec], tensors: Iterator[Iterable[np.ndarray]], notes: Mapping[str, str]
) -> None:
    header: dict[str, object] = {METADATA: notes}
    end = 0
    for spec in specs:
        start, end = end, end + spec.num_bytes
        code = CODES[np.dtype(spec.dtype)]
        header[spec.name] = {"dtype": code, "shape": list(spec.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for spec in specs:
            size, half = 0, np.zeros(0, np.uint8)
            for part in next(tensors):
                assert part.dtype == spec.dtype, spec
                size += part.size
                data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
                if spec.dtype == FOUR_BITS:  # the last one of an odd number waits for the next part
                    data = np.concatenate([half, data])
                    data, half = data[: len(data) // 2 * 2], data[len(data) // 2 * 2 :]
                    data = (data[::2] | data[1::2] << 4).astype(np.uint8)
                file.write(data.data)
                del part, data
            assert size == math.prod(spec.shape), spec


class TensorFile:
    """A tensor in a file, read slice by slice."""

    def __init__(self, path: epath.Path, name: str, entry: Mapping[str, Any], data: np.ndarray) -> None:
        """Checks the dtype; `entry` is the tensor's entry in the header, `data` the bytes after the header."""
        self.path, self.name = path, name
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name!r} in {path} is of type {entry['dtype']}, which jzero cannot read.")
        self.dtype = np.dtype(DTYPES[entry["dtype"]])
        self.shape = tuple(entry["shape"])
        self._data = data[slice(*entry["data_offsets"])]

    def view(self, index: Index) -> np.ndarray:
        """Returns one slice in the memory of the file, as far as its dtype allows."""
        data = self._data
        if self.dtype == FOUR_BITS:
            data = np.stack([data & 15, data >> 4], -1)
        return data.reshape(-1).view(self.dtype).reshape(self.shape)[index]


def find_tensors(path: epath.PathLike) -> tuple[dict[str, TensorFile], Mapping[str, str]]:
    """Returns the tensors of a safetensors file, of an index with its files, or of a directory, and their notes.

    Raises:
      CheckpointError: There is no such file, it is damaged, or it lacks tensors that the index lists.
    """
    source = epath.Path(path).expanduser()
    tensors: dict[str, TensorFile] = {}
    notes: dict[str, str] = {}
    for file, names in _files(source).items():
        try:
            header, data = _open(file)
        except (SafetensorError, OSError) as error:
            _check_is_no_pointer(file)
            raise CheckpointError(
                f"{file} cannot be read as safetensors: it is damaged, or cut short ({error})."
            ) from error
        notes |= header.pop(METADATA, None) or {}
        missing = [name for name in names or () if name not in header]
        if missing:
            raise CheckpointError(
                f"{file} lacks tensors that its index says it holds: {missing[:10]}. File and index are not of one "
                "export: fetch both again."
            )
        tensors |= {name: TensorFile(file, name, header[name], data) for name in (header if names is None else names)}
    return tensors, notes


def _check_is_no_pointer(path: epath.Path) -> None:
    """Raises if a file is a pointer of Git LFS."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise CheckpointError(
                f"{path} is a pointer of Git LFS, not the file that it stands for: run `git lfs pull` in its folder."
            )


def _open(path: epath.Path) -> tuple[dict[str, Any], np.ndarray]:
    """Returns the header of a file, and a memory map of the bytes after it."""
    with safe_open(str(path), framework="np"):  # checks the file
        pass
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    num_bytes = path.stat().length - 8 - size
    # Slices of a `memmap` would be ones, too, which takes longer.
    return header, np.asarray(np.memmap(str(path), np.uint8, "r", 8 + size) if num_bytes else np.zeros(0, np.uint8))


def _files(path: epath.Path) -> dict[epath.Path, list[str] | None]:
    """Returns the files to read, and for each the tensors to read; `None` for all."""
    if path.is_dir():
        path = _published(path)
    if not path.exists():
        raise CheckpointError(f"There is no file {path}.")
    if not path.name.endswith(INDEX_SUFFIX):
        return {path: None}
    held: dict[epath.Path, list[str]] = {}
    try:
        for name, file in check("", parse(path.read_bytes(), path), _INDEX, file=path)["weight_map"].items():
            held.setdefault(path.parent / file, []).append(name)
        missing = [file.name for file in held if not file.exists()]
        outside = [str(file) for file in held if not _is_below(path.parent, file)]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no index of safetensors files ({error}).") from error
    if outside:
        raise CheckpointError(f"{path} leads out of its folder, which an index never does: {shown(outside)}.")
    if missing:
        raise CheckpointError(f"{path} lists files that are not there: {shown(missing)}. Fetch them.")
    return {**held}


def _is_below(folder: epath.Path, file: epath.Path) -> bool:
    """Whether a name leads to a file of a folder. That file may be a link, as all are in the cache of `hf download`."""
    inner, outer = (pathlib.Path(os.path.realpath(os.fspath(x))) for x in (file.parent, folder))
    return inner.is_relative_to(outer)


def _published(folder: epath.Path) -> epath.Path:
    """Returns the file of a folder's model, or its index.

    The names that `transformers` reads come first: what lies beside them, such as `consolidated.safetensors`, is the
    same model in another form. Without such a name there must be one index, or one file.
    """
    named = [path for path in (folder / f"model{INDEX_SUFFIX}", folder / f"model{SUFFIX}") if path.exists()]
    files = named[:1] or sorted(folder.glob(f"*{INDEX_SUFFIX}")) or sorted(folder.glob(f"*{SUFFIX}"))
    pickles = sorted(x.name for pattern in PICKLES for x in folder.glob(pattern))
    if not files and pickles:
        raise CheckpointError(
            f"{folder} holds only pickles: {pickles}. Reading one runs the code in it, so jzero never does: fetch the "
            "model's safetensors files, or make some by `save_pretrained` of `transformers`."
        )
    if len(files) != 1 or PART.search(files[0].name):
        raise CheckpointError(
            f"{folder} must hold one safetensors file, or the parts of one with their index, model{INDEX_SUFFIX}: it "
            f"has {[x.name for x in files]}. Fetch what is missing, or name one of them."
        )
    single = folder / (files[0].name.removesuffix(INDEX_SUFFIX) + SUFFIX)
    if files[0].name.endswith(INDEX_SUFFIX) and single.exists() and single not in _files(files[0]):
        raise CheckpointError(
            f"{folder} holds two models: the file {single.name}, and the files that {files[0].name} lists. Name the "
            "file or the index, or remove the older one."
        )
    return files[0]
