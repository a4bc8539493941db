// Issues an exchange: announces it to the peers and puts its copies onto the streams.
#include <algorithm>
#include <stdexcept>

#include "backoff.h"
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
  const Backoff backoff;
  for (int spins = 0; !done(); ++spins) {
    if (Clock::now() > deadline) return false;
    if (spins < 64)
      std::this_thread::yield();
    else
      backoff.sleep();
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

// Pins the memory of a ring's present area when it is used for the first time.
void Queue::prepare_ring(Channel& channel, int peer, bool out) {
  const Ring& ring = out ? channel.out : channel.in;
  std::optional<std::size_t>& level = out ? channel.out_level : channel.in_level;
  if (level == ring.level()) return;
  level = ring.level();
  const Ring::Area area = ring.area();
  if (out) report_.ring_bytes += area.bytes;
  if (channel.in_device) return;      // device memory needs no pinning
  if (channel.pinned) return;         // at set-up
  if (!out && peer == rank_) return;  // a rank receives from itself out of its outgoing ring
  pin((out ? channel.out_ring : channel.in_ring) + area.offset, area.bytes);
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
  const Word number = exchange->number_ = static_cast<Word>(exchanges_);
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
      if (!channel.remote) continue;
      std::lock_guard pending(pending_mutex_);
      if (network_.front()->sender->needs_expectations())
        channel.expectations.push_back({0, number, hash_of(kind), 0, in[peer].bytes, 0, 0});
      if (sends[peer].empty()) channel.notices.push_back({0, number, hash_of(kind), 0, 0, 0, 0});
      for (const auto& slot : sends[peer])
        channel.pending.push_back({slot.number, number, hash_of(kind), 0, out[peer].bytes, slot.offset, slot.bytes});
    }
    {  // from here on the watchdog looks after it, also while the issue waits for room on the streams
      std::lock_guard watchdog_lock(watchdog_mutex_);
      if (outstanding_.empty()) oldest_since_ = Clock::now();
      outstanding_.push_back(exchange);
    }
    watchdog_wakes_.notify_one();
    wake_network_threads();
    const auto ready = device_->record(caller);
    out_->wait_event(ready);
    in_->wait_event(ready);
    enqueue(out, in, sends, receives);
    exchange->out_.event = out_->record();
    exchange->in_.event = in_->record();
  } catch (const std::exception& error) {
    // Half of the exchange may be issued, so no rank can continue.
    fail("rank " + std::to_string(rank_) + ": " + error.what());
    publish_final_counters();
    exchange->out_.event = out_->record();
    exchange->in_.event = in_->record();
    exchange->drain();
    throw std::runtime_error(failure_->reason());
  }
  ++report_.exchanges;
  return exchange;
}

// Operations that a device takes without blocking the host are limited, so few chunks are on a stream at a time. A
// chunk needs up to six operations, and a stream of CUDA takes about a thousand.
static constexpr std::size_t most_chunks_on_stream = 160, most_chunks_in_section = 48;

void Queue::enqueue(const std::vector<Buffer>& out, const std::vector<Buffer>& in, const SlotsByRank& sends,
                    const SlotsByRank& receives) {
  std::size_t rounds = 0, window = settings_.high_priority ? SIZE_MAX : 1;
  for (int peer = 0; peer < world(); ++peer) {
    rounds = std::max({rounds, sends[peer].size(), receives[peer].size()});
    window = std::min(window, std::max<std::size_t>(1, channels_[peer].out.slots() / 2));
  }
  for (std::size_t first = 0; first < rounds; first += window) {
    const std::size_t last = std::min(rounds, first + window);
    const auto sent = in_order(sends, first, last, true);
    for (std::size_t done = 0; done < sent.size(); done += most_chunks_in_section)
      send(out, sends, &sent[done], std::min(most_chunks_in_section, sent.size() - done));
    for (std::size_t round = first; round < last; ++round) {
      const auto received = in_order(receives, round, round + 1, false);
      for (std::size_t done = 0; done < received.size(); done += most_chunks_in_section)
        receive(in, receives, &received[done], std::min(most_chunks_in_section, received.size() - done));
    }
  }
}

// The chunks of some rounds in the order in which they are issued: in each round, the nearest peer first, and after all
// others those peers that would make the stream wait. So a late peer holds up the others as little as possible.
std::vector<Queue::ChunkOfRound> Queue::in_order(const SlotsByRank& slots, std::size_t first, std::size_t last,
                                                 bool out) const {
  std::vector<ChunkOfRound> chunks;
  const auto is_ready = [&](const ChunkOfRound& chunk) {
    const Ring::Slot& slot = slots[chunk.peer][chunk.round];
    if (out) return !slot.free_at || reached(load(channels_[chunk.peer].freed), *slot.free_at);
    return reached(load(channels_[chunk.peer].arrived), slot.number + 1);
  };
  for (std::size_t round = first; round < last; ++round) {
    const auto start = static_cast<std::ptrdiff_t>(chunks.size());
    for (int distance = 0; distance < world(); ++distance) {
      const int peer = (rank_ + (out ? distance : world() - distance)) % world();
      if (round < slots[peer].size()) chunks.push_back({peer, round});
    }
    std::stable_partition(chunks.begin() + start, chunks.end(), is_ready);
  }
  return chunks;
}

