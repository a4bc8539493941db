// The hash of an id: MurmurHash3 of two 64-bit words, the id and 0, as FBGEMM computes it. FBGEMM's read-only lookup
// then finds the ids of our tables.
#pragma once

#include <cstdint>

namespace freescale {

inline std::uint64_t rotate_left(std::uint64_t value, int bits) { return (value << bits) | (value >> (64 - bits)); }

inline std::uint64_t finalize(std::uint64_t h) {
  h ^= h >> 33;
  h *= 0xff51afd7ed558ccdULL;
  h ^= h >> 33;
  h *= 0xc4ceb9fe1a85ec53ULL;
  return h ^ (h >> 33);
}

inline std::uint64_t hash_id(std::int64_t id) {
  std::uint64_t k = static_cast<std::uint64_t>(id) * 0x87c37b91114253d5ULL;
  k = rotate_left(k, 31) * 0x4cf5ad432745937fULL;
  std::uint64_t h1 = rotate_left(k, 27) * 5 + 0x52dce729ULL;
  std::uint64_t h2 = h1 * 5 + 0x38495ab5ULL;
  h1 ^= 16;
  h2 ^= 16;
  h1 += h2;
  h2 += h1;
  h1 = finalize(h1);
  h2 = finalize(h2);
  h1 += h2;
  h2 += h1;
  return h1 ^ h2;
}

}  // namespace freescale
