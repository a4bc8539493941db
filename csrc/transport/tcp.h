// The TCP wire: its sockets, and the ends of its links.
#pragma once

#include <unistd.h>

#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <utility>

#include "wire.h"

namespace freescale::transport {

inline constexpr Word tcp_magic = 0xF5CA1E01;  // also tells a peer of the other byte order

[[noreturn]] inline void network_error(const std::string& what, int error) {
  throw std::runtime_error("network: " + what + ": " + std::strerror(error));
}

class Socket {
 public:
  explicit Socket(int file = -1) : file_(file) {}
  Socket(Socket&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(file_, other.file_);
    return *this;
  }
  ~Socket() {
    if (file_ >= 0) close(file_);
  }
  int file() const { return file_; }
  explicit operator bool() const { return file_ >= 0; }

 private:
  int file_;
};

using Sockets = std::map<int, std::shared_ptr<const Socket>>;  // by peer; not blocking

std::unique_ptr<Sender> tcp_sender(const Sockets& sockets);
std::unique_ptr<WireEnd> tcp_receiver(const Sockets& sockets);

}  // namespace freescale::transport
