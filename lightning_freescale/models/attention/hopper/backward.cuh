// Backward: one block computes the gradients of 128 keys and values of one head, and their share of the query gradients.
//
// Warpgroups 1 and 2 own 64 keys each: they compute the transposed scores and the gradient of the weights, sum dk and dv
// in registers, and leave the score gradients in shared memory. Warpgroup 0 multiplies those by the keys and adds the
// product to dq; its first thread also copies tiles of queries and output gradients to shared memory, last tile first.
//
// Sums of dq have a fixed order: the key tiles of a history add in ascending order. A counter per 16 queries says
// whose turn it is. A block waits for blocks with smaller tickets only, so it never waits for a block that has not
// started.
#pragma once
#include "tile.cuh"

namespace backward {

constexpr int ROWS = BACKWARD_ROWS, KEYS = 128, STAGES = BACKWARD_STAGES, BUFFERS = BACKWARD_BUFFERS, THREADS = 384;
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
constexpr int REGISTERS_DQ = BACKWARD_REGISTERS, REGISTERS_MAIN = (504 - REGISTERS_DQ) / 2 & ~7;
constexpr int PART = BACKWARD_PART;
constexpr int TURN = BACKWARD_TURN;  // query tiles that a block adds to before the next block may
constexpr int STRIPS = ROWS / 16;  // counters per query tile

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

// scores^T = k q^T; starts only, one group, as the three functions below. `key`: the warpgroup's first key.
DEVICE void start_scores(float (&scores)[ROWS / 2], u32 base, u32 key, int stage) {
  const u32 a = QK::by_rows(key), b = QK::by_rows(base + QUERY + stage * QUERY_BYTES);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < QK::STEPS; i++)
    Product<ROWS>::shared<0, 0>(scores, QK::column_step<KEYS>(a, i), QK::column_step<ROWS>(b, i), i > 0);
  wgmma_commit();
}

// Gradient of the weights, transposed: v dout^T.
DEVICE void start_dweights(float (&dweights)[ROWS / 2], u32 base, u32 value, int stage) {
  const u32 a = V::by_rows(value), b = V::by_rows(base + OUT + stage * OUT_BYTES);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < V::STEPS; i++)
    Product<ROWS>::shared<0, 0>(dweights, V::column_step<KEYS>(a, i), V::column_step<ROWS>(b, i), i > 0);
  wgmma_commit();
}

DEVICE void start_dv(float (&dv)[DV / 2], const u32 (&weights)[ROWS / 4], u32 base, int stage) {
  const u32 b = V::by_columns<ROWS>(base + OUT + stage * OUT_BYTES);
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < ROWS / 16; c++)
    Product<DV>::registers<1>(dv, weights + 4 * c, V::row_step(b, c), 1);
  wgmma_commit();
}

DEVICE void start_dk(float (&dk)[DQK / 2], const u32 (&grads)[ROWS / 4], u32 base, int stage) {
  const u32 b = QK::by_columns<ROWS>(base + QUERY + stage * QUERY_BYTES);
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < ROWS / 16; c++)
    Product<DQK>::registers<1>(dk, grads + 4 * c, QK::row_step(b, c), 1);
  wgmma_commit();
}

// Hide scores above the diagonal and those of queries that do not exist: their activation and its slope become zero.
// `key_row`: the thread's first key within the history.
DEVICE void hide(float (&scores)[ROWS / 2], int key_row, int query_row, int length, float half_alpha) {
  const int column = query_row + 2 * (threadIdx.x % 4);
  const float hidden = half_alpha > 0 ? -1e30f : 1e30f;
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) {
    const int query = column + i / 4 * 8 + i % 2;
    if (key_row + (i % 4 / 2) * 8 > query || query >= length) scores[i] = hidden;
  }
}

// weights = silu(2 half_alpha scores); scores := twice the slope there.
// With h = half_alpha * score: silu(2 h) = h (1 + tanh h), and twice its slope is 1 + tanh h + silu (1 - tanh h).
DEVICE void activate(u32 (&weights)[ROWS / 4], float (&scores)[ROWS / 2], float half_alpha) {
#pragma unroll
  for (int i = 0; i < ROWS / 4; i++) {
    float w[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float half = scores[2 * i + e] * half_alpha;
      const float gate = 1.0f + tanh_fast(half);
      w[e] = half * gate;
      scores[2 * i + e] = fmaf(w[e], 2.0f - gate, gate);
    }
    weights[i] = pack(w[0], w[1]);
  }
}

