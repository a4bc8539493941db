// The threads that carry chunks and counters between hosts: what our streams have sent goes onto the wire, what the wire
// brings goes into the ring that our streams take from. A thread that moves bytes over TCP copies them, so each pump has
// one for either direction, and the peers are dealt to several pumps.
#include "queue.h"

#include <algorithm>
#include <stdexcept>

namespace freescale::transport {

static constexpr std::chrono::microseconds rest = std::chrono::seconds(1);  // of a thread that somebody will wake

class Queue::Events : public WireEvents {
 public:
  explicit Events(Queue& queue) : queue_(queue) {}

  std::byte* landing(int peer, const Chunk& chunk) override {
    Lane& lane = queue_.lanes_[peer];
    const std::size_t region = lane.in.region();
    if (chunk.number != lane.landed || chunk.offset > region || chunk.bytes > region - chunk.offset)
      throw std::runtime_error("rank " + std::to_string(peer) + " sent chunk " + std::to_string(chunk.number) +
                               " where " + std::to_string(lane.landed) + " was expected");
    if (chunk.offset + chunk.bytes > lane.committed) {  // the first round of a ring; its places follow each other
      queue_.own_.commit(queue_.layout_.incoming_offset(peer) + chunk.offset, chunk.bytes);
      lane.committed = chunk.offset + chunk.bytes;
    }
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
    auto& lost = queue_.lanes_[peer].lost;
    if (!lost) lost = why;  // sender and receiver both see it
  }

 private:
  Queue& queue_;
};

void Queue::start_pumps() {
  std::vector<int> peers;
  for (int peer = 0; peer < world(); ++peer)
    if (lanes_[peer].remote) peers.push_back(peer);
  const std::size_t count = std::min(peers.size(), settings_.network_threads);
  for (std::size_t first = 0; first < count; ++first) {
    auto pump = std::make_unique<Pump>();
    for (std::size_t i = first; i < peers.size(); i += count) pump->peers.push_back(peers[i]);
    pump->sender = wire_->sender(pump->peers);
    pump->receiver = wire_->receiver(pump->peers);
    pumps_.push_back(std::move(pump));
  }
  for (auto& pump : pumps_) {
    pump->sends = std::thread([this, &pump = *pump] { send_chunks(pump); });
    pump->receives = std::thread([this, &pump = *pump] { receive_chunks(*pump.receiver); });
  }
}

// First those that send: peers wait for our last counters, or for the reason why we leave. One that the system had no
// thread for is not there.
void Queue::stop_pumps() {
  stop_sending_ = true;
  wake_senders();
  for (auto& pump : pumps_)
    if (pump->sends.joinable()) pump->sends.join();
  stop_receiving_ = true;
  for (auto& pump : pumps_) pump->receiver->wake();
  for (auto& pump : pumps_)
    if (pump->receives.joinable()) pump->receives.join();
}

void Queue::wake_senders() {
  for (auto& pump : pumps_) pump->sender->wake();
}

// Puts what is ready onto the wire. True while something is under way.
bool Queue::put_ready(Pump& pump) {
  bool busy = false, urgent = false;
  for (const int peer : pump.peers) {
    Lane& lane = lanes_[peer];
    const Word ready = load(lane.sent);
    while (lane.posted != ready && pump.sender->idle(peer) && (settings_.high || device_->urgent == 0)) {
      Chunk chunk;
      {
        std::lock_guard lock(pending_mutex_);
        chunk = lane.pending.front();
        lane.pending.pop_front();
      }
      pump.sender->put(peer, chunk, lane.out_ring + chunk.offset);
      ++lane.posted;
    }
    const Word taken = load(lane.received);
    if (taken != lane.credited) pump.sender->credit(peer, lane.credited = taken);
    urgent |= lane.posted != ready || !pump.sender->idle(peer);
    std::lock_guard lock(pending_mutex_);
    busy |= !lane.lost && (!lane.pending.empty() || !pump.sender->idle(peer) || load(lane.freed) != lane.posted);
  }
  if (settings_.high && urgent != pump.urgent) {
    pump.urgent = urgent;
    device_->urgent += urgent ? 1 : -1;
  }
  return busy;
}

void Queue::send_chunks(Pump& pump) {
  Events events(*this);
  bool told = false;
  while (!stop_sending_) {
    try {
      if (verdict_->given()) {
        if (!told) pump.sender->abort(verdict_->why());
        told = true;
        pump.sender->progress(events, std::chrono::milliseconds(1));
        continue;
      }
      bool busy;
      {
        std::lock_guard lock(watch_mutex_);
        busy = !outstanding_.empty();  // looked at first: when there is none, the counters below are the last ones
      }
      busy |= put_ready(pump);
      pump.sender->progress(events, busy ? std::chrono::microseconds(20) : rest);
    } catch (const std::exception& error) {
      fail("rank " + std::to_string(rank_) + ": " + error.what());
    }
  }
  try {
    const auto idle = [&pump](int peer) { return pump.sender->idle(peer); };
    for (int i = 0; i < 1000; ++i) {
      if (!told) put_ready(pump);
      if (std::all_of(pump.peers.begin(), pump.peers.end(), idle)) break;
      pump.sender->progress(events, std::chrono::milliseconds(1));
    }
  } catch (const std::exception&) {
    // They will see the connection close.
  }
  if (pump.urgent) --device_->urgent;
}

void Queue::receive_chunks(WireEnd& receiver) {
  Events events(*this);
  while (!stop_receiving_) {
    try {
      receiver.progress(events, rest);
    } catch (const std::exception& error) {
      fail("rank " + std::to_string(rank_) + ": " + error.what());
    }
  }
}

}  // namespace freescale::transport
