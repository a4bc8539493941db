// Warpgroup matrix products: D[64, N] += A[64, 16] B[16, N], float32 sums in registers.
//
// Layout of the sums: lane l of warp w holds rows 16 w + l / 4 and 8 below it; D[4 j], D[4 j + 1] are the columns
// 8 j + 2 (l % 4) and the next of the upper row, D[4 j + 2], D[4 j + 3] those of the lower row. Two neighbouring
// groups of eight columns, packed to 16 bit, are the register operand A of another product.
#pragma once
#include "ptx.cuh"

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keep the compiler from moving accesses of registers across this point.
template <int COUNT>
DEVICE void pin(float (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

template <int COUNT>
DEVICE void pin(u32 (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(d[i])::"memory");
}

// Descriptor of an operand in shared memory, whose lower half is `place`. An address advances by adding bytes / 16.
// ROW_BYTES: bytes of a row, 128 or 64, which is also the width of the swizzle.
template <int ROW_BYTES>
DEVICE u64 descriptor(u32 place) {
  constexpr u64 upper = (u64)(8 * ROW_BYTES >> 4 | (ROW_BYTES == 128 ? 1u : 2u) << 30) << 32;
  return upper | place;
}

template <int N>
struct Product;

#define NEW4(i) "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3])
#define NEW8(i) NEW4(i), NEW4(i + 4)
#define NEW16(i) NEW4(i), NEW4(i + 4), NEW4(i + 8), NEW4(i + 12)
#define NEW64(i) NEW16(i), NEW16(i + 16), NEW16(i + 32), NEW16(i + 48)
#define SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SUMS8(i) SUMS4(i), SUMS4(i + 4)
#define SUMS16(i) SUMS4(i), SUMS4(i + 4), SUMS4(i + 8), SUMS4(i + 12)
#define SUMS64(i) SUMS16(i), SUMS16(i + 16), SUMS16(i + 32), SUMS16(i + 48)
#define NAMES_HALF "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES16 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES32 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES48 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES64 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NAMES80 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES96 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define NAMES112 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define NAMES_FOUR NAMES0 ", " NAMES16 ", " NAMES32 ", " NAMES48
#define NAMES_FOUR_MORE NAMES64 ", " NAMES80 ", " NAMES96 ", " NAMES112

template <>
struct Product<16> {
  template <int TRANS_A, int TRANS_B>
  DEVICE static void shared(float (&d)[8], u64 a, u64 b, bool add) {
    if (add)
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n16k16.f32." ELEMENT "." ELEMENT " {" NAMES_HALF
          "}, %8, %9, 1, 1, 1, %10, %11;\n"
          : SUMS8(0)
          : "l"(a), "l"(b), "n"(TRANS_A), "n"(TRANS_B));
    else
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n16k16.f32." ELEMENT "." ELEMENT " {" NAMES_HALF
          "}, %8, %9, 0, 1, 1, %10, %11;\n"
          : NEW8(0)
          : "l"(a), "l"(b), "n"(TRANS_A), "n"(TRANS_B));
  }
  template <int TRANS_B>
  DEVICE static void registers(float (&d)[8], const u32* a, u64 b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32." ELEMENT "." ELEMENT " {" NAMES_HALF
        "}, {%8, %9, %10, %11}, %12, p, 1, 1, %14;}\n"
        : SUMS8(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANS_B));
  }
};

template <>
struct Product<32> {
  template <int TRANS_A, int TRANS_B>
  DEVICE static void shared(float (&d)[16], u64 a, u64 b, bool add) {
    if (add)
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n32k16.f32." ELEMENT "." ELEMENT " {" NAMES0
          "}, %16, %17, 1, 1, 1, %18, %19;\n"
          : SUMS16(0)
          : "l"(a), "l"(b), "n"(TRANS_A), "n"(TRANS_B));
    else
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n32k16.f32." ELEMENT "." ELEMENT " {" NAMES0
          "}, %16, %17, 0, 1, 1, %18, %19;\n"
          : NEW16(0)
          : "l"(a), "l"(b), "n"(TRANS_A), "n"(TRANS_B));
  }
  template <int TRANS_B>
  DEVICE static void registers(float (&d)[16], const u32* a, u64 b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." ELEMENT "." ELEMENT " {" NAMES0
        "}, {%16, %17, %18, %19}, %20, p, 1, 1, %22;}\n"
        : SUMS16(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANS_B));
  }
};

template <>
struct Product<64> {
  template <int TRANS_A, int TRANS_B>
  DEVICE static void shared(float (&d)[32], u64 a, u64 b, bool add) {
    if (add)
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT " {" NAMES0 ", " NAMES16
          "}, %32, %33, 1, 1, 1, %34, %35;\n"
          : SUMS16(0), SUMS16(16)
          : "l"(a), "l"(b), "n"(TRANS_A), "n"(TRANS_B));
    else
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT " {" NAMES0 ", " NAMES16
          "}, %32, %33, 0, 1, 1, %34, %35;\n"
          : NEW16(0), NEW16(16)
          : "l"(a), "l"(b), "n"(TRANS_A), "n"(TRANS_B));
  }
  template <int TRANS_B>
  DEVICE static void registers(float (&d)[32], const u32* a, u64 b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." ELEMENT "." ELEMENT " {" NAMES0 ", " NAMES16
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;}\n"
        : SUMS16(0), SUMS16(16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANS_B));
  }
};

