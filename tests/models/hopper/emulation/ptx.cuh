// Stands in for the kernels' ptx.cuh when bias.cuh is compiled for a CPU: one thread a lane, shared memory is an array, and
// exchanges between lanes are made through another array and a barrier.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "block.h"

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short u16;
#define DEVICE
using std::fmaf;
using std::max;
using std::min;

struct int2 {
  int x, y;
};
struct float2 {
  float x, y;
};
inline int2 make_int2(int x, int y) { return {x, y}; }

// Bits.
inline u32 __float_as_uint(float x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(u32 bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
inline float __int2float_rn(int x) { return (float)x; }
inline int saturated(i64 x) { return (int)max<i64>(min<i64>(x, 0x7fffffff), -0x80000000ll); }
inline int add_saturated(int a, int b) { return saturated((i64)a + b); }
inline int subtract_saturated(int a, int b) { return saturated((i64)a - b); }

inline u32 round_bf16(float x) {
  const u32 bits = __float_as_uint(x);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack(float low, float high) { return round_bf16(low) | round_bf16(high) << 16; }
inline float2 unpack(u32 x) { return {__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u)}; }

// Lanes.
inline u32 exchanged[32];
inline void __syncwarp() { block::barrier(); }

template <class Combine>
u32 combine_lanes(u32 x, Combine combine) {
  exchanged[threadIdx.x] = x;
  __syncwarp();
  const u32 result = combine();
  __syncwarp();
  return result;
}
template <class Reduce>
u32 reduce_lanes(u32 x, Reduce reduce) {
  return combine_lanes(x, [&] {
    u32 result = exchanged[0];
    for (int i = 1; i < 32; i++) result = reduce(result, exchanged[i]);
    return result;
  });
}
inline float __shfl_xor_sync(u32, float x, int mask) {
  return __uint_as_float(combine_lanes(__float_as_uint(x), [&] { return exchanged[threadIdx.x ^ mask]; }));
}
inline int __reduce_min_sync(u32, int x) {
  return (int)reduce_lanes((u32)x, [](u32 a, u32 b) { return (u32)min((int)a, (int)b); });
}
inline int __reduce_max_sync(u32, int x) {
  return (int)reduce_lanes((u32)x, [](u32 a, u32 b) { return (u32)max((int)a, (int)b); });
}
inline u32 __reduce_or_sync(u32, u32 x) {
  return reduce_lanes(x, [](u32 a, u32 b) { return a | b; });
}

// Shared memory.
inline char shared[16384];
template <class T>
T read_shared(u32 address) {
  if (address % sizeof(T) || address + sizeof(T) > sizeof(shared)) abort();
  T value;
  memcpy(&value, shared + address, sizeof(T));
  return value;
}
template <class T>
void write_shared(u32 address, T value) {
  if (address % sizeof(T) || address + sizeof(T) > sizeof(shared)) abort();
  memcpy(shared + address, &value, sizeof(T));
}
inline int load_shared(u32 address) { return read_shared<int>(address); }
inline float load_shared_float(u32 address) { return read_shared<float>(address); }
inline int2 load_shared2(u32 address) { return read_shared<int2>(address); }
inline void store_shared(u32 address, float value) { write_shared(address, value); }
inline void store_shared(u32 address, int value) { write_shared(address, value); }
