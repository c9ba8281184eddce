#!/usr/bin/env bash
set -uo pipefail # no -e: a step that fails is noted, and the next one runs
usage() {
  cat <<'HELP'
bash benchmarks/gpu_suite.sh [--tests | --benchmarks] [FOLDER]

All that needs an NVIDIA GPU, in less than ten minutes: builds for this GPU, runs the tests marked gpu (but those
marked slow and test_fuzz.py), the benchmarks, and small calls under compute-sanitizer. What tells most comes first;
with --tests or --benchmarks half of it has all of the time. Leaves in FOLDER (default:
benchmarks/results/<name of the GPU>)

  suite.log          everything that was printed (suite-tests.log, suite-benchmarks.log)
  tables.txt         the benchmarks' tables, and how each step ended (tables-tests.txt, tables-benchmarks.txt)
  *.json             every figure, with the GPU, the versions and the commit

The summary comes last. Exit status 1 if a step failed, 2 if there is no GPU to use. Targets that are missed are said,
and are no failure.

Needs torch with CUDA, its Triton, pytest, tqdm and, to build, nvcc, a C++ compiler, ninja, pybind11 and setuptools 77.
Builds where the sources are, what has changed, for this GPU alone, and fetches nothing. Used where they are
installed, else left out with a line that says so: hypothesis (some test files), pytest-xdist (tests on all cores:
compiling the kernels is most of their time), compute-sanitizer (CUDA's toolkit). pytest-timeout, where it is, ends
tests that hang. To a machine without network bring
wheels: where there is one,

  pip download --no-deps --only-binary=:all: --python-version 3.12 -d wheels hypothesis sortedcontainers attrs tqdm
  pip download --no-deps --only-binary=:all: --python-version 3.12 -d wheels pytest-xdist execnet

and on the machine: pip install --no-index --no-deps wheels/*.whl

  PYTHON             the Python to use (python3)
  TXL_SUITE_SECONDS  time for all of it (560); what there is no time left for is not started
  TXL_COMMIT         the commit that the results name, where the sources have come without git
HELP
}

if [[ ${1-} == -h || ${1-} == --help ]]; then
  usage
  exit 0
fi
half=''
case ${1-} in
--tests | --benchmarks) half=${1#-} && shift ;;
esac
if (($# > 1)) || [[ ${1-} == -* ]]; then
  usage >&2
  exit 2
fi
case ${1-} in
'' | /*) folder=${1-} ;;
*) folder=$PWD/$1 ;;
esac
python=${PYTHON:-python3}
[[ $python != */* || $python == /* ]] || python=$PWD/$python
cd "$(dirname "$0")/.." || exit 2
deadline=${TXL_SUITE_SECONDS:-560}
SECONDS=0

if ! gpu=$("$python" -c 'import torch; print(torch.cuda.get_device_name())' 2>&1); then
  echo "torch finds no GPU to use: ${gpu##*$'\n'}" >&2
  exit 2
fi
gpu=${gpu##*$'\n'} # without warnings
if [[ -z $folder ]]; then
  folder=benchmarks/results/$(tr 'A-Z ' 'a-z-' <<<"$gpu")
fi
mkdir -p "$folder" || exit 2
folder=$(cd "$folder" && pwd)
log=$folder/suite$half.log
tables=$folder/tables$half.txt
: >"$log"
: >"$tables"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
summary=()
failed=0
missed=10 # must_reach.py's exit status if nothing else is the matter

say() { echo "$*" | tee -a "$log"; }

note() { # NAME HOW SECONDS: a line of the summary
  summary+=("$(printf '%-24s %-14s %5s s' "$1" "$2" "$3")")
  say "---- $1: $2, $3 s"
}

has() { "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)"; }

# launch NAME SECONDS COMMAND...: runs it for so long at most. Leaves $scratch/NAME: its output, .how: how it ended.
launch() {
  local name=$1 limit=$2 left=$((deadline - SECONDS)) start=$SECONDS status=0
  shift 2
  if ((left < 5)); then
    status=no
  else
    # INT: pytest then still says what it has found, once its workers have ended, for which xdist waits 10 s.
    timeout --signal=INT --kill-after=25 $((limit < left ? limit : left)) "$@" >"$scratch/$name" 2>&1 </dev/null
    status=$?
  fi
  echo "$status $((SECONDS - start)) ${*//$'\n'/ }" >"$scratch/$name.how"
}

