"""Operating a store: retention, copies, health, repair. What `store.ops` returns is named here."""

from perdure.late import late_names

__getattr__, __dir__, __all__ = late_names(__name__)
