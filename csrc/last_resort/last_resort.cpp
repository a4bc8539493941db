#include "last_resort.h"

#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>

namespace freescale {

namespace {

constexpr auto kTick = std::chrono::milliseconds(200);
constexpr double kLongestTick = 1.0;  // seconds; a tick that took longer was an interruption of the whole process
constexpr std::size_t kMaxConnections = 64;
constexpr int kFatalSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};

// Text of limited length. It allocates no memory: another thread may hold the lock of the allocator, or may have damaged it.
template <std::size_t Size>
class FixedText {
 public:
  void clear() { length_ = 0; }
  void add(const char* text, std::size_t length) {
    length = std::min(length, Size - length_);
    std::memcpy(data_ + length_, text, length);
    length_ += length;
  }
  void add(const char* text) { add(text, std::strlen(text)); }
  void add(int number) {
    char digits[12];
    std::size_t first = sizeof digits;
    unsigned rest = number < 0 ? 0u : static_cast<unsigned>(number);
    do {
      digits[--first] = static_cast<char>('0' + rest % 10);
      rest /= 10;
    } while (rest > 0);
    add(digits + first, sizeof digits - first);
  }
  void write_to_stderr() const {
    for (std::size_t done = 0; done < length_;) {
      const ssize_t written = ::write(STDERR_FILENO, data_ + done, length_ - done);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return;
      done += static_cast<std::size_t>(written);
    }
  }

 private:
  char data_[Size];
  std::size_t length_ = 0;
};

struct Connection {
  int descriptor, rank;
};

// The state of one process. It lives until the end of the process, because its thread does.
struct Timer {
  pid_t process = ::getpid();
  std::mutex mutex;
  std::condition_variable changed;
  bool armed = false;
  double seconds_left = 0.0;
  FixedText<8192> message;
  Connection connections[kMaxConnections];
  std::size_t num_connections = 0;
};

Timer* timer = nullptr;
FixedText<4096> crash_message;

// Add what the other ranks have sent, without reading it: texts in parentheses, and the end of a connection.
void add_news(Timer& state) {
  for (std::size_t i = 0; i < state.num_connections; ++i) {
    const auto [descriptor, rank] = state.connections[i];
    char received[1024];
    const ssize_t length = ::recv(descriptor, received, sizeof received, MSG_PEEK | MSG_DONTWAIT);
    if (length == 0 || (length < 0 && errno == ECONNRESET)) {
      state.message.add("rank ");
      state.message.add(rank);
      state.message.add(" has died.\n");
    }
    for (ssize_t at = 0; at < length; ++at) {
      if (received[at] != '(') continue;
      const void* end = std::memchr(received + at, ')', static_cast<std::size_t>(length - at));
      if (end == nullptr) break;
      const ssize_t last = static_cast<const char*>(end) - received;
      state.message.add("rank ");
      state.message.add(rank);
      state.message.add(" reports: ");
      state.message.add(received + at + 1, static_cast<std::size_t>(last - at - 1));
      state.message.add("\n");
      at = last;
    }
  }
}

void count_down(Timer& state) {
  using Clock = std::chrono::steady_clock;
  std::unique_lock<std::mutex> lock(state.mutex);
  while (true) {
    if (!state.armed) state.changed.wait(lock, [&] { return state.armed; });
    const auto begin = Clock::now();
    state.changed.wait_for(lock, kTick);
    state.seconds_left -= std::min(std::chrono::duration<double>(Clock::now() - begin).count(), kLongestTick);
    if (!state.armed || state.seconds_left > 0.0) continue;
    add_news(state);
    state.message.write_to_stderr();
    ::_exit(1);
  }
}

// A forked process has the memory of its parent, but not its thread.
Timer& timer_of_this_process() {
  if (timer == nullptr || timer->process != ::getpid()) {
    timer = new Timer;
    std::thread(count_down, std::ref(*timer)).detach();
  }
  return *timer;
}

void end_after_crash(int number) {
  crash_message.add(number);
  crash_message.add(".\n");
  crash_message.write_to_stderr();
  ::_exit(1);
}

}  // namespace

void arm_last_resort(double seconds, const std::string& message, const std::vector<std::pair<int, int>>& connections) {
  Timer& state = timer_of_this_process();
  {
    const std::lock_guard<std::mutex> lock(state.mutex);
    state.seconds_left = seconds;
    state.message.clear();
    state.message.add(message.data(), message.size());
    state.message.add("\n");
    state.num_connections = std::min(connections.size(), kMaxConnections);
    for (std::size_t i = 0; i < state.num_connections; ++i)
      state.connections[i] = {connections[i].first, connections[i].second};
    if (state.armed) return;  // The thread looks at the new time at its next tick.
    state.armed = true;
  }
  state.changed.notify_one();
}

void disarm_last_resort() {
  if (timer == nullptr || timer->process != ::getpid()) return;
  const std::lock_guard<std::mutex> lock(timer->mutex);
  timer->armed = false;
}

void name_crashes(const std::string& message) {
  crash_message.clear();
  crash_message.add(message.data(), message.size());
  crash_message.add("\nThe process ends itself after the signal ");
  struct sigaction action = {};
  action.sa_handler = end_after_crash;
  ::sigemptyset(&action.sa_mask);
  for (const int number : kFatalSignals) ::sigaction(number, &action, nullptr);
}

}  // namespace freescale
