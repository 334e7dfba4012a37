"""DeepSpeed's configuration files: what jzero makes of each key."""
