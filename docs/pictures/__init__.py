"""The pictures of the documentation, computed while the site is built: `docs/render.py` puts them into the pages."""