// Copy the score gradients of queries 16 first to 16 (first + count) of this warpgroup's keys to shared memory.
DEVICE void store_grads(const u32 (&grads)[ROWS / 4], u32 base, int buffer, int first, int count) {
  const int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const u32 target = base + GRAD + buffer * GRAD_BYTES + (64 * group + 16 * warp + lane % 16) * 128;
  const u32 chunk = (lane / 16 ^ lane % 8) * 16;  // eight queries; the row swizzles them
#pragma unroll
  for (int c = first; c < first + count; c++)
    store_matrix(target + c / 4 * PANEL_BYTES + (chunk ^ (c % 4 * 32)), grads + 4 * c);
}

// grads = slopes * dweights, in registers and in shared memory.
DEVICE void differentiate(u32 (&grads)[ROWS / 4], const float (&slopes)[ROWS / 2], const float (&dweights)[ROWS / 2],
                          u32 base, int buffer) {
#pragma unroll
  for (int i = 0; i < ROWS / 4; i++)
    grads[i] = pack(slopes[2 * i] * dweights[2 * i], slopes[2 * i + 1] * dweights[2 * i + 1]);
  store_grads(grads, base, buffer, 0, ROWS / 16);
}

// Both of these at once, for PART sixteenths of the queries from `part`.
DEVICE void activate_part(u32 (&weights)[ROWS / 4], u32 (&grads)[ROWS / 4], const float (&scores)[ROWS / 2],
                          const float (&dweights)[ROWS / 2], u32 base, int buffer, int part, float half_alpha) {
#pragma unroll
  for (int i = 4 * part; i < 4 * (part + PART); i++) {
    float w[2], g[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float half = scores[2 * i + e] * half_alpha;
      const float gate = 1.0f + tanh_fast(half);
      w[e] = half * gate;
      g[e] = fmaf(w[e], 2.0f - gate, gate) * dweights[2 * i + e];
    }
    weights[i] = pack(w[0], w[1]);
    grads[i] = pack(g[0], g[1]);
  }
  store_grads(grads, base, buffer, part, PART);
}

// A warpgroup's sums, and the work on one tile after the other. Tiles count from the last: tile `i` of a block lies in
// stage i % STAGES and its score gradients go to buffer i % BUFFERS. Little else is kept in registers: there are few.
struct Consumer {
  u32 base;
  Range tiles;
  float half_alpha;
  float dk[DQK / 2] = {}, dv[DV / 2] = {};

  DEVICE int group() { return threadIdx.x / 128 - 1; }
  DEVICE void start(float (&scores)[ROWS / 2], int i) {
    barrier_wait(base + FULL + 8 * (i % STAGES), i / STAGES & 1);
    start_scores(scores, base, base + KEY + group() * 64 * QK::ROW_BYTES, i % STAGES);
  }
  DEVICE void start_out(float (&dweights)[ROWS / 2], int i) {
    start_dweights(dweights, base, base + VALUE + group() * 64 * V::ROW_BYTES, i % STAGES);
  }
  DEVICE void hide_scores(float (&scores)[ROWS / 2], int i) {
    const int tile = tiles.last - i;
    if (i > 0 && tile >= tiles.first + KEYS / ROWS) return;
    const int key_row = tiles.first * ROWS + 64 * group() + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    hide(scores, key_row, tile * ROWS, load_shared(base + LENGTH), half_alpha);
  }
  DEVICE void wait_buffer(int i) { barrier_wait(base + GRAD_EMPTY + 8 * (i % BUFFERS), i / BUFFERS & 1 ^ 1); }
  DEVICE void publish(int i) {
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(base + GRAD_FULL + 8 * (i % BUFFERS));
  }
  DEVICE void release(int i) {
    if (threadIdx.x % 128 == 0) barrier_arrive(base + EMPTY + 8 * (i % STAGES));
  }

  // One tile; unless it is the last, the next tile's scores are started in `next`. Groups under way on entry: the
  // products of `scores`, then those of the tile before for dk (an empty group for the first tile).
  template <bool LAST>
  DEVICE void step(int i, float (&scores)[ROWS / 2], float (&next)[ROWS / 2], u32 (&weights)[ROWS / 4],
                   u32 (&grads)[ROWS / 4]) {
    float dweights[ROWS / 2];
    opaque(base);
    start_out(dweights, i);
    wgmma_wait<2>();
    pin(scores);
    pin(weights);
    hide_scores(scores, i);
    activate(weights, scores, half_alpha);
    start_dv(dv, weights, base, i % STAGES);
    if constexpr (!LAST) start(next, i + 1);
    wgmma_wait<LAST ? 1 : 2>();
    pin(dweights);
    pin(grads);
    if (i > 0) release(i - 1);
    wait_buffer(i);
    differentiate(grads, scores, dweights, base, i % BUFFERS);
    publish(i);
    start_dk(dk, grads, base, i % STAGES);
    if constexpr (LAST) {
      wgmma_wait<0>();
      pin(dk);
      pin(dv);
    }
  }

