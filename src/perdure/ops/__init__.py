"""Operating a store: retention, copies, health, repair. This package exports the types that `store.ops` returns."""

from perdure.late import late_names

__getattr__, __dir__, __all__ = late_names(__name__)
