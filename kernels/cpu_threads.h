// Tasks on the threads that XLA lends to a kernel.

#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>

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

// Memory of this thread, of at least so many floats, which stays for its next task; of another number, other memory.  It
// has pages of its own, huge ones where Linux has them: products read it in strides, and of small pages a core knows too
// few.
template <int number = 0>
float* scratch(int64_t floats) {
  constexpr size_t kPage = 2 << 20;
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  static thread_local std::unique_ptr<float, Free> memory;
  static thread_local size_t size = 0;
  size_t needed = (floats * sizeof(float) + kPage - 1) / kPage * kPage;
  if (size < needed) {
    memory.reset();
    memory.reset(static_cast<float*>(std::aligned_alloc(kPage, needed)));
    size = memory ? needed : 0;
    if (!memory) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    madvise(memory.get(), size, MADV_HUGEPAGE);
#endif
  }
  return memory.get();
}

}  // namespace equivit
