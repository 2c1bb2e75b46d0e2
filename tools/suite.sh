#!/usr/bin/env bash
# The whole suite, for `make test`: two halves side by side, then what times links, alone. A few tests that failed run
# once more when nothing else does: what fails then too is a defect, what passes had too little of the machine.
# Usage: tools/suite.sh PYTHON [LEGACY_PYTHON]; the tests come in BESIDE, IN_TURN, ALONE and LEGACY_TESTS.
set -u
python=$1
legacy_python=${2:-}
export -n BESIDE IN_TURN ALONE LEGACY_TESTS # or each process of each test has these words in its environment
most=8 # failures, from which on the machine is no excuse

rm -rf build/suite
mkdir -p build/suite

# A pytest whose failures are kept under a name; its exit code too.
lane() {
  local name=$1 interpreter=$2
  shift 2
  "$interpreter" -m pytest -o cache_dir="$PWD/build/suite/$name" "$@"
  echo $? > "build/suite/$name.code"
}

# shellcheck disable=SC2086  # lists of tests
run_lane() {
  case $1 in
    beside) lane beside "$python" --durations=40 "${@:2}" $BESIDE ;;
    in_turn) lane in_turn "$python" --durations=40 "${@:2}" $IN_TURN ;;
    alone) lane alone "$python" --durations=40 "${@:2}" $ALONE ;;
    legacy) lane legacy "$legacy_python" --durations=10 "${@:2}" -k 'chainer or theano or legacy' $LEGACY_TESTS ;;
  esac
}

run_lane beside > build/beside.log 2>&1 &
run_lane in_turn
test -z "$legacy_python" || run_lane legacy
wait $!
cat build/beside.log
run_lane alone

failed=()
again=()
for code in build/suite/*.code; do
  name=$(basename "$code" .code)
  case $(cat "$code") in
    0) ;;
    1) again+=("$name") ;;
    *) failed+=("$name: pytest ended with $(cat "$code")") ;;
  esac
done
for name in ${again[@]+"${again[@]}"}; do
  mapfile -t tests < <("$python" -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' \
    "build/suite/$name/v/cache/lastfailed")
  printf '\nfailed, %s: %s' "$name" "${tests[*]}"
  if [ "${#tests[@]}" -gt "$most" ]; then
    failed+=("$name: ${#tests[@]} tests")
    continue
  fi
  printf '\nonce more, alone:\n'
  run_lane "$name" --last-failed --last-failed-no-failures none
  if [ "$(cat "build/suite/$name.code")" -eq 0 ]; then
    printf 'passed alone and failed beside others, %s: %s\n' "$name" "${tests[*]}"
  else
    failed+=("$name: failed alone too")
  fi
done
if [ "${#failed[@]}" -gt 0 ]; then
  printf '%s\n' "${failed[@]}"
  exit 1
fi
