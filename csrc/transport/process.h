// Whether another process of this host lives.
#pragma once

#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>

namespace freescale::transport {

struct Process {
  std::int32_t number = 0;
  std::uint64_t started = 0;     // in the kernel's ticks since boot; tells a reused number
  std::uint64_t namespace_ = 0;  // processes of another namespace cannot be looked up by number
  bool ended = false;            // a zombie, which nobody has waited for yet
};

inline std::uint64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1000000000u + time.tv_nsec;
}

// What /proc says about a process; `number` is 0 when there is none.
inline Process look_up(std::int32_t number) {
  std::ifstream file("/proc/" + std::to_string(number) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return {};
  std::istringstream rest(text.substr(text.rfind(')') + 1));  // the name before it may hold anything
  Process process;
  process.number = number;
  std::string field;
  for (int i = 3; i <= 22 && rest >> field; ++i) {
    if (i == 3) process.ended = field == "Z" || field == "X";
    if (i == 22) process.started = std::stoull(field);
  }
  return process;
}

inline std::uint64_t this_namespace() {
  struct stat status;
  return stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

inline Process this_process() {
  Process process = look_up(getpid());
  process.number = getpid();
  process.namespace_ = this_namespace();
  return process;
}

}  // namespace freescale::transport
