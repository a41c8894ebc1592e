#pragma once

#include <initializer_list>

#include "base/thread_pool.hpp"
#include "cpu/target.hpp"

// Calls body(pool) with every CPU target that this machine has, and pools of these numbers of threads.
template <typename Body>
void for_each_target(std::initializer_list<int> nums_threads, Body&& body) {
  for (const zerooffload::cpu::Target target : zerooffload::cpu::supported_targets()) {
    zerooffload::cpu::set_target(zerooffload::cpu::target_name(target));
    for (const int num_threads : nums_threads) {
      zerooffload::ThreadPool pool(num_threads);
      body(pool);
    }
  }
}
