#pragma once
// The record that `verify` compares with, and the report of how it went.
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/image_decode.h"
#include "model/json_util.h"
#include "model/safetensors.h"

namespace saccade {

// A recorded tensor as numbers, with its last dimension as columns.
struct Recorded {
  std::vector<double> values;
  std::vector<int64_t> dims;
  int64_t columns() const { return dims.empty() ? 1 : dims.back(); }
  int64_t rows() const;
};

double MaxAbs(const std::vector<double>& values);
// Of the first `count` values. NaN on either side is the largest difference there is.
double MaxDifference(const std::vector<double>& a, const std::vector<double>& b, size_t count);

// golden.safetensors and the golden.json beside it.
class Golden {
 public:
  // `path` is either of the two. A tensor that the list in the .json names must be there.
  static absl::StatusOr<Golden> Load(const std::string& path);

  std::vector<std::string> names() const;  // sorted
  bool Has(std::string_view name) const { return file_.Has(name); }
  absl::StatusOr<Recorded> Get(std::string_view name) const;
  JsonView info() const { return JsonView(info_, "golden.json"); }

  // The frame of a model's camera: image_u8 (of the only one), imageN_u8 (of the Nth), or
  // image.NAME_u8 with the last part of its name. NOT_FOUND: there is none.
  absl::StatusOr<Rgb8Image> Frame(uint32_t camera, std::string_view camera_name) const;
  absl::StatusOr<Rgb8Image> Image(std::string_view name) const;  // u8[height, width, 3]
  static bool IsFrame(std::string_view name);
  // What the robot was told: "instruction", or "task".
  absl::StatusOr<std::string> Instruction() const;
  // Empty where the record has none.
  absl::StatusOr<std::vector<float>> Floats(std::string_view name) const;

 private:
  Golden(Json info, SafetensorsFile file) : info_(std::move(info)), file_(std::move(file)) {}
  Json info_;
  SafetensorsFile file_;
};

// One line per tensor on standard output, and whether all of them were good.
class Report {
 public:
  void Begin(std::string_view precision);
  void Compared(const std::string& name, double difference, double tolerance,
                const std::string& note);
  void NotCompared(const std::string& name, std::string_view why);
  void Noted(const std::string& name, const std::string& note);
  bool ok() const { return ok_; }

 private:
  bool ok_ = true;
};

}  // namespace saccade
