"""Bridges to model libraries. Only these modules import them."""
