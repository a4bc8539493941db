// Zero-collision ids: gives every 64-bit id a row of its own, by probing for a free one, and takes rows back from ids
// that have not been seen for long.
//
// The rows of a table form `buckets` equal buckets. An id belongs to bucket `id % buckets`. It probes at most
// `max_probe` slots of its bucket, from its home slot `hash % (bucket_size - reserved)` on, in a circle. The last
// `reserved` slots of a bucket are never assigned: ids that find no slot share them.
//
// The result of `insert` depends on the set of ids, not on their order or number. Buckets do not depend on each other,
// so it does not matter either which ranks hold them. lightning_freescale/embedding/zero_collision/reference.py is the
// same in plain Python.
#pragma once

#include <cstdint>
#include <vector>

#include "../jagged/jagged.h"

namespace freescale {

constexpr std::int64_t kEmpty = -1;  // the identity of a slot without an id

// The part of a table that this rank holds: `held` buckets from `first_bucket` on. Slots are numbered within it.
struct ZeroCollisionLayout {
  std::int64_t buckets;
  std::int64_t first_bucket;
  std::int64_t held;
  std::int64_t bucket_size;
  std::int64_t reserved;
  std::int64_t max_probe;
};

enum class EvictionPolicy : int { kNone = 0, kTtl = 1, kLru = 2 };

// What `insert` has changed, so that it can be undone, and what it could not place.
struct InsertedIds {
  std::vector<std::int64_t> touched;       // slots of the batch: those that were hit, and after them the fresh ones
  std::vector<std::int64_t> old_ids;       // their identities before
  std::vector<std::int32_t> old_seen;      // the steps at which they were seen before
  std::int64_t hits = 0;                   // how many of them were hit
  std::vector<std::int64_t> fallback;      // the reserved slot of each distinct id that found no slot
};

// Look up ids, and insert those that are missing. `slots` gets the slot of each id. `identities` and `seen` have
// held * bucket_size entries.
InsertedIds insert(const ZeroCollisionLayout& layout, EvictionPolicy policy, std::int64_t ttl, std::int64_t step,
                   std::int64_t* identities, std::int32_t* seen, Indices ids, std::int64_t* slots);

// Look up ids without any change. A missing id gets a reserved slot. Returns how many are missing.
std::int64_t find(const ZeroCollisionLayout& layout, const std::int64_t* identities, Indices ids, std::int64_t* slots);

}  // namespace freescale
