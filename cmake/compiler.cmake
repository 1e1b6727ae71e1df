# Warnings are errors; one baseline (x86-64-v2) for every file, kernels raise it per file.
find_program(CCACHE ccache)
if(CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE})
endif()
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
add_compile_options(-Wall -Wextra -Werror -fno-math-errno -ffp-contract=off)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64")
  add_compile_options(-march=x86-64-v2)
endif()
# Builds that look for mistakes check each K/V page that a step reads (server/engine/page_guard.h).
if(SACCADE_SANITIZE OR CMAKE_BUILD_TYPE STREQUAL "Debug")
  add_compile_definitions(SACCADE_CHECK_PAGES)
endif()
# The presets use clang for these: it compiles them in half the time of g++ 12, most of all the tests. -O1: with checks
# around every access, more costs more to compile than it saves when the tests run.
set(CMAKE_CXX_FLAGS_SANITIZE "-O1 -g1 -fno-omit-frame-pointer")
if(SACCADE_SANITIZE STREQUAL "address+undefined")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=undefined)
  add_link_options(-fsanitize=address,undefined)
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    add_compile_options(-fsanitize=fuzzer-no-link) # the same objects serve tests/fuzz
  endif()
elseif(SACCADE_SANITIZE STREQUAL "thread")
  add_compile_options(-fsanitize=thread)
  add_link_options(-fsanitize=thread)
elseif(SACCADE_SANITIZE)
  message(FATAL_ERROR "SACCADE_SANITIZE must be address+undefined or thread, not ${SACCADE_SANITIZE}")
endif()
