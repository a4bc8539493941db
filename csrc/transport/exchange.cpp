// Issues an exchange: announces it to the peers and puts its copies onto the streams.
#include <algorithm>
#include <stdexcept>

#include "queue.h"

namespace freescale::transport {
namespace {

// FNV-1a: two ranks compare this number instead of the name.
Word hash_of(const std::string& name) {
  Word hash = 2166136261u;
  for (const unsigned char letter : name) hash = (hash ^ letter) * 16777619u;
  return hash;
}

// The value of a chunk counter after the last of `slots`.
std::optional<Word> after_last(const std::vector<Ring::Slot>& slots) {
  return slots.empty() ? std::nullopt : std::optional<Word>(slots.back().number + 1);
}

}  // namespace

bool Failure::set(const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (is_set_) return false;
  reason_ = reason;
  is_set_.store(true, std::memory_order_release);
  return true;
}

std::string Failure::reason() const {
  std::lock_guard lock(mutex_);
  return reason_;
}

void Failure::throw_if_set() const {
  if (is_set()) throw std::runtime_error(reason());
}

bool Exchange::done() {
  const bool finished = out_.event->done() && in_.event->done();
  // Read after the events: a failure makes the streams skip their waits, but only after it has been set.
  failure_->throw_if_set();
  return finished;
}

void Exchange::block_stream(StreamHandle caller) {
  failure_->throw_if_set();
  out_.event->block_stream(caller);
  in_.event->block_stream(caller);
}

// Polls in growing intervals until `done()`. Returns false if `deadline` comes first.
template <typename Done>
static bool wait_until(Clock::time_point deadline, Done done) {
  for (int spins = 0; !done(); ++spins) {
    if (Clock::now() > deadline) return false;
    if (spins < 64)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(spins < 256 ? 20 : 200));
  }
  return true;
}

// Waits until the streams have finished after a failure. The watchdog ends their waits; until then they use the
// tensors.
void Exchange::drain() {
  wait_until(after_seconds(10), [this] { return out_.event->done() && in_.event->done(); });
}

void Exchange::wait(double seconds) {
  const auto ended = [this] { return (out_.event->done() && in_.event->done()) || failure_->is_set(); };
  const bool in_time = wait_until(after_seconds(seconds), ended);
  if (failure_->is_set()) drain();
  failure_->throw_if_set();
  if (!in_time) throw std::runtime_error(name_ + ": not finished within " + std::to_string(seconds) + " s");
}

// Commits and pins the memory of a ring's present area when it is used for the first time.
void Queue::prepare_ring(Channel& channel, int peer, bool out) {
  const Ring& ring = out ? channel.out : channel.in;
  std::optional<std::size_t>& level = out ? channel.out_level : channel.in_level;
  if (level == ring.level()) return;
  level = ring.level();
  const Ring::Area area = ring.area();
  if (!out && peer == rank_) return;  // a rank receives from itself out of its outgoing ring
  const bool mine = out || channel.remote;
  const std::size_t start = out              ? layout_.outgoing_offset(peer)
                            : channel.remote ? layout_.incoming_offset(peer)
                                             : channel.view.outgoing_offset(rank_);
  (mine ? own_segment_ : *channel.peer).commit(start + area.offset, area.bytes);
  pin((out ? channel.out_ring : channel.in_ring) + area.offset, area.bytes);
  if (out) report_.ring_bytes += area.bytes;
}

void Queue::announce(const Exchange& exchange, Word number, Word kind) {
  for (int peer = 0; peer < world(); ++peer)
    channels_[peer].ours->announce(number, {kind, exchange.out_.bytes[peer], exchange.in_.bytes[peer]});
  for (int peer = 0; peer < world(); ++peer)
    if (const auto problem = mismatch(peer, number)) throw std::runtime_error(exchange.name_ + ": " + *problem);
}

