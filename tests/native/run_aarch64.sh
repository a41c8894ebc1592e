#!/usr/bin/env bash
# Builds the C++ tests for 64-bit Arm and runs them on an emulator: same sources, same expected bits as on x86-64.
#
#   tests/native/run_aarch64.sh [build folder [part of a test's name]]
#
# Exit status 77 where a tool is missing; it is then said where to get it.
set -euo pipefail
source_folder=$(cd "$(dirname "$0")" && pwd)

missing=0
need() {
  if ! command -v "$1" > /dev/null; then
    printf '%s: not found; on Debian and Ubuntu it comes with: apt install %s\n' "$1" "$2" >&2
    missing=1
  fi
}
need cmake cmake
need aarch64-linux-gnu-g++ g++-aarch64-linux-gnu
need aarch64-linux-gnu-objdump binutils-aarch64-linux-gnu
need qemu-aarch64-static qemu-user-static
[ "$missing" = 0 ] || exit 77

if [ $# -ge 1 ]; then
  build=$1
  shift
else
  build=$(mktemp -d)
  trap 'rm -rf "$build"' EXIT
fi
generator=()
if command -v ninja > /dev/null; then generator=(-G Ninja); fi

# -static: the emulator needs no Arm libraries then.
cmake "${generator[@]}" -S "$source_folder" -B "$build" \
  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static
cmake --build "$build" --parallel 2

# Vectors in the neon object and none in the baseline, and nothing that rounds once where two operations stand.
for target in baseline neon; do
  object=$(find "$build" -path "*zerooffload_kernels_$target.dir*" -name 'kernels.cpp.o')
  aarch64-linux-gnu-objdump --disassemble --no-show-raw-insn "$object" > "$build/$target.s"
  if grep -qE '\s(fmadd|fmsub|fnmadd|fnmsub|fmla|fmls)\s' "$build/$target.s"; then
    printf 'fused multiply-add in %s\n' "$object" >&2
    exit 1
  fi
done
grep -qE '\sfsqrt\s+v[0-9]+\.4s' "$build/neon.s"
if grep -qE '\sf(sqrt|div)\s+v[0-9]+\.4s' "$build/baseline.s"; then
  printf 'vectors in the baseline\n' >&2
  exit 1
fi

qemu-aarch64-static "$build/native_tests" "$@"
