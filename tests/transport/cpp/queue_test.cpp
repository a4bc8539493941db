// The queue on host memory, with threads of one process as its ranks. test_queue_scenarios.py builds it and runs it
// under the thread and the address sanitizer. Usage: queue_test SCENARIO...; without a scenario it lists them. With
// "@device" behind its name, a scenario puts the rings into device memory. With "@nixl" it moves data between hosts by
// the library that the environment variable FAKE_NIXL names. The exit status 0 means success.
#include <cstdio>
#include <functional>
#include <map>

#include "failed_outputs.h"
#include "failures.h"
#include "memory.h"
#include "network.h"
#include "priorities.h"
#include "random_exchanges.h"
#include "stragglers.h"

namespace {

const std::map<std::string, std::function<void()>> scenarios{
    {"random2", [] { random_exchanges(2, 1, false); }},
    {"random4", [] { random_exchanges(4, 1, false); }},
    {"random_high", [] { random_exchanges(3, 1, true); }},
    {"random_hosts", [] { random_exchanges(4, 2, false); }},
    {"random_hosts_high", [] { random_exchanges(2, 2, true); }},
    {"random_hosts_apart", [] { random_exchanges(4, 4, false); }},
    {"random_hosts_one_thread", [] { random_exchanges(4, 4, true, 0, 1); }},
    {"random_wrap", [] { random_exchanges(2, 1, false, 0xFFFFFFF0u); }},
    {"random_hosts_wrap", [] { random_exchanges(2, 2, false, 0xFFFFFFF0u); }},
    {"priority", priority},
    {"one_queue", one_queue},
    {"early_flag", early_flag},
    {"timeout", [] { timeout(1); }},
    {"timeout_hosts", [] { timeout(3); }},
    {"leaver", [] { leaver(1); }},
    {"leaver_hosts", [] { leaver(2); }},
    {"disagreement", [] { mismatch(1); }},
    {"disagreement_hosts", [] { mismatch(2); }},
    {"poisoned_output", [] { poisoned_output(1); }},
    {"poisoned_output_hosts", [] { poisoned_output(2); }},
    {"late_receiver", late_receiver},
    {"failure_during_issue", failure_during_issue},
    {"idle_rank_fails", [] { idle_rank_fails(1); }},
    {"idle_rank_fails_hosts", [] { idle_rank_fails(3); }},
    {"zero_bytes_hosts", [] { expects_bytes_of_nobody(0); }},
    {"zero_bytes_hosts_ahead", [] { expects_bytes_of_nobody(100); }},
    {"silent_peer", silent_peer},
    {"late_reader", late_reader},
    {"full_stream", full_stream},
    {"failure_before_close", failure_before_close},
    {"no_descriptors", no_descriptors},
    {"strangers", strangers},
    {"bad_chunk", bad_chunk},
    {"held_chunk", held_chunk},
    {"held_queue", held_queue},
    {"chunks_over_tcp", chunks_over_tcp},
    {"ring", ring},
    {"ring_of_two_transfers", ring_of_two_transfers},
    {"segments", segments},
    {"interrupted_reserve", interrupted_reserve},
    {"numa", numa},
};

}  // namespace

int main(int count, char** arguments) {
  try {
    for (int i = 1; i < count; ++i) {
      const std::string argument = arguments[i], name = argument.substr(0, argument.find('@'));
      const std::string engine = argument.substr(name.size());
      rings_on_device = engine == "@device";
      nixl_library = engine == "@nixl" ? std::getenv("FAKE_NIXL") : "";
      if (!engine.empty() && !rings_on_device && nixl_library.empty()) throw std::runtime_error("no engine " + engine);
      const auto scenario = scenarios.find(name);
      if (scenario == scenarios.end()) throw std::runtime_error(std::string("there is no scenario ") + arguments[i]);
      scenario->second();
      std::printf("%s ok\n", arguments[i]);
      std::fflush(stdout);
    }
    if (count == 1)
      for (const auto& scenario : scenarios) std::printf("%s\n", scenario.first.c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
