"""Hugging Face's folders and PEFT's adapters, as users import them. Imports none of Hugging Face's libraries."""

from jzero.checkpoint.peft import export_peft
from jzero.pretrained.config import ModelConfig, read_config
from jzero.pretrained.presets import peft_mapping

__all__ = ["ModelConfig", "export_peft", "peft_mapping", "read_config"]
