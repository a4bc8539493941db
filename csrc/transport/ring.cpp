// Assigns chunks to the slots of a ring.
#include "ring.h"

#include "segment.h"

namespace freescale::transport {

Ring::Ring(std::size_t largest, std::size_t chunk, std::size_t transfer, Word first)
    : chunk_(chunk / page * page), transfer_(transfer / page * page), count_(first), first_(first) {
  // Each area is eight times as large as the one before, so all of them together are little more than the largest.
  constexpr std::size_t smallest = 64 << 10, growth = 8;
  std::vector<std::size_t> sizes{largest};
  while (sizes.back() / growth >= smallest) sizes.push_back(sizes.back() / growth / page * page);
  std::size_t offset = 0;
  for (auto bytes = sizes.rbegin(); bytes != sizes.rend(); offset += *bytes++) areas_.push_back({offset, *bytes});
}

std::vector<Ring::Slot> Ring::allocate(std::size_t bytes) {
  // With room for two transfers, the second one does not wait until the peer has copied the first one. And a transfer that
  // fits into a chunk fits into a slot.
  const auto is_small = [&] { return area().bytes < bytes || area().bytes / 2 < std::min(transfer_, bytes); };
  while (is_small() && level_ + 1 < areas_.size()) {
    ++level_;
    first_ = count_;
  }
  const std::size_t size = slot_bytes(), many = slots();
  std::vector<Slot> allocated;
  for (std::size_t done = 0; done < bytes; done += size) {
    const std::uint64_t index = count_ - first_;
    Slot slot{static_cast<Word>(count_), area().offset + index % many * size, std::min(size, bytes - done), {}};
    if (index >= many) slot.free_at = static_cast<Word>(count_ - many + 1);
    allocated.push_back(slot);
    ++count_;
  }
  return allocated;
}

}  // namespace freescale::transport
