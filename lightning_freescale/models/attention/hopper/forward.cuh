// Forward: one block computes the output of FORWARD_ROWS queries of one head.
//
// Warpgroup 0 copies tiles of keys and values to shared memory; each other warpgroup owns 64 queries. The products of
// a tile's values run while the activation of the next tile's scores is computed.
#pragma once
#include "bias.cuh"
#include "tile.cuh"

namespace forward {

constexpr int GROUPS = FORWARD_GROUPS, ROWS = 64 * GROUPS, KEYS = FORWARD_KEYS, STAGES = FORWARD_STAGES;
constexpr int THREADS = 128 * (GROUPS + 1);
using QK = Tile<DQK>;
using V = Tile<DV>;

constexpr int QUERY_BYTES = ROWS * DQK * 2, KEY_BYTES = KEYS * DQK * 2, VALUE_BYTES = KEYS * DV * 2;
constexpr int SHARED = 1024 + QUERY_BYTES + STAGES * (KEY_BYTES + VALUE_BYTES);

// Records of the times of a tile's keys. They are read until the next tile's scores are there, when the tile's keys may
// have been replaced: so there are more places for them than stages.
constexpr int RECORDS = KEYS / bias::EVENTS, RECORD_BYTES = RECORDS * bias::RECORD_BYTES, RECORD_STAGES = 2 * STAGES;
constexpr int BIAS_BYTES = RECORD_STAGES * RECORD_BYTES + bias::TABLE_BYTES + 4 * GROUPS * bias::ROWS_BYTES;
using Strip = bias::Strip<true>;

struct Shared {
  u32 query, key, value;                                         // tiles
  u32 tables, records, rows;                                     // of the bias
  u32 query_full, key_full, key_empty, value_full, value_empty;  // barriers; stage s at + 8 s
};

DEVICE void produce(const Shared& s, const TensorMap* q, const TensorMap* k, const TensorMap* v, const int* records,
                    Work work, int head, int blocks) {
  barrier_expect(s.query_full, QUERY_BYTES);
  QK::load<ROWS>(s.query, q, s.query_full, head, work.start + work.row);
  for (int i = 0; i < blocks; i++) {
    const int stage = i % STAGES, parity = (i / STAGES & 1) ^ 1, row = work.start + (blocks - 1 - i) * KEYS;
    barrier_wait(s.key_empty + 8 * stage, parity);
    barrier_expect(s.key_full + 8 * stage, KEY_BYTES + BIAS * RECORD_BYTES);
    QK::load<KEYS>(s.key + stage * KEY_BYTES, k, s.key_full + 8 * stage, head, row);
    if constexpr (BIAS) {
      const int* source = records + (i64)(work.tile + (blocks - 1 - i) * RECORDS) * bias::RECORD;
      bulk_load(s.records + i % RECORD_STAGES * RECORD_BYTES, source, RECORD_BYTES, s.key_full + 8 * stage);
    }
    barrier_wait(s.value_empty + 8 * stage, parity);
    barrier_expect(s.value_full + 8 * stage, VALUE_BYTES);
    V::load<KEYS>(s.value + stage * VALUE_BYTES, v, s.value_full + 8 * stage, head, row);
  }
}

// scores = q k^T for this warpgroup's 64 queries; starts only.
DEVICE void start_scores(float (&scores)[KEYS / 2], u32 query, u32 key) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < QK::STEPS; step++)
    Product<KEYS>::shared<0, 0>(scores, QK::column_step<ROWS>(query, step), QK::column_step<KEYS>(key, step), step > 0);
  wgmma_commit();
}

DEVICE void start_output(float (&out)[DV / 2], const u32 (&weights)[KEYS / 4], u32 value, int add) {
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < KEYS / 16; step++)
    Product<DV>::registers<1>(out, weights + 4 * step, V::row_step(value, step), add | (step > 0));
  wgmma_commit();
}

// scores := silu(scale scores + 2 offset) for scale = 2 half_scale, from element FROM to element TO.
template <int FROM, int TO>
DEVICE void silu(float (&scores)[KEYS / 2], float half_scale, float offset) {
#pragma unroll
  for (int i = FROM; i < TO; i++) {
    const float half = BIAS ? fmaf(scores[i], half_scale, offset) : scores[i] * half_scale;
    scores[i] = fmaf(half, tanh_fast(half), half);
  }
}

