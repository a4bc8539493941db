// Writes and reads announcements in shared memory without locks.
#include "segment_layout.h"

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

void Announcements::announce(Word exchange, const Announcement& announcement) {
  Entry& entry = entries_[exchange % kept];
  put(entry.valid_for, Word{0});
  put(entry.kind, announcement.kind);
  put(entry.sends, announcement.sends);
  put(entry.receives, announcement.receives);
  // Sequentially consistent: either we see the peer's announcement afterwards, or the peer sees ours.
  put(entry.valid_for, exchange + 1, __ATOMIC_SEQ_CST);
}

std::optional<Announcement> Announcements::find(Word exchange) const {
  const Entry& entry = entries_[exchange % kept];
  if (get(entry.valid_for, __ATOMIC_SEQ_CST) != exchange + 1) return std::nullopt;
  const Announcement announcement{get(entry.kind), get(entry.sends), get(entry.receives)};
  if (get(entry.valid_for) != exchange + 1) return std::nullopt;  // the owner overwrote it while we read it
  return announcement;
}

}  // namespace freescale::transport
