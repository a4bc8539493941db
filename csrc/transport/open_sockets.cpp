// The sockets of this process, in a list without a lock, so that a forked child can close them.
#include "tcp.h"

namespace freescale::transport {

static std::atomic<OpenSocket*> open_sockets{nullptr};

OpenSocket* note_open_socket(int file) {
  for (OpenSocket* entry = open_sockets; entry; entry = entry->next) {
    int none = -1;
    if (entry->file.compare_exchange_strong(none, file)) return entry;
  }
  auto* entry = new OpenSocket{{file}, open_sockets};
  while (!open_sockets.compare_exchange_weak(entry->next, entry)) {
  }
  return entry;
}

void close_sockets_after_fork() {
  for (OpenSocket* entry = open_sockets; entry; entry = entry->next)
    if (const int file = entry->file.exchange(-1); file >= 0) close(file);
}

}  // namespace freescale::transport
