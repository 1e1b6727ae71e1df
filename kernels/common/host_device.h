#pragma once
// Marks functions that every backend, host or device, compiles from one source.
#if defined(__CUDACC__)
#define SACCADE_HD __host__ __device__ inline
#else
#define SACCADE_HD inline
#endif
