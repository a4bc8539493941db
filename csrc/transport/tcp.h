// The network over TCP: what tcp_wire.cpp, which makes the connections, and tcp_endpoints.cpp, which uses them, share.
#pragma once

#include <netdb.h>
#include <unistd.h>

#include <atomic>
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

// An entry of the list of open sockets, which close_sockets_after_fork() reads. It stays in the list for ever, and is used again.
struct OpenSocket {
  std::atomic<int> file;  // -1: none
  OpenSocket* next;
};
OpenSocket* note_open_socket(int file);

class Socket {
 public:
  explicit Socket(int file = -1) : file_(file), entry_(file >= 0 ? note_open_socket(file) : nullptr) {}
  Socket(Socket&& other) noexcept : file_(std::exchange(other.file_, -1)), entry_(std::exchange(other.entry_, nullptr)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(file_, other.file_);
    std::swap(entry_, other.entry_);
    return *this;
  }
  ~Socket() {
    if (file_ < 0) return;
    entry_->file = -1;  // first: another thread may get the same number as soon as it is closed
    close(file_);
  }
  int file() const { return file_; }
  explicit operator bool() const { return file_ >= 0; }

 private:
  int file_;
  OpenSocket* entry_;
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

// A sender over TCP. It can also tell a peer about a chunk that was written by other means.
class TcpFrames : public WireSender {
 public:
  virtual void delivered(int peer, const Chunk& chunk) = 0;
  void expect(int peer, const Chunk& chunk) override = 0;
  virtual void close(int peer) = 0;  // ends the connection to this peer, which cannot be reached by other means
};

// The TCP connections of a rank.
class TcpConnections : public Wire {
 public:
  virtual Sockets sockets(const std::vector<int>& peers) const = 0;
  virtual const Sockets& sockets() const = 0;  // of all peers
};
std::unique_ptr<TcpConnections> tcp_connections(int rank, const std::string& bind_to, const std::string& secret,
                                                double silence);

// Sends a text to each peer and returns the text that each peer sends. All peers must do the same.
std::map<int, std::string> swap_texts(const Sockets& sockets, const std::map<int, std::string>& texts,
                                      Clock::time_point deadline, const std::function<void()>& check);

std::unique_ptr<TcpFrames> tcp_sender(const Sockets& sockets);
std::unique_ptr<WireReceiver> tcp_receiver(const Sockets& sockets);

}  // namespace freescale::transport
