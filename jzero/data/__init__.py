"""Batches for ZeRO's steps, read with Grain. Each process loads its own rows, in an order independent of their number.

Read `loader`, `iterator`, `position` (in epochs, and their order), `pipeline` (works ahead) with `examples`,
then `files`.
"""

try:
    import grain as _grain  # noqa: F401  # only for the message
except ModuleNotFoundError as error:
    if error.name != "grain":
        raise
    raise ImportError("`jzero.data` reads with Grain, which is not installed: pip install 'jzero[data]'.") from error

from jzero.data.files import FileSource as FileSource
from jzero.data.iterator import LoaderIterator as LoaderIterator
from jzero.data.loader import Loader as Loader
from jzero.data.loader import make_loader as make_loader

__all__ = ["FileSource", "Loader", "LoaderIterator", "make_loader"]
