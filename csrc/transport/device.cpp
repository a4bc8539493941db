// The priority gates of a device.
#include "device.h"

#include <stdexcept>

namespace freescale::transport {

Gate Device::claim_gate() {
  std::lock_guard lock(gate_mutex_);
  for (std::size_t i = 0; i < max_gates; ++i) {
    if (claimed_[i]) continue;
    claimed_[i] = true;
    store(&gate_words_[i].out, 1);
    store(&gate_words_[i].in, 1);
    return {&gate_words_[i].out, &gate_words_[i].in};
  }
  throw std::runtime_error("more than " + std::to_string(max_gates) +
                           " high-priority groups are open on one device; destroy some, or make some low-priority");
}

void Device::release_gate(const Gate& gate) {
  std::lock_guard lock(gate_mutex_);
  for (std::size_t i = 0; i < max_gates; ++i)
    if (&gate_words_[i].out == gate.out) {
      store(gate.out, 1);
      store(gate.in, 1);
      claimed_[i] = false;
    }
}

std::vector<Gate> Device::gates() const {
  std::lock_guard lock(gate_mutex_);
  std::vector<Gate> found;
  for (std::size_t i = 0; i < max_gates; ++i)
    if (claimed_[i]) found.push_back({&gate_words_[i].out, &gate_words_[i].in});
  return found;
}

}  // namespace freescale::transport
