#pragma once
// A safetensors file (https://github.com/huggingface/safetensors, format of v0.3+), mapped
// read-only. Everything the header says is checked before anything is used: dtypes, shapes, offsets
// inside the file, no overlap, no gap, no name twice. A file that shrinks while it is mapped kills
// the reader (as with any mapping): replace files, do not truncate.
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "tensor/tensor.h"

namespace saccade {

class SafetensorsFile {
 public:
  static constexpr size_t kMaxHeaderBytes = 64 << 20;

  struct Entry {
    std::string dtype;          // as in the file, e.g. "BF16"
    std::vector<int64_t> dims;  // any rank
    size_t offset = 0;          // of the first byte, from the start of the data section
    size_t bytes = 0;
  };

  // NOT_FOUND: no such file. INVALID_ARGUMENT: not a valid file; names the file and the tensor.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);
  // The same over bytes in memory, which must outlive the result; `name` is for errors.
  static absl::StatusOr<SafetensorsFile> Parse(std::span<const uint8_t> bytes,
                                               std::string_view name);

  SafetensorsFile(SafetensorsFile&&) noexcept = default;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept = default;

  const std::string& path() const { return path_; }
  bool Has(std::string_view name) const { return entries_.find(name) != entries_.end(); }
  const std::map<std::string, Entry, std::less<>>& entries() const { return entries_; }
  const std::map<std::string, std::string, std::less<>>& metadata() const { return metadata_; }

  // A dense, read-only host view, aligned to its element size; valid as long as this object. BOOL
  // is U8. NOT_FOUND: no such tensor; UNIMPLEMENTED: rank over 4, or a dtype the server has no type
  // for (I8, I16, U16, U32, U64, F8_*).
  absl::StatusOr<TensorView> Tensor(std::string_view name) const;
  // The tensor's bytes, whatever its rank and dtype.
  absl::StatusOr<std::span<const uint8_t>> Bytes(std::string_view name) const;

  std::span<const uint8_t> header() const { return header_; }  // the JSON text
  std::span<const uint8_t> data() const { return data_; }      // the data section

 private:
  // Unmaps on destruction.
  class Mapping;

  SafetensorsFile() = default;
  absl::Status ParseHeader(std::span<const uint8_t> bytes);

  std::string path_;
  std::shared_ptr<const Mapping> mapping_;  // null for Parse()
  std::span<const uint8_t> header_;
  std::span<const uint8_t> data_;
  std::map<std::string, Entry, std::less<>> entries_;
  std::map<std::string, std::string, std::less<>> metadata_;
  // Copies of tensors that the writer did not align to their element size (the format does not
  // demand it).
  std::map<std::string, std::vector<uint64_t>, std::less<>> realigned_;
};

}  // namespace saccade
