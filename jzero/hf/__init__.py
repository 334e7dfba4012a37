"""What Hugging Face's files say: the sizes and kinds of a model in `config.json`. Imports no library of theirs."""

from jzero.hf.config import ModelConfig as ModelConfig
from jzero.hf.config import read_config as read_config

__all__ = ["ModelConfig", "read_config"]
