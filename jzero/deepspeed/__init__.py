"""DeepSpeed's configuration files: what jzero makes of each key; and DeepSpeed's estimators of memory.

`conversion` is the way of a file; `schema` has a row for each key, in the nouns of `key`; `rules` say what else holds.
"""
