// The threads that carry chunks and counters between hosts. A sending thread hands the chunks that our streams have
// written to the network. A receiving thread writes what arrives into the rings that our streams read. TCP copies the
// bytes on the CPU, so the peers are divided among several pairs of threads, one thread for each direction.
#include "queue.h"

#include <algorithm>
#include <stdexcept>

namespace freescale::transport {

// How long a thread without work waits. Whoever has work for it wakes it earlier.
static constexpr std::chrono::microseconds idle_wait = std::chrono::seconds(1);

class Queue::Callbacks : public WireCallbacks {
 public:
  explicit Callbacks(Queue& queue) : queue_(queue) {}

  std::byte* destination(int peer, const Chunk& chunk) override {
    Channel& channel = queue_.channels_[peer];
    const std::size_t region = channel.in.region();
    if (chunk.number != channel.next_arrival || chunk.offset > region || chunk.bytes > region - chunk.offset)
      throw std::runtime_error("rank " + std::to_string(peer) + " sent chunk " + std::to_string(chunk.number) +
                               ", but chunk " + std::to_string(channel.next_arrival) + " was expected");
    if (chunk.offset + chunk.bytes > channel.committed) {  // the first use of this part of the ring
      queue_.own_segment_.commit(queue_.layout_.incoming_offset(peer) + chunk.offset, chunk.bytes);
      channel.committed = chunk.offset + chunk.bytes;
    }
    return channel.in_ring + chunk.offset;
  }

  void arrived(int peer, const Chunk& chunk) override {
    Channel& channel = queue_.channels_[peer];
    channel.theirs->announce(chunk.exchange, {chunk.kind, chunk.total, Announcement::unknown});
    if (const auto problem = queue_.mismatch(peer, chunk.exchange))
      throw std::runtime_error("exchange #" + std::to_string(chunk.exchange) + ": " + *problem);
    ++channel.next_arrival;
    store(channel.arrived, chunk.number + 1);
  }

  void credited(int peer, Word received) override { store(queue_.channels_[peer].freed, received); }
  void aborted(int, const std::string& why) override { queue_.fail(why); }
  void lost(int peer, const std::string& why) override {
    std::lock_guard lock(queue_.pending_mutex_);
    auto& lost = queue_.channels_[peer].lost;
    if (!lost) lost = why;  // the sender and the receiver both report it
  }

 private:
  Queue& queue_;
};

void Queue::start_network_threads() {
  std::vector<int> peers;
  for (int peer = 0; peer < world(); ++peer)
    if (channels_[peer].remote) peers.push_back(peer);
  const std::size_t count = std::min(peers.size(), settings_.network_threads);
  for (std::size_t first = 0; first < count; ++first) {
    auto threads = std::make_unique<NetworkThreads>();
    for (std::size_t i = first; i < peers.size(); i += count) threads->peers.push_back(peers[i]);
    threads->sender = wire_->sender(threads->peers);
    threads->receiver = wire_->receiver(threads->peers);
    network_.push_back(std::move(threads));
  }
  for (auto& threads : network_) {
    threads->send_thread = std::thread([this, &threads = *threads] { send_chunks(threads); });
    threads->receive_thread = std::thread([this, &threads = *threads] { receive_chunks(*threads.receiver); });
  }
}

// The sending threads stop first, because peers wait for our last counters or for the reason of our failure. A thread
// that the system could not start is not joinable.
void Queue::stop_network_threads() {
  stop_sending_ = true;
  wake_senders();
  for (auto& threads : network_)
    if (threads->send_thread.joinable()) threads->send_thread.join();
  stop_receiving_ = true;
  for (auto& threads : network_) threads->receiver->wake();
  for (auto& threads : network_)
    if (threads->receive_thread.joinable()) threads->receive_thread.join();
}

void Queue::wake_senders() {
  for (auto& threads : network_) threads->sender->wake();
}

// Hands the chunks that are ready to the network. Returns whether chunks or credits are still outstanding.
bool Queue::send_ready(NetworkThreads& threads) {
  bool busy = false, urgent = false;
  for (const int peer : threads.peers) {
    Channel& channel = channels_[peer];
    const Word ready = load(channel.sent);
    while (channel.posted != ready && threads.sender->idle(peer) &&
           (settings_.high_priority || device_->urgent_senders == 0)) {
      Chunk chunk;
      {
        std::lock_guard lock(pending_mutex_);
        chunk = channel.pending.front();
        channel.pending.pop_front();
      }
      threads.sender->put(peer, chunk, channel.out_ring + chunk.offset);
      ++channel.posted;
    }
    const Word received = load(channel.received);
    if (received != channel.credited) threads.sender->credit(peer, channel.credited = received);
    urgent |= channel.posted != ready || !threads.sender->idle(peer);
    std::lock_guard lock(pending_mutex_);
    busy |= !channel.lost &&
            (!channel.pending.empty() || !threads.sender->idle(peer) || load(channel.freed) != channel.posted);
  }
  if (settings_.high_priority && urgent != threads.urgent) {
    threads.urgent = urgent;
    device_->urgent_senders += urgent ? 1 : -1;
  }
  return busy;
}

void Queue::send_chunks(NetworkThreads& threads) {
  Callbacks callbacks(*this);
  bool abort_sent = false;
  while (!stop_sending_) {
    try {
      if (failure_->is_set()) {
        if (!abort_sent) threads.sender->abort(failure_->reason());
        abort_sent = true;
        threads.sender->progress(callbacks, std::chrono::milliseconds(1));
        continue;
      }
      bool busy;
      {
        std::lock_guard lock(watchdog_mutex_);
        busy = !outstanding_.empty();  // read first: if it is empty, the counters that send_ready() reads are final
      }
      busy |= send_ready(threads);
      threads.sender->progress(callbacks, busy ? std::chrono::microseconds(20) : idle_wait);
    } catch (const std::exception& error) {
      fail("rank " + std::to_string(rank_) + ": " + error.what());
    }
  }
  try {
    const auto idle = [&threads](int peer) { return threads.sender->idle(peer); };
    for (int i = 0; i < 1000; ++i) {
      if (!abort_sent) send_ready(threads);
      if (std::all_of(threads.peers.begin(), threads.peers.end(), idle)) break;
      threads.sender->progress(callbacks, std::chrono::milliseconds(1));
    }
  } catch (const std::exception&) {
    // The peers will notice that the connection closes.
  }
  if (threads.urgent) --device_->urgent_senders;
}

void Queue::receive_chunks(WireEndpoint& receiver) {
  Callbacks callbacks(*this);
  while (!stop_receiving_) {
    try {
      receiver.progress(callbacks, idle_wait);
    } catch (const std::exception& error) {
      fail("rank " + std::to_string(rank_) + ": " + error.what());
    }
  }
}

}  // namespace freescale::transport
