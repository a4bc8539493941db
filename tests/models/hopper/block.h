// The threads of a block on a CPU: contexts of one thread of the system, which take turns. A context runs until a barrier or
// its end, and then the next one runs. So it does not matter how many cores are free. All of them must meet the same barriers.
#pragma once
#include <ucontext.h>

#include <cstdlib>
#include <functional>
#include <vector>

struct Index {
  unsigned x;
};
inline Index threadIdx;

namespace block {

struct Thread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(256 << 10);
  bool ended = false;
};
inline std::vector<Thread> threads;
inline ucontext_t caller;
inline std::function<void()> body;

inline void enter() {
  body();
  threads[threadIdx.x].ended = true;
  if (++threadIdx.x < threads.size()) setcontext(&threads[threadIdx.x].context);
  setcontext(&caller);
}

inline void barrier() {
  const unsigned own = threadIdx.x;
  threadIdx.x = (own + 1) % threads.size();
  if (threads[threadIdx.x].ended) abort();  // it met fewer barriers
  swapcontext(&threads[own].context, &threads[threadIdx.x].context);
  threadIdx.x = own;
}

// Runs `work` in `count` threads, each of which finds its number in `threadIdx`.
inline void run(unsigned count, std::function<void()> work) {
  body = std::move(work);
  threads = std::vector<Thread>(count);
  for (Thread& thread : threads) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    makecontext(&thread.context, enter, 0);
  }
  threadIdx.x = 0;
  swapcontext(&caller, &threads[0].context);
}

}  // namespace block
