#!/usr/bin/env bash
# The engine's unit tests under the compiler's sanitizers: tools/sanitize.sh PYTHON [thread] [address,undefined]
set -eu
cd "$(dirname "$0")/.."
python=$1; shift
tests=$(ls tests/unit/test_engine*.py)
for kind in "${@:-thread address,undefined}"; do
    for sanitizers in $kind; do
        build=build/sanitize-${sanitizers/,/-}
        cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DMULTIRING_SANITIZE="$sanitizers" \
            -DPython_EXECUTABLE="$($python -c 'import sys; print(sys.executable)')" > /dev/null
        cmake --build "$build" > /dev/null
        mkdir -p "$build/src"
        cp -r src/multiring "$build/src/"
        cp "$build"/_native*.so "$build/src/multiring/"
        # The interpreter is not instrumented: the library comes first, and its own leaks are not ours.
        library=$(${CXX:-c++} -print-file-name="lib${sanitizers:0:1}san.so")
        [ "$sanitizers" = thread ] || library="$library $(${CXX:-c++} -print-file-name=libubsan.so)"
        echo "== $sanitizers"
        env PYTHONPATH="$build/src" LD_PRELOAD="$library" ASAN_OPTIONS=detect_leaks=0 \
            TSAN_OPTIONS="halt_on_error=1 report_signal_unsafe=0" UBSAN_OPTIONS="halt_on_error=1 print_stacktrace=1" \
            setarch -R "$python" -m pytest -q -p no:cacheprovider $tests \
            --deselect tests/unit/test_engine_failure.py::test_too_few_descriptors_name_the_limit  # they need some
    done
done
