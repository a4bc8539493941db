// Relative bias: position_bias[bucket(i - j)] + time_bias[bucket(t_i - t_j)], and the gradients of both tables.
//
// A warp works on strips: its 16 rows of scores and 64 columns. Buckets are logarithmic, so all distances of a strip far
// from the diagonal are in one bucket. Such a strip has one constant bias, and both of its gradients are the sum over the
// strip. In other strips few edges between buckets occur: one comparison a score and edge. Near the diagonal, where there
// are many, the bias is read from the table.
#pragma once
#include "ptx.cuh"

struct Bias {
  const float* position;  // tables of `positions` and `times` entries, at most bias::SLOTS each
  const float* time;
  const int* edges;    // [SLOTS], the smallest distance of each bucket
  const int* records;  // [tiles][RECORD], see below
  float* shares;       // [blocks][2 SLOTS], a block's share of twice the gradients of both tables
  int positions, times;
};

namespace bias {

constexpr int SLOTS = 64;
// A record has the times of 64 events of a history, twice the first event's row, the smallest and the largest time.
constexpr int EVENTS = 64, RECORD = EVENTS + 4, RECORD_BYTES = 4 * RECORD;
constexpr int FEW = 3;  // edges of a strip up to which scores are compared with each edge

// Places in shared memory: half of each bias, entries behind the last repeat it; the edges; the last bucket by lane % 4.
constexpr int POSITION = 0, TIME = 4 * SLOTS, EDGES = 8 * SLOTS, LIMITS = 12 * SLOTS, TABLE_BYTES = LIMITS + 16;
// What a warp knows of its rows: their times; by lane % 4 what to compare the bounds of a record with. Registers are few.
constexpr int BOUNDS = 64, ROWS_BYTES = BOUNDS + 16;

DEVICE void load_tables(u32 tables, const Bias& bias, int thread, int threads) {
  for (int i = thread; i < SLOTS; i += threads) {
    store_shared(tables + POSITION + 4 * i, 0.5f * bias.position[min(i, bias.positions - 1)]);
    store_shared(tables + TIME + 4 * i, 0.5f * bias.time[min(i, bias.times - 1)]);
    store_shared(tables + EDGES + 4 * i, bias.edges[i]);
  }
  if (thread < 4) store_shared(tables + LIMITS + 4 * thread, thread < 2 ? bias.positions - 1 : bias.times - 1);
}

// Byte offset into a table of 4-byte entries of the bucket of distance x - 1 >= 0, plus ORIGIN. Same bits as buckets.py.
constexpr int ORIGIN = 4 * (0x3f800000 >> 22);
DEVICE u32 entry(float x) { return __float_as_uint(x) >> 20 & ~3u; }

// The buckets of a strip as four bytes: lowest and highest of the positions, then of the times.
struct Buckets {
  u32 code;
  DEVICE int position_low() const { return code & 255; }
  DEVICE int position_high() const { return code >> 8 & 255; }
  DEVICE int time_low() const { return code >> 16 & 255; }
  DEVICE int time_high() const { return code >> 24; }
  DEVICE bool constant() const { return ((code ^ code >> 8) & 0x00ff00ff) == 0; }
};

// A thread's part of a strip: two rows, eight apart. QUERIES: the rows are queries and the columns keys, otherwise the
// other way round. Element i of the thread is in row i % 4 / 2 and column i / 4 * 8 + i % 2.
template <bool QUERIES>
struct Strip {
  static constexpr int COUNT = 32, SIGN = QUERIES ? 1 : -1;
  u32 tables, rows;  // in shared memory

