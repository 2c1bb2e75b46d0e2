#!/usr/bin/env bash
# The engine's unit tests, or TESTS, under the compiler's sanitizers: tools/sanitize.sh PYTHON [thread] [address,undefined]
set -eu
cd "$(dirname "$0")/.."
. tools/instrumented.sh
python=$1; shift
tests=${TESTS:-$(ls tests/unit/test_engine*.py tests/unit/test_encryption.py)}
for sanitizers in ${@:-thread address,undefined}; do
    build_engine "$python" "sanitize-${sanitizers/,/-}" "$sanitizers"
    libraries=$(${CXX:-c++} -print-file-name="lib${sanitizers:0:1}san.so")
    [ "$sanitizers" = thread ] || libraries="$libraries $(${CXX:-c++} -print-file-name=libubsan.so)"
    is_instrumented "$libraries" "__${sanitizers:0:1}san_init"
    echo "== $sanitizers"
    # The report of a sanitizer ends the process: pytest must not hold back what is written to the descriptor.
    instrumented "$libraries" -m pytest -q --capture=sys -p no:cacheprovider $tests \
        --deselect tests/unit/test_engine_failure.py::test_too_few_descriptors_name_the_limit  # they need some
done
