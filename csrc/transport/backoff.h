// How long to sleep between two looks at a word that a device writes. The device wakes nobody, so the host must look.
#pragma once

#include <algorithm>
#include <chrono>
#include <thread>

namespace freescale::transport {

// The intervals grow with the time that has passed, so that a long wait costs little and is noticed with a delay of a
// few percent, and of `longest` at most.
class Backoff {
 public:
  explicit Backoff(std::chrono::microseconds longest = std::chrono::microseconds(2000)) : longest_(longest) {}
  void restart() { started_ = std::chrono::steady_clock::now(); }
  std::chrono::microseconds interval() const {
    const auto passed = std::chrono::steady_clock::now() - started_;
    return std::clamp(std::chrono::duration_cast<std::chrono::microseconds>(passed / 16), shortest, longest_);
  }
  void sleep() const { std::this_thread::sleep_for(interval()); }

 private:
  static constexpr std::chrono::microseconds shortest{20};
  std::chrono::microseconds longest_;
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
};

}  // namespace freescale::transport
