// Backward: the warpgroups that compute scores and their gradients, and sum dk and dv.
#pragma once
#include "backward_tiles.cuh"

namespace backward {

// Which 64 keys of the block this warpgroup works on.
DEVICE int key_group() { return SPLIT ? 0 : uniform(threadIdx.x / 128) - 1; }
// Which columns of dk and dv it sums, in units of KEY_COLUMNS and VALUE_COLUMNS.
DEVICE int column_group() { return SPLIT ? uniform(threadIdx.x / 128) - 1 : 0; }

// Where the warpgroup's columns of a tile start, for sums over the tile's rows.
template <int D>
DEVICE u32 own_columns(u32 tile) {
  const int column = column_group() * (SPLIT ? D / 2 : D);
  constexpr int WIDTH = Tile<D>::WIDTH, ROW_BYTES = Tile<D>::ROW_BYTES;
  return Tile<D>::template by_columns<ROWS>(tile + column / WIDTH * ROWS * ROW_BYTES + column % WIDTH * 2);
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

DEVICE void start_dv(float (&dv)[VALUE_COLUMNS / 2], const u32 (&weights)[ROWS / 4], u32 base, int stage) {
  const u32 b = own_columns<DV>(base + OUT + stage * OUT_BYTES);
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < ROWS / 16; c++)
    Product<VALUE_COLUMNS>::registers<1>(dv, weights + 4 * c, V::row_step(b, c), 1);
  wgmma_commit();
}

DEVICE void start_dk(float (&dk)[KEY_COLUMNS / 2], const u32 (&grads)[ROWS / 4], u32 base, int stage) {
  const u32 b = own_columns<DQK>(base + QUERY + stage * QUERY_BYTES);
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < ROWS / 16; c++)
    Product<KEY_COLUMNS>::registers<1>(dk, grads + 4 * c, QK::row_step(b, c), 1);
  wgmma_commit();
}

// Hide scores above the diagonal and those of queries that do not exist: their activation and its slope become zero.
// `key_row`: the thread's first key within the history. `scale`: what scores will be multiplied by.
DEVICE void hide(float (&scores)[ROWS / 2], int key_row, int query_row, int length, float scale) {
  const int column = query_row + 2 * (threadIdx.x % 4);
  const float hidden = scale > 0 ? -1e30f : 1e30f;
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) {
    const int query = column + i / 4 * 8 + i % 2;
    if (key_row + (i % 4 / 2) * 8 > query || query >= length) scores[i] = hidden;
  }
}

// Scores are activated at 2 h for h = half_scale * score + offset. silu(2 h) = h (1 + tanh h), and twice its slope is
// 1 + tanh h + silu (1 - tanh h).
struct Affine {
  float half_scale, offset;
  DEVICE float operator()(float score) const { return BIAS ? fmaf(score, half_scale, offset) : score * half_scale; }
};

// weights = silu; scores := twice the slope.
DEVICE void activate(u32 (&weights)[ROWS / 4], float (&scores)[ROWS / 2], Affine affine) {
#pragma unroll
  for (int i = 0; i < ROWS / 4; i++) {
    float w[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float half = affine(scores[2 * i + e]);
      const float gate = 1.0f + tanh_fast(half);
      w[e] = half * gate;
      scores[2 * i + e] = fmaf(w[e], 2.0f - gate, gate);
    }
    weights[i] = pack(w[0], w[1]);
  }
}

// Copy the score gradients of queries 16 first to 16 (first + count) of this warpgroup's keys to shared memory.
DEVICE void store_grads(const u32 (&grads)[ROWS / 4], u32 base, int buffer, int first, int count) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const u32 target = base + GRAD + buffer * GRAD_BYTES + (64 * key_group() + 16 * warp + lane % 16) * 128;
  const u32 chunk = (lane / 16 ^ lane % 8) * 16;  // eight queries; the row swizzles them
#pragma unroll
  for (int c = first; c < first + count; c++)
    if (!SPLIT || c / (ROWS / 32) == column_group())  // both warpgroups have them: each stores half
      store_matrix(target + c / 4 * PANEL_BYTES + (chunk ^ (c % 4 * 32)), grads + 4 * c);
}

// grads = slopes * dweights, in registers and in shared memory. Their sum is added to `sum` if there is a bias.
DEVICE void differentiate(u32 (&grads)[ROWS / 4], const float (&slopes)[ROWS / 2], const float (&dweights)[ROWS / 2],
                          u32 base, int buffer, float& sum) {
#pragma unroll
  for (int i = 0; i < ROWS / 4; i++) {
    const float low = slopes[2 * i] * dweights[2 * i], high = slopes[2 * i + 1] * dweights[2 * i + 1];
    grads[i] = pack(low, high);
    if (BIAS) sum += low + high;
  }
  store_grads(grads, base, buffer, 0, ROWS / 16);
}

