#pragma once
// Compiler spellings that the kernels need.
#define SACCADE_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define SACCADE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define SACCADE_UNROLL _Pragma("GCC unroll 16")
#endif
