// The thread that carries chunks and counters between hosts: what our streams have sent goes onto the wire, what the
// wire brings goes into the ring that our streams take from.
#include "transport_queue.h"

#include <stdexcept>

namespace freescale::transport {

class Queue::Events : public WireEvents {
 public:
  explicit Events(Queue& queue) : queue_(queue) {}

  std::byte* landing(int peer, const Chunk& chunk) override {
    Lane& lane = queue_.lanes_[peer];
    const std::size_t region = lane.in.region();
    if (chunk.number != lane.landed || chunk.offset > region || chunk.bytes > region - chunk.offset)
      throw std::runtime_error("rank " + std::to_string(peer) + " sent chunk " + std::to_string(chunk.number) +
                               " where " + std::to_string(lane.landed) + " was expected");
    queue_.own_.commit(queue_.layout_.incoming_offset(peer) + chunk.offset, chunk.bytes);
    return lane.in_ring + chunk.offset;
  }

  void arrived(int peer, const Chunk& chunk) override {
    Lane& lane = queue_.lanes_[peer];
    lane.theirs->announce(chunk.exchange, {chunk.kind, chunk.total, Claim::unknown});
    if (const auto problem = queue_.disagreement(peer, chunk.exchange)) throw std::runtime_error(*problem);
    ++lane.landed;
    store(lane.arrived, chunk.number + 1);
  }

  void credited(int peer, Word received) override { store(queue_.lanes_[peer].freed, received); }
  void aborted(int, const std::string& why) override { queue_.fail(why); }
  void lost(int peer, const std::string& why) override {
    std::lock_guard lock(queue_.pending_mutex_);
    queue_.lanes_[peer].lost = why;
  }

 private:
  Queue& queue_;
};

// Puts what is ready onto the wire. True while something is under way.
bool Queue::pump_once() {
  bool busy = false, urgent = false;
  for (int peer = 0; peer < world(); ++peer) {
    Lane& lane = lanes_[peer];
    if (!lane.remote) continue;
    const Word ready = load(lane.sent);
    while (lane.posted != ready && wire_->idle(peer) && (settings_.high || device_->urgent == 0)) {
      Chunk chunk;
      {
        std::lock_guard lock(pending_mutex_);
        chunk = lane.pending.front();
        lane.pending.pop_front();
      }
      wire_->put(peer, chunk, lane.out_ring + chunk.offset);
      ++lane.posted;
    }
    const Word taken = load(lane.received);
    if (taken != lane.credited) wire_->credit(peer, lane.credited = taken);
    urgent |= lane.posted != ready || !wire_->idle(peer);
    std::lock_guard lock(pending_mutex_);
    busy |= !lane.lost && (!lane.pending.empty() || !wire_->idle(peer) || load(lane.freed) != lane.posted);
  }
  if (settings_.high && urgent != urgent_) {
    urgent_ = urgent;
    device_->urgent += urgent ? 1 : -1;
  }
  return busy;
}

void Queue::pump() {
  Events events(*this);
  bool told = false;
  while (!stop_pump_) {
    try {
      if (verdict_->given()) {
        if (!told) wire_->abort(verdict_->why());
        told = true;
        wire_->progress(events, std::chrono::milliseconds(1));
        continue;
      }
      bool busy = pump_once();
      {
        std::lock_guard lock(watch_mutex_);
        busy |= !outstanding_.empty();
      }
      wire_->progress(events, std::chrono::microseconds(busy ? 20 : 100'000));
    } catch (const std::exception& error) {
      fail("rank " + std::to_string(rank_) + ": " + error.what());
    }
  }
  // Peers wait for our last counters, or for the reason why we leave.
  try {
    for (int i = 0; i < 1000; ++i) {
      bool idle = true;
      if (!told) pump_once();
      for (int peer = 0; peer < world(); ++peer) idle &= !lanes_[peer].remote || wire_->idle(peer);
      if (idle) break;
      wire_->progress(events, std::chrono::milliseconds(1));
    }
  } catch (const std::exception&) {
    // They will see the connection close.
  }
  if (urgent_) --device_->urgent;
}

}  // namespace freescale::transport
