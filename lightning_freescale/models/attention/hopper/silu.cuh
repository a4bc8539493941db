// The last step of backward where queries, keys and values are outputs of a SiLU: dq from its sums, all three gradients times
// the slope of the SiLU, and their sums over the rows, which are the gradients of a bias. One pass over memory.
//
// A block takes one of the three, one head and every `programs`-th tile. It sums over its tiles, so every sum has a fixed order.
#pragma once
#include "tile.cuh"

namespace silu {

constexpr int ROWS = BACKWARD_ROWS, STRIPS = ROWS / 16, WARPS = 8;

// Gradients of queries, keys or values. Rows lie `stride` elements apart, heads side by side.
struct Part {
  u16* grad;          // [rows, heads, width]; those of keys and values on entry without the slope
  const u16* before;  // [rows, heads, width], the input of the SiLU
  float* shares;      // [programs, heads, width], receives this block's share of the sum over the rows
  i64 grad_stride, before_stride, share_stride;
};

struct Parts {
  Part q, k, v;
};

DEVICE float slope(float x) {
  const float sigmoid = __fdividef(1.0f, 1.0f + __expf(-x));
  return sigmoid * (1.0f + x * (1.0f - sigmoid));
}

// Multiply eight neighbouring gradients by the slopes at `before`, add them to `total`, and round them.
DEVICE uint4 multiply(const float (&grads)[8], uint4 before, float (&total)[8]) {
  const u32 x[4] = {before.x, before.y, before.z, before.w};
  u32 y[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const float2 input = unpack(x[j]);
    const float low = grads[2 * j] * slope(input.x), high = grads[2 * j + 1] * slope(input.y);
    total[2 * j] += low;
    total[2 * j + 1] += high;
    y[j] = pack(low, high);
  }
  return {y[0], y[1], y[2], y[3]};
}

// One tile of one head. A thread has eight columns of row `lane / 4` of a strip of 16 rows, and of the row eight below. With
// SUMS the gradients are the sums of dq at `sums` (rows.cuh says how they lie) times `scale`.
template <int D, bool SUMS>
DEVICE void finish_tile(const Part& part, const float* sums, float scale, Work work, int head, float (&total)[8]) {
  constexpr int GROUPS = D / 32;  // warps that share the columns of a strip
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = warp % GROUPS * 4 + lane % 4;
  for (int strip = warp / GROUPS; strip < STRIPS; strip += WARPS / GROUPS) {
    const int row = work.row + strip * 16 + lane / 4, column = head * D + block * 8;
    u16* grad = part.grad + (i64)(work.start + row) * part.grad_stride + column;
    const u16* before = part.before + (i64)(work.start + row) * part.before_stride + column;
    float values[2][8];
    uint4 inputs[2];
    if constexpr (SUMS) {
      const float4* source = (const float4*)(sums + strip * (16 * D) + block * 128 + lane / 4 * 16);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float4 x = source[j];
        values[0][2 * j] = x.x * scale;
        values[0][2 * j + 1] = x.y * scale;
        values[1][2 * j] = x.z * scale;
        values[1][2 * j + 1] = x.w * scale;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (row + 8 * half >= work.length) continue;
      inputs[half] = *(const uint4*)(before + 8 * half * part.before_stride);
      if constexpr (!SUMS) {
        const uint4 x = *(const uint4*)(grad + 8 * half * part.grad_stride);
        const u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float2 y = unpack(pairs[j]);
          values[half][2 * j] = y.x;
          values[half][2 * j + 1] = y.y;
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (row + 8 * half < work.length)
        *(uint4*)(grad + 8 * half * part.grad_stride) = multiply(values[half], inputs[half], total);
  }
}

// Sum `total` over the threads that have the same columns, and write the result. `place`: 32 values for each warp.
template <int D>
DEVICE void write_share(const Part& part, float (&total)[8], float (&place)[WARPS][32], int program, int head) {
  constexpr int GROUPS = D / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 8; j++) {
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) total[j] += __shfl_xor_sync(0xffffffffu, total[j], distance);
    if (lane < 4) place[warp][lane * 8 + j] = total[j];
  }
  __syncthreads();
  const int column = threadIdx.x;
  if (column < D) {
    float sum = 0.0f;
#pragma unroll
    for (int other = 0; other < WARPS / GROUPS; other++) sum += place[other * GROUPS + column / 32][column % 32];
    part.shares[program * part.share_stride + head * D + column] = sum;
  }
}

}  // namespace silu

// Blocks: queries, keys and values in turn, then heads, then programs.
extern "C" __global__ void __launch_bounds__(256, 4)
    hstu_finish_silu(const float* sums, const __grid_constant__ silu::Parts parts, const Work* schedule, int tiles,
                     int heads, float scale) {
  using namespace silu;
  __shared__ float place[WARPS][32];
  const int part = blockIdx.x % 3, head = blockIdx.x / 3 % heads, program = blockIdx.x / 3 / heads;
  const int programs = gridDim.x / 3 / heads;
  float total[8] = {};
  for (int i = program; i < tiles; i += programs) {
    const Work work = schedule[i];
    if (work.length == 0) break;  // tiles that are not needed come last
    const float* tile = sums + ((i64)(work.tile + work.row / ROWS) * heads + head) * (ROWS * DQK);
    if (part == 0) finish_tile<DQK, true>(parts.q, tile, scale, work, head, total);
    if (part == 1) finish_tile<DQK, false>(parts.k, nullptr, 1.0f, work, head, total);
    if (part == 2) finish_tile<DV, false>(parts.v, nullptr, 1.0f, work, head, total);
  }
  if (part == 0) write_share<DQK>(parts.q, total, place, program, head);
  if (part == 1) write_share<DQK>(parts.k, total, place, program, head);
  if (part == 2) write_share<DV>(parts.v, total, place, program, head);
}