  // `row`: the warp's first row within the history; `record`: of the 64 events that the row belongs to.
  DEVICE void init(const int* record, int row) const {
    const int lane = threadIdx.x % 32, time = record[row % EVENTS + lane % 16];
    const int least = __reduce_min_sync(~0u, time), most = __reduce_max_sync(~0u, time);
    if (lane < 16) store_shared(rows + 4 * lane, time);
    if (lane == 0) {
      store_shared(rows + BOUNDS, QUERIES ? row - EVENTS + 1 : row + 15);
      store_shared(rows + BOUNDS + 4, QUERIES ? row + 15 : row - EVENTS + 1);
      store_shared(rows + BOUNDS + 8, QUERIES ? least : most);
      store_shared(rows + BOUNDS + 12, QUERIES ? most : least);
    }
    __syncwarp();
  }
  DEVICE int upper() const { return load_shared(rows + threadIdx.x % 32 / 4 * 4); }
  DEVICE int lower() const { return load_shared(rows + threadIdx.x % 32 / 4 * 4 + 32); }

  // All distances of the strip lie in these buckets.
  DEVICE Buckets buckets(u32 record) const {
    const int part = threadIdx.x % 4, other = QUERIES && part >= 2 ? part ^ 1 : part;
    const int bound = load_shared(rows + BOUNDS + 4 * part);
    const int distance = SIGN * (bound - load_shared(record + 4 * (EVENTS + other)));
    const u32 found = (entry(__int2float_rn(max(distance, 0)) + 1.0f) - ORIGIN) >> 2;
    return {__reduce_or_sync(~0u, min(found, (u32)load_shared(tables + LIMITS + 4 * part)) << 8 * part)};
  }

  // Half of the bias of a strip that has one.
  DEVICE float constant(Buckets b) const { return half_position(b.position_low()) + half_time(b.time_low()); }
  DEVICE float half_position(int bucket) const { return load_shared_float(tables + POSITION + 4 * bucket); }
  DEVICE float half_time(int bucket) const { return load_shared_float(tables + TIME + 4 * bucket); }
  DEVICE int edge(int bucket) const { return load_shared(tables + EDGES + 4 * bucket); }

  // Distance of element i in events, minus that of element 0 of the thread, which is distance(record).
  DEVICE static constexpr int offset(int i) { return SIGN * ((i % 4 / 2) * 8 - (i / 4 * 8 + i % 2)); }
  DEVICE int distance(u32 record) const {
    const int row = load_shared(rows + BOUNDS) + (QUERIES ? EVENTS - 1 : -15);
    const int first = row + threadIdx.x % 32 / 4 - 2 * (threadIdx.x % 4);
    return SIGN * (first - load_shared(record + 4 * EVENTS));
  }
  // Times of columns 8 j + 2 (lane % 4) and the next.
  DEVICE static int2 column_times(u32 record, int j) { return load_shared2(record + 32 * j + threadIdx.x % 4 * 8); }

  // What the times of columns are compared with: those of the upper and of the lower row, `edge` away.
  DEVICE int2 time_bounds(int edge) const {
    return QUERIES ? make_int2(subtract_saturated(upper(), edge), subtract_saturated(lower(), edge))
                   : make_int2(add_saturated(upper(), edge), add_saturated(lower(), edge));
  }
  // Whether the time between row and column of element i is at least that edge; `t`: column_times(record, i / 4).
  DEVICE static bool time_reached(int i, int2 t, int2 bounds) {
    const int column = i % 2 ? t.y : t.x, bound = i % 4 / 2 ? bounds.y : bounds.x;
    return QUERIES ? column <= bound : column >= bound;
  }

  DEVICE float read_time(int from, int to) const {
    const float x = __int2float_rn(max(to - from, 0)) + 1.0f;
    return load_shared_float(tables + TIME - ORIGIN + entry(x));
  }

