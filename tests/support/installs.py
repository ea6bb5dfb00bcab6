"""Virtual environments that hold what a page tells its reader to install, and nothing else.

`Installs.python({"search"})` is the interpreter of an environment with Perdure's wheel, its dependencies and those of
the extra `search`. The wheel is built and installed by pip once. The other packages are linked, file by file, from the
environment that runs the tests: which ones, their own metadata say. So a new environment takes a moment, no network,
and can import nothing that `pip install` would not have brought.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import Distribution, PackageNotFoundError, PathDistribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SITE = Path(sysconfig.get_paths()["purelib"])
IN_WORDS = re.compile(r"extra `([\w-]+)`")
COMMAND = re.compile(r"pip install ([^`\n#]*)")


def named(text: str) -> frozenset[str]:
    """What a text tells its reader to install, by `pip install …` in a clone, or by the words: the extra `search`."""
    wanted = {f"perdure[{extra}]" for extra in IN_WORDS.findall(text)}
    for command in COMMAND.findall(text):
        for word in shlex.split(command):
            if word == "./speed":
                wanted.add("perdure-speed")
            elif word not in (".", "-e"):
                wanted.add(f"perdure{word[1:]}" if word.startswith(".[") else word)
    return frozenset(wanted)


class Installs:
    """The environments of a test run. Its processes share a folder, and make each environment once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def python(self, requirements: Iterable[str] = ()) -> Path:
        """The interpreter of an environment with Perdure and these requirements."""
        wanted = sorted(set(requirements))
        digest = hashlib.sha256(" ".join(wanted).encode()).hexdigest()[:8]
        with self._locked():
            bare = self._bare()
            if not wanted:
                return bare / "bin" / "python"
            where = self._folder / f"with-{digest}"
            if not where.exists():
                _make(where)
                ours = next(_site(bare).glob("perdure-*.dist-info"))
                perdure = PathDistribution(ours)
                _link(perdure, _site(bare), _site(where))
                for each in _closure(perdure, [Requirement(word) for word in wanted]):
                    _link(each, SITE, _site(where))
        return where / "bin" / "python"

    def _bare(self) -> Path:
        """The environment without extras, into which pip itself installs the wheel."""
        where = self._folder / "bare"
        if where.exists():
            return where
        wheels = self._folder / "wheel"
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
        _make(where)
        [wheel] = wheels.glob("*.whl")
        install = ["install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", str(wheel)]
        pip = [sys.executable, "-m", "pip", "--python", str(where / "bin" / "python"), *install]
        subprocess.run(pip, check=True, capture_output=True, timeout=120)
        for each in _closure(PathDistribution(next(_site(where).glob("perdure-*.dist-info"))), []):
            _link(each, SITE, _site(where))
        return where

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _make(where: Path) -> None:
    venv.EnvBuilder(symlinks=True, with_pip=False).create(where)


def _site(where: Path) -> Path:
    [found] = where.glob("lib/python*/site-packages")
    return found


def _closure(perdure: Distribution, wanted: list[Requirement]) -> list[Distribution]:
    """Every distribution that pip would install for Perdure and these requirements."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    todo = [Requirement("perdure"), *wanted]
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        package = perdure if name == "perdure" else _installed(name)
        if package is None:
            continue
        if name != "perdure":
            found[name] = package
        for extra in {"", *one.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            needed = [Requirement(line) for line in package.requires or ()]
            todo += [each for each in needed if each.marker is None or each.marker.evaluate({"extra": extra})]
    return list(found.values())


def _installed(name: str) -> Distribution | None:
    """A package of the environment that runs the tests. The accelerator needs a compiler; CrewAI has its own place."""
    try:
        return distribution(name)
    except PackageNotFoundError:
        if name in ("perdure-speed", "crewai"):
            return None
        raise


def _link(package: Distribution, source: Path, target: Path) -> None:
    for file in package.files or ():
        if ".." in file.parts or file.suffix == ".pyc":
            continue
        new = target / file
        if new.is_symlink():
            continue
        new.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(source / file, new)
        compiled = new.parent / "__pycache__"
        if file.suffix == ".py" and not compiled.is_symlink():
            (source / file.parent / "__pycache__").mkdir(exist_ok=True)
            os.symlink(source / file.parent / "__pycache__", compiled)  # compiled once, by whichever imports it first
