#include "lane.h"

namespace freescale::transport {
namespace {

template <typename T>
void put(T& field, T value, int order = __ATOMIC_RELEASE) {
  __atomic_store_n(&field, value, order);
}

template <typename T>
T get(const T& field, int order = __ATOMIC_ACQUIRE) {
  return __atomic_load_n(&field, order);
}

}  // namespace

void Ledger::announce(Word exchange, const Claim& claim) {
  Entry& entry = entries_[exchange % kept];
  put(entry.valid_for, Word{0});
  put(entry.kind, claim.kind);
  put(entry.sends, claim.sends);
  put(entry.receives, claim.receives);
  put(entry.valid_for, exchange + 1, __ATOMIC_SEQ_CST);  // ordered with the peer's read of it and ours of the peer's
}

std::optional<Claim> Ledger::find(Word exchange) const {
  const Entry& entry = entries_[exchange % kept];
  if (get(entry.valid_for, __ATOMIC_SEQ_CST) != exchange + 1) return std::nullopt;
  const Claim claim{get(entry.kind), get(entry.sends), get(entry.receives)};
  if (get(entry.valid_for) != exchange + 1) return std::nullopt;  // overwritten while it was read
  return claim;
}

Ring::Ring(std::size_t largest, std::size_t chunk, Word first)
    : chunk_(chunk / page * page), count_(first), first_(first) {
  // Each place is eight times as large as the one before, so together they are little more than the largest.
  constexpr std::size_t smallest = 64 << 10, growth = 8;
  std::vector<std::size_t> sizes{largest};
  while (sizes.back() / growth >= smallest) sizes.push_back(sizes.back() / growth / page * page);
  std::size_t offset = 0;
  for (auto bytes = sizes.rbegin(); bytes != sizes.rend(); offset += *bytes++) places_.push_back({offset, *bytes});
}

std::vector<Ring::Slot> Ring::take(std::size_t bytes) {
  while (place().bytes < bytes && level_ + 1 < places_.size()) {
    ++level_;
    first_ = count_;
  }
  const std::size_t size = slot_bytes(), many = slots();
  std::vector<Slot> taken;
  for (std::size_t done = 0; done < bytes; done += size) {
    const std::uint64_t index = count_ - first_;
    Slot slot{static_cast<Word>(count_), place().offset + index % many * size, std::min(size, bytes - done), {}};
    if (index >= many) slot.free = static_cast<Word>(count_ - many + 1);
    taken.push_back(slot);
    ++count_;
  }
  return taken;
}

}  // namespace freescale::transport
