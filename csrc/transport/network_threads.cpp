// The threads that carry chunks and counters between hosts. A sending thread hands the chunks that our streams have
// written to the network. A receiving thread writes what arrives into the rings that our streams read. TCP copies
// the bytes with the CPU, so the peers are divided among several pairs of threads, one thread for each direction.
#include "backoff.h"
#include "queue.h"

#include <sys/prctl.h>

#include <algorithm>
#include <stdexcept>

namespace freescale::transport {

// How long a thread without work waits. Whoever has work for it wakes it earlier.
static constexpr std::chrono::microseconds idle_wait = std::chrono::seconds(1);

// How long a chunk may lie in a ring until a thread notices it. A host that is far ahead of its device issues an exchange
// long before the device writes the chunks, and then the whole exchange waits for the slowest look of any rank.
static constexpr std::chrono::microseconds longest_delay{200}, longest_urgent_delay{50};

class Queue::Callbacks : public WireCallbacks {
 public:
  explicit Callbacks(Queue& queue) : queue_(queue) {}

  std::byte* destination(int peer, const Chunk& chunk) override {
    Channel& channel = queue_.channels_[peer];
    const std::size_t region = channel.in.region();
    if (chunk.number != channel.next_arrival || chunk.offset > region || chunk.bytes > region - chunk.offset)
      throw std::runtime_error("rank " + std::to_string(peer) + " sent chunk " + std::to_string(chunk.number) +
                               ", but chunk " + std::to_string(channel.next_arrival) + " was expected");
    return channel.in_ring + chunk.offset;
  }

  void announced(int peer, const Chunk& chunk) override {
    compare(peer, chunk);
    store(&queue_.channels_[peer].last_heard, chunk.exchange + 1);
  }

  void expected(int peer, const Chunk& chunk) override {
    const auto known = queue_.channels_[peer].theirs->find(chunk.exchange);
    compare(peer, chunk.exchange, {chunk.kind, known ? known->sends : Announcement::unknown, chunk.total});
    for (auto& threads : queue_.network_) threads->sender->permit(peer, chunk.exchange + 1);
  }

  void arrived(int peer, const Chunk& chunk) override {
    compare(peer, chunk);
    Channel& channel = queue_.channels_[peer];
    const Word count = ++channel.next_arrival;
    if (!reached(load(channel.arrived), count)) store(channel.arrived, count);  // the network may have written it already
    store(&channel.last_heard, chunk.exchange + 1);
    queue_.wake_sender_of(peer);  // it will report that our stream has copied the chunk out
  }

  void credited(int peer, Word received) override { store(queue_.channels_[peer].freed, received); }
  void aborted(int, const std::string& why) override { queue_.fail(why); }
  void lost(int peer, const std::string& why) override {
    std::lock_guard lock(queue_.pending_mutex_);
    auto& lost = queue_.channels_[peer].lost;
    if (!lost) lost = why;  // the sender and the receiver both report it
  }

 private:
  // Compares what the peer says about an exchange with what this rank has announced, if it has.
  void compare(int peer, const Chunk& chunk) {
    const auto known = queue_.channels_[peer].theirs->find(chunk.exchange);
    compare(peer, chunk.exchange, {chunk.kind, chunk.total, known ? known->receives : Announcement::unknown});
  }
  void compare(int peer, Word exchange, const Announcement& said) {
    queue_.channels_[peer].theirs->announce(exchange, said);
    if (const auto problem = queue_.mismatch(peer, exchange))
      throw std::runtime_error("exchange #" + std::to_string(exchange) + ": " + *problem);
  }

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
    threads->receive_thread = std::thread([this, &threads = *threads] { receive_chunks(threads); });
  }
}

// The sending threads stop first, because peers wait for our last counters or for the reason of our failure. A thread
// that the system could not start is not joinable.
void Queue::stop_network_threads() {
  stop_sending_ = true;
  wake_network_threads();
  for (auto& threads : network_)
    if (threads->send_thread.joinable()) threads->send_thread.join();
  stop_receiving_ = true;
  for (auto& threads : network_) threads->receiver->wake();
  for (auto& threads : network_)
    if (threads->receive_thread.joinable()) threads->receive_thread.join();
}

void Queue::wake_network_threads() {
  for (auto& threads : network_) {
    threads->sleeps = false;
    threads->sender->wake();
    if (failure_->is_set()) threads->receiver->wake();
  }
}

// Wakes the thread only if it sleeps, because a wake-up is a call of the system.
void Queue::wake_sender_of(int peer) {
  for (auto& threads : network_)
    if (std::find(threads->peers.begin(), threads->peers.end(), peer) != threads->peers.end() &&
        threads->sleeps.exchange(false))
      threads->sender->wake();
}

// Hands the next chunk for this peer to the network, if our stream has written it. Returns whether it did.
bool Queue::post_next_chunk(NetworkThreads& threads, int peer) {
  Channel& channel = channels_[peer];
  if (channel.posted == load(channel.sent) || !threads.sender->ready(peer)) return false;
  if (!settings_.high_priority && device_->urgent_senders != 0) return false;
  Chunk chunk;
  {
    std::lock_guard lock(pending_mutex_);
    chunk = channel.pending.front();
    channel.pending.pop_front();
  }
  threads.sender->put(peer, chunk, channel.out_ring + chunk.offset);
  ++channel.posted;
  return true;
}

