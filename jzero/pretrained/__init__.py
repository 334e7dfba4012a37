"""Published models: what `config.json` says, which tensors make which parameters. Imports no library of theirs.

Read `config`, `mapping`, `presets`, `folder`. `jzero/checkpoint/` reads and writes weights by them.
"""
