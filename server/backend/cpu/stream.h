#pragma once
// A stream runs work inside the call. An error found while work runs (an index from device memory
// that is out of range) sticks: later work is skipped, and later calls, events and Synchronize
// return it.
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "backend/cpu/core.h"
#include "tensor/backend.h"

namespace saccade::cpu {

class CpuStream final : public Stream {
 public:
  explicit CpuStream(std::shared_ptr<Core> core) : core_(std::move(core)) {}

  absl::Status Copy(TensorView dst, TensorView src) override;
  absl::StatusOr<std::unique_ptr<Event>> Record() override;
  absl::Status Synchronize() override { return error_; }

  // Runs `work`, which returns a status, under the core's lock. The result is the error of earlier
  // work only.
  template <class Work>
  absl::Status Run(const Work& work) {
    if (!error_.ok()) return error_;
    const std::lock_guard lock(core_->mutex());
    error_ = work();
    return absl::OkStatus();
  }
  Core& core() { return *core_; }
  const Kernels& kernels() const { return core_->kernels(); }

  // Kept between ops; the running op's own.
  struct Scratch {
    Workspace rows;   // activations in the form that the GEMM takes
    Workspace pages;  // K and V of dense attention
    std::vector<const float*> rope_rows;
    std::vector<std::unique_ptr<float[]>> rope_spill;
    std::vector<int32_t> dense_pages;
    std::vector<int32_t> dense_lengths;
    struct RowBlock {
      int32_t sequence;
      int32_t begin;
      int32_t end;
    };
    std::vector<RowBlock> row_blocks;
  };
  Scratch& scratch() { return scratch_; }

 private:
  std::shared_ptr<Core> core_;
  absl::Status error_;
  Scratch scratch_;
};

}  // namespace saccade::cpu
