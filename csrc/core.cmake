# zerooffload_core: everything under csrc/ but the Python bindings. Included by the package's build and by the C++ tests.

include(CheckCXXCompilerFlag)
include(CheckCXXSourceCompiles)
find_package(Threads REQUIRED)

option(ZEROOFFLOAD_WERROR "Turn the compiler's warnings into errors (for developers and CI)" OFF)
set(ZEROOFFLOAD_WARNINGS -Wall -Wextra -Wshadow -Wconversion)
if(ZEROOFFLOAD_WERROR)
  list(APPEND ZEROOFFLOAD_WARNINGS -Werror)
endif()

# optim/kernels.cpp once more, for one CPU target: [Note: The same bits in every target] there says why these flags.
function(zerooffload_add_kernels name table)
  add_library(zerooffload_kernels_${name} OBJECT ${ZEROOFFLOAD_CSRC}/optim/kernels.cpp)
  target_compile_definitions(zerooffload_kernels_${name} PRIVATE ZEROOFFLOAD_KERNEL_TABLE=${table})
  target_compile_options(zerooffload_kernels_${name} PRIVATE
    -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math ${ARGN})
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
  ${ZEROOFFLOAD_CSRC}/io/failure.cpp
  ${ZEROOFFLOAD_CSRC}/io/thread_engine.cpp
  ${ZEROOFFLOAD_CSRC}/io/transfer.cpp
  ${ZEROOFFLOAD_CSRC}/optim/adamw.cpp
  ${ZEROOFFLOAD_CSRC}/optim/gradients.cpp
  ${ZEROOFFLOAD_CSRC}/optim/launch.cpp
  ${ZEROOFFLOAD_CSRC}/optim/master_weights.cpp)
target_link_libraries(zerooffload_core PUBLIC zerooffload_options Threads::Threads)
set_target_properties(zerooffload_core PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)

zerooffload_add_kernels(baseline kBaselineKernels)

# What the compiler aims at decides, not the machine that it runs on.
check_cxx_source_compiles("
#if !defined(__x86_64__)
#error not x86-64
#endif
int main() { return 0; }" ZEROOFFLOAD_IS_X86_64)
check_cxx_compiler_flag(-mavx2 ZEROOFFLOAD_COMPILER_KNOWS_AVX2)
if(ZEROOFFLOAD_IS_X86_64 AND ZEROOFFLOAD_COMPILER_KNOWS_AVX2)
  target_compile_definitions(zerooffload_options INTERFACE ZEROOFFLOAD_HAS_AVX2)
  zerooffload_add_kernels(avx2 kAvx2Kernels -mavx2)
endif()