template <>
struct Product<128> {
  template <int TRANS_A, int TRANS_B>
  DEVICE static void shared(float (&d)[64], u64 a, u64 b, bool add) {
    if (add)
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT "." ELEMENT " {" NAMES_FOUR
          "}, %64, %65, 1, 1, 1, %66, %67;\n"
          : SUMS64(0)
          : "l"(a), "l"(b), "n"(TRANS_A), "n"(TRANS_B));
    else
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT "." ELEMENT " {" NAMES_FOUR
          "}, %64, %65, 0, 1, 1, %66, %67;\n"
          : NEW64(0)
          : "l"(a), "l"(b), "n"(TRANS_A), "n"(TRANS_B));
  }
  template <int TRANS_B>
  DEVICE static void registers(float (&d)[64], const u32* a, u64 b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." ELEMENT "." ELEMENT " {" NAMES_FOUR
        "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;}\n"
        : SUMS64(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANS_B));
  }
};

template <>
struct Product<256> {
  template <int TRANS_A, int TRANS_B>
  DEVICE static void shared(float (&d)[128], u64 a, u64 b, bool add) {
    if (add)
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n256k16.f32." ELEMENT "." ELEMENT " {" NAMES_FOUR ", " NAMES_FOUR_MORE
          "}, %128, %129, 1, 1, 1, %130, %131;\n"
          : SUMS64(0), SUMS64(64)
          : "l"(a), "l"(b), "n"(TRANS_A), "n"(TRANS_B));
    else
      asm volatile(
          "wgmma.mma_async.sync.aligned.m64n256k16.f32." ELEMENT "." ELEMENT " {" NAMES_FOUR ", " NAMES_FOUR_MORE
          "}, %128, %129, 0, 1, 1, %130, %131;\n"
          : NEW64(0), NEW64(64)
          : "l"(a), "l"(b), "n"(TRANS_A), "n"(TRANS_B));
  }
  template <int TRANS_B>
  DEVICE static void registers(float (&d)[128], const u32* a, u64 b, int add) {
    asm volatile(
        "{.reg .pred p; setp.ne.b32 p, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." ELEMENT "." ELEMENT " {" NAMES_FOUR ", " NAMES_FOUR_MORE
        "}, {%128, %129, %130, %131}, %132, p, 1, 1, %134;}\n"
        : SUMS64(0), SUMS64(64)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANS_B));
  }
};
