# zerooffload_core: everything under csrc/ but the Python bindings. Included by the package's build and by the C++ tests.

include(CheckCXXSourceCompiles)
find_package(Threads REQUIRED)

option(ZEROOFFLOAD_WERROR "Turn the compiler's warnings into errors (for developers and CI)" OFF)
set(ZEROOFFLOAD_WARNINGS -Wall -Wextra -Wshadow -Wconversion)
if(ZEROOFFLOAD_WERROR)
  list(APPEND ZEROOFFLOAD_WARNINGS -Werror)
endif()

# Of the kernels, whose plain loops the compiler is to vectorize.
set(ZEROOFFLOAD_KERNEL_OPTIMIZATION -O3 CACHE STRING "")

# optim/kernels.cpp once more, for one CPU target: [Note: The same bits in every target] there says why these flags.
function(zerooffload_add_kernels name table)
  add_library(zerooffload_kernels_${name} OBJECT ${ZEROOFFLOAD_CSRC}/optim/kernels.cpp)
  target_compile_definitions(zerooffload_kernels_${name} PRIVATE ZEROOFFLOAD_KERNEL_TABLE=${table})
  target_compile_options(zerooffload_kernels_${name} PRIVATE
    ${ZEROOFFLOAD_KERNEL_OPTIMIZATION} -ffp-contract=off -fno-math-errno -fno-trapping-math ${ARGN})
  target_link_libraries(zerooffload_kernels_${name} PRIVATE zerooffload_options)
  set_target_properties(zerooffload_kernels_${name} PROPERTIES
    POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)
  target_sources(zerooffload_core PRIVATE $<TARGET_OBJECTS:zerooffload_kernels_${name}>)
endfunction()

set(ZEROOFFLOAD_CSRC ${CMAKE_CURRENT_LIST_DIR})

add_library(zerooffload_options INTERFACE)
target_include_directories(zerooffload_options INTERFACE ${ZEROOFFLOAD_CSRC})
target_compile_features(zerooffload_options INTERFACE cxx_std_17)
target_compile_options(zerooffload_options INTERFACE ${ZEROOFFLOAD_WARNINGS})

add_library(zerooffload_core STATIC
  ${ZEROOFFLOAD_CSRC}/base/thread_pool.cpp
  ${ZEROOFFLOAD_CSRC}/cpu/target.cpp
  ${ZEROOFFLOAD_CSRC}/io/engine.cpp
  ${ZEROOFFLOAD_CSRC}/io/failure.cpp
  ${ZEROOFFLOAD_CSRC}/io/kernel_ring.cpp
  ${ZEROOFFLOAD_CSRC}/io/request.cpp
  ${ZEROOFFLOAD_CSRC}/io/thread_engine.cpp
  ${ZEROOFFLOAD_CSRC}/io/transfer.cpp
  ${ZEROOFFLOAD_CSRC}/io/uring_engine.cpp
  ${ZEROOFFLOAD_CSRC}/optim/exact_sum.cpp
  ${ZEROOFFLOAD_CSRC}/optim/gradients.cpp
  ${ZEROOFFLOAD_CSRC}/optim/launch.cpp
  ${ZEROOFFLOAD_CSRC}/optim/master_weights.cpp
  ${ZEROOFFLOAD_CSRC}/optim/step.cpp
  ${ZEROOFFLOAD_CSRC}/optim/traffic.cpp)
target_link_libraries(zerooffload_core PUBLIC zerooffload_options Threads::Threads)
set_target_properties(zerooffload_core PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)

# What the compiler aims at decides, not the machine that it runs on.
function(zerooffload_aims_at macro result)
  check_cxx_source_compiles("
#if !defined(${macro})
#error another architecture
#endif
int main() { return 0; }" ${result})
endfunction()
zerooffload_aims_at(__x86_64__ ZEROOFFLOAD_IS_X86_64)
zerooffload_aims_at(__aarch64__ ZEROOFFLOAD_IS_AARCH64)

if(ZEROOFFLOAD_IS_AARCH64)
  # Every 64-bit Arm vectorizes: its baseline is the same code in scalar instructions, to compare with.
  zerooffload_add_kernels(baseline kBaselineKernels -fno-tree-vectorize -fno-tree-slp-vectorize)
  target_compile_definitions(zerooffload_options INTERFACE ZEROOFFLOAD_HAS_NEON)
  zerooffload_add_kernels(neon kNeonKernels)
else()
  zerooffload_add_kernels(baseline kBaselineKernels)
endif()

# A target that this compiler can aim at: its name in the code, the table's, and the flags.
function(zerooffload_add_x86_target name definition table)
  string(REPLACE ";" " " flags "${ARGN}")
  set(CMAKE_REQUIRED_FLAGS "${flags}")
  check_cxx_source_compiles("int main() { return 0; }" ZEROOFFLOAD_COMPILER_KNOWS_${definition})
  if(ZEROOFFLOAD_COMPILER_KNOWS_${definition})
    target_compile_definitions(zerooffload_options INTERFACE ZEROOFFLOAD_HAS_${definition})
    zerooffload_add_kernels(${name} ${table} ${ARGN})
  endif()
endfunction()

if(ZEROOFFLOAD_IS_X86_64)
  zerooffload_add_x86_target(avx2 AVX2 kAvx2Kernels -mavx2 -mf16c)
  zerooffload_add_x86_target(avx512 AVX512 kAvx512Kernels
    -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
endif()