finish() { # NAME: notes how a launched step ended
  local name=$1 status seconds command how
  read -r status seconds command <"$scratch/$name.how"
  touch "$scratch/$name"
  {
    printf '\n==== %s: %s\n' "$name" "$command"
    cat "$scratch/$name"
  } >>"$log"
  case $status in
  0) how="ok" ;;
  124 | 137) how="TIMED OUT" ;;
  no) how="NO TIME" ;;
  "$missed") how="missed targets" ;;
  *) how="FAILED" ;;
  esac
  [[ $how == ok || $how == missed* ]] || failed=1
  note "$name" "$how" "$seconds"
}

step() { # NAME SECONDS COMMAND...
  launch "$@"
  finish "$1"
  tail -n 15 "$scratch/$1"
}

bench() { # NAME SECONDS COMMAND...: a step that prints a table and writes NAME.json
  rm -f "$folder/$1.json" # of another commit
  launch "$@" --json "$folder/$1.json"
  finish "$1"
  # Without what the progress bar left.
  sed 's/.*\r//' "$scratch/$1" | grep -v '^ *$' | tee -a "$tables"
  echo >>"$tables"
}

# ---- Build -------------------------------------------------------------------------------------------------

say "$gpu, $(date -u +%Y-%m-%dT%H:%MZ)"
# This GPU's number, if nvcc knows it; else PTX has to serve it.
arch=$("$python" -c '
import sys
import torch
sys.path.insert(0, "csrc")
import cuda_build
major, minor = torch.cuda.get_device_capability()
nvcc = cuda_build.find_nvcc()
known = cuda_build.output_of([*nvcc, "--list-gpu-code"]).split() if nvcc else []
print(f"{major}.{minor}" if f"sm_{major}{minor}" in known else "")')
step build 120 env TXL_BUILD_CUDA=1 TORCH_CUDA_ARCH_LIST="${arch##*$'\n'}" MAX_JOBS="$(nproc)" \
  "$python" setup.py build_ext --inplace
# Triton's kernels need no C++: they are found here even where that did not build.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# shellcheck disable=SC2016
step report 40 bash -c 'nvidia-smi; "$0" -m txl_kernels && "$0" -c "
from txl_kernels import backends
missing = [name for name in (\"triton\", \"cuda\") if not backends()[name].available]
raise SystemExit(f\"without {missing}, whose tests are then left out\" if missing else 0)"' "$python"

# ---- Tests -------------------------------------------------------------------------------------------------

# Not test_fuzz.py: each of its examples compiles kernels of its own, which takes longer than all the rest.
# Tiles are not chosen by measuring: beside other tests that would choose wrong ones, and Triton remembers them.
# -W default: what torch has to remark on a GPU is no failure of ours.
pytest=(env OMP_NUM_THREADS=2 TXL_TRITON_AUTOTUNE=0 "$python" -m pytest -q -W default -p no:cacheprovider
  -p no:benchmark --durations=10 --continue-on-collection-errors --ignore=tests/test_fuzz.py)
parallel=()
sanitizer=

prepare_tests() {
  local module file
  say "left out, to be run by itself: tests/test_fuzz.py"
  for module in hypothesis tqdm; do
    if ! has $module; then
      while read -r file; do
        say "left out, for want of $module: $file"
        pytest+=("--ignore=$file")
      done < <(grep -lE "^(import|from) $module\b" tests/test_*.py)
    fi
  done
  if has xdist; then
    parallel=(-n "$(nproc)")
  else
    say "without pytest-xdist the tests run on one core, and may not get through in time"
  fi
  # What hangs on a GPU is then named, and ends; a signal would not reach it.
  if has pytest_timeout; then pytest+=(--timeout 80 --timeout-method thread); fi
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
  [[ -n $sanitizer ]] || say "left out, for want of compute-sanitizer: memcheck, racecheck"
}

run_tests() { # NAME SECONDS PYTEST'S ARGUMENTS...: those marked gpu, on all cores
  local name=$1 limit=$2
  shift 2
  step "$name" "$limit" "${pytest[@]}" -m "gpu and not slow" ${parallel[@]+"${parallel[@]}"} "$@"
}

first_tests() {
  # The CUDA kernels are compiled: nothing to wait for.
  run_tests tests-cuda 120 tests -k "cuda and not test_large"
  # By mma.sync, as elsewhere.
  if "$python" -c 'import sys, torch; from txl_kernels import cuda; sys.exit(not cuda.has_warpgroups(torch.device("cuda")))'; then
    TXL_CUDA_WARPGROUPS=0 run_tests tests-mma 75 -k "cuda and not float32 and not test_large" \
      tests/test_triton_gpu.py tests/test_forward.py tests/test_masks.py tests/test_clamp.py tests/test_key_range.py \
      tests/test_dropout.py tests/test_rel_attn_grad.py
  else
    say "without sm_90 or kernels for it: that was by mma.sync"
  fi
  # What only a GPU shows of Triton's: sizes, races, streams, graphs.
  run_tests tests-triton-gpu 90 tests/test_triton_gpu.py -k "not cuda and not test_large"
}

other_tests() {
  local tool backend
  for tool in memcheck racecheck; do
    # Every tensor an allocation of its own, so that reading past its end is seen. Meanwhile the tests run. What
    # libraries ask the driver in vain is no error of ours. Not Triton's kernels by racecheck: their reductions have
    # several threads write a sum to one place, which it counts as races (triton-lang/triton#7264).
    [[ -z $sanitizer ]] || launch $tool 200 env TXL_TRITON_AUTOTUNE=0 PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
      "$sanitizer" --tool $tool --report-api-errors no --error-exitcode 1 --print-limit 20 \
      "$python" tests/sanitize_gpu.py $([[ $tool == racecheck ]] && echo cuda) &
  done
  run_tests tests-triton 300 tests --ignore=tests/test_triton_gpu.py -k "not cuda and not test_large"
  wait
  for tool in memcheck racecheck; do
    [[ -z $sanitizer ]] || { finish $tool && tail -n 15 "$scratch/$tool"; }
  done
  # Of tensors with more than 2^31 elements there is room for one test at a time.
  step tests-large 60 "${pytest[@]}" -m gpu tests/test_triton_gpu.py -k test_large
  for backend in cuda triton; do
    step tests-strides-$backend 90 "${pytest[@]}" -m "gpu and not slow" tests/test_large_strides.py -k $backend
  done
}

# ---- Benchmarks --------------------------------------------------------------------------------------------

run_benchmarks() {
  local batch head attention=("$python" benchmarks/bench_attn.py --device cuda)
  if ! has tqdm; then
    failed=1
    say "no benchmarks: they need tqdm"
    return
  fi
  bench must_reach 300 "$python" benchmarks/must_reach.py --device cuda
  bench attention-d64 120 "${attention[@]}"
  for batch in 1 64; do
    bench decode-b$batch 60 "${attention[@]}" --pass decode --klen 3800 --batch $batch
  done
  bench attention-d128 120 "${attention[@]}" --d-head 128
}

[[ $half == -benchmarks ]] || { prepare_tests; first_tests; }
[[ $half == -tests ]] || run_benchmarks
[[ $half == -benchmarks ]] || other_tests

# ---- Summary -----------------------------------------------------------------------------------------------

{
  printf '\n%s\n' "$gpu, commit $(cd benchmarks && "$python" -c 'import machine; print(machine.commit() or "unknown")')"
  printf '%s\n' "${summary[@]}"
  echo "$SECONDS s in all; in $folder"
} | tee -a "$tables" "$log"
exit $failed
