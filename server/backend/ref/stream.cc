#include "backend/ref/stream.h"

#include <array>
#include <cstring>
#include <utility>

#include "backend/ref/binder.h"
#include "base/strings.h"
#include "kernels/common/philox.h"

namespace saccade::ref {
namespace {

struct Completion {
  mutable std::mutex mutex;
  mutable std::condition_variable changed;
  bool done = false;
  absl::Status status;

  void Finish(absl::Status result) {
    {
      const std::lock_guard lock(mutex);
      done = true;
      status = std::move(result);
    }
    changed.notify_all();
  }
};

class RefEvent final : public Event {
 public:
  explicit RefEvent(std::shared_ptr<const Completion> completion)
      : completion_(std::move(completion)) {}
  bool Done() const override {
    const std::lock_guard lock(completion_->mutex);
    return completion_->done;
  }
  absl::Status Wait() const override {
    std::unique_lock lock(completion_->mutex);
    completion_->changed.wait(lock, [this] { return completion_->done; });
    return completion_->status;
  }

 private:
  std::shared_ptr<const Completion> completion_;
};

// Rows of the last dimension, one after another.
void CopyBytes(const TensorView& dst, const TensorView& src) {
  if (dst.numel() == 0) return;
  const size_t element = DTypeSize(dst.dtype);
  const int last = dst.rank - 1;
  std::array<int64_t, TensorView::kMaxRank> dims{1, 1, 1, 1};
  std::array<int64_t, TensorView::kMaxRank> to{};
  std::array<int64_t, TensorView::kMaxRank> from{};
  for (int d = 0; d < last; ++d) {
    const auto at = static_cast<size_t>(d);
    dims[at] = dst.dims[at];
    to[at] = dst.strides[at];
    from[at] = src.strides[at];
  }
  const size_t row_bytes = static_cast<size_t>(dst.dim(last)) * element;
  for (int64_t i = 0; i < dims[0]; ++i) {
    for (int64_t j = 0; j < dims[1]; ++j) {
      for (int64_t k = 0; k < dims[2]; ++k) {
        const int64_t to_offset = i * to[0] + j * to[1] + k * to[2];
        const int64_t from_offset = i * from[0] + j * from[1] + k * from[2];
        std::memmove(dst.data + static_cast<size_t>(to_offset) * element,
                     src.data + static_cast<size_t>(from_offset) * element, row_bytes);
      }
    }
  }
}

}  // namespace

RefStream::RefStream(std::shared_ptr<const MemoryTable> table, const Options& options)
    : table_(std::move(table)), options_(options) {
  if (options_.threaded) thread_ = std::thread([this] { Loop(); });
}

RefStream::~RefStream() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  thread_.join();
}

absl::Status RefStream::Execute(const Task& task) const {
  for (const auto& memory : task.uses) {
    if (memory->released()) {
      return absl::FailedPreconditionError(
          "ref: memory was freed before the work that uses it ran");
    }
  }
  return task.run();
}

absl::Status RefStream::Submit(Task task) {
  std::unique_lock lock(mutex_);
  if (!error_.ok()) return error_;
  if (!options_.threaded) {
    error_ = Execute(task);
    return absl::OkStatus();
  }
  space_.wait(lock, [this] { return queue_.size() < kMaxQueued; });
  queue_.push_back(std::move(task));
  lock.unlock();
  work_.notify_one();
  return absl::OkStatus();
}

absl::Status RefStream::Copy(TensorView dst, TensorView src) {
  if (dst.dtype != src.dtype || dst.rank != src.rank || dst.dims != src.dims) {
    return absl::InvalidArgumentError(
        StrCat("Copy: ", src.DebugString(), " does not fit ", dst.DebugString()));
  }
  Binder bind(*this, "Copy");
  const TensorView to = bind.Copyable(dst, "dst");
  const TensorView from = bind.Copyable(src, "src");
  return bind.Submit(*this, [to, from] {
    CopyBytes(to, from);
    return absl::OkStatus();
  });
}

absl::StatusOr<std::unique_ptr<Event>> RefStream::Record() {
  auto completion = std::make_shared<Completion>();
  {
    std::unique_lock lock(mutex_);
    if (!options_.threaded) {
      completion->Finish(error_);
    } else {
      // Also after an error: an event must always complete.
      space_.wait(lock, [this] { return queue_.size() < kMaxQueued; });
      Task task;
      task.marker = true;
      task.run = [this, completion] {
        absl::Status status;
        {
          const std::lock_guard inner(mutex_);
          status = error_;
        }
        completion->Finish(std::move(status));
        return absl::OkStatus();
      };
      queue_.push_back(std::move(task));
    }
  }
  work_.notify_one();
  return std::make_unique<RefEvent>(std::move(completion));
}

absl::Status RefStream::Synchronize() {
  ASSIGN_OR_RETURN(const std::unique_ptr<Event> event, Record());
  return event->Wait();
}

void RefStream::Delay() {
  if (options_.max_delay.count() <= 0) return;
  const double fraction = UniformDraw(options_.delay_seed, delays_++);
  std::this_thread::sleep_for(
      std::chrono::duration_cast<std::chrono::microseconds>(options_.max_delay * fraction));
}

void RefStream::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Task task = std::move(queue_.front());
    queue_.pop_front();
    const bool skip = !error_.ok() && !task.marker;
    lock.unlock();
    space_.notify_one();
    absl::Status status;
    if (!skip) {
      Delay();
      status = Execute(task);
    }
    task = Task{};  // lets go of memory before anyone is told that the work is done
    lock.lock();
    if (error_.ok()) error_ = std::move(status);
  }
}

}  // namespace saccade::ref
