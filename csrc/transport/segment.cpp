// Segments of shared memory, as files in /dev/shm.
#include "segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <stdexcept>

#include "sha256.h"

namespace freescale::transport {
namespace {

constexpr const char* folder = "/dev/shm/";
constexpr const char* prefix = "freescale-";

[[noreturn]] void shared_memory_error(const std::string& what, int error) {
  throw std::runtime_error("shared memory: " + what + ": " + std::strerror(error));
}

std::atomic<std::size_t> reserved_by_process{0};

// Removes segments of processes that were killed before their peers had mapped them. A living owner holds a lock on its
// file. Files younger than a minute stay, because their owner may not have locked them yet.
void remove_stale_segments() {
  DIR* listing = opendir(folder);
  if (!listing) return;
  while (const dirent* entry = readdir(listing)) {
    if (std::strncmp(entry->d_name, prefix, std::strlen(prefix)) != 0) continue;
    const std::string path = std::string(folder) + entry->d_name;
    struct stat status;
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);  // a FIFO would block
    if (file < 0) continue;
    if (fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == geteuid() &&
        std::time(nullptr) - status.st_ctime > 60 && flock(file, LOCK_EX | LOCK_NB) == 0)
      ::unlink(path.c_str());
    close(file);
  }
  closedir(listing);
}

std::mutex& local_mutex() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

Segment::Memory::~Memory() {
  reserved_by_process -= reserved;
  if (data) munmap(data, bytes);
  if (!linked_name.empty()) ::unlink((folder + linked_name).c_str());
  if (file >= 0) close(file);
}

// The segments of this process by name. With them, two ranks in one process use one mapping. ThreadSanitizer needs that
// to see that they access the same memory.
static std::map<std::string, std::weak_ptr<void>>& local_segments() {
  static std::map<std::string, std::weak_ptr<void>> segments;
  return segments;
}

Segment Segment::create() {
  remove_stale_segments();
  auto memory = std::make_shared<Memory>();
  const std::string name = prefix + random_text();
  memory->file = ::open((folder + name).c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (memory->file < 0) shared_memory_error("cannot create " + (folder + name), errno);
  memory->linked_name = name;
  if (flock(memory->file, LOCK_EX | LOCK_NB) != 0) shared_memory_error("cannot lock " + name, errno);
  const std::string key = random_text();
  static_assert(key_bytes == std::tuple_size_v<Digest>);
  if (pwrite(memory->file, key.data(), key_bytes, 0) != static_cast<ssize_t>(key_bytes))
    shared_memory_error("cannot write " + name + "; /dev/shm may be full (docker run --shm-size)", errno);
  std::lock_guard lock(local_mutex());
  local_segments()[name] = memory;
  return Segment(name, memory);
}

Segment Segment::open(const std::string& name) {
  {
    std::lock_guard lock(local_mutex());
    const auto found = local_segments().find(name);
    if (found != local_segments().end())
      if (auto memory = found->second.lock()) return Segment(name, std::static_pointer_cast<Memory>(memory));
  }
  if (name.rfind(prefix, 0) != 0 || name.find('/') != std::string::npos)
    throw std::runtime_error("shared memory: '" + name + "' is not the name of a segment");
  auto memory = std::make_shared<Memory>();
  memory->file = ::open((folder + name).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (memory->file < 0) shared_memory_error("cannot open " + (folder + name) + " of a rank on the same host", errno);
  struct stat status;
  if (fstat(memory->file, &status) != 0) shared_memory_error("cannot inspect " + name, errno);
  if (status.st_uid != geteuid() || (status.st_mode & 0077) != 0)
    throw std::runtime_error("shared memory: " + (folder + name) + " belongs to another user");
  return Segment(name, memory);
}

std::string Segment::key_of(const std::string& name) {
  const Segment segment = open(name);
  std::string key(key_bytes, '\0');
  if (pread(segment.memory_->file, key.data(), key_bytes, 0) != static_cast<ssize_t>(key_bytes))
    shared_memory_error("cannot read " + name, errno);
  return key;
}

void Segment::map(std::size_t bytes) {
  std::lock_guard lock(local_mutex());
  if (memory_->data) {
    if (memory_->bytes != bytes) throw std::logic_error("shared memory: a segment was mapped with two sizes");
    return;
  }
  if (ftruncate(memory_->file, static_cast<off_t>(bytes)) != 0) shared_memory_error("cannot size " + name_, errno);
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memory_->file, 0);
  if (data == MAP_FAILED) shared_memory_error("cannot map " + std::to_string(bytes) + " bytes", errno);
  memory_->data = static_cast<std::byte*>(data);
  memory_->bytes = bytes;
}

void Segment::prefer_node(int node) {
  constexpr int preferred = 1;  // MPOL_PREFERRED
  constexpr std::size_t bits = 8 * sizeof(unsigned long), words = 16;
  if (node < 0 || static_cast<std::size_t>(node) >= bits * words) return;
  unsigned long nodes[words] = {};
  nodes[node / bits] = 1ul << node % bits;
  syscall(SYS_mbind, memory_->data, memory_->bytes, preferred, nodes, bits * words + 1, 0);
}

// Older kernels end the call with EINTR at every signal, and give back what it has taken so far. A process may have a timer
// that sends signals all the time. So each call takes a piece that needs less than a tenth of a millisecond.
void Segment::reserve(std::size_t offset, std::size_t bytes) {
  constexpr std::size_t piece = 256 << 10;
  constexpr int most_attempts = 1000;  // for one piece
  int error = 0;
  for (std::size_t done = 0; done < bytes && error == 0; done += piece) {
    const auto start = static_cast<off_t>(offset + done), size = static_cast<off_t>(std::min(piece, bytes - done));
    for (int attempt = 0; attempt < most_attempts; ++attempt)
      if ((error = posix_fallocate(memory_->file, start, size)) != EINTR) break;
  }
  if (error != 0)
    shared_memory_error("cannot reserve " + std::to_string(bytes) + " bytes in /dev/shm, where " +
                            std::to_string(free_bytes()) + " are free and this process holds " +
                            std::to_string(reserved_bytes()) +
                            "; enlarge it (docker run --shm-size=2g) or lower FREESCALE_BUFFER_BYTES",
                        error);
  memory_->reserved += bytes;
  reserved_by_process += bytes;
}

void Segment::close_file() {
  std::lock_guard lock(local_mutex());
  if (memory_->file < 0 || !memory_->linked_name.empty()) return;
  close(memory_->file);
  memory_->file = -1;
}

void Segment::unlink() {
  std::lock_guard lock(local_mutex());
  if (memory_->linked_name.empty()) return;
  ::unlink((folder + memory_->linked_name).c_str());
  local_segments().erase(memory_->linked_name);
  memory_->linked_name.clear();
  close(memory_->file);  // this also releases the lock, which has protected the name
  memory_->file = -1;
}

std::size_t Segment::reserved_bytes() { return reserved_by_process; }

std::size_t Segment::free_bytes() {
  struct statvfs status;
  if (statvfs(folder, &status) != 0) shared_memory_error("this machine has no /dev/shm", errno);
  return static_cast<std::size_t>(status.f_bavail) * status.f_frsize;
}

}  // namespace freescale::transport