std::optional<std::string> Queue::mismatch(int peer, Word number) const {
  const auto ours = channels_[peer].ours->find(number), theirs = channels_[peer].theirs->find(number);
  if (!ours || !theirs) return std::nullopt;
  const auto differ = [](std::uint64_t a, std::uint64_t b) {
    return a != b && a != Announcement::unknown && b != Announcement::unknown;
  };
  const std::string me = "rank " + std::to_string(rank_), other = "rank " + std::to_string(peer);
  if (ours->kind != theirs->kind)
    return other + " issued another collective than " + me + "; all ranks must issue collectives in the same order";
  if (differ(ours->sends, theirs->receives))
    return me + " sends " + std::to_string(ours->sends) + " bytes to " + other + ", which expects " +
           std::to_string(theirs->receives);
  if (differ(ours->receives, theirs->sends))
    return me + " expects " + std::to_string(ours->receives) + " bytes from " + other + ", which sends " +
           std::to_string(theirs->sends);
  return std::nullopt;
}

std::shared_ptr<Exchange> Queue::exchange(const std::string& kind, const std::vector<Buffer>& out,
                                          const std::vector<Buffer>& in, StreamHandle caller) {
  if (static_cast<int>(out.size()) != world() || static_cast<int>(in.size()) != world())
    throw std::invalid_argument(kind + ": one buffer per rank is needed");
  std::lock_guard lock(mutex_);
  failure_->throw_if_set();
  if (!connected_ || closed_) throw std::runtime_error(kind + ": the group is not connected, or is closed");
  {
    std::vector<std::shared_ptr<Exchange>> finished;
    std::lock_guard watchdog_lock(watchdog_mutex_);
    finished.swap(finished_);
  }
  auto exchange = std::make_shared<Exchange>();
  const Word number = static_cast<Word>(exchanges_);
  exchange->name_ = kind + " #" + std::to_string(exchanges_++);
  exchange->failure_ = failure_;
  for (const auto& part : out) exchange->out_.bytes.push_back(part.bytes);
  for (const auto& part : in) exchange->in_.bytes.push_back(part.bytes);
  try {
    announce(*exchange, number, hash_of(kind));
    SlotsByRank sends(world()), receives(world());
    for (int peer = 0; peer < world(); ++peer) {
      Channel& channel = channels_[peer];
      sends[peer] = channel.out.allocate(out[peer].bytes);
      receives[peer] = channel.in.allocate(in[peer].bytes);
      if (!sends[peer].empty()) prepare_ring(channel, peer, true);
      if (!receives[peer].empty()) prepare_ring(channel, peer, false);
      exchange->slot_free_at_.push_back(sends[peer].empty() ? std::nullopt : sends[peer].back().free_at);
      exchange->out_.last.push_back(after_last(sends[peer]));
      exchange->in_.last.push_back(after_last(receives[peer]));
      report_.sent_bytes += out[peer].bytes;
      report_.received_bytes += in[peer].bytes;
      if (!channel.remote || sends[peer].empty()) continue;
      std::lock_guard pending(pending_mutex_);
      for (const auto& slot : sends[peer])
        channel.pending.push_back({slot.number, number, hash_of(kind), 0, out[peer].bytes, slot.offset, slot.bytes});
    }
    const auto ready = device_->record(caller);
    out_->wait_event(ready);
    in_->wait_event(ready);
    enqueue(out, in, sends, receives);
    exchange->out_.event = out_->record();
    exchange->in_.event = in_->record();
  } catch (const std::exception& error) {
    // Half of the exchange may be issued, so no rank can continue.
    fail("rank " + std::to_string(rank_) + ": " + error.what());
    exchange->out_.event = out_->record();
    exchange->in_.event = in_->record();
    exchange->drain();
    throw std::runtime_error(failure_->reason());
  }
  ++report_.exchanges;
  {
    std::lock_guard watchdog_lock(watchdog_mutex_);
    if (outstanding_.empty()) oldest_since_ = Clock::now();
    outstanding_.push_back(exchange);
  }
  watchdog_wakes_.notify_one();
  wake_senders();
  return exchange;
}

