// The thread that watches over a queue: it notices exchanges that are late and peers that are gone, tells every rank,
// and lets the streams run out. It takes no part in moving data, and never calls the driver: a copy to memory that is
// not pinned keeps every other thread out of it while that copy waits, perhaps for an exchange that will never end.
#include <algorithm>
#include <cstring>
#include <sstream>

#include "process.h"
#include "queue.h"

namespace freescale::transport {
namespace {

// A peer whose process cannot be looked up counts as dead when its watch thread has been silent for this long.
constexpr std::uint64_t silence_ns = 30'000'000'000;

// Past every chunk that can be under way: what a failed rank sets words to, so that every wait for them passes.
constexpr Word released = 1u << 30;

// Whether a counter that our stream writes has come to `value` by itself: a peer on this host that failed sets it, too.
bool counted(const Word* word, Word value) {
  const Word now = load(word);
  return reached(now, value) && !reached(now, value + released / 2);
}

}  // namespace

void Queue::watch() {
  std::unique_lock lock(watch_mutex_);
  while (!stop_) {
    const auto patience = std::chrono::milliseconds(verdict_->given() ? 1 : outstanding_.empty() ? 200 : 20);
    watch_wakes_.wait_for(lock, patience);
    __atomic_store_n(&layout_.header().heartbeat, now_ns(), __ATOMIC_RELEASE);
    try {
      while (!verdict_->given() && !outstanding_.empty() && through(*outstanding_.front())) {
        finished_.push_back(std::move(outstanding_.front()));
        outstanding_.pop_front();
        oldest_since_ = Clock::now();
      }
      if (verdict_->given()) {
        release_waits();
      } else if (!outstanding_.empty()) {
        const auto oldest = outstanding_.front();
        const double seconds = std::chrono::duration<double>(Clock::now() - oldest_since_).count();
        lock.unlock();
        look_after(*oldest, seconds);
        lock.lock();
      }
    } catch (const std::exception& error) {
      if (!lock.owns_lock()) lock.lock();
      fail("rank " + std::to_string(rank_) + ": " + error.what());
    }
  }
}

// Whether our streams have moved all of it, by the words that they write.
bool Queue::through(const Exchange& exchange) const {
  for (int peer = 0; peer < world(); ++peer) {
    const auto sent = exchange.out_.last[peer], received = exchange.in_.last[peer];
    if (sent && !counted(lanes_[peer].sent, *sent)) return false;
    if (received && !counted(lanes_[peer].received, *received)) return false;
  }
  return true;
}

// The oldest exchange is not done: is a peer that it needs gone, has a peer failed, or is it late?
void Queue::look_after(const Exchange& exchange, double seconds) {
  const std::string who = "rank " + std::to_string(rank_) + ", " + exchange.name_ + ": ";
  std::ostringstream waits;
  for (int peer = 0; peer < world(); ++peer) {
    const Lane& lane = lanes_[peer];
    if (!lane.remote && load(&lane.view.header().state) == State::failed) return fail(lane.view.header().error);
    std::string wait;
    if (const auto target = exchange.in_.last[peer]; target && !reached(load(lane.arrived), *target))
      wait = std::to_string(exchange.in_.bytes[peer]) + " bytes from rank " + std::to_string(peer);
    else if (const auto free = exchange.room_[peer]; free && !reached(load(lane.freed), *free))
      wait = "rank " + std::to_string(peer) + " to take " + std::to_string(exchange.out_.bytes[peer]) + " bytes";
    if (wait.empty()) continue;
    if (const auto reason = gone(peer)) return fail(who + "waits for " + wait + ", but " + *reason);
    waits << (waits.tellp() > 0 ? ", " : "") << wait;
  }
  if (seconds < settings_.timeout) return;
  const std::string missing = waits.str().empty() ? "its own device: the input is not computed yet" : waits.str();
  std::ostringstream text;
  text << who << "not done after " << seconds << " s; waits for " << missing;
  fail(text.str());
}

// Why nothing will come from a peer any more, if so.
std::optional<std::string> Queue::gone(int peer) {
  const Lane& lane = lanes_[peer];
  const std::string name = "rank " + std::to_string(peer);
  if (lane.remote) {
    std::lock_guard lock(pending_mutex_);
    return lane.lost ? std::optional(name + " is gone: " + *lane.lost) : std::nullopt;
  }
  if (peer == rank_) return std::nullopt;
  const Header& header = lane.view.header();
  if (load(&header.state) == State::closed) return name + " has left the group";
  const std::string process = " (process " + std::to_string(header.process) + ")";
  if (header.namespace_ == this_namespace()) {
    const Process found = look_up(header.process);
    if (found.number == 0 || found.ended || found.started != header.started) return name + process + " died";
  } else if (now_ns() - __atomic_load_n(&header.heartbeat, __ATOMIC_ACQUIRE) > silence_ns) {
    return name + process + " has been silent for 30 s";
  }
  return std::nullopt;
}

void Queue::fail(const std::string& why) {
  std::lock_guard lock(fail_mutex_);
  if (verdict_->given()) return;
  for (Lane& lane : lanes_) {
    lane.freed_release = load(lane.freed) + released;
    lane.arrived_release = load(lane.arrived) + released;
  }
  if (connected_) {
    Header& header = layout_.header();
    std::strncpy(header.error, why.c_str(), sizeof header.error - 1);
    store(&header.state, State::failed);
  }
  verdict_->give(why);       // last: the watch thread now lets the streams run out
  wake_senders();            // and the senders tell the other hosts
}

// Lets every wait of our streams pass. Only our streams wait for these words; a peer that still runs may set one back,
// so this is repeated until the queue closes. Whoever asks for a result is told of the failure instead.
void Queue::release_waits() {
  for (Lane& lane : lanes_) {
    store(lane.freed, lane.freed_release);
    store(lane.arrived, lane.arrived_release);
  }
}

}  // namespace freescale::transport
