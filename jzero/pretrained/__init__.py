"""The former name of `jzero.weights`, for one release: `presets` alone."""