  // scores[FROM + i] := half_alpha * scores[FROM + i] + half of the bias of element i.
  template <int FROM, int ALL>
  DEVICE void add(float (&scores)[ALL], Buckets b, u32 record, float half_alpha) const {
    const bool few_positions = b.position_high() - b.position_low() <= FEW;
    const bool few_times = b.time_high() - b.time_low() <= FEW;
    const float start = (few_positions ? half_position(b.position_low()) : 0.0f) +
                        (few_times ? half_time(b.time_low()) : 0.0f);
#pragma unroll
    for (int i = 0; i < COUNT; i++) scores[FROM + i] = fmaf(scores[FROM + i], half_alpha, start);
    if (few_positions) {
#pragma unroll 1
      for (int k = b.position_low() + 1; k <= b.position_high(); k++) {
        const float step = half_position(k) - half_position(k - 1);
        const int rest = edge(k) - distance(record);
#pragma unroll
        for (int i = 0; i < COUNT; i++)
          if (offset(i) >= rest) scores[FROM + i] += step;
      }
    } else {
      const float nearest = __int2float_rn(distance(record) + 1);  // exact, as are sums with an offset
#pragma unroll
      for (int i = 0; i < COUNT; i++)
        scores[FROM + i] += load_shared_float(tables + POSITION - ORIGIN + entry(fmaxf(nearest + offset(i), 1.0f)));
    }
    if (few_times) {
#pragma unroll 1
      for (int k = b.time_low() + 1; k <= b.time_high(); k++) {
        const float step = half_time(k) - half_time(k - 1);
        const int2 bounds = time_bounds(edge(k));
#pragma unroll
        for (int j = 0; j < COUNT / 4; j++) {
          const int2 t = column_times(record, j);
#pragma unroll
          for (int i = 4 * j; i < 4 * j + 4; i++)
            if (time_reached(i, t, bounds)) scores[FROM + i] += step;
        }
      }
    } else {
      const int top = upper(), bottom = lower();
#pragma unroll
      for (int j = 0; j < COUNT / 4; j++) {
        const int2 t = column_times(record, j);
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int row = e / 2 ? bottom : top, column = e % 2 ? t.y : t.x;
          scores[FROM + 4 * j + e] += QUERIES ? read_time(column, row) : read_time(row, column);
        }
      }
    }
  }
};

