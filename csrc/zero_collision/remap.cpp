#include "remap.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <tuple>

#include "hash.h"

namespace freescale {
namespace {

constexpr std::int64_t kMissing = -1;  // no slot

// Where an id probes: `usable` slots from `base` on, first the one at `home`.
struct Probe {
  std::int64_t base;
  std::int64_t home;
  std::int64_t usable;

  std::int64_t slot(std::int64_t step) const {
    const std::int64_t at = home + step;
    return base + (at < usable ? at : at - usable);
  }
};

class Prober {
 public:
  explicit Prober(const ZeroCollisionLayout& layout)
      : layout_(layout),
        usable_(layout.bucket_size - layout.reserved),
        limit_(std::min(layout.max_probe, layout.bucket_size - layout.reserved)) {}

  std::int64_t limit() const { return limit_; }

  Probe probe(std::int64_t id, std::uint64_t hash) const {
    return {base(id), static_cast<std::int64_t>(hash % static_cast<std::uint64_t>(usable_)), usable_};
  }

  std::int64_t reserved_slot(std::int64_t id, std::uint64_t hash) const {
    return base(id) + usable_ + static_cast<std::int64_t>(hash % static_cast<std::uint64_t>(layout_.reserved));
  }

  // The slot that holds `id`. An empty slot ends the search: ids take the first empty slot, and slots never empty.
  std::int64_t hit(const std::int64_t* identities, std::int64_t id, const Probe& probe) const {
    for (std::int64_t step = 0; step < limit_; ++step) {
      const std::int64_t slot = probe.slot(step);
      if (identities[slot] == id) return slot;
      if (identities[slot] == kEmpty) return kMissing;
    }
    return kMissing;
  }

 private:
  std::int64_t base(std::int64_t id) const {
    return (id % layout_.buckets - layout_.first_bucket) * layout_.bucket_size;  // the first slot of the id's bucket
  }

  const ZeroCollisionLayout& layout_;
  const std::int64_t usable_;
  const std::int64_t limit_;
};

// Throws unless all ids belong to buckets that are held here.
void check(const ZeroCollisionLayout& layout, Indices ids) {
  for (std::int64_t i = 0; i < ids.size; ++i) {
    const std::int64_t id = ids[i];
    if (id < 0) throw std::invalid_argument("ids: " + std::to_string(id) + " is negative");
    const std::int64_t bucket = id % layout.buckets;
    if (bucket < layout.first_bucket || bucket >= layout.first_bucket + layout.held)
      throw std::invalid_argument("ids: " + std::to_string(id) + " belongs to bucket " + std::to_string(bucket) +
                                  ", which is not held here");
  }
}

// The slot that a missing id takes: an empty one, or one whose id has expired; kMissing if there is none.
std::int64_t free_slot(const Prober& prober, const Probe& probe, EvictionPolicy policy, std::int64_t ttl,
                       std::int64_t step, const std::int64_t* identities, const std::int32_t* seen) {
  std::int64_t oldest = kMissing;
  for (std::int64_t tried = 0; tried < prober.limit(); ++tried) {
    const std::int64_t slot = probe.slot(tried);
    if (identities[slot] == kEmpty) return slot;
    if (policy == EvictionPolicy::kNone || seen[slot] + ttl >= step) continue;
    if (policy == EvictionPolicy::kTtl) return slot;
    if (oldest == kMissing || seen[slot] < seen[oldest]) oldest = slot;
  }
  return oldest;
}

struct MissingId {
  std::uint64_t hash;
  std::int64_t id;
  std::int64_t position;  // in the batch

  bool operator<(const MissingId& other) const {
    return std::tie(id, position) < std::tie(other.id, other.position);
  }
};

}  // namespace

InsertedIds insert(const ZeroCollisionLayout& layout, EvictionPolicy policy, std::int64_t ttl, std::int64_t step,
                   std::int64_t* identities, std::int32_t* seen, Indices ids, std::int64_t* slots) {
  check(layout, ids);
  const Prober prober(layout);
  InsertedIds result;
  std::vector<MissingId> missing;
  const auto touch = [&](std::int64_t slot, std::int64_t id) {
    result.touched.push_back(slot);
    result.old_ids.push_back(identities[slot]);
    result.old_seen.push_back(seen[slot]);
    identities[slot] = id;
    seen[slot] = static_cast<std::int32_t>(step);
  };

  for (std::int64_t i = 0; i < ids.size; ++i) {  // all hits first: no id of the batch can take the slot of another
    const std::uint64_t hash = hash_id(ids[i]);
    const std::int64_t slot = prober.hit(identities, ids[i], prober.probe(ids[i], hash));
    slots[i] = slot;
    if (slot == kMissing)
      missing.push_back({hash, ids[i], i});
    else if (seen[slot] != step)
      touch(slot, ids[i]);
  }
  result.hits = static_cast<std::int64_t>(result.touched.size());

  std::sort(missing.begin(), missing.end());
  for (std::size_t i = 0; i < missing.size(); ++i) {
    const MissingId& one = missing[i];
    if (i > 0 && missing[i - 1].id == one.id) {
      slots[one.position] = slots[missing[i - 1].position];
      continue;
    }
    const std::int64_t slot =
        free_slot(prober, prober.probe(one.id, one.hash), policy, ttl, step, identities, seen);
    if (slot == kMissing) {
      slots[one.position] = prober.reserved_slot(one.id, one.hash);
      result.fallback.push_back(slots[one.position]);
    } else {
      slots[one.position] = slot;
      touch(slot, one.id);
    }
  }
  return result;
}

std::int64_t find(const ZeroCollisionLayout& layout, const std::int64_t* identities, Indices ids, std::int64_t* slots) {
  check(layout, ids);
  const Prober prober(layout);
  std::int64_t missing = 0;
  for (std::int64_t i = 0; i < ids.size; ++i) {
    const std::uint64_t hash = hash_id(ids[i]);
    slots[i] = prober.hit(identities, ids[i], prober.probe(ids[i], hash));
    if (slots[i] != kMissing) continue;
    slots[i] = prober.reserved_slot(ids[i], hash);
    ++missing;
  }
  return missing;
}

}  // namespace freescale