// Waits until `more` chunks can be issued without blocking inside the device. Nothing that others need is held
// meanwhile: neither the issue mutex, nor Python's lock.
void Queue::wait_for_room(ChunksInFlight& chunks, std::size_t more) {
  const Backoff backoff;
  while (true) {
    while (!chunks.empty() && reached(load(chunks.front().first), chunks.front().second)) chunks.pop_front();
    if (chunks.size() + more <= most_chunks_on_stream) return;
    failure_->throw_if_set();
    backoff.sleep();
  }
}

// Waits until the peer has copied the previous chunk out of the slot. If it has already, no wait is issued, because
// even a wait that ends at once takes time on the stream.
void Queue::wait_for_slot(const Channel& channel, const Ring::Slot& slot) {
  if (slot.free_at && !reached(load(channel.freed), *slot.free_at)) out_->wait_word(channel.freed, *slot.free_at);
}

// A high-priority queue first waits for all slots of these chunks, and closes its gate only while it copies. It must
// not block low-priority transfers while it waits, because the peer may need those first.
void Queue::send(const std::vector<Buffer>& out, const SlotsByRank& sends, const ChunkOfRound* first,
                 std::size_t count) {
  wait_for_room(out_flight_, count);
  const auto gates = settings_.high_priority ? std::vector<Gate>() : device_->gates();
  std::lock_guard issue_lock(device_->issue_mutex);
  if (gate_) {
    for (const auto* chunk = first; chunk != first + count; ++chunk)
      wait_for_slot(channels_[chunk->peer], sends[chunk->peer][chunk->round]);
    out_->write_word(gate_->out, 0);
  }
  for (const auto* chunk = first; chunk != first + count; ++chunk) {
    const auto [peer, round] = *chunk;
    Channel& channel = channels_[peer];
    const Ring::Slot& slot = sends[peer][round];
    if (!gate_) wait_for_slot(channel, slot);
    for (const Gate& gate : gates) out_->wait_word(gate.out, 1);
    const Address source = out[peer].address + round * sends[peer][0].bytes;
    if (settings_.early_flag) out_->write_word(channel.sent, slot.number + 1);
    if (channel.out_device)
      out_->copy_on_device(channel.out_device + slot.offset, source, slot.bytes);
    else
      out_->copy_to_host(channel.out_ring + slot.offset, source, slot.bytes);
    out_->write_word(channel.sent, slot.number + 1);
    store(&channel.issued_out, slot.number + 1);
    out_flight_.emplace_back(channel.sent, slot.number + 1);
  }
  if (gate_) out_->write_word(gate_->out, 1);
}

// A high-priority queue copies each chunk as soon as it is there, and closes its gate only for the last one, when it has
// nothing left to wait for. It frees the slots after the last copy: a word between two copies delays the second one.
void Queue::receive(const std::vector<Buffer>& in, const SlotsByRank& receives, const ChunkOfRound* first,
                    std::size_t count) {
  wait_for_room(in_flight_, count);
  const auto gates = settings_.high_priority ? std::vector<Gate>() : device_->gates();
  const auto free_slot = [&](const ChunkOfRound& chunk) {
    Channel& channel = channels_[chunk.peer];
    const Word freed = receives[chunk.peer][chunk.round].number + 1;
    in_->write_word(channel.received, freed);
    store(&channel.issued_in, freed);
    in_flight_.emplace_back(channel.received, freed);
  };
  std::lock_guard issue_lock(device_->issue_mutex);
  for (const auto* chunk = first; chunk != first + count; ++chunk) {
    const auto [peer, round] = *chunk;
    Channel& channel = channels_[peer];
    const Ring::Slot& slot = receives[peer][round];
    if (!reached(load(channel.arrived), slot.number + 1)) in_->wait_word(channel.arrived, slot.number + 1);
    for (const Gate& gate : gates) in_->wait_word(gate.in, 1);
    if (gate_ && chunk + 1 == first + count) in_->write_word(gate_->in, 0);
    const Address target = in[peer].address + round * receives[peer][0].bytes;
    if (channel.in_device) {
      in_->copy_on_device(target, channel.in_device + slot.offset, slot.bytes);
      in_->fill_with_ones(channel.in_device + slot.offset, slot.bytes);  // see device_rings.h
    } else {
      in_->copy_from_host(target, channel.in_ring + slot.offset, slot.bytes);
    }
    if (!gate_) free_slot(*chunk);
  }
  if (!gate_) return;
  in_->write_word(gate_->in, 1);
  std::for_each(first, first + count, free_slot);
}

}  // namespace freescale::transport
