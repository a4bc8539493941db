// Backward: one block computes the gradients of 128 keys and values of one head (64 if heads are wide) and their share
// of the query gradients.
//
// Warpgroups 1 and 2 compute the transposed scores and the gradient of the weights, sum dk and dv in registers, and
// leave the score gradients in shared memory. Warpgroup 0 multiplies those by the keys and adds the product to dq; its
// first thread also copies tiles of queries and output gradients to shared memory, last tile first.
//
// Sums of dq have a fixed order: the key tiles of a history add in ascending order. Counters say whose turn it is at
// TURN tiles of queries. A block waits for blocks with smaller tickets only, so it never waits for a block that has not
// started.
#pragma once
#include "backward_keys.cuh"
#include "backward_queries.cuh"

static_assert(backward::SHARED == BACKWARD_SHARED, "config.py counts other bytes");

extern "C" __global__ void __launch_bounds__(backward::THREADS, 1)
    hstu_backward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k,
                  const __grid_constant__ TensorMap v, const __grid_constant__ TensorMap dout,
                  const __grid_constant__ Bias bias, float* dq, u16* dk, u16* dv, i64 dk_stride, i64 dv_stride,
                  int* counters, const Work* schedule, int heads, float half_alpha) {
  using namespace backward;
  extern __shared__ char memory[];
  const u32 base = (shared_address(memory) + 1023) & ~1023u;
  int* ticket = (int*)(memory + (base - shared_address(memory)) + TICKET);
  if (threadIdx.x == 0) {
    *ticket = atomicAdd(counters, 1);
    barrier_init(base + KEY_FULL, 1);
    for (int i = 0; i < STAGES; i++) {
      barrier_init(base + FULL + 8 * i, 1);
      barrier_init(base + EMPTY + 8 * i, BIAS ? 8 : 2);
    }
    for (int i = 0; i < BUFFERS; i++) {
      barrier_init(base + GRAD_FULL + 8 * i, 8);
      barrier_init(base + GRAD_EMPTY + 8 * i, 1);
    }
    barrier_init_fence();
  }
  u32 bias_base = 0;
#if BIAS
  __shared__ alignas(16) char bias_memory[BIAS_BYTES];
  bias_base = shared_address(bias_memory);
  bias::load_tables(bias_base + TABLES, bias, threadIdx.x, THREADS);
#endif
  __syncthreads();
  const int number = uniform(*ticket), head = number % heads;
  Work work = schedule[number / heads];
  work = {uniform(work.start), uniform(work.length), uniform(work.row), uniform(work.tile)};
  if (work.length == 0) {
    if (BIAS && threadIdx.x < 2 * bias::SLOTS) bias.shares[(i64)number * (2 * bias::SLOTS) + threadIdx.x] = 0.0f;
    return;
  }
  if (threadIdx.x % 128 == 0) ticket[1] = work.length;  // LENGTH; each warpgroup writes it for itself
  const int* records = bias.records + (i64)work.tile * bias::RECORD;
  const Source source = {&q, &dout, records, bias_base, head, work.start};
  const Range tiles = {work.row / ROWS, (work.length - 1) / ROWS};
  if (threadIdx.x < 128) {
    registers_decrease<REGISTERS_DQ>();
    if (threadIdx.x == 0) {
      barrier_expect(base + KEY_FULL, KEY_BYTES + VALUE_BYTES);
      QK::load<KEYS>(base + KEY, &k, base + KEY_FULL, head, work.start + work.row);
      V::load<KEYS>(base + VALUE, &v, base + KEY_FULL, head, work.start + work.row);
      for (int i = 0; i < STAGES && tiles.last - i >= tiles.first; i++)
        load_tile(base, source, i, tiles.last - i);
    }
    __syncwarp();
    sum_queries(base, source, dq, counters + 1, work, head, heads, tiles);
  } else {
    registers_increase<REGISTERS_MAIN>();
    Consumer consumer{base, tiles, half_alpha, bias_base};
    if constexpr (BIAS) consumer.init_bias(records, work.row);
    consume(consumer, dk, dv, dk_stride, dv_stride, work, head);
    if constexpr (BIAS) consumer.finish_bias(bias.shares + (i64)number * (2 * bias::SLOTS));
  }
}
