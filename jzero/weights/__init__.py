"""Weights of others: safetensors files, the folders of Hugging Face, PEFT's adapters. Never the training state.

Read `mapping` (what users say), `entries` (what follows from it: which box of which tensor is which box of which
parameter), `loading`, and `draft` with `exporting` (the two ways to read an entry), then `safetensors_files`,
`families`, `config` with its tables `model_types`, and `peft`.
"""
