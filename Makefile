# Everything a newcomer or a robot runs. `make help` lists the targets; variables may be set on the command line:
PYTHON ?= python3#  the interpreter that .venv is made of
VENV ?= .venv#      where everything is installed
TORCH ?= torch==2.13.0#  what to install where no torch can be imported by PYTHON
TORCH_INDEX ?=#     index to take it from; https://download.pytorch.org/whl/cpu has the CPU-only build
TESTS ?=#           what `make test` hands to pytest besides its own settings

BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
SOURCES = $(shell find csrc src -name '*.[ch]pp' -o -name '*.h' -o -name '*.py' -o -name '*.pyi')
CXX_SOURCES = $(shell find csrc -name '*.[ch]pp' -o -name '*.h')

.NOTPARALLEL:  # two pips in one environment do not get along
.PHONY: help demo test check wheel native clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1\t/' | expand -t 16

demo: $(VENV)/.package $(VENV)/.torch $(VENV)/.demo  ## train on two ranks and compare with Gloo and one process
	$(BIN)/multiring run -n 2 examples/digits.py

test: $(VENV)/.package $(VENV)/.torch $(VENV)/.demo $(VENV)/.test wheel  ## the whole suite
	$(BIN)/python -m pytest $(TESTS)

check: $(VENV)/.package $(VENV)/.torch $(VENV)/.demo $(VENV)/.test $(VENV)/.check  ## format, lint and types, then the whole suite
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)
	$(MAKE) test

wheel: build/wheel/.built  ## portable wheels in dist/, one for each interpreter at hand

native:  ## build the native engine beside its sources, for PYTHONPATH=src (PYTHON has nanobind; cmake and ninja on PATH)
	cmake -S . -B build/native -G Ninja -DPython_EXECUTABLE=$$($(PYTHON) -c 'import sys; print(sys.executable)') > /dev/null
	cmake --build build/native
	cp build/native/_native*.so src/multiring/

clean:  ## remove all that make made
	rm -rf $(VENV) build dist src/multiring/_native*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Each stamp below is one step of the setup, redone only when what it was made from changes.

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("multiring needs Python 3.10 or newer, and $(PYTHON) is " + sys.version.split()[0] + ": set PYTHON=python3.X")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q 'pip>=25.1'  # the first that knows --group
	touch $@

$(VENV)/.build: pyproject.toml | $(VENV)/.python
	$(PIP) install -q --group build
	touch $@

$(VENV)/.package: $(VENV)/.build CMakeLists.txt $(CXX_SOURCES)
	$(PIP) install -q --no-build-isolation -e .
	touch $@

# A torch that PYTHON can import is used where it lies, through a .pth file.
$(VENV)/.torch: | $(VENV)/.python
	@$(PYTHON) -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' > $(VENV)/torch.pth 2>/dev/null \
	  && mv $(VENV)/torch.pth $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth \
	  || rm $(VENV)/torch.pth
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP) install -q $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	touch $@

$(VENV)/.demo $(VENV)/.test $(VENV)/.check $(VENV)/.wheel: $(VENV)/.%: pyproject.toml | $(VENV)/.python
	$(PIP) install -q --group $*
	touch $@

build/wheel/.built: $(VENV)/.build $(VENV)/.wheel tools/build_wheels.py CMakeLists.txt $(SOURCES)
	$(BIN)/python tools/build_wheels.py
	touch $@
