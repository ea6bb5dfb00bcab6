"""Builds the one C file. Everything else is in pyproject.toml."""

from setuptools import Extension, setup

setup(ext_modules=[Extension("perdure_speed", ["perdure_speed.c"])], py_modules=[])
