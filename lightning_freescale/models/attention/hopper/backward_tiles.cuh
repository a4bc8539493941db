// Sizes of the backward kernel, its shared memory, and how its tiles get there; backward.cuh says what it does.
#pragma once
#include "bias.cuh"
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

// Places of the bias, in shared memory of their own: each warp's sums of its gradients, the tables, a record a stage, and
// the rows of each warp.
constexpr int RECORD_BYTES = bias::RECORD_BYTES, SUM_BYTES = bias::Gradient::BYTES;
constexpr int SUMS = 0, TABLES = 8 * SUM_BYTES, RECORDS = TABLES + bias::TABLE_BYTES;
constexpr int WARP_ROWS = RECORDS + STAGES * RECORD_BYTES, BIAS_BYTES = WARP_ROWS + 8 * bias::ROWS_BYTES;
static_assert(!BIAS || ROWS == bias::EVENTS, "a query tile has one record");

struct Range {
  int first, last;  // query tiles
};

// What the copies of tiles need.
struct Source {
  const TensorMap *q, *dout;
  const int* records;  // of the history's first tile, if there is a bias
  u32 bias;            // where BIAS_BYTES lie
  int head, start;     // start: flat row of the history's first event
};

// Copy one tile of queries and output gradients; `number` counts the block's tiles. Used by one thread.
DEVICE void load_tile(u32 base, const Source& source, int number, int tile) {
  const int row = source.start + tile * ROWS;
  const int stage = number % STAGES, parity = (number / STAGES & 1) ^ 1;
  const u32 full = base + FULL + 8 * stage;
  barrier_wait(base + EMPTY + 8 * stage, parity);
  barrier_expect(full, QUERY_BYTES + OUT_BYTES + BIAS * RECORD_BYTES);
  QK::load<ROWS>(base + QUERY + stage * QUERY_BYTES, source.q, full, source.head, row);
  V::load<ROWS>(base + OUT + stage * OUT_BYTES, source.dout, full, source.head, row);
  if constexpr (BIAS)
    bulk_load(source.bias + RECORDS + stage * RECORD_BYTES, source.records + tile * bias::RECORD, RECORD_BYTES, full);
}

}  // namespace backward
