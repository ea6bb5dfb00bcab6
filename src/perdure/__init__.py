"""Perdure keeps the state of AI agents: what was saved is there, whatever happens to the process.

    import perdure

    @perdure.effect
    def book(flight: str, key: perdure.IdempotencyKey) -> str: ...

    @perdure.durable
    def travel(request: str) -> str:
        return book(perdure.ask("Which flight?", options=["LH400", "UA88"]))

    store = perdure.open("agent.db")
    run = store.run(travel, "NYC tomorrow", id="trip-42")    # kill it anywhere, run the line again: it resumes
    store.thread("alice-001").save({"messages": ["hi"]})     # or keep states yourself

`__init__.pyi` lists what is public; anything else may change.
"""

from perdure.late import add_registrar, late_names

__version__ = "0.1.0"

# A store may hold them without the adapter being imported.
add_registrar("perdure.langchain", "^msg.", "langchain_core.messages.")
add_registrar("perdure.values.crdts", "perdure.crdt.")
add_registrar("perdure.values.external", "perdure.External")
# `perdure.ops.store` loads the modules that are names themselves: `perdure.outcome`.
__getattr__, __dir__, __all__ = late_names(__name__, first="perdure.ops.store")
__all__ += ["__version__"]
