"""The version of the package, as in pyproject.toml."""

__all__ = ["__version__"]

__version__ = "0.1.0"
