// Thin wrappers of the PTX instructions that the kernels use. No header of the CUDA toolkit is needed.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short u16;  // one bf16 or fp16 value

struct alignas(64) TensorMap {  // same size and alignment as CUtensorMap
  char bytes[128];
};

#define DEVICE __device__ __forceinline__

DEVICE u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// A value that is the same in all lanes, told to the compiler: it can then use uniform registers.
DEVICE int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// mbarrier ----------------------------------------------------------------------------------------------------------

DEVICE void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Named barrier of `threads` threads.
DEVICE void named_sync(u32 id, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Copies ------------------------------------------------------------------------------------------------------------

// Copy one box of a three-dimensional tensor (column, head, row) to shared memory.
DEVICE void tma_load(u32 target, const TensorMap* map, u32 barrier, int column, int head, int row) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(target),
      "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(row)
      : "memory");
}

// Copy `bytes` bytes to shared memory; all three are multiples of 16.
DEVICE void bulk_load(u32 target, const void* source, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(barrier)
               : "memory");
}

// Make ordinary writes to shared memory visible to the tensor cores and to the copy engine.
DEVICE void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void store_matrix(u32 address, const u32* v) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v[0]), "r"(v[1]),
               "r"(v[2]), "r"(v[3])
               : "memory");
}

DEVICE int load_shared(u32 address) {
  int value;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

DEVICE float load_shared_float(u32 address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

DEVICE int2 load_shared2(u32 address) {
  int2 value;
  asm volatile("ld.shared.v2.s32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address) : "memory");
  return value;
}

DEVICE void store_shared(u32 address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}

DEVICE void store_shared(u32 address, int value) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// Global memory -----------------------------------------------------------------------------------------------------

DEVICE int load_acquire(const int* pointer) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}

DEVICE int load_relaxed(const int* pointer) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
  return value;
}

DEVICE void store_relaxed(int* pointer, int value) {
  asm volatile("st.relaxed.gpu.global.s32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

DEVICE void store_release(int* pointer, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(pointer), "r"(value) : "memory");
}

DEVICE void reduce_add(float* pointer, float a, float b, float c, float d) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
}

DEVICE void store4(float* pointer, float a, float b, float c, float d) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "f"(a), "f"(b), "f"(c), "f"(d)
               : "memory");
}

// Arithmetic --------------------------------------------------------------------------------------------------------

DEVICE float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE int add_saturated(int a, int b) {
  int y;
  asm("add.sat.s32 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

DEVICE int subtract_saturated(int a, int b) {
  int y;
  asm("sub.sat.s32 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

#if HALF
#define ELEMENT "f16"
#else
#define ELEMENT "bf16"
#endif

// Two values as one register of two elements, `low` in the lower half.
DEVICE u32 pack(float low, float high) {
  u32 y;
  asm("cvt.rn." ELEMENT "x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

DEVICE float2 unpack(u32 x) {
#if HALF
  float low, high;
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(x));
  return make_float2(low, high);
#else
  return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
#endif
}

template <int COUNT>
DEVICE void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

template <int COUNT>
DEVICE void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
