// Tasks on the threads that XLA lends to a kernel.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace equivit {

// do_task(i) for each i < tasks, in any order; returns when all are done.
//
// The calling thread takes tasks too, and waits only for those that others have begun: it goes on even if no thread of
// the pool is ever free.
template <class Function>
void in_parallel(xla::ffi::ThreadPool& pool, int64_t tasks, Function do_task) {
  struct Progress {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto progress = std::make_shared<Progress>();  // a thread may look at it when all is done
  auto work = [progress, tasks, do_task] {
    for (int64_t i; (i = progress->next++) < tasks;) {
      do_task(i);
      if (++progress->done == tasks) progress->done.notify_all();
    }
  };
  for (int64_t i = 1; i < std::min<int64_t>(pool.num_threads(), tasks); i++) pool.Schedule(decltype(work)(work));
  work();
  // Not asleep at once: tasks are short, and to be woken takes as long as many of them.
  for (int i = 0; i < 1000 && progress->done < tasks; i++) std::this_thread::yield();
  for (int64_t done; (done = progress->done) < tasks;) progress->done.wait(done);
}

// Memory of this thread, of at least so many floats, which stays for its next task.  It begins with a cache line: a
// vector that lies in two of them takes twice as long to load.
inline float* scratch(int64_t floats) {
  constexpr int64_t kLine = 64;
  static thread_local std::vector<float> memory;
  if (static_cast<int64_t>(memory.size()) < floats + kLine) memory.resize(floats + kLine);
  auto address = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<float*>((address + kLine - 1) / kLine * kLine);
}

}  // namespace equivit
