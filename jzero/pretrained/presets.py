"""The former place of `tensor_shapes`."""

from jzero.weights.families import tensor_shapes

__all__ = ["tensor_shapes"]
