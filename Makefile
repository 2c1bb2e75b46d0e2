PYTHON ?= python3

.PHONY: native
native:  ## build the native engine in place, for work on the source tree
	cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE=$(shell $(PYTHON) -c 'import sys; print(sys.executable)') > /dev/null
	cmake --build build/dev
	cp build/dev/_native*.so src/multiring/
