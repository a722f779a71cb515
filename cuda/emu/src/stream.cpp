// Streams and events.  Work is queued, and runs as late as CUDA allows: when the host waits for it, and then only what
// it waits for.  A copy reads and writes host memory when it runs, as those from page-locked memory may.
//
// A task knows the tasks that it must follow: the last of its stream, those that it was told to wait for by events,
// and, by the rule of the default stream, the last of the default stream or, for a task on that, the last of all
// streams.
#include <memory>

#include "internal.h"

struct CUstream_st {
  std::shared_ptr<cuemu::Task> last;
};
struct CUevent_st {
  std::shared_ptr<cuemu::Task> recorded;
};

namespace cuemu {

struct Task {
  std::vector<std::shared_ptr<Task>> after;
  std::function<void()> run;
};

namespace {

// Never destroyed: static objects of the host may still free device memory at the end.
CUstream_st& default_stream() {
  static auto& s = *new CUstream_st;
  return s;
}
std::vector<CUstream_st*>& streams() {
  static auto& all = *new std::vector<CUstream_st*>;
  return all;
}

void finish(std::shared_ptr<Task>& task) {
  if (!task) return;
  note_wait();
  const DeviceMemoryOpen open;
  std::vector<Task*> todo{task.get()};  // depth first; queues are long, so without recursion
  while (!todo.empty()) {
    Task* t = todo.back();
    if (!t->after.empty()) {
      const std::shared_ptr<Task> before = t->after.back();
      if (before->run || !before->after.empty()) {
        todo.push_back(before.get());
        continue;
      }
      t->after.pop_back();
      continue;
    }
    if (t->run) std::exchange(t->run, nullptr)();
    todo.pop_back();
  }
  task.reset();
}

void add(CUstream_st* stream, std::function<void()> run) {
  auto task = std::make_shared<Task>();
  task->run = std::move(run);
  CUstream_st& s = stream ? *stream : default_stream();
  auto follow = [&](const std::shared_ptr<Task>& t) {
    if (t) task->after.push_back(t);
  };
  follow(s.last);
  if (stream)
    follow(default_stream().last);
  else
    for (CUstream_st* other : streams()) follow(other->last);
  s.last = std::move(task);
}

}  // namespace

void queue(cudaStream_t stream, std::function<void()> run) { add(stream, std::move(run)); }

static uint64_t g_waits = 0;
void note_wait() { g_waits++; }
uint64_t host_waits() { return g_waits; }

void finish_all() {
  for (CUstream_st* s : streams()) finish(s->last);
  finish(default_stream().last);
}

}  // namespace cuemu

using cuemu::finish;

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  cuemu::streams().push_back(*stream = new CUstream_st);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  finish(stream->last);
  std::erase(cuemu::streams(), stream);
  delete stream;
  return cudaPeekAtLastError();
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (stream)
    finish(stream->last);
  else
    finish(cuemu::default_stream().last);
  return cudaPeekAtLastError();
}
cudaError_t cudaDeviceSynchronize() {
  cuemu::finish_all();
  return cudaPeekAtLastError();
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  cuemu::add(stream, nullptr);
  event->recorded = (stream ? *stream : cuemu::default_stream()).last;
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  finish(event->recorded);
  return cudaPeekAtLastError();
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  cuemu::add(stream, nullptr);
  if (event->recorded) (stream ? *stream : cuemu::default_stream()).last->after.push_back(event->recorded);
  return cudaSuccess;
}
