"""Bridges to model libraries. The only modules that import them."""
