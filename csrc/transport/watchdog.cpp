// The watchdog thread of a queue. It detects exchanges that take too long and peers that are gone. Then it makes every
// rank fail with the same reason, and ends the waits of the streams. It does not move data. It never calls the driver:
// while a thread copies to memory that is not pinned, the driver blocks all other threads, and that copy may wait for
// an exchange that never ends.
#include <algorithm>
#include <cstring>
#include <sstream>

#include "process.h"
#include "queue.h"

namespace freescale::transport {
namespace {

// A peer whose process cannot be found by number counts as dead after this time without a heartbeat of its watchdog.
constexpr std::uint64_t silence_ns = 30'000'000'000;

// After a failure, words are set this far ahead: past every chunk that can be outstanding, so that every wait ends.
constexpr Word released = 1u << 30;

// Whether a counter has reached `value` because our stream wrote it. A peer on this host that failed sets it further
// ahead.
bool counted(const Word* word, Word value) {
  const Word now = load(word);
  return reached(now, value) && !reached(now, value + released / 2);
}

}  // namespace

void Queue::run_watchdog() {
  std::unique_lock lock(watchdog_mutex_);
  while (!stop_) {
    const auto patience = std::chrono::milliseconds(failure_->is_set() ? 1 : outstanding_.empty() ? 200 : 20);
    watchdog_wakes_.wait_for(lock, patience);
    __atomic_store_n(&layout_.header().heartbeat, now_ns(), __ATOMIC_RELEASE);
    try {
      while (!failure_->is_set() && !outstanding_.empty() && has_completed(*outstanding_.front())) {
        finished_.push_back(std::move(outstanding_.front()));
        outstanding_.pop_front();
        oldest_since_ = Clock::now();
      }
      if (failure_->is_set()) {
        release_waits();
      } else if (!outstanding_.empty()) {
        const auto oldest = outstanding_.front();
        const double seconds = std::chrono::duration<double>(Clock::now() - oldest_since_).count();
        lock.unlock();
        check_exchange(*oldest, seconds);
        lock.lock();
      }
    } catch (const std::exception& error) {
      if (!lock.owns_lock()) lock.lock();
      fail("rank " + std::to_string(rank_) + ": " + error.what());
    }
  }
}

// Whether our streams have moved all chunks of the exchange, judged by the counters that they write.
bool Queue::has_completed(const Exchange& exchange) const {
  for (int peer = 0; peer < world(); ++peer) {
    const auto sent = exchange.out_.last[peer], received = exchange.in_.last[peer];
    if (sent && !counted(channels_[peer].sent, *sent)) return false;
    if (received && !counted(channels_[peer].received, *received)) return false;
  }
  return true;
}

// Fails if the oldest exchange cannot end: a peer has failed, a peer that it needs is gone, or its time is over.
void Queue::check_exchange(const Exchange& exchange, double seconds) {
  const std::string who = "rank " + std::to_string(rank_) + ", " + exchange.name_ + ": ";
  std::ostringstream waits;
  for (int peer = 0; peer < world(); ++peer) {
    const Channel& channel = channels_[peer];
    if (!channel.remote && load(&channel.view.header().state) == State::failed)
      return fail(channel.view.header().error);
    std::string wait;
    if (const auto target = exchange.in_.last[peer]; target && !reached(load(channel.arrived), *target))
      wait = std::to_string(exchange.in_.bytes[peer]) + " bytes from rank " + std::to_string(peer);
    else if (const auto free = exchange.slot_free_at_[peer]; free && !reached(load(channel.freed), *free))
      wait = "rank " + std::to_string(peer) + " to receive " + std::to_string(exchange.out_.bytes[peer]) + " bytes";
    if (wait.empty()) continue;
    if (const auto reason = why_gone(peer)) return fail(who + "waiting for " + wait + ", but " + *reason);
    waits << (waits.tellp() > 0 ? ", " : "") << wait;
  }
  if (seconds < settings_.timeout) return;
  const std::string missing = waits.str().empty() ? "this rank's own device, which has not computed the input yet"
                                                  : waits.str();
  std::ostringstream text;
  text << who << "not finished after " << seconds << " s (the timeout is " << settings_.timeout
       << " s); still waiting for " << missing << ". Check the ranks that are named here, or raise the timeout";
  fail(text.str());
}

// Why nothing more will come from a peer; empty if the peer is alive.
std::optional<std::string> Queue::why_gone(int peer) {
  const Channel& channel = channels_[peer];
  const std::string name = "rank " + std::to_string(peer);
  if (channel.remote) {
    std::lock_guard lock(pending_mutex_);
    return channel.lost ? std::optional(name + " cannot be reached: " + *channel.lost) : std::nullopt;
  }
  if (peer == rank_) return std::nullopt;
  const Header& header = channel.view.header();
  if (load(&header.state) == State::closed) return name + " has left the group";
  const std::string process = " (process " + std::to_string(header.process) + ")";
  if (header.namespace_ == this_namespace()) {
    const Process found = find_process(header.process);
    if (found.number == 0 || found.ended || found.started != header.started) return name + process + " died";
  } else if (now_ns() - __atomic_load_n(&header.heartbeat, __ATOMIC_ACQUIRE) > silence_ns) {
    return name + process + " has sent no heartbeat for 30 s";
  }
  return std::nullopt;
}

void Queue::fail(const std::string& why) {
  std::lock_guard lock(fail_mutex_);
  if (failure_->is_set()) return;
  for (Channel& channel : channels_) {
    channel.freed_release = load(channel.freed) + released;
    channel.arrived_release = load(channel.arrived) + released;
  }
  if (connected_) {
    Header& header = layout_.header();
    std::strncpy(header.error, why.c_str(), sizeof header.error - 1);
    store(&header.state, State::failed);
  }
  failure_->set(why);        // last: from now on the watchdog ends the waits of the streams
  wake_senders();            // the sending threads tell the peers on other hosts
}

// Ends every wait of our streams. Only our streams wait for these words. A peer that still runs may set one back, so
// the watchdog repeats this until the queue closes. Callers that ask for a result get the failure instead.
void Queue::release_waits() {
  for (Channel& channel : channels_) {
    store(channel.freed, channel.freed_release);
    store(channel.arrived, channel.arrived_release);
  }
}

}  // namespace freescale::transport