DEVICE float warp_sum(float x, int from = 16) {
#pragma unroll
  for (int lane = from; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
  return x;
}

// Add over the lanes that differ in bit BIT alone: `low` to lanes without the bit, `high` to lanes with it.
template <int BIT>
DEVICE float fold(float low, float high) {
  const bool upper = threadIdx.x & BIT;
  return (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, BIT);
}

// A warp's share of the gradients: sums of score gradients in shared memory, by bucket and by edge. A strip is added to its
// lowest buckets, and what lies at or behind an edge to that edge: the sum over a bucket is what was added to it, plus what
// was added to the edge before it, minus what was added to the edge behind it. Strips in a row that have the same lowest
// buckets are summed in a register first.
struct Gradient {
  static constexpr int BY_BUCKET = 0, BY_EDGE = 8 * SLOTS, BYTES = 16 * SLOTS;  // positions, then times
  u32 sums;
  float running = 0.0f;
  u32 code = 0;  // buckets of `running`

  DEVICE void clear() {
    for (int i = threadIdx.x % 32; i < BYTES / 4; i += 32) store_shared(sums + 4 * i, 0.0f);
    __syncwarp();
  }
  DEVICE void add_shared(int place, float x) const { store_shared(sums + place, load_shared_float(sums + place) + x); }

  DEVICE void flush() {
    const float total = warp_sum(running);
    const int lane = threadIdx.x % 32, time = 4 * (SLOTS + Buckets{code}.time_low());
    if (lane < 2) add_shared(BY_BUCKET + (lane ? time : 4 * Buckets{code}.position_low()), total);
    running = 0.0f;
  }

  // Before the score gradients of a strip are added to `running`.
  DEVICE void begin(Buckets b) {
    if (((b.code ^ code) & 0x00ff00ff) == 0) return;
    flush();
    code = b.code;
  }

  // After that: add to the edges. `grads`: the score gradients, rounded, two a register.
  DEVICE void finish(const Strip<false>& strip, const u32 (&grads)[16], Buckets b, u32 record) const {
    const int positions = b.position_high() - b.position_low(), times = b.time_high() - b.time_low();
    if (positions <= 1 && times <= 1) {
      if (times == 0)
        add_edges<1, 0>(strip, grads, b, b.position_high(), 0, record);
      else if (positions == 0)
        add_edges<0, 1>(strip, grads, b, 0, b.time_high(), record);
      else
        add_edges<1, 1>(strip, grads, b, b.position_high(), b.time_high(), record);
      return;
    }
#pragma unroll 1
    for (int k = b.position_low() + 1; k <= b.position_high(); k += 4)
      add_edges<4, 0>(strip, grads, b, k, 0, record);
#pragma unroll 1
    for (int k = b.time_low() + 1; k <= b.time_high(); k += 4) add_edges<0, 4>(strip, grads, b, 0, k, record);
  }

  // Add to P edges of the positions and T edges of the times, from these edges on to the last one of the strip.
  template <int P, int T>
  DEVICE void add_edges(const Strip<false>& strip, const u32 (&grads)[16], Buckets b, int position, int time,
                        u32 record) const {
    constexpr int NEVER = 0x7fffffff;  // more than any distance between rows and columns, and than any time
    int rest[P + 1];
    int2 bounds[T + 1];
    float parts[P + T] = {}, more[P + T] = {};  // of even and odd elements: neighbours do not wait for each other
    const int distance = P ? strip.distance(record) : 0;
#pragma unroll
    for (int k = 0; k < P; k++)
      rest[k] = position + k <= b.position_high() ? strip.edge(position + k) - distance : NEVER;
#pragma unroll
    for (int k = 0; k < T; k++)
      bounds[k] = time + k <= b.time_high() ? strip.time_bounds(strip.edge(time + k)) : make_int2(NEVER, NEVER);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int2 t = T ? strip.column_times(record, j) : int2{};
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; i++) {
        const float2 pair = unpack(grads[i / 2]);
        const float grad = i % 2 ? pair.y : pair.x;
#pragma unroll
        for (int k = 0; k < P; k++)
          if (strip.offset(i) >= rest[k]) (i % 2 ? more : parts)[k] += grad;
#pragma unroll
        for (int k = 0; k < T; k++)
          if (strip.time_reached(i, t, bounds[k])) (i % 2 ? more : parts)[P + k] += grad;
      }
    }
#pragma unroll
    for (int k = 0; k < P + T; k++) parts[k] += more[k];
    const int lane = threadIdx.x % 32;
    if constexpr (P + T == 1) {
      const float total = warp_sum(parts[0]);
      if (lane == 0) add_shared(BY_EDGE + 4 * (T ? SLOTS + time : position), total);
    } else if constexpr (P + T == 2) {
      const float total = warp_sum(fold<16>(parts[0], parts[1]), 8);
      if (lane % 16 == 0) add_shared(BY_EDGE + 4 * (lane ? SLOTS + time : position), total);
    } else {
      const float total = warp_sum(fold<8>(fold<16>(parts[0], parts[2]), fold<16>(parts[1], parts[3])), 4);
      const int edge = (P ? position : time) + lane / 16 * 2 + lane / 8 % 2;
      if (lane % 8 == 0 && edge < SLOTS) add_shared(BY_EDGE + 4 * (T ? SLOTS + edge : edge), total);
    }
    __syncwarp();
  }

  // The warp's sum over bucket `slot`, from SLOTS on of the times. `sums`: of the warp.
  DEVICE static float total(u32 sums, int slot) {
    const float behind = slot % SLOTS == SLOTS - 1 ? 0.0f : load_shared_float(sums + BY_EDGE + 4 * (slot + 1));
    return load_shared_float(sums + BY_BUCKET + 4 * slot) + load_shared_float(sums + BY_EDGE + 4 * slot) - behind;
  }
};

}  // namespace bias
