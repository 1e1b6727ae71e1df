#pragma once
// A safetensors file (https://github.com/huggingface/safetensors, format of v0.3+), mapped
// read-only. Everything the header says is checked before anything is used: dtypes, shapes, offsets
// inside the file, no overlap, no gap, no name twice.
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "model/tensor_file.h"

namespace saccade {

class SafetensorsFile final : public TensorFile {
 public:
  static constexpr size_t kMaxHeaderBytes = 64 << 20;

  // NOT_FOUND: no such file. INVALID_ARGUMENT: not a valid file; names the file and the tensor.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);
  // The same over bytes in memory, which must outlive the result; `name` is for errors.
  static absl::StatusOr<SafetensorsFile> Parse(std::span<const uint8_t> bytes,
                                               std::string_view name);

  const std::map<std::string, std::string, std::less<>>& metadata() const { return metadata_; }
  std::span<const uint8_t> header() const { return header_; }  // the JSON text

 private:
  SafetensorsFile() = default;
  absl::Status ParseHeader(std::span<const uint8_t> bytes);

  std::span<const uint8_t> header_;
  std::map<std::string, std::string, std::less<>> metadata_;
};

}  // namespace saccade
