// The blocks of device memory that queues have left behind, because other ranks had them mapped for longer.
#include "device_rings.h"

#include <unistd.h>

#include <list>
#include <mutex>

namespace freescale::transport {
namespace {

struct LeftRings {
  std::unique_ptr<DeviceRings> rings;
  std::function<bool()> in_use;
  pid_t process;  // a forked child has a copy of the list, but not the memory
};

struct LeftBehind {
  std::mutex mutex;
  std::list<LeftRings> all;
};

// Never destroyed: at the end of the process the driver frees the memory, and may be gone already.
LeftBehind& left_behind() {
  static auto* left = new LeftBehind;
  return *left;
}

}  // namespace

void free_when_unused(std::unique_ptr<DeviceRings> rings, std::function<bool()> in_use) {
  {
    std::lock_guard lock(left_behind().mutex);
    left_behind().all.push_back({std::move(rings), std::move(in_use), getpid()});
  }
  free_unused_rings();
}

void free_unused_rings() {
  std::list<LeftRings> unused;
  {
    auto& [mutex, all] = left_behind();
    std::lock_guard lock(mutex);
    for (auto left = all.begin(); left != all.end();) {
      const auto next = std::next(left);
      if (left->process == getpid() && !left->in_use()) unused.splice(unused.end(), all, left);
      left = next;
    }
  }
  for (const auto& left : unused) try {  // without the mutex, because the driver may block
      left.rings->free();
    } catch (const std::exception&) {  // after an error of the device, which ends with its process
    }
}

}  // namespace freescale::transport
