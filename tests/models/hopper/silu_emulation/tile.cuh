// Stands in for the kernels' tile.cuh when silu.cuh is compiled for a CPU: a thread for each of the 256 threads of a block, which
// run one block after the other.
#pragma once
#include <cmath>
#include <cstring>

#include "block.h"

typedef unsigned int u32;
typedef long long i64;
typedef unsigned short u16;
#define DEVICE
#define __global__
#define __grid_constant__
#define __shared__ static
#define __launch_bounds__(...)

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
inline Index blockIdx, gridDim;

struct Work {
  int start, length, row, tile;
};

inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }

inline float as_float(u32 bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline u32 round_bf16(float x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }
inline float2 unpack(u32 x) { return {as_float(x << 16), as_float(x & 0xffff0000u)}; }

inline float exchanged[256];
inline void __syncthreads() { block::barrier(); }
inline float __shfl_xor_sync(u32, float x, int mask) {
  exchanged[threadIdx.x] = x;
  __syncthreads();
  const float result = exchanged[threadIdx.x ^ mask];
  __syncthreads();
  return result;
}
