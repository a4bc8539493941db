// The network over TCP: what tcp_wire.cpp, which makes the connections, and tcp_endpoints.cpp, which uses them, share.
#pragma once

#include <netdb.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>
#include <utility>

#include "wire.h"

namespace freescale::transport {

inline constexpr Word tcp_magic = 0xF5CA1E02;  // a peer with the other byte order reads another number

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

// The socket addresses of a name or a number, in the order in which they are to be tried.
struct ResolvedAddress {
  explicit ResolvedAddress(const std::string& host, const std::string& port, int flags) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags;
    if (const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &first))
      throw std::runtime_error("network: cannot resolve '" + host + "': " + gai_strerror(error));
  }
  ~ResolvedAddress() { freeaddrinfo(first); }
  ResolvedAddress(const ResolvedAddress&) = delete;
  ResolvedAddress& operator=(const ResolvedAddress&) = delete;
  addrinfo* first = nullptr;
};

using Sockets = std::map<int, std::shared_ptr<const Socket>>;  // by peer; all are non-blocking

std::unique_ptr<WireSender> tcp_sender(const Sockets& sockets);
std::unique_ptr<WireReceiver> tcp_receiver(const Sockets& sockets);

}  // namespace freescale::transport
