#pragma once
// What all streams of one CPU backend share: the kernels of its level, the helpers and their
// scratch, the RoPE tables.
#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "backend/cpu/memory.h"
#include "base/thread_pool.h"
#include "kernels/cpu/api.h"

namespace saccade::cpu {

// Cosines and sines of one (theta, head_dim), made on first use of a position.
class RopeTable {
 public:
  RopeTable(double theta, uint32_t head_dim);
  double theta() const { return theta_; }
  uint32_t head_dim() const { return head_dim_; }
  // head_dim/2 cosines, then as many sines. Positions outside [0, kCached) are made anew in
  // `spill`, which must live as long as the result is used.
  const float* Row(int32_t position, std::vector<std::unique_ptr<float[]>>& spill);

 private:
  static constexpr int32_t kChunk = 256;  // positions
  static constexpr int32_t kCached = 1 << 20;
  void Fill(int32_t position, float* row) const;

  double theta_;
  uint32_t head_dim_;
  std::vector<float> inverse_frequencies_;
  std::vector<std::unique_ptr<float[]>> chunks_;
};

class Core {
 public:
  Core(const Kernels& kernels, std::unique_ptr<ThreadPool> pool, std::vector<Memory> scratch)
      : kernels_(kernels), pool_(std::move(pool)), scratch_(std::move(scratch)) {}

  const Kernels& kernels() const { return kernels_; }
  int threads() const { return pool_->threads(); }
  std::mutex& mutex() { return mutex_; }  // held by whoever calls one of the functions below

  // Calls body(task, scratch of the thread) for every task in [0, tasks).
  template <class Body>
  void ParallelFor(int64_t tasks, const Body& body) {
    if (tasks == 1) {
      body(int64_t{0}, static_cast<void*>(scratch_[0].data()));
      return;
    }
    pool_->ParallelFor(static_cast<int>(tasks), [&](int task, int thread) {
      body(int64_t{task}, static_cast<void*>(scratch_[static_cast<size_t>(thread)].data()));
    });
  }
  RopeTable& Rope(double theta, uint32_t head_dim);

 private:
  const Kernels& kernels_;
  std::mutex mutex_;
  std::unique_ptr<ThreadPool> pool_;
  std::vector<Memory> scratch_;  // one per thread, kScratchBytes each
  std::vector<std::unique_ptr<RopeTable>> ropes_;
};

}  // namespace saccade::cpu