  // All tiles, with two sets of scores.
  DEVICE void run_double() {
    float even[ROWS / 2] = {}, odd[ROWS / 2] = {};
    u32 weights[ROWS / 4] = {}, grads[ROWS / 4] = {};
    pin(dk);
    pin(dv);
    pin(even);
    pin(odd);
    pin(weights);
    pin(grads);
    start(even, 0);
    wgmma_commit();
    const int last = tiles.last - tiles.first;
    for (int i = 0;; i += 2) {
      if (i == last) {
        step<true>(i, even, odd, weights, grads);
        break;
      }
      step<false>(i, even, odd, weights, grads);
      if (i + 1 == last) {
        step<true>(i + 1, odd, even, weights, grads);
        break;
      }
      step<false>(i + 1, odd, even, weights, grads);
    }
  }

  // All tiles, with one set of scores. The products of a part of the tile start while the next part is activated.
  DEVICE void run_single() {
    float scores[ROWS / 2], dweights[ROWS / 2];
    pin(dk);
    pin(dv);
    start(scores, 0);
    start_out(dweights, 0);
    for (int i = 0;; i++) {
      u32 weights[ROWS / 4], grads[ROWS / 4];
      opaque(base);
      wgmma_wait<0>();
      pin(scores);
      pin(dweights);
      hide_scores(scores, i);
      wait_buffer(i);
#pragma unroll
      for (int part = 0; part < ROWS / 16; part += PART) {
        activate_part(weights, grads, scores, dweights, base, i % BUFFERS, part, half_alpha);
        const u32 query = QK::by_columns<ROWS>(base + QUERY + i % STAGES * QUERY_BYTES);
        const u32 out = V::by_columns<ROWS>(base + OUT + i % STAGES * OUT_BYTES);
        wgmma_fence();
#pragma unroll
        for (int c = part; c < part + PART; c++) {
          Product<DV>::registers<1>(dv, weights + 4 * c, V::row_step(out, c), 1);
          Product<DQK>::registers<1>(dk, grads + 4 * c, QK::row_step(query, c), 1);
        }
      }
      wgmma_commit();
      publish(i);
      if (i == tiles.last - tiles.first) break;
      start(scores, i + 1);
      wgmma_wait<1>();
      pin(weights);
      pin(grads);
      release(i);
      start_out(dweights, i + 1);
    }
    wgmma_wait<0>();
    pin(dk);
    pin(dv);
  }
};

