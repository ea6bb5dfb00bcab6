"""Which classes may be saved and rebuilt: the closed registry, and the module prefixes the user trusts.

Names in stored text are looked up only here, and never called. A name is that of a registered class, or of a data class
that is defined (not only imported) in a module under a trusted prefix. The only effect that a stored name can have is
the import of a module under such a prefix. The same rule holds for saving: every value that was saved can be loaded.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, TypeVar, overload

from perdure.errors import Undecodable, UnknownType, UsageError
from perdure.late import import_registrar
from perdure.values.class_adapters import ClassAdapter, CustomAdapter, adapter_of
from perdure.values.model_tags import ModelShape, add_models, name_of, package_of, shape_of, trusted_prefixes
from perdure.values.names import class_name, is_doubled, loaded, module_name

C = TypeVar("C", bound=type)
Upgrade = Callable[[Any], Any]
# The codec's reader, while it decodes (`values/external.py`).
reader: ContextVar[Any] = ContextVar("perdure_external_reader", default=None)


@dataclass(frozen=True, slots=True)
class RegisteredClass:
    """A class that may be saved and rebuilt, with its name, version and adapter."""

    name: str
    version: int
    cls: type
    adapter: ClassAdapter
    upgrade: Mapping[int, Upgrade]
    shape: ModelShape | None = None  # of a class that has a tag of its own (`model_tags`)
    fields: frozenset[str] | None = None  # for a foreign class: other stored fields are dropped

    def rebuild(self, version: int, body: Any, extras: dict[str, Any] | None) -> Any:
        """Upgrade the fields of an older version, one version at a time, and make the object."""
        if version > self.version:
            raise UnknownType(
                f"a stored value of type {self.name!r} has version {version}, but this process knows "
                f"it up to version "
                f"{self.version}; it was saved by newer code: update this one",
                type_name=self.name,
            )
        for step in range(version, self.version):
            function = self.upgrade.get(step)
            if function is None:
                raise UnknownType(
                    f"a stored value of type {self.name!r} has version {version}, and there is no "
                    f"upgrade from version "
                    f"{step} to {step + 1}; give it: @perdure.register({self.name!r}, "
                    f"version={self.version}, "
                    f"upgrade={{{step}: function}})",
                    type_name=self.name,
                )
            try:
                body = function(body)
            except Exception as problem:
                raise Undecodable(
                    f"the upgrade of {self.name!r} from version {step} to {step + 1} failed: {problem!r}"
                ) from problem
        if self.fields is not None and type(body) is dict:
            body = {name: value for name, value in body.items() if name in self.fields}
        return self.adapter.rebuild(body, extras)


def default_name(cls: type) -> str:
    """Return the name of a class that was registered without a name."""
    return ".".join(class_name(cls))


class Registry:
    """The registered classes by name. A process has one; tests make their own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[
            str, dict[str, RegisteredClass]
        ] = {}  # by module: of a script that is imported too, both copies
        self._by_class: dict[type, RegisteredClass] = {}
        self.generation = 0

    def add(
        self,
        cls: type,
        *,
        name: str | None = None,
        version: int = 1,
        upgrade: Mapping[int, Upgrade] | None = None,
        dump: Callable[[Any], Any] | None = None,
        load: Callable[[Any], Any] | None = None,
        foreign: bool = False,
    ) -> None:
        """Register a class. The same class may be registered again, also after a reload of its module.

        foreign: it belongs to another package. Stored fields that the installed version does not have are dropped.
        """
        name = default_name(cls) if name is None else name
        upgrade = dict(upgrade or {})
        _check(cls, name, version, upgrade)
        adapter = _adapter(cls, dump, load)
        names = getattr(adapter, "fields", None) if foreign else None  # an Enum has none
        fields = None if names is None else frozenset(names)
        entry = RegisteredClass(name, version, cls, adapter, upgrade, shape_of(name, version, adapter), fields)
        with self._lock:
            other = self.named(name)
            if other is not None and other.cls is not cls and default_name(other.cls) != default_name(cls):
                raise UsageError(
                    f"the name {name!r} is registered for {default_name(other.cls)}; give "
                    f'{default_name(cls)} another: @perdure.register("another.name")'
                )
            # The entry of the class before a reload stays, so that its values can still be saved.
            self._by_name.setdefault(name, {})[cls.__module__] = entry
            self._by_class[cls] = entry
            self.generation += 1

    def add_models(self, prefix: str, package: str, tags: Mapping[str, str]) -> None:
        """Trust the classes of a package, and give some of them tags of their own (`model_tags.add_models`)."""
        with self._lock:
            add_models(prefix, package, tags)
            self.generation += 1

    def named(self, name: str, home: str | None = None) -> RegisteredClass | None:
        """Return the entry with a name. Of two copies of a module, prefer that of `home`, then the script's."""
        copies = self._by_name.get(name)
        if not copies:
            return None
        return copies.get(home or "") or copies.get("__main__") or next(reversed(copies.values()))

    def of(self, cls: type) -> RegisteredClass | None:
        return self._by_class.get(cls)


