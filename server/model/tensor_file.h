#pragma once
// Named tensors in one read-only mapped file, whatever its format: what is left when a parser
// (safetensors.h, torch_file.h) has checked the file. A file that shrinks while it is mapped kills
// the reader (as with any mapping): replace files, do not truncate.
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "tensor/tensor.h"

namespace saccade {

// An element type by its safetensors name.
struct StoredType {
  std::string_view name;
  size_t size;
  std::optional<DType> dtype;  // nullopt: the server has no such type; the tensor is kept
};
const StoredType* FindStoredType(std::string_view name);  // null: unknown

class TensorFile {
 public:
  struct Entry {
    std::string dtype;          // a StoredType, e.g. "BF16"
    std::vector<int64_t> dims;  // any rank
    size_t offset = 0;          // of the first byte, from the start of data()
    size_t bytes = 0;
  };

  TensorFile(TensorFile&&) noexcept = default;
  TensorFile& operator=(TensorFile&&) noexcept = default;

  const std::string& path() const { return path_; }
  bool Has(std::string_view name) const { return entries_.find(name) != entries_.end(); }
  const std::map<std::string, Entry, std::less<>>& entries() const { return entries_; }
  // A dense, read-only host view, aligned to its element size; valid as long as this object. BOOL
  // is U8. NOT_FOUND: no such tensor; UNIMPLEMENTED: rank over 4, or a dtype the server has no type
  // for (I8, I16, U16, U32, U64, F8_*).
  absl::StatusOr<TensorView> Tensor(std::string_view name) const;
  // The tensor's bytes, whatever its rank and dtype.
  absl::StatusOr<std::span<const uint8_t>> Bytes(std::string_view name) const;

  std::span<const uint8_t> data() const { return data_; }  // what the entries' offsets count in

 protected:
  TensorFile() = default;
  // Maps a regular file of at least `min_bytes`. NOT_FOUND: no such file. INVALID_ARGUMENT: not a
  // regular file, or smaller; `kind` is the format's name for that error.
  absl::StatusOr<std::span<const uint8_t>> Map(const std::string& path, size_t min_bytes,
                                               std::string_view kind);
  // Bytes of a dense tensor; nullopt: more than there can be.
  static std::optional<size_t> DenseBytes(const StoredType& type, std::span<const int64_t> dims);
  // Copies tensors that the writer did not align to their element size. Once all entries are there.
  void Realign();

  std::string path_;
  std::span<const uint8_t> data_;
  std::map<std::string, Entry, std::less<>> entries_;

 private:
  // Unmaps on destruction.
  class Mapping;

  std::shared_ptr<const Mapping> mapping_;  // null for bytes in memory
  std::map<std::string, std::vector<uint64_t>, std::less<>> realigned_;
};

}  // namespace saccade
