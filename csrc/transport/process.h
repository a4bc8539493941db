// Finds out whether another process of this host is alive.
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
  std::uint64_t started = 0;     // kernel ticks since boot; differs if the number was reused
  std::uint64_t namespace_ = 0;  // a process of another namespace cannot be found by its number
  bool ended = false;            // it has ended, and its parent has not collected its exit status yet
};

inline std::uint64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<std::uint64_t>(time.tv_sec) * 1000000000u + time.tv_nsec;
}

// The process as /proc describes it; its `number` is 0 if there is no such process.
inline Process find_process(std::int32_t number) {
  std::ifstream file("/proc/" + std::to_string(number) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return {};
  std::istringstream fields(text.substr(text.rfind(')') + 1));  // the name before ')' may contain any character
  Process process;
  process.number = number;
  std::string field;
  for (int i = 3; i <= 22 && fields >> field; ++i) {
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
  Process process = find_process(getpid());
  process.number = getpid();
  process.namespace_ = this_namespace();
  return process;
}

}  // namespace freescale::transport
