"""Checkpoints: saving, restoring, export. The only modules that import orbax and safetensors."""
