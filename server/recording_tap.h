#pragma once
// RecordingTap: keeps the stage tensors of one request, for `verify` and the golden tests.
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/model.h"
#include "tensor/backend.h"

namespace saccade {

// Record runs on the worker; everything else only when no step of the request is in flight.
class RecordingTap final : public TapSink {
 public:
  // `backend` is the worker's; it must outlive the tap. Wants exactly `names`.
  RecordingTap(Backend& backend, std::set<std::string, std::less<>> names)
      : backend_(backend), names_(std::move(names)) {}

  bool Wants(std::string_view name) const override { return names_.find(name) != names_.end(); }
  absl::Status Record(Stream& stream, std::string_view name, TensorView tensor) override;

  struct Stage {
    int64_t rows = 0;
    int64_t columns = 0;
    std::vector<float> values;  // [rows, columns]
  };
  // The rows of every record of `name` one after another; NOT_FOUND when there is none.
  absl::StatusOr<Stage> Rows(std::string_view name) const;
  // The first record of `name` with at least `rows` rows, cut to `rows`.
  absl::StatusOr<Stage> FirstWithRows(std::string_view name, int64_t rows) const;

 private:
  struct Copy {
    int64_t rows;
    int64_t columns;
    std::unique_ptr<Buffer> host;  // pinned, F32
  };

  Backend& backend_;
  std::set<std::string, std::less<>> names_;
  std::map<std::string, std::vector<Copy>, std::less<>> copies_;
};

}  // namespace saccade
