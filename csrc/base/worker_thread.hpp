#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <thread>
#include <utility>
#include <vector>

namespace zerooffload {

// Starts a thread that receives no signals: those belong to the main thread, where Python's handlers run, and
// a worker that were interrupted would only see needless EINTRs. `name` is at most 15 characters (the
// kernel's limit).
template <typename Body>
std::thread start_worker(const char* name, Body&& body) {
  struct BlockedSignals {
    sigset_t previous;
    BlockedSignals() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &previous);
    }
    ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &previous, nullptr); }
  } const blocked;  // a new thread inherits the mask of its creator

  std::thread worker(std::forward<Body>(body));
#if defined(__linux__)
  pthread_setname_np(worker.native_handle(), name);
#else
  static_cast<void>(name);
#endif
  return worker;
}

// Lets a thread run on these cores only. Where the system does not, or a core is not there, it runs anywhere:
// that is slower, not wrong.
inline void keep_on(std::thread& worker, const std::vector<int>& cores) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) {
    if (core >= 0 && core < CPU_SETSIZE) CPU_SET(static_cast<std::size_t>(core), &set);
  }
  if (!cores.empty()) pthread_setaffinity_np(worker.native_handle(), sizeof set, &set);
#else
  static_cast<void>(worker);
  static_cast<void>(cores);
#endif
}

}  // namespace zerooffload
