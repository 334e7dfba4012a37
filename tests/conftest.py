"""Eight CPU devices for every test; set before anything asks jax for its devices."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

assert jax.device_count() == 8, jax.devices()
