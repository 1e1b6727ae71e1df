#pragma once
// Compiler spellings that the kernels need.
#define SACCADE_INLINE inline __attribute__((always_inline))
#define SACCADE_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define SACCADE_UNROLL _Pragma("clang loop unroll(full)")
#define SACCADE_UNROLL_BY(n)  // it unrolls enough, and a sanitizer's build takes minutes with it
#else
#define SACCADE_UNROLL _Pragma("GCC unroll 16")
#define SACCADE_UNROLL_BY(n) SACCADE_PRAGMA(GCC unroll n)
#endif
