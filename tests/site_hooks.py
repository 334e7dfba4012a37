"""The hooks of the site, `docs/*.py`, as modules."""

import importlib.util
import pathlib
import types

DOCS = pathlib.Path(__file__).parents[1] / "docs"


def hook(name: str) -> types.ModuleType:
    """Returns a hook that has just been imported."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