def _check(cls: object, name: object, version: object, upgrade: Mapping[int, Upgrade]) -> None:
    if not isinstance(cls, type):
        raise UsageError(f"only classes can be registered, not {cls!r}")
    if type(name) is not str or not name:
        raise UsageError(f"the name of a registered class is a str that is not empty, not {name!r}")
    if type(version) is not int or version < 1:
        raise UsageError(f"the version of a registered class is an int from 1, not {version!r}")
    for step, function in upgrade.items():
        if type(step) is not int or not 1 <= step < version or not callable(function):
            raise UsageError(
                f"upgrade of {name!r}: {step!r} is not a version before {version} with a function; write "
                f"upgrade={{1: from_1_to_2, 2: from_2_to_3}}, version=3"
            )


def _adapter(cls: type, dump: Callable[[Any], Any] | None, load: Callable[[Any], Any] | None) -> ClassAdapter:
    if cls.__module__ == "builtins":
        raise UsageError(f"{cls.__name__} is a built-in type and cannot be registered")
    if dump is not None and load is not None:
        return CustomAdapter(dump, load)
    if dump is not None or load is not None:
        raise UsageError(f"{default_name(cls)}: dump= and load= go together")
    adapter = adapter_of(cls)
    if adapter is None:
        raise UsageError(
            f"{default_name(cls)} is not a dataclass, NamedTuple, msgspec Struct, pydantic model or "
            f"Enum; say how to "
            f"keep it: perdure.register({cls.__name__}, dump=to_plain, load=from_plain)"
        )
    return adapter


REGISTRY: Final = Registry()


@overload
def register(
    target: C,
    *,
    name: str | None = None,
    version: int = 1,
    upgrade: Mapping[int, Upgrade] | None = None,
    dump: Callable[[Any], Any] | None = None,
    load: Callable[[Any], Any] | None = None,
) -> C: ...


@overload
def register(
    target: str | None = None,
    *,
    version: int = 1,
    upgrade: Mapping[int, Upgrade] | None = None,
    dump: Callable[[Any], Any] | None = None,
    load: Callable[[Any], Any] | None = None,
) -> Callable[[C], C]: ...


def register(target: Any = None, *, name: str | None = None, **options: Any) -> Any:
    """Let a class be saved and loaded.

    As a decorator, `@register` or `@register("app.Plan", version=2, upgrade={1: function})`, or as a call,
    `register(Plan, name="app.Plan")`. A name of its own lets the class move between modules. An upgrade takes
    the dict of fields as of one version and returns that of the next. For a class that is no data class give
    `dump` and `load`: to a storable value and back.
    """
    if isinstance(target, type):
        REGISTRY.add(target, name=name, **options)
        return target
    if target is not None and (not isinstance(target, str) or name is not None):
        raise UsageError(f"register takes a class or a name, not {target!r}")

    def decorate(cls: C) -> C:
        REGISTRY.add(cls, name=target if target is not None else name, **options)
        return cls

    return decorate