void Queue::enqueue(const std::vector<Buffer>& out, const std::vector<Buffer>& in, const SlotsByRank& sends,
                    const SlotsByRank& receives) {
  std::size_t rounds = 0, window = settings_.high_priority ? SIZE_MAX : 1;
  for (int peer = 0; peer < world(); ++peer) {
    rounds = std::max({rounds, sends[peer].size(), receives[peer].size()});
    window = std::min(window, std::max<std::size_t>(1, channels_[peer].out.slots() / 2));
  }
  for (std::size_t first = 0; first < rounds; first += window) {
    const std::size_t last = std::min(rounds, first + window);
    send_rounds(out, sends, first, last);
    receive_rounds(in, receives, first, last);
  }
}

// Waits until the peer has copied the previous chunk out of the slot. If it has already, no wait is issued, because
// even a wait that ends at once takes time on the stream.
void Queue::wait_for_slot(const Channel& channel, const Ring::Slot& slot) {
  if (slot.free_at && !reached(load(channel.freed), *slot.free_at)) out_->wait_word(channel.freed, *slot.free_at);
}

// A high-priority queue first waits for all slots of these rounds, and closes its gate only while it copies. It must
// not block low-priority transfers while it waits, because the peer may need those first.
void Queue::send_rounds(const std::vector<Buffer>& out, const SlotsByRank& sends, std::size_t first, std::size_t last) {
  const auto gates = settings_.high_priority ? std::vector<Gate>() : device_->gates();
  std::lock_guard issue_lock(device_->issue_mutex);
  if (gate_) {
    for (int peer = 0; peer < world(); ++peer) {
      const std::size_t end = std::min(last, sends[peer].size());
      if (end > first) wait_for_slot(channels_[peer], sends[peer][end - 1]);
    }
    out_->write_word(gate_->out, 0);
  }
  for (std::size_t round = first; round < last; ++round)
    for (int distance = 0; distance < world(); ++distance) {
      const int peer = (rank_ + distance) % world();
      if (round >= sends[peer].size()) continue;
      Channel& channel = channels_[peer];
      const Ring::Slot& slot = sends[peer][round];
      if (!gate_) wait_for_slot(channel, slot);
      for (const Gate& gate : gates) out_->wait_word(gate.out, 1);
      const Address source = out[peer].address + round * sends[peer][0].bytes;
      if (settings_.early_flag) out_->write_word(channel.sent, slot.number + 1);
      out_->copy_to_host(channel.out_ring + slot.offset, source, slot.bytes);
      out_->write_word(channel.sent, slot.number + 1);
    }
  if (gate_) out_->write_word(gate_->out, 1);
}

void Queue::receive_rounds(const std::vector<Buffer>& in, const SlotsByRank& receives, std::size_t first,
                           std::size_t last) {
  const auto gates = settings_.high_priority ? std::vector<Gate>() : device_->gates();
  std::lock_guard issue_lock(device_->issue_mutex);
  for (std::size_t round = first; round < last; ++round) {
    if (gate_) {
      for (int peer = 0; peer < world(); ++peer)
        if (round < receives[peer].size()) in_->wait_word(channels_[peer].arrived, receives[peer][round].number + 1);
      in_->write_word(gate_->in, 0);
    }
    for (int distance = 0; distance < world(); ++distance) {
      const int peer = (rank_ - distance + world()) % world();
      if (round >= receives[peer].size()) continue;
      Channel& channel = channels_[peer];
      const Ring::Slot& slot = receives[peer][round];
      if (!gate_) in_->wait_word(channel.arrived, slot.number + 1);
      for (const Gate& gate : gates) in_->wait_word(gate.in, 1);
      const Address target = in[peer].address + round * receives[peer][0].bytes;
      in_->copy_from_host(target, channel.in_ring + slot.offset, slot.bytes);
      in_->write_word(channel.received, slot.number + 1);
    }
    if (gate_) in_->write_word(gate_->in, 1);
  }
}

}  // namespace freescale::transport
