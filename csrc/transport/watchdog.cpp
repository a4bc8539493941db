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

// After a failure, a peer that neither ends nor says what it has issued gets this long. Then the waits end without it.
constexpr std::chrono::seconds longest_release{10};

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
    const auto patience = std::chrono::milliseconds(failure_->is_set() ? 2 : outstanding_.empty() ? 50 : 20);
    watchdog_wakes_.wait_for(lock, patience);
    __atomic_store_n(&layout_.header().heartbeat, now_ns(), __ATOMIC_RELEASE);
    try {
      while (!failure_->is_set() && !outstanding_.empty() && has_completed(*outstanding_.front())) {
        finished_.push_back(std::move(outstanding_.front()));
        outstanding_.pop_front();
        oldest_since_ = Clock::now();
      }
      const auto oldest = outstanding_.empty() ? nullptr : outstanding_.front();
      const double seconds = std::chrono::duration<double>(Clock::now() - oldest_since_).count();
      lock.unlock();
      if (!failure_->is_set()) check_peers();
      if (failure_->is_set())
        release_waits();
      else if (oldest)
        check_exchange(*oldest, seconds);
      lock.lock();
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

// Fails if a peer of this host has failed, also if this rank has nothing outstanding: it must not go on and save what it
// has computed from a peer's invalid data. (Peers on other hosts send a message.)
void Queue::check_peers() {
  for (const Channel& channel : channels_)
    if (!channel.remote && load(&channel.view.header().state) == State::failed)
      return fail(channel.view.header().error);
}

// Fails if the oldest exchange cannot end: a peer that it needs is gone or does something else, or its time is over.
void Queue::check_exchange(const Exchange& exchange, double seconds) {
  const std::string who = "rank " + std::to_string(rank_) + ", " + exchange.name_ + ": ";
  std::ostringstream waits;
  for (int peer = 0; peer < world(); ++peer) {
    const Channel& channel = channels_[peer];
    std::string wait;
    const Word heard = load(&channel.last_heard);  // read before the counter of arrivals, which grows first
    const auto target = exchange.in_.last[peer];
    const bool misses_bytes = target && !reached(load(channel.arrived), *target);
    if (misses_bytes)
      wait = std::to_string(exchange.in_.bytes[peer]) + " bytes from rank " + std::to_string(peer);
    else if (const auto free = exchange.slot_free_at_[peer]; free && !reached(load(channel.freed), *free))
      wait = "rank " + std::to_string(peer) + " to receive " + std::to_string(exchange.out_.bytes[peer]) + " bytes";
    if (wait.empty()) continue;
    // A peer announces its exchanges in order, so this one has been announced and has had no bytes for us.
    if (channel.remote && misses_bytes && reached(heard, exchange.number_ + 2))
      return fail(who + "waiting for " + wait + ", which has gone on to exchange #" + std::to_string(heard - 1) +
                  " without sending them; all ranks must agree on the sizes");
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
  const auto reason = why_gone(channel.view.header(), longest_silence(settings_.timeout));
  return reason ? std::optional(name + *reason) : std::nullopt;
}

std::optional<std::string> Queue::why_gone(const Header& header, double silence) {
  if (load(&header.state) == State::closed) return " has left the group";
  const std::string process = " (process " + std::to_string(header.process) + ")";
  if (header.namespace_ == this_namespace()) {
    const Process found = find_process(header.process);
    if (found.number == 0 || found.ended || found.started != header.started) return process + " died";
    return std::nullopt;
  }
  // A process of another namespace cannot be found by its number, so its watchdog must give a sign of life.
  const std::uint64_t heard = __atomic_load_n(&header.heartbeat, __ATOMIC_ACQUIRE);  // before the clock is read
  const double seconds = 1e-9 * static_cast<double>(now_ns() - heard);
  if (seconds <= silence) return std::nullopt;
  return process + " has sent no heartbeat for " + std::to_string(static_cast<long>(seconds)) + " s";
}

void Queue::fail(const std::string& why) {
  std::lock_guard lock(fail_mutex_);
  if (failure_->is_set()) return;
  failed_at_ = Clock::now().time_since_epoch().count();
  if (connected_) {
    Header& header = layout_.header();
    std::strncpy(header.error, why.c_str(), sizeof header.error - 1);
    store(&header.state, State::failed);
  }
  failure_->set(why);      // last: from now on nothing is issued, and the watchdog ends the waits of the streams
  wake_network_threads();  // the sending threads tell the peers on other hosts
}

// Tells the peers of this host what our streams will still do. The caller holds mutex_, so nothing more is issued.
void Queue::publish_final_counters() {
  if (!connected_) return;
  for (int peer = 0; peer < world(); ++peer) {
    store(&layout_.counters(peer).final_sent, load(&channels_[peer].issued_out));
    store(&layout_.counters(peer).final_received, load(&channels_[peer].issued_in));
  }
  store(&layout_.header().final, 1);
}

// Whether no byte will be written to the ring from this peer any more, and our stream has copied out all that came.
bool Queue::nothing_more_arrives(int peer) {
  const Channel& channel = channels_[peer];
  Word last = load(channel.arrived);
  if (channel.remote) {
    if (!network_threads_have_stopped()) return false;
  } else if (!why_gone(peer)) {
    if (!load(&channel.view.header().final) || last != load(&channel.view.counters(rank_).final_sent)) return false;
  }
  const Word issued = load(&channel.issued_in);
  if (reached(last, issued)) last = issued;
  return reached(load(channel.received), last);
}

// Whether no byte will be read from our ring for this peer any more.
bool Queue::nothing_more_is_read(int peer) {
  const Channel& channel = channels_[peer];
  if (channel.remote) return network_threads_have_stopped();
  if (why_gone(peer)) return true;
  return load(&channel.view.header().final) &&
         reached(load(channel.freed), load(&channel.view.counters(rank_).final_received));
}

// Ends the waits of our streams that nobody will end any more. A ring whose bytes will not come is filled with ones
// first (a ring in device memory has ones already): floating-point numbers are NaN then, and integers are -1. The streams copy that into the outputs, so that
// nobody takes old bytes of the ring for a result. Callers that ask for a result get the failure instead.
void Queue::release_waits() {
  if (std::unique_lock issue(mutex_, std::try_to_lock); issue && !load(&layout_.header().final))
    publish_final_counters();
  // Until the final counters are there, a thread may still issue copies out of a ring whose bytes have come.
  const bool final = load(&layout_.header().final);
  const bool overdue = Clock::now().time_since_epoch().count() - failed_at_ >
                       std::chrono::duration_cast<Clock::duration>(longest_release).count();
  for (int peer = 0; peer < world(); ++peer) {
    Channel& channel = channels_[peer];
    if (!channel.arrived_release && (overdue || (final && nothing_more_arrives(peer)))) {
      if (!channel.in_device) std::memset(channel.in_ring, 0xFF, channel.in.region());
      channel.arrived_release = load(channel.arrived) + released;
    }
    if (!channel.freed_release && (overdue || nothing_more_is_read(peer)))
      channel.freed_release = load(channel.freed) + released;
    // Only our streams wait for these words. A peer that is not as dead as it seemed may set one back.
    if (channel.arrived_release) store(channel.arrived, *channel.arrived_release);
    if (channel.freed_release) store(channel.freed, *channel.freed_release);
  }
}

}  // namespace freescale::transport