// Both of these at once, for PART sixteenths of the queries from `part`.
DEVICE void activate_part(u32 (&weights)[ROWS / 4], u32 (&grads)[ROWS / 4], const float (&scores)[ROWS / 2],
                          const float (&dweights)[ROWS / 2], u32 base, int buffer, int part, Affine affine,
                          float& sum) {
#pragma unroll
  for (int i = 4 * part; i < 4 * (part + PART); i++) {
    float w[2], g[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float half = affine(scores[2 * i + e]);
      const float gate = 1.0f + tanh_fast(half);
      w[e] = half * gate;
      g[e] = fmaf(w[e], 2.0f - gate, gate) * dweights[2 * i + e];
    }
    weights[i] = pack(w[0], w[1]);
    grads[i] = pack(g[0], g[1]);
    if (BIAS) sum += g[0] + g[1];
  }
  store_grads(grads, base, buffer, part, PART);
}

// A warpgroup's sums, and the work on one tile after the other. Tiles count from the last: tile `i` of a block lies in
// stage i % STAGES and its score gradients go to buffer i % BUFFERS. Little else is kept in registers: there are few.
struct Consumer {
  u32 base;
  Range tiles;
  float half_alpha;
  u32 bias_base;
  bias::Strip<false> strip = {};
  bias::Gradient bias_gradient = {};
  float dk[KEY_COLUMNS / 2] = {}, dv[VALUE_COLUMNS / 2] = {};

  DEVICE void start(float (&scores)[ROWS / 2], int i) {
    barrier_wait(base + FULL + 8 * (i % STAGES), i / STAGES & 1);
    start_scores(scores, base, base + KEY + key_group() * 64 * QK::ROW_BYTES, i % STAGES);
  }
  DEVICE void start_out(float (&dweights)[ROWS / 2], int i) {
    start_dweights(dweights, base, base + VALUE + key_group() * 64 * V::ROW_BYTES, i % STAGES);
  }
  DEVICE bool hides(int i) const { return i == 0 || tiles.last - i < tiles.first + KEYS / ROWS; }
  DEVICE void hide_scores(float (&scores)[ROWS / 2], int i, float scale) {
    const int key_row = tiles.first * ROWS + 64 * key_group() + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    hide(scores, key_row, (tiles.last - i) * ROWS, load_shared(base + LENGTH), scale);
  }

  // Bias. `row`: the block's first key within the history; `records`: of the history's first tile.
  DEVICE void init_bias(const int* records, int row) {
    const int warp = uniform(threadIdx.x / 32);
    row += 64 * key_group() + warp % 4 * 16;
    strip = {bias_base + TABLES, bias_base + WARP_ROWS + (warp - 4) * bias::ROWS_BYTES};
    strip.init(records + row / bias::EVENTS * bias::RECORD, row);
    bias_gradient.sums = bias_base + SUMS + (warp - 4) * SUM_BYTES;
    bias_gradient.clear();
  }
  DEVICE u32 record(int i) const { return bias_base + RECORDS + i % STAGES * RECORD_BYTES; }
  DEVICE bias::Buckets buckets(int i) const { return BIAS ? strip.buckets(record(i)) : bias::Buckets{0}; }

  // Half of the bias of a strip that has one. It is read before the scores are there.
  DEVICE float constant(bias::Buckets buckets) const { return BIAS ? strip.constant(buckets) : 0.0f; }

