// Verdicts, and how an exchange is put onto the streams.
#include <algorithm>
#include <stdexcept>

#include "queue.h"

namespace freescale::transport {
namespace {

// FNV-1a: a number that two ranks can compare in the place of a name.
Word code_of(const std::string& name) {
  Word code = 2166136261u;
  for (const unsigned char letter : name) code = (code ^ letter) * 16777619u;
  return code;
}

// What a counter of chunks is at after the last of `slots`.
std::optional<Word> after_last(const std::vector<Ring::Slot>& slots) {
  return slots.empty() ? std::nullopt : std::optional<Word>(slots.back().number + 1);
}

}  // namespace

bool Verdict::give(const std::string& why) {
  std::lock_guard lock(mutex_);
  if (given_) return false;
  why_ = why;
  given_.store(true, std::memory_order_release);
  return true;
}

std::string Verdict::why() const {
  std::lock_guard lock(mutex_);
  return why_;
}

void Verdict::check() const {
  if (given()) throw std::runtime_error(why());
}

bool Exchange::done() {
  const bool passed = out_.mark->passed() && in_.mark->passed();
  verdict_->check();  // after the marks: a failure lets streams run on, and is told before it does
  return passed;
}

void Exchange::hold(Handle caller) {
  verdict_->check();
  out_.mark->hold(caller);
  in_.mark->hold(caller);
}

// Polls with growing patience; false when `deadline` comes first.
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

// After a failure the watch thread lets the streams run out. Until they have, the caller's tensors are still in use.
void Exchange::run_out() {
  wait_until(after_seconds(10), [this] { return out_.mark->passed() && in_.mark->passed(); });
}

void Exchange::block(double seconds) {
  const auto passed = [this] { return (out_.mark->passed() && in_.mark->passed()) || verdict_->given(); };
  const bool in_time = wait_until(after_seconds(seconds), passed);
  if (verdict_->given()) run_out();
  verdict_->check();
  if (!in_time) throw std::runtime_error(name_ + ": not done within " + std::to_string(seconds) + " s");
}

// Memory for the present place of a ring, the first time it is used.
void Queue::place_ring(Lane& lane, int peer, bool out) {
  const Ring& ring = out ? lane.out : lane.in;
  std::optional<std::size_t>& level = out ? lane.out_level : lane.in_level;
  if (level == ring.level()) return;
  level = ring.level();
  const Ring::Place place = ring.place();
  if (!out && peer == rank_) return;  // the same memory as the way out
  const bool mine = out || lane.remote;
  const std::size_t start = out           ? layout_.outgoing_offset(peer)
                            : lane.remote ? layout_.incoming_offset(peer)
                                          : lane.view.outgoing_offset(rank_);
  (mine ? own_ : *lane.peer).commit(start + place.offset, place.bytes);
  pin((out ? lane.out_ring : lane.in_ring) + place.offset, place.bytes);
  if (out) report_.ring_bytes += place.bytes;
}

void Queue::claim(const Exchange& exchange, Word number, Word kind) {
  for (int peer = 0; peer < world(); ++peer)
    lanes_[peer].ours->announce(number, {kind, exchange.out_.bytes[peer], exchange.in_.bytes[peer]});
  for (int peer = 0; peer < world(); ++peer)
    if (const auto problem = disagreement(peer, number)) throw std::runtime_error(exchange.name_ + ": " + *problem);
}

std::optional<std::string> Queue::disagreement(int peer, Word number) const {
  const auto ours = lanes_[peer].ours->find(number), theirs = lanes_[peer].theirs->find(number);
  if (!ours || !theirs) return std::nullopt;
  const auto differ = [](std::uint64_t a, std::uint64_t b) {
    return a != b && a != Claim::unknown && b != Claim::unknown;
  };
  const std::string me = "rank " + std::to_string(rank_), other = "rank " + std::to_string(peer);
  if (ours->kind != theirs->kind)
    return other + " calls another collective than " + me + "; all ranks must issue them in the same order";
  if (differ(ours->sends, theirs->receives))
    return me + " sends " + std::to_string(ours->sends) + " bytes to " + other + ", which expects " +
           std::to_string(theirs->receives);
  if (differ(ours->receives, theirs->sends))
    return me + " expects " + std::to_string(ours->receives) + " bytes from " + other + ", which sends " +
           std::to_string(theirs->sends);
  return std::nullopt;
}

std::shared_ptr<Exchange> Queue::exchange(const std::string& kind, const std::vector<Part>& out,
                                          const std::vector<Part>& in, Handle caller) {
  if (static_cast<int>(out.size()) != world() || static_cast<int>(in.size()) != world())
    throw std::invalid_argument(kind + ": one part per rank is needed");
  std::lock_guard lock(mutex_);
  verdict_->check();
  if (!connected_ || closed_) throw std::runtime_error(kind + ": the queue is not open");
  {
    std::vector<std::shared_ptr<Exchange>> finished;
    std::lock_guard watched(watch_mutex_);
    finished.swap(finished_);
  }
  auto exchange = std::make_shared<Exchange>();
  const Word number = static_cast<Word>(exchanges_);
  exchange->name_ = kind + " #" + std::to_string(exchanges_++);
  exchange->verdict_ = verdict_;
  for (const auto& part : out) exchange->out_.bytes.push_back(part.bytes);
  for (const auto& part : in) exchange->in_.bytes.push_back(part.bytes);
  try {
    claim(*exchange, number, code_of(kind));
    Pieces sends(world()), takes(world());
    for (int peer = 0; peer < world(); ++peer) {
      Lane& lane = lanes_[peer];
      sends[peer] = lane.out.take(out[peer].bytes);
      takes[peer] = lane.in.take(in[peer].bytes);
      if (!sends[peer].empty()) place_ring(lane, peer, true);
      if (!takes[peer].empty()) place_ring(lane, peer, false);
      exchange->room_.push_back(sends[peer].empty() ? std::nullopt : sends[peer].back().free);
      exchange->out_.last.push_back(after_last(sends[peer]));
      exchange->in_.last.push_back(after_last(takes[peer]));
      report_.sent_bytes += out[peer].bytes;
      report_.received_bytes += in[peer].bytes;
      if (!lane.remote || sends[peer].empty()) continue;
      std::lock_guard pending(pending_mutex_);
      for (const auto& slot : sends[peer])
        lane.pending.push_back({slot.number, number, code_of(kind), 0, out[peer].bytes, slot.offset, slot.bytes});
    }
    const auto ready = device_->mark(caller);
    out_->after(ready);
    in_->after(ready);
    enqueue(out, in, sends, takes);
    exchange->out_.mark = out_->mark();
    exchange->in_.mark = in_->mark();
  } catch (const std::exception& error) {
    fail("rank " + std::to_string(rank_) + ": " + error.what());  // half an exchange is on its way: nobody can go on
    exchange->out_.mark = out_->mark();
    exchange->in_.mark = in_->mark();
    exchange->run_out();
    throw std::runtime_error(verdict_->why());
  }
  ++report_.exchanges;
  {
    std::lock_guard watched(watch_mutex_);
    if (outstanding_.empty()) oldest_since_ = Clock::now();
    outstanding_.push_back(exchange);
  }
  watch_wakes_.notify_one();
  wake_senders();
  return exchange;
}

void Queue::enqueue(const std::vector<Part>& out, const std::vector<Part>& in, const Pieces& sends,
                    const Pieces& takes) {
  std::size_t rounds = 0, window = settings_.high ? SIZE_MAX : 1;
  for (int peer = 0; peer < world(); ++peer) {
    rounds = std::max({rounds, sends[peer].size(), takes[peer].size()});
    window = std::min(window, std::max<std::size_t>(1, lanes_[peer].out.slots() / 2));
  }
  for (std::size_t first = 0; first < rounds; first += window) {
    const std::size_t last = std::min(rounds, first + window);
    send_rounds(out, sends, first, last);
    take_rounds(in, takes, first, last);
  }
}

// The slot was used before: wait for the peer to have emptied it, unless it has by now. A wait that is over takes the
// stream time all the same.
void Queue::await_slot(const Lane& lane, const Ring::Slot& slot) {
  if (slot.free && !reached(load(lane.freed), *slot.free)) out_->await(lane.freed, *slot.free);
}

// A high-priority queue first waits for all slots of these rounds, then copies behind a closed gate: whatever it waits
// for must not hold up a low-priority transfer, which the peer may need first.
void Queue::send_rounds(const std::vector<Part>& out, const Pieces& sends, std::size_t first, std::size_t last) {
  const auto gates = settings_.high ? std::vector<Gate>() : device_->gates();
  std::lock_guard issue(device_->issue);
  if (gate_) {
    for (int peer = 0; peer < world(); ++peer) {
      const std::size_t end = std::min(last, sends[peer].size());
      if (end > first) await_slot(lanes_[peer], sends[peer][end - 1]);
    }
    out_->write(gate_->out, 0);
  }
  for (std::size_t round = first; round < last; ++round)
    for (int distance = 0; distance < world(); ++distance) {
      const int peer = (rank_ + distance) % world();
      if (round >= sends[peer].size()) continue;
      Lane& lane = lanes_[peer];
      const Ring::Slot& slot = sends[peer][round];
      if (!gate_) await_slot(lane, slot);
      for (const Gate& gate : gates) out_->await(gate.out, 1);
      const Address source = out[peer].address + round * sends[peer][0].bytes;
      if (settings_.early_flag) out_->write(lane.sent, slot.number + 1);
      out_->to_host(lane.out_ring + slot.offset, source, slot.bytes);
      out_->write(lane.sent, slot.number + 1);
    }
  if (gate_) out_->write(gate_->out, 1);
}

void Queue::take_rounds(const std::vector<Part>& in, const Pieces& takes, std::size_t first, std::size_t last) {
  const auto gates = settings_.high ? std::vector<Gate>() : device_->gates();
  std::lock_guard issue(device_->issue);
  for (std::size_t round = first; round < last; ++round) {
    if (gate_) {
      for (int peer = 0; peer < world(); ++peer)
        if (round < takes[peer].size()) in_->await(lanes_[peer].arrived, takes[peer][round].number + 1);
      in_->write(gate_->in, 0);
    }
    for (int distance = 0; distance < world(); ++distance) {
      const int peer = (rank_ - distance + world()) % world();
      if (round >= takes[peer].size()) continue;
      Lane& lane = lanes_[peer];
      const Ring::Slot& slot = takes[peer][round];
      if (!gate_) in_->await(lane.arrived, slot.number + 1);
      for (const Gate& gate : gates) in_->await(gate.in, 1);
      const Address target = in[peer].address + round * takes[peer][0].bytes;
      in_->from_host(target, lane.in_ring + slot.offset, slot.bytes);
      in_->write(lane.received, slot.number + 1);
    }
    if (gate_) in_->write(gate_->in, 1);
  }
}

}  // namespace freescale::transport
