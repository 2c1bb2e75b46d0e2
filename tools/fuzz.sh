#!/usr/bin/env bash
# Every target of tests/fuzz under libFuzzer and the address sanitizer: tools/fuzz.sh PYTHON SECONDS
set -eu
cd "$(dirname "$0")/.."
. tools/instrumented.sh
clang=$(command -v clang++ || ls /usr/bin/clang++-[0-9]* 2> /dev/null | sort -V | tail -1)
[ -n "$clang" ] || { echo "$0: needs clang++: apt-get install clang libclang-rt-14-dev, or whichever version is yours" >&2; exit 1; }
build_engine "$1" fuzz address,fuzzer-no-link "$clang"
libraries=$packages/asan_with_fuzzer.so  # Atheris brings it
is_instrumented "$libraries" __sanitizer_cov
for target in $(instrumented "$libraries" tests/fuzz/fuzz.py); do
    echo "== $target"
    mkdir -p "$build/corpus/$target"
    instrumented "$libraries" tests/fuzz/fuzz.py "$target" "$build/corpus/$target" -max_total_time="$2"
done
