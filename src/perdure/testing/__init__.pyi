# The public names: see `perdure/__init__.pyi`.

from perdure.testing.clock import Clock as Clock
