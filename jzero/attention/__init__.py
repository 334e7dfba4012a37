"""Causal attention for a loss of your own: one kernel where one suffices, else plain products.

Read `plain` (products, and parts of rows), `kernels` (what each can do, and which to take), `exchange` (what windows
need of other devices), then `causal`.
"""

from jzero.attention.causal import attend as attend
from jzero.attention.kernels import KERNELS as KERNELS
from jzero.attention.kernels import Choice as Choice
from jzero.attention.kernels import choose as choose
from jzero.attention.kernels import save_attention as save_attention
from jzero.attention.plain import own_part as own_part
from jzero.attention.plain import whole_rows as whole_rows

__all__ = ["KERNELS", "Choice", "attend", "choose", "own_part", "save_attention", "whole_rows"]