// What is read of the bias of a tile before its scores are there, for each 64 columns.
struct TileBias {
  u32 record;
  bias::Buckets buckets[RECORDS];
  float constants[RECORDS];  // half of the bias of a strip that has one
};

DEVICE TileBias read_bias(const Strip& strip, u32 record) {
  TileBias tile = {record};
  if constexpr (BIAS) {
#pragma unroll
    for (int i = 0; i < RECORDS; i++) tile.buckets[i] = strip.buckets(record + i * bias::RECORD_BYTES);
#pragma unroll
    for (int i = 0; i < RECORDS; i++) tile.constants[i] = strip.constant(tile.buckets[i]);
  }
  return tile;
}

// The same with the bias, for columns 64 PART to 64 (PART + 1).
template <int PART>
DEVICE void biased_silu(float (&scores)[KEYS / 2], const Strip& strip, const TileBias& tile, float half_alpha) {
  constexpr int FROM = 32 * PART;
  const u32 record = tile.record + PART * bias::RECORD_BYTES;
  const bias::Buckets buckets = tile.buckets[PART];
  if (buckets.constant()) {
    silu<FROM, FROM + 32>(scores, half_alpha, tile.constants[PART]);
  } else {
    strip.add<FROM>(scores, buckets, record, half_alpha);
    silu<FROM, FROM + 32>(scores, 1.0f, 0.0f);
  }
}

// scores := silu(2 half_alpha scores + bias). `first`: the thread's first query minus its first key.
DEVICE void activate(float (&scores)[KEYS / 2], const Strip& strip, const TileBias& tile, float half_alpha, bool masked,
                     int first) {
  if constexpr (BIAS) {
    biased_silu<0>(scores, strip, tile, half_alpha);
    if constexpr (RECORDS == 2) biased_silu<RECORDS - 1>(scores, strip, tile, half_alpha);
  } else {
    silu<0, KEYS / 2>(scores, half_alpha, 0.0f);
  }
  if (masked) {
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++)
      if (i / 4 * 8 + i % 2 > first + (i % 4 / 2) * 8) scores[i] = 0;
  }
}

DEVICE void round_weights(u32 (&weights)[KEYS / 4], const float (&scores)[KEYS / 2]) {
#pragma unroll
  for (int i = 0; i < KEYS / 4; i++) weights[i] = pack(scores[2 * i], scores[2 * i + 1]);
}