class Codec:
    """The classes that a store may save and load: the registry, and the prefixes that it trusts."""

    def __init__(
        self,
        trust: Iterable[str] = (),
        *,
        registry: Registry | None = None,
        classes: Iterable[tuple[str, str]] = (),
        home: str | None = None,
        values: Any = None,
    ) -> None:
        if isinstance(trust, str) or not isinstance(trust, Iterable):
            raise UsageError(f'trust is a list of module prefixes such as trust=["myapp."], not {trust!r}')
        self.trust = tuple(dict.fromkeys(_prefix(item) for item in trust))
        #: single classes that are also trusted, by module and name
        self.classes = frozenset(classes)
        #: the module whose code receives the values: if a module is loaded twice, classes of this copy are used
        self.home = home
        #: reads the large values of the store (`values.external.Reader`); None: it has no place for them
        self.values = values
        self._registry = REGISTRY if registry is None else registry
        self._generation = self._registry.generation
        self._by_class: dict[type, RegisteredClass | None] = {}
        self._by_name: dict[str, RegisteredClass] = {}

    def entry_of(self, cls: type) -> RegisteredClass | None:
        """Return the entry of a class to save; None if it is neither registered nor trusted."""
        self._refresh()
        try:
            return self._by_class[cls]
        except KeyError:
            pass
        entry = self._registry.of(cls)
        if entry is None:
            trusted = self._trusted(default_name(cls), cls.__module__)
            entry = trusted if trusted is not None and trusted.cls is cls else None
        self._by_class[cls] = entry
        return entry

    def shape_of(self, cls: type) -> ModelShape | None:
        """Return the shape of a class that has a tag of its own; None if it has none."""
        entry = self._by_class.get(cls) if self._generation == self._registry.generation else None
        entry = entry or self.entry_of(cls)
        return entry.shape if entry is not None else None

    def entry_named(self, name: str) -> RegisteredClass:
        """Return the entry of a class named in stored text. Raises UnknownType if it is not registered or trusted."""
        entry = self._find(name)
        if entry is None:
            raise UnknownType(
                f"a stored value has the type {name[:200]!r}, which is neither registered nor trusted "
                f"here; import the "
                f"module that registers it (@perdure.register), or open the store with "
                f'trust=["{_suggest(name)}"]; '
                f"raw=True reads the value without its class",
                type_name=name,
            )
        return entry

    def entry_tagged(self, tag: str) -> RegisteredClass:
        """Return the entry of the class with a tag of its own. Raises UnknownType if its package is not installed."""
        name = name_of(tag) or tag
        entry = self._find(name)
        if entry is None:
            raise UnknownType(
                f"a stored value is a {name}, which is not installed here: pip install -U {package_of(name)}; "
                f"raw=True reads the value without its class",
                type_name=name,
            )
        return entry

    def _find(self, name: str) -> RegisteredClass | None:
        self._refresh()
        entry = self._by_name.get(name) or self._registry.named(name, self.home) or self._trusted(name, self.home)
        entry = entry or self._registry.named(name, self.home)  # a registrar was imported meanwhile
        if entry is not None:
            self._by_name[name] = entry
        return entry

    def _refresh(self) -> None:
        if self._generation != self._registry.generation:
            self._generation = self._registry.generation
            self._by_class.clear()
            self._by_name.clear()

    def with_classes(self, classes: Iterable[tuple[str, str]]) -> Codec:
        """Return a codec that also trusts these single classes (module and name)."""
        known = self.classes | {(module_name(module), name) for module, name in classes}
        return (
            self
            if known == self.classes
            else Codec(self.trust, registry=self._registry, classes=known, values=self.values)
        )

    def seen_from(self, home: str) -> Codec:
        """Return a codec for values that a module's code reads; itself unless that module is loaded twice."""
        if home == self.home or not is_doubled(home):
            return self
        return Codec(self.trust, registry=self._registry, classes=self.classes, home=home, values=self.values)

    def with_values(self, values: Any) -> Codec:
        """Return a codec whose large values are read by `values`."""
        return Codec(self.trust, registry=self._registry, classes=self.classes, home=self.home, values=values)

    def _trusted(self, name: str, home: str | None) -> RegisteredClass | None:
        last = name.rpartition(".")[2]
        single = (f"{module}." for module, cls_name in self.classes if cls_name == last)
        import_registrar(name)
        for prefix in (*self.trust, *trusted_prefixes(), *single):
            if name.startswith(prefix):
                cls = _resolve(prefix, name, home)
                adapter = None if cls is None else adapter_of(cls)
                if cls is not None and adapter is not None:
                    return RegisteredClass(name, 1, cls, adapter, {}, shape_of(name, 1, adapter))
        return None


def _prefix(item: object) -> str:
    if not isinstance(item, str) or not all(part.isidentifier() for part in item.removesuffix(".").split(".")):
        raise UsageError(f'trust takes module prefixes such as "myapp.", not {item!r}')
    return module_name(item.removesuffix(".")) + "."


def _suggest(name: str) -> str:
    root = name.partition(".")[0]
    return f"{root}." if root.isidentifier() else "myapp."


def _resolve(prefix: str, name: str, home: str | None) -> type | None:
    """Return the class of exactly this name, defined in a module under the prefix. Imports modules, calls nothing."""
    parts = name[len(prefix) :].split(".")
    if not all(part.isidentifier() for part in parts):
        return None
    place = prefix[:-1]
    module = _import(place, home)
    while module is not None and parts:
        cls = _class_in(module, parts)
        # A class that the module only imported from elsewhere has another name, and is not trusted.
        if cls is not None and default_name(cls) == name:
            return cls
        place = f"{place}.{parts.pop(0)}"
        module = _import(place, home)
    return None


def _class_in(module: ModuleType, parts: list[str]) -> type | None:
    # Attributes are read from the dict, so that no `__getattr__` or descriptor runs.
    member: Any = module
    for part in parts:
        member = vars(member).get(part)
        if not isinstance(member, type):
            return None
    return member if isinstance(member, type) else None


def _import(name: str, home: str | None) -> ModuleType | None:
    module = loaded(name, home)
    if module is not None:
        return module
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as problem:
        if problem.name is not None and (name == problem.name or name.startswith(problem.name + ".")):
            return None
        raise UnknownType(f"the trusted module {name!r} cannot be imported: {problem!r}", type_name=name) from problem
    except Exception as problem:
        raise UnknownType(f"the trusted module {name!r} cannot be imported: {problem!r}", type_name=name) from problem
