"""Published models: what `config.json` says, which tensors make which parameters. Imports no library of theirs.

Read `config`, `mapping`, `presets`, `folder`. What reads and writes weights by them is in `jzero/checkpoint/`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jzero.hf.config import ModelConfig as ModelConfig
from jzero.hf.config import read_config as read_config
from jzero.hf.presets import peft_mapping as peft_mapping

if TYPE_CHECKING:
    from jzero.checkpoint.peft import export_peft as export_peft

__all__ = ["ModelConfig", "export_peft", "peft_mapping", "read_config"]


if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name == "export_peft":  # of a room above, so imported when it is used, as `jzero` itself does
            return importlib.import_module("jzero.checkpoint.peft").export_peft
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
