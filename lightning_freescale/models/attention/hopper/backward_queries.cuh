// Backward: the warpgroup that sums dq, in a fixed order.
#pragma once
#include "backward_tiles.cuh"

namespace backward {

// Write, or add, 16 queries' product of this warp. Element order within a strip: see rows.cuh.
template <int COUNT>
DEVICE void add_strip(const float (&d)[COUNT], float* target, bool first) {
  if (first) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) store4(target + i * 32, d[i], d[i + 1], d[i + 2], d[i + 3]);
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) reduce_add(target + i * 32, d[i], d[i + 1], d[i + 2], d[i + 3]);
  }
}

// Let the next block add to the queries of `finished`, then wait for this block's turn at those of `counter`. One fence
// orders both. It comes a step after the sums of `finished` were added, so it rarely waits for them.
DEVICE void change_turn(const int* counter, int* finished, int turn) {
  int value = load_relaxed(counter);
  fence_device();
  if (finished) store_relaxed(finished, turn + 1);
  while (value != turn) value = load_acquire(counter);
}

// dq += grads k, by 64 queries and N columns at a time.
DEVICE void sum_queries(u32 base, const Source& source, float* dq, int* counters, Work work, int head, int heads,
                        Range tiles) {
  constexpr int N = BACKWARD_WIDTH, PARTS = DQK / N;
  const int turn = work.row / KEYS, step = heads * STRIPS;  // step: strips from one tile to the next
  int strip = ((work.tile + tiles.last) * heads + head) * STRIPS + threadIdx.x / 32;
  barrier_wait(base + KEY_FULL, 0);
#pragma unroll 1
  for (int tile = tiles.last; tile >= tiles.first; tile--) {
    const int buffer = (tiles.last - tile) % BUFFERS, parity = (tiles.last - tile) / BUFFERS & 1;
    if (threadIdx.x == 0 && tile < tiles.last && tile - STAGES + 1 >= tiles.first)
      load_tile(base, source, tiles.last - tile + STAGES - 1, tile - STAGES + 1);
    __syncwarp();
    barrier_wait(base + GRAD_FULL + 8 * buffer, parity);
#pragma unroll
    for (int part = 0; part < ROWS / 64 * PARTS; part++) {
      const int half = part / PARTS, column = part % PARTS * N;
      const u32 a = Grad::by_columns<KEYS>(base + GRAD + buffer * GRAD_BYTES + half * PANEL_BYTES);
      const int panel = column / QK::WIDTH, within = column % QK::WIDTH;
      const u32 b = QK::by_columns<KEYS>(base + KEY + panel * KEYS * QK::ROW_BYTES + within * 2);
      float sums[N / 2];
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < KEYS / 16; c++)
        Product<N>::shared<1, 1>(sums, Grad::row_step(a, c), QK::row_step(b, c), c > 0);
      wgmma_commit();
      if (ORDERED && part == 0 && (tile == tiles.last || tile % TURN == TURN - 1)) {
        int* counter = counters + strip;
        if (threadIdx.x % 32 == 0)
          change_turn(counter - tile % TURN * step, tile < tiles.last ? counter + step : nullptr, turn);
        __syncwarp();
      }
      wgmma_wait<0>();
      pin(sums);
      if (part == ROWS / 64 * PARTS - 1 && threadIdx.x == 0) barrier_arrive(base + GRAD_EMPTY + 8 * buffer);
      float* target = dq + (i64)strip * (16 * DQK) + threadIdx.x % 32 * 4;
      add_strip(sums, target + half * (64 * DQK) + 16 * column, turn == 0);
    }
    __syncwarp();  // the sums are added before lane 0 passes the turn on
    strip -= step;
  }
  strip += step * (1 - tiles.first % TURN);
  if (ORDERED && threadIdx.x % 32 == 0) store_release(counters + strip, turn + 1);
}

}  // namespace backward