  // Add the bias and hide scores where that is needed. Returns what is left to do before the activation.
  DEVICE Affine prepare(float (&scores)[ROWS / 2], bias::Buckets buckets, float constant, int i) {
    if constexpr (!BIAS) {
      if (hides(i)) hide_scores(scores, i, half_alpha);
      return {half_alpha, 0.0f};
    } else {
      bias_gradient.begin(buckets);
      if (!hides(i) && buckets.constant()) return {half_alpha, constant};
      strip.add<0>(scores, buckets, record(i), half_alpha);
      if (hides(i)) hide_scores(scores, i, 1.0f);
      return {1.0f, 0.0f};
    }
  }
  // `grads`: score gradients of tile i.
  DEVICE void finish_tile(const u32 (&grads)[ROWS / 4], bias::Buckets buckets, int i) {
    if constexpr (BIAS)
      if (!buckets.constant()) bias_gradient.finish(strip, grads, buckets, record(i));
  }
  // Write the block's share: half of the sum over the warps, because slopes are doubled. With wide heads both warpgroups
  // have the same sums.
  DEVICE void finish_bias(float* share) {
    bias_gradient.flush();
    named_sync(3, 256);
    const int slot = threadIdx.x - 128;
    if (slot >= 2 * bias::SLOTS) return;
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < (SPLIT ? 4 : 8); warp++)
      sum += bias::Gradient::total(bias_base + SUMS + warp * SUM_BYTES, slot);
    share[slot] = 0.5f * sum;
  }

  DEVICE void wait_buffer(int i) { barrier_wait(base + GRAD_EMPTY + 8 * (i % BUFFERS), i / BUFFERS & 1 ^ 1); }
  DEVICE void publish(int i) {
    fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(base + GRAD_FULL + 8 * (i % BUFFERS));
  }
  DEVICE void release(int i) {
    if (threadIdx.x % (BIAS ? 32 : 128) == 0) barrier_arrive(base + EMPTY + 8 * (i % STAGES));
  }

  // One tile; unless it is the last, the next tile's scores are started in `next`. Groups under way on entry: the
  // products of `scores`, then those of the tile before for dk (an empty group for the first tile).
  template <bool LAST>
  DEVICE void step(int i, float (&scores)[ROWS / 2], float (&next)[ROWS / 2], u32 (&weights)[ROWS / 4],
                   u32 (&grads)[ROWS / 4]) {
    float dweights[ROWS / 2];
    start_out(dweights, i);
    const bias::Buckets buckets = this->buckets(i);
    const float constant = this->constant(buckets);
    wgmma_wait<2>();
    pin(scores);
    pin(weights);
    activate(weights, scores, prepare(scores, buckets, constant, i));
    start_dv(dv, weights, base, i % STAGES);
    if constexpr (!LAST) start(next, i + 1);
    wgmma_wait<LAST ? 1 : 2>();
    pin(dweights);
    pin(grads);
    if (i > 0) release(i - 1);
    wait_buffer(i);
    differentiate(grads, scores, dweights, base, i % BUFFERS, bias_gradient.running);
    publish(i);
    start_dk(dk, grads, base, i % STAGES);
    finish_tile(grads, buckets, i);
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
      const bias::Buckets buckets = this->buckets(i);
      const float constant = this->constant(buckets);
      wgmma_wait<0>();
      pin(scores);
      pin(dweights);
      const Affine affine = prepare(scores, buckets, constant, i);
      wait_buffer(i);
#pragma unroll
      for (int part = 0; part < ROWS / 16; part += PART) {
        activate_part(weights, grads, scores, dweights, base, i % BUFFERS, part, affine, bias_gradient.running);
        const u32 query = own_columns<DQK>(base + QUERY + i % STAGES * QUERY_BYTES);
        const u32 out = own_columns<DV>(base + OUT + i % STAGES * OUT_BYTES);
        wgmma_fence();
#pragma unroll
        for (int c = part; c < part + PART; c++) {
          Product<VALUE_COLUMNS>::registers<1>(dv, weights + 4 * c, V::row_step(out, c), 1);
          Product<KEY_COLUMNS>::registers<1>(dk, grads + 4 * c, QK::row_step(query, c), 1);
        }
      }
      wgmma_commit();
      publish(i);
      if (i == tiles.last - tiles.first) {
        finish_tile(grads, buckets, i);
        break;
      }
      start(scores, i + 1);
      finish_tile(grads, buckets, i);
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

// Strides: elements from one row of a gradient to the next.
DEVICE void consume(Consumer& consumer, u16* dk, u16* dv, i64 dk_stride, i64 dv_stride, Work work, int head) {
  const float half_alpha = consumer.half_alpha;
  named_sync(threadIdx.x / 128, 128);  // LENGTH is written
  barrier_wait(consumer.base + KEY_FULL, 0);
  if constexpr (BACKWARD_DOUBLE)
    consumer.run_double();
  else
    consumer.run_single();
  const int row = work.row + 64 * key_group();
  const i64 first = work.start + row;
  store_rows(consumer.dk, dk + first * dk_stride + head * DQK + column_group() * KEY_COLUMNS, dk_stride,
             work.length - row, half_alpha, half_alpha);
  store_rows(consumer.dv, dv + first * dv_stride + head * DV + column_group() * VALUE_COLUMNS, dv_stride,
             work.length - row, 1.0f, 1.0f);
}

}  // namespace backward
