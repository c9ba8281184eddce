#!/usr/bin/env bash
set -uo pipefail # no -e: a step that fails is noted, and the next one runs
usage() {
  cat <<'HELP'
bash benchmarks/gpu_suite.sh [FOLDER]

All that needs an NVIDIA GPU, in less than ten minutes: builds, runs the tests marked gpu (but those marked slow and
test_fuzz.py), runs small calls under compute-sanitizer, then the benchmarks. Leaves in FOLDER (default:
benchmarks/results/<name of the GPU>)

  suite.log          everything that was printed
  tables.txt         the benchmarks' tables, and how each step ended
  *.json             every figure, with the GPU, the versions and the commit

The summary comes last. Exit status 1 if a step failed, 2 if there is no GPU to use.

Needs torch with CUDA, its Triton, pytest, tqdm and, to build, a C++ compiler, ninja, pybind11 and setuptools 77. It
installs this package if it is not importable and fetches nothing. Used where they are installed, else left out with
a line that says so: hypothesis (some test files), pytest-xdist (tests on all cores: compiling the kernels is most
of their time), compute-sanitizer (CUDA's toolkit). To a machine without network bring wheels: where there is one,

  pip download --no-deps --only-binary=:all: --python-version 3.12 -d wheels hypothesis sortedcontainers attrs tqdm
  pip download --no-deps --only-binary=:all: --python-version 3.12 -d wheels pytest-xdist execnet

and on the machine: pip install --no-index --no-deps wheels/*.whl

  PYTHON             the Python to use (python3)
  TXL_SUITE_SECONDS  time for all of it (570); what there is no time left for is not started
HELP
}

if [[ ${1-} == -h || ${1-} == --help ]]; then
  usage
  exit 0
fi
if (($# > 1)) || [[ ${1-} == -* ]]; then
  usage >&2
  exit 2
fi
case ${1-} in
'' | /*) folder=${1-} ;;
*) folder=$PWD/$1 ;;
esac
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
deadline=${TXL_SUITE_SECONDS:-570}
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
log=$folder/suite.log
tables=$folder/tables.txt
: >"$log"
: >"$tables"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
summary=()
failed=0

say() { echo "$*" | tee -a "$log"; }

note() { # NAME HOW SECONDS: a line of the summary
  summary+=("$(printf '%-24s %-10s %5s s' "$1" "$2" "$3")")
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
    # INT: pytest then still says what it has found.
    timeout --signal=INT --kill-after=10 $((limit < left ? limit : left)) "$@" >"$scratch/$name" 2>&1 </dev/null
    status=$?
  fi
  echo "$status $((SECONDS - start)) $*" >"$scratch/$name.how"
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
  *) how="FAILED" ;;
  esac
  [[ $how == ok ]] || failed=1
  note "$name" "$how" "$seconds"
}

step() { # NAME SECONDS COMMAND...
  launch "$@"
  finish "$1"
  tail -n 15 "$scratch/$1"
}

bench() { # NAME SECONDS COMMAND...: a step that prints a table
  launch "$@"
  finish "$1"
  # Without what the progress bar left.
  sed 's/.*\r//' "$scratch/$1" | grep -v '^ *$' | tee -a "$tables"
  echo >>"$tables"
}

# ---- Build -------------------------------------------------------------------------------------------------

say "$gpu, $(date -u +%Y-%m-%dT%H:%MZ)"
if (cd / && PYTHONPATH='' "$python" -c 'import txl_kernels') 2>/dev/null; then
  say "txl_kernels is installed"
else
  step build 100 "$python" -m pip install --no-build-isolation --no-deps --no-index -e .
fi
# The kernels of a GPU need no C++: they are found here even where that did not build.
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
# shellcheck disable=SC2016
step report 60 bash -c '"$0" -m txl_kernels; nvidia-smi' "$python"

# ---- Tests -------------------------------------------------------------------------------------------------

# Not test_fuzz.py: each of its examples compiles kernels of its own, which takes longer than all the rest.
tests=("$python" -m pytest -q -p no:cacheprovider -p no:benchmark --durations=10 --continue-on-collection-errors
  tests --ignore=tests/test_fuzz.py)
say "left out, to be run by itself: tests/test_fuzz.py"
for module in hypothesis tqdm; do
  if ! has $module; then
    while read -r file; do
      say "left out, for want of $module: $file"
      tests+=("--ignore=$file")
    done < <(grep -lE "^(import|from) $module\b" tests/test_*.py)
  fi
done
parallel=()
if has xdist; then
  parallel=(-n "$(nproc)")
else
  say "without pytest-xdist the tests run on one core, and may not get through in time"
fi
tests=(env OMP_NUM_THREADS=2 "${tests[@]}")

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
[[ -n $sanitizer ]] || say "left out, for want of compute-sanitizer: memcheck, racecheck"
for tool in memcheck racecheck; do
  # Every tensor an allocation of its own, so that reading past its end is seen. Meanwhile the tests run.
  [[ -z $sanitizer ]] || launch $tool 200 env TXL_TRITON_AUTOTUNE=0 PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    "$sanitizer" --tool $tool --error-exitcode 1 --print-limit 20 "$python" tests/sanitize_gpu.py &
done
step tests 220 "${tests[@]}" -m "gpu and not slow" -k "not test_large" ${parallel[@]+"${parallel[@]}"}
wait
for tool in memcheck racecheck; do
  [[ -z $sanitizer ]] || { finish $tool && tail -n 15 "$scratch/$tool"; }
done
# Forward by wgmma, which has to be asked for.
if "$python" -c 'import sys, torch; from txl_kernels import cuda; sys.exit(not cuda.has_warpgroups(torch.device("cuda")))'; then
  step tests-warpgroups 45 env TXL_CUDA_WARPGROUPS=1 "${tests[@]}" -m "gpu and not slow" \
    -k "cuda and not float32 and (test_forward or test_masks or test_clamp or test_key_range)" \
    ${parallel[@]+"${parallel[@]}"}
else
  say "left out, for want of sm_90 or of kernels for it: tests of forward by wgmma"
fi
# Of tensors with more than 2^31 elements there is room for one test at a time.
step tests-large 60 "${tests[@]}" -m gpu -k test_large

# ---- Benchmarks --------------------------------------------------------------------------------------------

if has tqdm; then
  attention=("$python" benchmarks/bench_attn.py --device cuda)
  bench attention-d64 120 "${attention[@]}" --json "$folder/attention-d64.json"
  for batch in 1 64; do
    bench decode-b$batch 60 "${attention[@]}" --pass decode --klen 3800 --batch $batch \
      --json "$folder/decode-b$batch.json"
  done
  bench must-reach 150 "$python" benchmarks/must_reach.py --device cuda --json "$folder/must_reach.json"
  bench attention-d128 120 "${attention[@]}" --d-head 128 --json "$folder/attention-d128.json"
else
  failed=1
  say "no benchmarks: they need tqdm"
fi

# ---- Summary -----------------------------------------------------------------------------------------------

{
  printf '\n%s\n' "$gpu, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
  printf '%s\n' "${summary[@]}"
  echo "$SECONDS s in all; in $folder"
} | tee -a "$tables" "$log"
exit $failed
