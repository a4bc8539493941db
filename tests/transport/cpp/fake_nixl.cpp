// A NIXL for machines without it, for ranks that are threads of one process. A write is a copy by a thread of its own, a
// little later, as a network card would do it. It checks that writes stay within registered memory on both sides, and
// that no thread calls an agent while another one does.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int done = 0, in_progress = 1, invalid = -3;

struct Span {
  std::uintptr_t start = 0;
  std::size_t bytes = 0;
};

struct Agent {
  std::string name;
  std::vector<Span> registered;
  std::atomic<int> callers{0};
};

struct Request {
  Span from, to;
  std::atomic<int> status{in_progress};
  std::thread thread;
};

std::mutex registry;
std::map<std::string, Agent*> agents;

// One call of an agent. Two at the same time end the process.
class Call {
 public:
  explicit Call(Agent* agent) : agent_(agent) {
    if (agent_->callers++ != 0) std::abort();
  }
  ~Call() { --agent_->callers; }

 private:
  Agent* agent_;
};

bool inside(const Agent& agent, const Span& span) {
  for (const Span& known : agent.registered)
    if (span.start >= known.start && span.start + span.bytes <= known.start + known.bytes) return true;
  return false;
}

}  // namespace

extern "C" {

int nixl_capi_create_configured_agent(const char* name, const void*, Agent** out) {
  *out = new Agent;
  (*out)->name = name;
  return done;
}
int nixl_capi_destroy_agent(Agent* agent) {
  std::lock_guard lock(registry);
  agents.erase(agent->name);
  delete agent;
  return done;
}
int nixl_capi_get_plugin_params(Agent*, const char* plugin, void** kinds, void** parameters) {
  *kinds = *parameters = nullptr;
  return std::strcmp(plugin, "UCX") == 0 ? done : invalid;
}
int nixl_capi_destroy_mem_list(void*) { return done; }
int nixl_capi_destroy_params(void*) { return done; }
int nixl_capi_create_backend(Agent*, const char*, void*, void** out) { return *out = nullptr, done; }
int nixl_capi_destroy_backend(void*) { return done; }
int nixl_capi_create_opt_args(void** out) { return *out = nullptr, done; }
int nixl_capi_destroy_opt_args(void*) { return done; }
int nixl_capi_opt_args_add_backend(void*, void*) { return done; }

int nixl_capi_create_reg_dlist(int, Span** out) { return *out = new Span, done; }
int nixl_capi_destroy_reg_dlist(Span* list) { return delete list, done; }
int nixl_capi_reg_dlist_add_desc(Span* list, std::uintptr_t start, std::size_t bytes, std::uint64_t, const void*,
                                 std::size_t) {
  *list = {start, bytes};
  return done;
}
int nixl_capi_register_mem(Agent* agent, Span* list, void*) {
  agent->registered.push_back(*list);
  std::lock_guard lock(registry);
  agents[agent->name] = agent;
  return done;
}
int nixl_capi_deregister_mem(Agent*, Span*, void*) { return done; }

// The description of an agent is its name.
int nixl_capi_get_local_md(Agent* agent, void** out, std::size_t* bytes) {
  *bytes = agent->name.size();
  *out = std::malloc(*bytes);
  std::memcpy(*out, agent->name.data(), *bytes);
  return done;
}
int nixl_capi_load_remote_md(Agent*, const void* text, std::size_t bytes, char** name) {
  const std::string found(static_cast<const char*>(text), bytes);
  return *name = strdup(found.c_str()), done;
}
int nixl_capi_invalidate_remote_md(Agent*, const char*) { return done; }
int nixl_capi_agent_make_connection(Agent*, const char* peer, void*) {
  std::lock_guard lock(registry);
  return agents.count(peer) ? done : invalid;
}

int nixl_capi_create_xfer_dlist(int, Span** out) { return *out = new Span, done; }
int nixl_capi_destroy_xfer_dlist(Span* list) { return delete list, done; }
int nixl_capi_xfer_dlist_add_desc(Span* list, std::uintptr_t start, std::size_t bytes, std::uint64_t) {
  *list = {start, bytes};
  return done;
}
int nixl_capi_create_xfer_req(Agent* agent, int operation, Span* from, Span* to, const char* peer, Request** out, void*) {
  Call call(agent);
  std::lock_guard lock(registry);
  const auto target = agents.find(peer);
  if (operation != 1 || from->bytes != to->bytes || !inside(*agent, *from)) return invalid;
  if (target == agents.end() || !inside(*target->second, *to)) return invalid;
  *out = new Request;
  (*out)->from = *from;
  (*out)->to = *to;
  return done;
}
int nixl_capi_post_xfer_req(Agent* agent, Request* request, void*) {
  Call call(agent);
  request->thread = std::thread([request] {
    std::this_thread::sleep_for(std::chrono::microseconds(request->from.bytes % 7 * 50));  // writes overtake each other
    auto* to = reinterpret_cast<void*>(request->to.start);
    const auto* from = reinterpret_cast<const void*>(request->from.start);
    if (request->from.bytes == sizeof(std::uint32_t))  // a counter, which others read meanwhile
      __atomic_store_n(static_cast<std::uint32_t*>(to), *static_cast<const std::uint32_t*>(from), __ATOMIC_RELEASE);
    else
      std::memcpy(to, from, request->from.bytes);
    request->status = done;
  });
  return in_progress;
}
int nixl_capi_get_xfer_status(Agent* agent, Request* request) {
  Call call(agent);
  return request->status;
}
int nixl_capi_release_xfer_req(Agent* agent, Request* request) {
  Call call(agent);
  return request->thread.join(), done;
}
int nixl_capi_destroy_xfer_req(Request* request) { return delete request, done; }

int nixl_capi_create_notif_map(void** out) { return *out = nullptr, done; }
int nixl_capi_destroy_notif_map(void*) { return done; }
int nixl_capi_get_notifs(Agent* agent, void*, void*) {
  Call call(agent);
  return done;
}
}
