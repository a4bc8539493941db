// Messages of invalid arguments, which Python raises as ValueError.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace freescale {

[[noreturn]] inline void fail(const std::string& message) { throw std::invalid_argument(message); }

// For example "lengths[3] = -1".
template <typename T>
std::string at(const char* name, std::int64_t i, T value) {
  return std::string(name) + "[" + std::to_string(i) + "] = " + std::to_string(value);
}

}  // namespace freescale
