"""Hugging Face's folders and PEFT's adapters, as users import them. Imports none of Hugging Face's libraries."""

from jzero.weights.config import Experts, ModelConfig, read_config
from jzero.weights.families import peft_mapping
from jzero.weights.peft import export_peft

__all__ = ["Experts", "ModelConfig", "export_peft", "peft_mapping", "read_config"]
