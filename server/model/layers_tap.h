#pragma once
// StageTap: gives copies of stage tensors to a TapSink (`verify`) without changing the serving path
// or its workspace: what a tap needs beside the stages themselves lives in buffers of its own.
// One per Encode or Forward call, on the worker thread.
#include <initializer_list>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/model.h"

namespace saccade {

class StageTap {
 public:
  // `backend` is the one `ctx` runs on.
  StageTap(const ExecContext& ctx, Backend& backend) : ctx_(ctx), backend_(backend) {}

  bool Wants(std::string_view name) const { return ctx_.tap != nullptr && ctx_.tap->Wants(name); }
  // Records `view` when its name is wanted: any rank-2 device view, F32 or BF16, rows may be
  // strided.
  absl::Status Record(std::string_view name, const TensorView& view);
  // Device memory for a value that the serving path does not keep; lives until Finish.
  absl::StatusOr<TensorView> Scratch(DType dtype, std::initializer_list<int64_t> dims);
  // Tokens that the cache of a one-sequence batch holds. Waits for the device.
  absl::StatusOr<int64_t> CachedTokens(const PagedBatch& batch);
  // Waits for the recorded copies and frees the scratch. Must be called after the last Record.
  absl::Status Finish();

 private:
  const ExecContext& ctx_;
  Backend& backend_;
  std::vector<std::unique_ptr<Buffer>> scratch_;
  std::optional<int64_t> cached_tokens_;
};

}  // namespace saccade