// Announces exchanges without bytes for this peer. An announcement does not overtake the chunks of earlier exchanges, so
// that the peer hears of all exchanges in order.
bool Queue::send_notices(NetworkThreads& threads, int peer) {
  std::vector<Chunk> ready;
  {
    Channel& channel = channels_[peer];
    std::lock_guard lock(pending_mutex_);
    while (!channel.notices.empty() &&
           (channel.pending.empty() || reached(channel.pending.front().exchange, channel.notices.front().exchange))) {
      ready.push_back(channel.notices.front());
      channel.notices.pop_front();
    }
  }
  for (const Chunk& notice : ready) threads.sender->announce(peer, notice);
  return !ready.empty();
}

// Says which exchanges this rank has issued, and how many bytes it expects.
bool Queue::send_expectations(NetworkThreads& threads, int peer) {
  std::deque<Chunk> ready;
  {
    std::lock_guard lock(pending_mutex_);
    ready.swap(channels_[peer].expectations);
  }
  for (const Chunk& expectation : ready) threads.sender->expect(peer, expectation);
  return !ready.empty();
}

// Sends what is ready: announcements, chunks and credits. The peers take turns, one chunk each.
Queue::SendState Queue::send_ready(NetworkThreads& threads) {
  SendState state;
  bool urgent = false;
  threads.turn = (threads.turn + 1) % threads.peers.size();
  const auto by_turn = [&](std::size_t i) { return threads.peers[(threads.turn + i) % threads.peers.size()]; };
  for (bool posted = true; posted;) {
    posted = false;
    for (std::size_t i = 0; i < threads.peers.size(); ++i) posted |= post_next_chunk(threads, by_turn(i));
    state.progress |= posted;
  }
  for (const int peer : threads.peers) {
    Channel& channel = channels_[peer];
    state.progress |= send_notices(threads, peer);
    state.progress |= send_expectations(threads, peer);
    const Word received = load(channel.received);
    if (received != channel.credited) {
      threads.sender->credit(peer, channel.credited = received);
      state.progress = true;
    }
    urgent |= channel.posted != load(channel.sent) || !threads.sender->idle(peer);
    std::lock_guard lock(pending_mutex_);
    // Words that a device will write: it copies a chunk into our ring, or one that has arrived out of it.
    state.waits |= !channel.lost && (!channel.pending.empty() || channel.credited != load(channel.arrived));
  }
  if (settings_.high_priority && urgent != threads.urgent) {
    threads.urgent = urgent;
    device_->urgent_senders += urgent ? 1 : -1;
  }
  return state;
}

void Queue::send_chunks(NetworkThreads& threads) {
  // By default Linux may end a wait 50 us late, to save power. That is longer than the interval between two looks.
  if (settings_.high_priority) prctl(PR_SET_TIMERSLACK, 1UL);
  Callbacks callbacks(*this);
  Backoff backoff(settings_.high_priority ? longest_urgent_delay : longest_delay);
  bool abort_sent = false, waited = false;
  const auto send_abort = [&] {
    if (abort_sent) return;
    threads.sender->hold(false);
    threads.sender->abort(failure_->reason());
    abort_sent = true;
    ++stopped_threads_;
  };
  while (!stop_sending_) {
    try {
      if (failure_->is_set()) {
        send_abort();
        threads.sender->progress(callbacks, std::chrono::milliseconds(20));
        continue;
      }
      threads.sleeps = true;  // before the look, so that whoever changes something after it wakes this thread
      SendState state = send_ready(threads);
      // A chunk of a low-priority queue may be large, so the rest of it waits for urgent chunks, too.
      const bool held = !settings_.high_priority && device_->urgent_senders != 0;
      threads.sender->hold(held);
      state.waits |= held;  // nobody wakes this thread when the urgent chunks have been sent
      if (state.progress || !waited) backoff.restart();
      waited = state.waits;
      if (state.waits) threads.sleeps = false;
      threads.sender->progress(callbacks, state.waits || state.progress ? backoff.interval() : idle_wait);
    } catch (const std::exception& error) {
      fail("rank " + std::to_string(rank_) + ": " + error.what());
    }
  }
  try {
    threads.sender->hold(false);
    const auto idle = [&threads](int peer) { return threads.sender->idle(peer); };
    for (int i = 0; i < 1000; ++i) {
      if (failure_->is_set())
        send_abort();
      else
        send_ready(threads);
      if (std::all_of(threads.peers.begin(), threads.peers.end(), idle)) break;
      threads.sender->progress(callbacks, std::chrono::milliseconds(1));
    }
  } catch (const std::exception&) {
    // The peers will notice that the connection closes.
  }
  if (threads.urgent) --device_->urgent_senders;
}

void Queue::receive_chunks(NetworkThreads& threads) {
  Callbacks callbacks(*this);
  bool discards = false;
  while (!stop_receiving_) {
    try {
      if (failure_->is_set() && !discards) {
        threads.receiver->discard();
        discards = true;
        ++stopped_threads_;
      }
      threads.receiver->progress(callbacks, idle_wait);
    } catch (const std::exception& error) {
      fail("rank " + std::to_string(rank_) + ": " + error.what());
    }
  }
}

}  // namespace freescale::transport
