# Everything a newcomer or a robot runs. `make help` lists the targets; variables may be set on the command line:
PYTHON ?= python3#  the interpreter that .venv is made of
VENV ?= .venv#      where everything is installed
TORCH ?= torch==2.13.0#  what to install where no torch can be imported by PYTHON
TORCH_INDEX ?=#     index to take it from; https://download.pytorch.org/whl/cpu has the CPU-only build
TESTS ?=#           what `make test` hands to pytest besides its own settings
LEGACY ?=#          any word: `make test` and `make check` run `test-legacy` too, beside the rest
FAULTS ?= 500#      how many faults `make chaos` tries
SEED ?=#            of `make chaos`
AT_ONCE ?= 1#       how many jobs of `make chaos` run beside each other
SECONDS ?= 60#      of `make fuzz` for each target

BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check
LEGACY_PYTHON = $(VENV)/legacy/bin/python
LEGACY_TESTS = $(LEGACY_PYTHON) -m pytest -k 'chainer or theano or legacy' tests/frontends/test_chainer.py tests/frontends/test_theano.py tests/docs
ENGINES_TESTS = SPARK_LOCAL_IP=127.0.0.1 $(VENV)/engines/bin/python -m pytest -o cache_dir=$(CURDIR)/build/suite/engines --durations=10 \
  -k clusters tests/clusters tests/docs/test_documents.py
SOURCES = $(shell find csrc src -name '*.[ch]pp' -o -name '*.h' -o -name '*.py' -o -name '*.pyi')
CXX_SOURCES = $(shell find csrc -name '*.[ch]pp' -o -name '*.h')

# Without byte code, each of the suite's thousands of processes compiles all modules again. Measured:
# benchmarks/results/2026-11-28-constants.md, Suite.
unexport PYTHONDONTWRITEBYTECODE
# Threads that no test computes with: on 2 cores they take 0.04 s of processor time of each process that imports NumPy,
# and 0.1 s of one that is a rank.
export OPENBLAS_NUM_THREADS = 1

.NOTPARALLEL:  # two pips in one environment do not get along
.PHONY: help setup demo demo-cluster docs test test-legacy test-engines check chaos pairs soak fuzz sanitize wheel native stub clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 24

demo: $(VENV)/.package $(VENV)/.torch $(VENV)/.demo  ## train on two ranks and compare with Gloo and one process
	$(BIN)/multiring run -n 2 examples/digits.py

demo-cluster: $(VENV)/.package $(VENV)/.torch $(VENV)/.demo  ## the same on two emulated racks, with a picture (root)
	@mkdir -p build
	$(BIN)/python examples/two_racks.py build/two-racks.png

docs: $(VENV)/.package $(VENV)/.docs  ## the documentation as a site: build/site/index.html
	$(BIN)/python tools/build_site.py

setup: $(VENV)/.wheel  ## all that the targets below install; the wheels, and what is built on them, beside the rest
	$(MAKE) $(VENV)/.legacy & legacy=$$!; \
	  $(MAKE) $(addprefix $(VENV)/,.package .torch .demo .docs .check .test .mpich .frameworks .engines); rest=$$?; \
	  wait $$legacy && test $$rest -eq 0

test: $(VENV)/.package $(VENV)/.torch $(VENV)/.demo $(VENV)/.test $(VENV)/.docs $(VENV)/.mpich $(VENV)/.frameworks wheel $(if $(strip $(LEGACY)),$(VENV)/.legacy)  ## the whole suite
ifeq ($(strip $(TESTS)),)
	$(BIN)/python tools/suite.py $(if $(strip $(LEGACY)),$(LEGACY_TESTS))
else
	$(BIN)/python -m pytest $(TESTS)
endif

test-legacy: $(VENV)/.legacy  ## Chainer, Theano and Aesara, in an environment of their own with an old Python
	$(LEGACY_TESTS)

test-engines: $(VENV)/.package $(VENV)/.demo $(VENV)/.frameworks $(VENV)/.engines wheel  ## ranks in the workers of cluster engines (Spark with Java, Dask, Ray), manifests and an image for Kubernetes, in an environment of their own
	$(ENGINES_TESTS) || $(ENGINES_TESTS) --last-failed --last-failed-no-failures none  # what failed once more, as in `test`

