// Kernels that pass over rows once: the scaled output gradient, and dq in its final form.
#pragma once
#include "tile.cuh"

// target[r, :] = source[r, :] * scale[r]. Rows of `width` elements, a multiple of 8; source rows are `stride` apart.
extern "C" __global__ void __launch_bounds__(256)
    hstu_scale(const u16* source, i64 stride, u16* target, const float* scale, int width, i64 count) {
  const int vectors = width / 8;
  for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < count * vectors; i += (i64)gridDim.x * 256) {
    const i64 row = i / vectors;
    const int column = (int)(i % vectors) * 8;
    uint4 x = *(const uint4*)(source + row * stride + column);
    const float factor = scale[row];
    u32* parts = (u32*)&x;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 y = unpack(parts[j]);
      parts[j] = pack(y.x * factor, y.y * factor);
    }
    *(uint4*)(target + row * width + column) = x;
  }
}

// dq := sums * scale; rows of dq are `stride` apart. Sums lie in strips of 16 queries, as the registers of a 16 x DQK product: four values of a lane
// next to each other, then lanes, then groups of eight columns.
extern "C" __global__ void __launch_bounds__(256)
    hstu_finish(const float* sums, u16* dq, i64 stride, const Work* schedule, int heads, float scale) {
  constexpr int ROWS = BACKWARD_ROWS, BLOCKS = DQK / 8;
  const int head = blockIdx.x % heads;
  const Work work = schedule[blockIdx.x / heads];
  if (work.length == 0) return;
  const float* tile = sums + ((i64)(work.tile + work.row / ROWS) * heads + head) * (ROWS * DQK);
  for (int i = threadIdx.x; i < ROWS * BLOCKS; i += 256) {
    const int row = i / BLOCKS, block = i % BLOCKS;
    if (work.row + row >= work.length) continue;
    const float* source = tile + row / 16 * (16 * DQK) + block * 128 + row % 8 * 16 + row % 16 / 8 * 2;
    uint4 y;
    u32* parts = (u32*)&y;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const float2 x = *(const float2*)(source + 4 * j);
      parts[j] = pack(x.x * scale, x.y * scale);
    }
    *(uint4*)(dq + (i64)(work.start + work.row + row) * stride + head * DQK + block * 8) = y;
  }
}
