// Rings in the memory of the receiving device. Each rank allocates one block with a ring for every rank, and maps the
// blocks of the other ranks of its host. A sender copies into its ring in the block of the receiver.
//
// The host cannot write to this memory without the driver, which the watchdog must not call. So the ring never holds old
// bytes: the receiver's stream fills each slot with ones after it has copied the chunk out. A slot then has the bytes of
// its next chunk, or ones, and a wait that ends after a failure finds nothing else.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "device.h"

namespace freescale::transport {

class DeviceRings {
 public:
  // Allocates the block of this rank. Throws with the reason if the device cannot do it.
  DeviceRings(std::shared_ptr<Device> device, int rank, std::size_t bytes)
      : device_(std::move(device)), rank_(rank), bytes_(bytes), own_(device_->allocate_shared(bytes)) {
    blocks_[rank_] = own_;
    try {
      handle_ = device_->handle_of(own_);
    } catch (const std::exception&) {
      free();
      throw;
    }
  }
  DeviceRings(const DeviceRings&) = delete;
  DeviceRings& operator=(const DeviceRings&) = delete;

  std::size_t bytes() const { return bytes_; }
  const std::string& handle() const { return handle_; }  // for map() of the other ranks
  void map(int peer, const std::string& handle) { blocks_[peer] = device_->map_shared(handle, bytes_); }
  // The ring of chunks from rank `source` to rank `target`, one of which is this rank. `region` is its size.
  Address ring(int source, int target, std::size_t region) const { return blocks_.at(target) + source * region; }

  void unmap() {
    for (const auto& [peer, memory] : blocks_)
      if (peer != rank_) device_->unmap_shared(memory);
    blocks_.clear();
  }
  // After every rank that has mapped the block has unmapped it.
  void free() { device_->free_shared(own_); }

 private:
  const std::shared_ptr<Device> device_;
  const int rank_;
  const std::size_t bytes_;
  const Address own_;
  std::string handle_;
  std::map<int, Address> blocks_;  // by rank
};

// Frees the block of `rings` if no other rank has it mapped. `in_use` tells that. Otherwise a later call of
// free_unused_rings() does it, which every set-up and every end of a queue calls.
void free_when_unused(std::unique_ptr<DeviceRings> rings, std::function<bool()> in_use);
void free_unused_rings();

}  // namespace freescale::transport
