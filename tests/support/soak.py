"""HOLDFAST_SOAK=1, as `make soak` sets it: everything that `make test` runs a sample of is run in full."""

from __future__ import annotations

import os

SOAK = bool(os.environ.get("HOLDFAST_SOAK"))