DEVICE void consume(const Shared& s, const int* records, u16* out, Work work, int head, int heads, int blocks,
                    float half_alpha) {
  const int group = uniform(threadIdx.x / 128) - 1, lane = threadIdx.x % 32;
  const int own = work.row + 64 * group;  // the warpgroup's first query
  const int first = own + threadIdx.x / 32 % 4 * 16 + lane / 4 - 2 * (lane % 4);
  const bool leader = threadIdx.x % 128 == 0, key_leader = threadIdx.x % (BIAS ? 32 : 128) == 0;
  const u32 query = QK::by_rows(s.query + group * 64 * QK::ROW_BYTES);
  const u32 key = QK::by_rows(s.key), value = V::by_columns<KEYS>(s.value);
  float scores[KEYS / 2], sums[DV / 2];
  u32 weights[KEYS / 4];
  const Strip strip = {s.tables, s.rows + (threadIdx.x / 32 - 4) * bias::ROWS_BYTES};
  if constexpr (BIAS)
    strip.init(records + (i64)(work.tile + own / bias::EVENTS) * bias::RECORD, own + threadIdx.x / 32 % 4 * 16);

  barrier_wait(s.query_full, 0);
  barrier_wait(s.key_full, 0);
  start_scores(scores, query, key);
  wgmma_wait<0>();
  pin(scores);
  if (key_leader) barrier_arrive(s.key_empty);
  int block = blocks - 1;
  activate(scores, strip, read_bias(strip, s.records), half_alpha, block * KEYS + KEYS > own + 1, first - block * KEYS);
  round_weights(weights, scores);
  for (int i = 1; i < blocks; i++) {
    const int stage = i % STAGES, before = (i - 1) % STAGES;
    block--;
    barrier_wait(s.key_full + 8 * stage, i / STAGES & 1);
    start_scores(scores, query, key + (stage * KEY_BYTES >> 4));
    barrier_wait(s.value_full + 8 * before, (i - 1) / STAGES & 1);
    start_output(sums, weights, value + (before * VALUE_BYTES >> 4), i > 1);
    const TileBias tile = read_bias(strip, s.records + i % RECORD_STAGES * RECORD_BYTES);
    wgmma_wait<1>();
    pin(scores);
    if (key_leader) barrier_arrive(s.key_empty + 8 * stage);
    activate(scores, strip, tile, half_alpha, block * KEYS + KEYS > own + 1, first - block * KEYS);
    wgmma_wait<0>();
    pin(weights);
    pin(sums);
    if (leader) barrier_arrive(s.value_empty + 8 * before);
    round_weights(weights, scores);
  }
  const int last = (blocks - 1) % STAGES;
  barrier_wait(s.value_full + 8 * last, (blocks - 1) / STAGES & 1);
  start_output(sums, weights, value + (last * VALUE_BYTES >> 4), blocks > 1);
  wgmma_wait<0>();
  pin(sums);

  const int row = own + threadIdx.x / 32 % 4 * 16 + lane / 4;
  const i64 stride = (i64)heads * DV;
  store_rows(sums, out + (i64)(work.start + own) * stride + head * DV, stride, work.length - own, 1.0f / (row + 1),
             1.0f / (row + 9));
}

}  // namespace forward

static_assert(forward::SHARED == FORWARD_SHARED, "config.py counts other bytes");

extern "C" __global__ void __launch_bounds__(forward::THREADS, 1)
    hstu_forward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                 const __grid_constant__ TensorMap v, const __grid_constant__ Bias bias, u16* out,
                 const Work* schedule, int heads, float half_alpha) {
  using namespace forward;
  const int head = blockIdx.x % heads;
  Work work = schedule[blockIdx.x / heads];
  work = {uniform(work.start), uniform(work.length), uniform(work.row), uniform(work.tile)};
  if (work.length == 0) return;
  extern __shared__ char memory[];
  __shared__ alignas(8) u64 barriers[1 + 4 * STAGES];
  Shared s;
  s.query = (shared_address(memory) + 1023) & ~1023u;
  s.key = s.query + QUERY_BYTES;
  s.value = s.key + STAGES * KEY_BYTES;
#if BIAS
  __shared__ alignas(16) char bias_memory[BIAS_BYTES];
  s.records = shared_address(bias_memory);
  s.tables = s.records + RECORD_STAGES * RECORD_BYTES;
  s.rows = s.tables + bias::TABLE_BYTES;
  bias::load_tables(s.tables, bias, threadIdx.x, THREADS);
#endif
  s.query_full = shared_address(barriers);
  s.key_full = s.query_full + 8;
  s.key_empty = s.key_full + 8 * STAGES;
  s.value_full = s.key_empty + 8 * STAGES;
  s.value_empty = s.value_full + 8 * STAGES;
  if (threadIdx.x == 0) {
    barrier_init(s.query_full, 1);
    for (int i = 0; i < STAGES; i++) {
      barrier_init(s.key_full + 8 * i, 1);
      barrier_init(s.value_full + 8 * i, 1);
      barrier_init(s.key_empty + 8 * i, BIAS ? 4 * GROUPS : GROUPS);
      barrier_init(s.value_empty + 8 * i, GROUPS);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int end = work.row + ROWS < work.length ? work.row + ROWS : work.length;
  const int blocks = (end - 1) / KEYS + 1;
  if (threadIdx.x < 128) {
    registers_decrease<GROUPS == 2 ? 24 : 32>();
    if (threadIdx.x == 0) produce(s, &q, &k, &v, bias.records, work, head, blocks);
  } else {
    registers_increase<GROUPS == 2 ? 240 : 160>();
    consume(s, bias.records, out, work, head, heads, blocks, half_alpha);
  }
}