DEVICE void consume(u32 base, u16* dk, u16* dv, Work work, int head, int heads, Range tiles, float half_alpha) {
  Consumer consumer{base, tiles, half_alpha};
  named_sync(threadIdx.x / 128, 128);  // LENGTH is written
  barrier_wait(base + KEY_FULL, 0);
  if constexpr (BACKWARD_DOUBLE)
    consumer.run_double();
  else
    consumer.run_single();
  const int row = work.row + 64 * consumer.group();
  const i64 first = (i64)(work.start + row) * heads + head;
  store_rows(consumer.dk, dk + first * DQK, (i64)heads * DQK, work.length - row, half_alpha, half_alpha);
  store_rows(consumer.dv, dv + first * DV, (i64)heads * DV, work.length - row, 1.0f, 1.0f);
}

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
DEVICE void sum_queries(u32 base, const TensorMap* q, const TensorMap* dout, float* dq, int* counters, Work work,
                        int head, int heads, Range tiles) {
  constexpr int N = BACKWARD_WIDTH;
  const int turn = work.row / KEYS;
  const int step = heads * STRIPS;  // strips from one tile to the next
  const i64 place = ((i64)(work.tile + tiles.last) * heads + head) * STRIPS + threadIdx.x / 32;
  dq += place * (16 * DQK) + threadIdx.x % 32 * 4;
  counters += place;
  int* finished = nullptr;  // counter of queries that all sums have been added to, but which the next block still waits for
  barrier_wait(base + KEY_FULL, 0);
#pragma unroll 1
  for (int tile = tiles.last; tile >= tiles.first; tile--) {
    opaque(base);
    const int buffer = (tiles.last - tile) % BUFFERS, parity = (tiles.last - tile) / BUFFERS & 1;
    if (threadIdx.x == 0 && tile < tiles.last && tile - STAGES + 1 >= tiles.first)
      load_tile(base, q, dout, tiles.last - tile + STAGES - 1, head, work.start + (tile - STAGES + 1) * ROWS);
    __syncwarp();
    barrier_wait(base + GRAD_FULL + 8 * buffer, parity);
    const bool enter = tile == tiles.last || tile % TURN == TURN - 1, leave = tile == tiles.first || tile % TURN == 0;
#pragma unroll
    for (int part = 0; part < ROWS / 64 * DQK / N; part++) {
      constexpr int PARTS = DQK / N;
      const int half = part / PARTS, column = part % PARTS * N;
      const u32 a = Grad::by_columns<KEYS>(base + GRAD + buffer * GRAD_BYTES + half * PANEL_BYTES);
      const u32 b = QK::by_columns<KEYS>(base + KEY + column / QK::WIDTH * KEYS * QK::ROW_BYTES + column % QK::WIDTH * 2);
      float sums[N / 2];
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < KEYS / 16; c++)
        Product<N>::shared<1, 1>(sums, Grad::row_step(a, c), QK::row_step(b, c), c > 0);
      wgmma_commit();
      if (ORDERED && part == 0 && enter) {
        if (threadIdx.x % 32 == 0) change_turn(counters - tile % TURN * step, finished, turn);
        __syncwarp();
      }
      wgmma_wait<0>();
      pin(sums);
      if (part == ROWS / 64 * PARTS - 1 && threadIdx.x == 0) barrier_arrive(base + GRAD_EMPTY + 8 * buffer);
      add_strip(sums, dq + half * (64 * DQK) + 16 * column, turn == 0);
    }
    if (ORDERED && leave) {
      __syncwarp();
      finished = counters - tile % TURN * step;
    }
    counters -= step;
    dq -= step * (16 * DQK);
  }
  if (ORDERED && threadIdx.x % 32 == 0) store_release(finished, turn + 1);
}

}  // namespace backward

static_assert(backward::SHARED == BACKWARD_SHARED, "config.py counts other bytes");

extern "C" __global__ void __launch_bounds__(backward::THREADS, 1)
    hstu_backward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                  const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap dout, float* dq, u16* dk,
                  u16* dv, int* counters, const Work* schedule, int heads, float half_alpha) {
  using namespace backward;
  extern __shared__ char memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  int* ticket = (int*)(memory + (base - shared_address(memory)) + TICKET);
  if (threadIdx.x == 0) {
    *ticket = atomicAdd(counters, 1);
    barrier_init(base + KEY_FULL, 1);
    for (int i = 0; i < STAGES; i++) {
      barrier_init(base + FULL + 8 * i, 1);
      barrier_init(base + EMPTY + 8 * i, 2);
    }
    for (int i = 0; i < BUFFERS; i++) {
      barrier_init(base + GRAD_FULL + 8 * i, 8);
      barrier_init(base + GRAD_EMPTY + 8 * i, 1);
    }
    barrier_init_fence();
  }
  __syncthreads();
  const int head = *ticket % heads;
  const Work work = schedule[*ticket / heads];
  if (work.length == 0) return;
  if (threadIdx.x % 128 == 0) ticket[1] = work.length;  // LENGTH; each warpgroup writes it for itself
  const Range tiles = {work.row / ROWS, (work.length - 1) / ROWS};
  if (threadIdx.x < 128) {
    registers_decrease<REGISTERS_DQ>();
    if (threadIdx.x == 0) {
      barrier_expect(base + KEY_FULL, KEY_BYTES + VALUE_BYTES);
      QK::load<KEYS>(base + KEY, &k, base + KEY_FULL, head, work.start + work.row);
      V::load<KEYS>(base + VALUE, &v, base + KEY_FULL, head, work.start + work.row);
      for (int i = 0; i < STAGES && tiles.last - i >= tiles.first; i++)
        load_tile(base, &q, &dout, i, head, work.start + (tiles.last - i) * ROWS);
    }
    __syncwarp();
    sum_queries(base, &q, &dout, dq, counters + 1, work, head, heads, tiles);
  } else {
    registers_increase<REGISTERS_MAIN>();
    consume(base, dk, dv, work, head, heads, tiles, half_alpha);
  }
}
