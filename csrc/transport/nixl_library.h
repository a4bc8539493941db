// The part of NIXL's C interface that the transport uses. NIXL is loaded at run time from its package (nixl-cu12 or
// nixl-cu13), so that the package builds without it. The types are declared by hand after its documented C interface.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace freescale::transport::nixl {

using Agent = struct OpaqueAgent*;
using Parameters = struct OpaqueParameters*;
using MemoryKinds = struct OpaqueMemoryKinds*;
using Backend = struct OpaqueBackend*;
using Arguments = struct OpaqueArguments*;
using TransferList = struct OpaqueTransferList*;
using MemoryList = struct OpaqueMemoryList*;
using Request = struct OpaqueRequest*;
using Messages = struct OpaqueMessages*;

inline constexpr int success = 0, in_progress = 1, host_memory = 0, write_operation = 1;

struct AgentConfig {
  bool progress_thread, listen_thread;
  int listen_port;
  int thread_sync;  // 0: the caller takes care that one thread calls at a time
  unsigned workers;
  std::uint64_t progress_delay_us, listen_delay_us;
  bool telemetry;
};

#define FREESCALE_NIXL_CALLS(X)                                                                        \
  X(create_configured_agent, (const char*, const AgentConfig*, Agent*))                                \
  X(destroy_agent, (Agent))                                                                            \
  X(get_plugin_params, (Agent, const char*, MemoryKinds*, Parameters*))                                \
  X(destroy_mem_list, (MemoryKinds))                                                                   \
  X(destroy_params, (Parameters))                                                                      \
  X(create_backend, (Agent, const char*, Parameters, Backend*))                                        \
  X(destroy_backend, (Backend))                                                                        \
  X(create_opt_args, (Arguments*))                                                                     \
  X(destroy_opt_args, (Arguments))                                                                     \
  X(opt_args_add_backend, (Arguments, Backend))                                                        \
  X(create_reg_dlist, (int, MemoryList*))                                                              \
  X(destroy_reg_dlist, (MemoryList))                                                                   \
  X(reg_dlist_add_desc, (MemoryList, std::uintptr_t, std::size_t, std::uint64_t, const void*, std::size_t)) \
  X(register_mem, (Agent, MemoryList, Arguments))                                                      \
  X(deregister_mem, (Agent, MemoryList, Arguments))                                                    \
  X(get_local_md, (Agent, void**, std::size_t*))                                                       \
  X(load_remote_md, (Agent, const void*, std::size_t, char**))                                         \
  X(invalidate_remote_md, (Agent, const char*))                                                        \
  X(agent_make_connection, (Agent, const char*, Arguments))                                            \
  X(create_xfer_dlist, (int, TransferList*))                                                           \
  X(destroy_xfer_dlist, (TransferList))                                                                \
  X(xfer_dlist_add_desc, (TransferList, std::uintptr_t, std::size_t, std::uint64_t))                   \
  X(create_xfer_req, (Agent, int, TransferList, TransferList, const char*, Request*, Arguments))       \
  X(post_xfer_req, (Agent, Request, Arguments))                                                        \
  X(get_xfer_status, (Agent, Request))                                                                 \
  X(release_xfer_req, (Agent, Request))                                                                \
  X(destroy_xfer_req, (Request))                                                                       \
  X(create_notif_map, (Messages*))                                                                     \
  X(destroy_notif_map, (Messages))                                                                     \
  X(get_notifs, (Agent, Messages, Arguments))

struct Library {
#define X(name, arguments) int(*name) arguments;
  FREESCALE_NIXL_CALLS(X)
#undef X

  explicit Library(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(std::string("NIXL cannot be loaded: ") + dlerror());
#define X(name, arguments)                                                           \
  name = reinterpret_cast<int(*) arguments>(dlsym(library, "nixl_capi_" #name));     \
  if (!name) throw std::runtime_error("this release of NIXL does not fit: it has no nixl_capi_" #name);
    FREESCALE_NIXL_CALLS(X)
#undef X
  }
};

inline void check(int status, const std::string& what) {
  if (status != success && status != in_progress)
    throw std::runtime_error("NIXL: " + what + " failed with status " + std::to_string(status));
}

}  // namespace freescale::transport::nixl