check: $(VENV)/.package $(VENV)/.torch $(VENV)/.demo $(VENV)/.test $(VENV)/.docs $(VENV)/.frameworks $(VENV)/.check  ## format, lint and types, then the whole suite
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports --no-cache
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)
	$(MAKE) test

chaos: $(VENV)/.package $(VENV)/.test  ## random faults for an hour or so; FAULTS=50 for fewer, AT_ONCE=6 for load, SEED=N for the same
	$(BIN)/python tests/faults/chaos.py --faults $(FAULTS) --beside $(AT_ONCE) $(if $(SEED),--seed $(SEED))

pairs: $(VENV)/.package $(VENV)/.test  ## every pair of 3 to 8 hosts of a lab parted, for an hour or so (root)
	$(BIN)/python tests/faults/pairs.py

soak: $(VENV)/.package $(VENV)/.test  ## memory of two ranks over 15 minutes of mixed calls, and a training of which 10 ranks are killed
	$(BIN)/python tests/faults/soak.py
	KILLS=10 $(BIN)/python -m pytest tests/frontends/test_imagenet.py -k killed_at_random

fuzz: $(VENV)/.package $(VENV)/.test  ## libFuzzer at the handshake, the store and the parsers, with clang; SECONDS=600 for each
	PATH="$$PWD/$(BIN):$$PATH" tools/fuzz.sh $(BIN)/python $(SECONDS)

sanitize: $(VENV)/.package $(VENV)/.test  ## the engine's unit tests under the thread, address and undefined-behaviour sanitizers
	PATH="$$PWD/$(BIN):$$PATH" tools/sanitize.sh $(BIN)/python

wheel: build/wheel/.built  ## portable wheels in dist/, one for each interpreter at hand

native:  ## build the native engine beside its sources, for PYTHONPATH=src (PYTHON has nanobind; cmake and ninja on PATH)
	cmake -S . -B build/native -G Ninja -DPython_EXECUTABLE=$$($(PYTHON) -c 'import sys; print(sys.executable)') > /dev/null
	cmake --build build/native
	cp --remove-destination build/native/_native*.so src/multiring/  # processes may have loaded the old one
	mkdir -p src/multiring/lib && cp --remove-destination build/native/libmultiring.so src/multiring/lib/

stub: $(VENV)/.package $(VENV)/.docs  ## the types and docstrings of csrc/bindings.cpp, for mypy: src/multiring/_native.pyi
	$(BIN)/python tools/native_stub.py

clean:  ## remove all that make made
	rm -rf $(VENV) build dist src/multiring/_native*.so src/multiring/lib .pytest_cache .mypy_cache .ruff_cache .hypothesis

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

$(VENV)/.frameworks: | $(VENV)/.torch  # or they would bring a torch of their own

$(VENV)/.demo $(VENV)/.docs $(VENV)/.test $(VENV)/.check $(VENV)/.frameworks $(VENV)/.wheel: $(VENV)/.%: pyproject.toml | $(VENV)/.python
	$(PIP) install -q --group $*
	touch $@

# A second MPI beside the one in group `test`: both have an mpirun, so it gets an environment over this one.
$(VENV)/.mpich: $(VENV)/.test
	$(BIN)/python -m venv --without-pip $(VENV)/mpich
	$(BIN)/python -c 'import sysconfig; path = sysconfig.get_path("purelib"); print(f"import site; site.addsitedir({path!r})")' \
	  > $$($(VENV)/mpich/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/over.pth
	$(PIP) --python $(VENV)/mpich/bin/python install -q mpich
	touch $@

# Spark's half a gigabyte is only for tests/clusters, so it gets an environment over this one too.
$(VENV)/.engines: pyproject.toml | $(VENV)/.test $(VENV)/.torch
	$(BIN)/python -m venv --without-pip $(VENV)/engines
	$(BIN)/python -c 'import sysconfig; path = sysconfig.get_path("purelib"); print(f"import site; site.addsitedir({path!r})")' \
	  > $$($(VENV)/engines/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/over.pth
	$(PIP) --python $(VENV)/engines/bin/python install -q --group engines
	touch $@

$(VENV)/.legacy: build/wheel/.built tools/legacy_environment.py pyproject.toml
	$(BIN)/python tools/legacy_environment.py $(VENV)/legacy
	touch $@

build/wheel/.built: $(VENV)/.wheel tools/build_wheels.py CMakeLists.txt $(SOURCES)
	$(BIN)/python tools/build_wheels.py
	touch $@
