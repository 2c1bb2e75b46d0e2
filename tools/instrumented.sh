# Sourced by sanitize.sh and fuzz.sh: an engine with the compiler's instruments, and a Python that imports it.

# build_engine PYTHON NAME SANITIZERS [CXX]: the engine in build/NAME, and a place to run it from.
build_engine() {
    build=$PWD/build/$2
    cmake -S . -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DMULTIRING_SANITIZE="$3" ${4:+-DCMAKE_CXX_COMPILER="$4"} \
        -DPython_EXECUTABLE="$("$1" -c 'import sys; print(sys.executable)')" > /dev/null
    cmake --build "$build" --target _native > /dev/null
    mkdir -p "$build/src"
    cp -r src/multiring "$build/src/"
    cp "$build"/_native*.so "$build/src/multiring/"
    # An editable install goes before PYTHONPATH and would bring its own engine: PYTHON's packages without their .pth.
    "$1" -m venv --without-pip "$build/venv"
    packages=$("$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
}

# instrumented LIBRARIES ARGUMENTS...: Python with that engine. It is not instrumented itself, so that the libraries have
# to come first, and its own leaks are not ours.
instrumented() {
    local libraries=$1; shift
    env PYTHONPATH="$build/src:$packages" LD_PRELOAD="$libraries" ASAN_OPTIONS=detect_leaks=0 \
        TSAN_OPTIONS="halt_on_error=1 report_signal_unsafe=0 suppressions=$PWD/tools/thread_sanitizer.supp" \
        UBSAN_OPTIONS="halt_on_error=1 print_stacktrace=1" \
        setarch -R "$build/venv/bin/python" "$@"
}

# is_instrumented LIBRARIES SYMBOL: ends the script unless the engine that Python imports refers to SYMBOL.
is_instrumented() {
    local engine
    engine=$(instrumented "$1" -c 'from multiring import _native; print(_native.__file__)')
    nm -D "$engine" | grep -q "$2" || { echo "$0: $engine is built without $2" >&2; exit 1; }
}
