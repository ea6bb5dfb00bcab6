"""The web inspector: pages that show one store and act on it (`perdure inspect`).

It uses public names of `perdure` alone. `server.py` makes the application, `security.py` decides who may ask and what a
page may do, `view.py` and `actions.py` are the contracts of pages and of actions, `values.py` makes values readable,
`live.py` tells pages that the store changed. A page is a module in `pages/` and a template.
"""

from __future__ import annotations

from perdure.errors import ExtraMissing

try:
    import jinja2  # noqa: F401
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as missing:
    raise ExtraMissing("perdure inspect", "inspect") from missing
