// Sizes of the backward kernel, its shared memory, and how its tiles get there; backward.cuh says what it does.
#pragma once
#include "tile.cuh"

namespace backward {

// Wide heads: a block has 64 keys, both warpgroups compute all scores, and each sums half of the columns of dk and dv.
// Others: a block has 128 keys, and each warpgroup owns 64 of them.
constexpr bool SPLIT = BACKWARD_SPLIT;
constexpr int ROWS = BACKWARD_ROWS, KEYS = SPLIT ? 64 : 128, STAGES = BACKWARD_STAGES, BUFFERS = BACKWARD_BUFFERS;
constexpr int KEY_COLUMNS = SPLIT ? DQK / 2 : DQK, VALUE_COLUMNS = SPLIT ? DV / 2 : DV;  // of a warpgroup's sums
constexpr int THREADS = 384;
constexpr int STRIPS = ROWS / 16;    // parts of a query tile that one warp adds to dq; each has a counter
constexpr int PART = BACKWARD_PART;  // sixteenths of a tile that are activated before their products start
constexpr int TURN = BACKWARD_TURN;  // query tiles that a block adds to dq before the next block may
constexpr int REGISTERS_DQ = BACKWARD_REGISTERS, REGISTERS_MAIN = (504 - REGISTERS_DQ) / 2 & ~7;
using QK = Tile<DQK>;
using V = Tile<DV>;
using Grad = Tile<64>;  // score gradients: panels of 64 queries, a row per key

constexpr int KEY_BYTES = KEYS * DQK * 2, VALUE_BYTES = KEYS * DV * 2, QUERY_BYTES = ROWS * DQK * 2;
constexpr int OUT_BYTES = ROWS * DV * 2, GRAD_BYTES = KEYS * ROWS * 2, PANEL_BYTES = KEYS * 128;
// Places in shared memory, from a base that is a multiple of 1024. Barriers: stage or buffer i is at + 8 i.
constexpr int KEY_FULL = 0, FULL = 8, EMPTY = FULL + 8 * STAGES, GRAD_FULL = EMPTY + 8 * STAGES;
constexpr int GRAD_EMPTY = GRAD_FULL + 8 * BUFFERS, TICKET = GRAD_EMPTY + 8 * BUFFERS, LENGTH = TICKET + 4;
constexpr int KEY = 1024, VALUE = KEY + KEY_BYTES, QUERY = VALUE + VALUE_BYTES, OUT = QUERY + STAGES * QUERY_BYTES;
constexpr int GRAD = OUT + STAGES * OUT_BYTES, SHARED = 1024 + GRAD + BUFFERS * GRAD_BYTES;

struct Range {
  int first, last;  // query tiles
};

// Copy one tile of queries and output gradients; `number` counts the block's tiles. Used by one thread.
DEVICE void load_tile(u32 base, const TensorMap* q, const TensorMap* dout, int number, int head, int row) {
  const int stage = number % STAGES, parity = (number / STAGES & 1) ^ 1;
  const u32 full = base + FULL + 8 * stage;
  barrier_wait(base + EMPTY + 8 * stage, parity);
  barrier_expect(full, QUERY_BYTES + OUT_BYTES);
  QK::load<ROWS>(base + QUERY + stage * QUERY_BYTES, q, full, head, row);
  V::load<ROWS>(base + OUT + stage * OUT_BYTES, dout, full, head, row);
}

}  // namespace backward
