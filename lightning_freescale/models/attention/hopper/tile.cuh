// Tiles of q, k, v and the output gradient in shared memory, and what the kernels share.
//
// A tile of R rows and D columns lies as D / W panels of W = min(D, 64) columns, one below the other; a panel has R
// rows of 2 W bytes, swizzled by the copy engine.
#pragma once
#include "wgmma.cuh"

// One entry of a schedule: a tile of one history.
struct Work {
  int start;   // flat row of the history's first event
  int length;  // events of the history, 0: nothing to do
  int row;     // the tile's first row within the history
  int tile;    // number of the history's first query tile among those of all histories
};

template <int D>
struct Tile {
  static constexpr int WIDTH = D < 64 ? D : 64;
  static constexpr int PANELS = D / WIDTH;
  static constexpr int ROW_BYTES = 2 * WIDTH;
  static constexpr int STEPS = D / 16;  // products of depth 16 that sum over the columns

  // Lower half of a descriptor for sums over columns: rows are the operand's outer index.
  DEVICE static u32 by_rows(u32 address) { return address >> 4 | 1u << 16; }
  // The same for sums over rows: columns are the operand's outer index, and its panels lie ROWS rows apart.
  template <int ROWS>
  DEVICE static u32 by_columns(u32 address) {
    return address >> 4 | (u32)(ROWS * ROW_BYTES >> 4) << 16;
  }
  // Descriptor of step `step` of a sum over columns.
  template <int ROWS>
  DEVICE static u64 column_step(u32 place, int step) {
    return descriptor<ROW_BYTES>(place + (((step * 16 / WIDTH) * ROWS * ROW_BYTES + step * 16 % WIDTH * 2) >> 4));
  }
  // The same of a sum over rows.
  DEVICE static u64 row_step(u32 place, int step) { return descriptor<ROW_BYTES>(place + step * ROW_BYTES); }

  // Load ROWS rows, a multiple of 64. The tensor map's box has 64 rows and WIDTH columns.
  template <int ROWS>
  DEVICE static void load(u32 target, const TensorMap* map, u32 barrier, int head, int row) {
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
#pragma unroll
      for (int r = 0; r < ROWS; r += 64)
        tma_load(target + (panel * ROWS + r) * ROW_BYTES, map, barrier, panel * WIDTH, head, row + r);
  }
};

// Write the sums of a 64 x N product, times `scale`, to rows of 16-bit elements. `rows`: how many of the 64 exist.
template <int COUNT>
DEVICE void store_rows(const float (&d)[COUNT], u16* target, i64 stride, int rows, float upper, float lower) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  u16* top = target + row * stride + 2 * (lane % 4);
  u16* bottom = top + 8 * stride;
#pragma unroll
  for (int j = 0; j < COUNT / 4; j++) {
    if (row < rows) *(u32*)(top + 8 * j) = pack(d[4 * j] * upper, d[4 * j + 1] * upper);
    if (row + 8 < rows) *(u32*)(bottom + 8 * j) = pack(d[4 * j + 2] * lower, d[4 * j + 3] * lower);
  }
}
