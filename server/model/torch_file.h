#pragma once
// What torch.save writes of a state dict (.pt, .pth): a zip of uncompressed entries, of which
// data.pkl is a pickle of names and shapes and data/N are the bytes. Nothing is run: the pickle is
// read by an interpreter that knows dict, OrderedDict, strings, numbers, tuples and
// torch._utils._rebuild_tensor_v2 over torch's storages, and refuses everything else by its name.
// Tensors may share a storage; each must be contiguous in it.
// Not read: the format before torch 1.6 (no zip), compressed or encrypted entries, files over 4 GiB
// (zip64), big-endian files. Checksums of the zip are not compared.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/status.h"
#include "model/tensor_file.h"

namespace saccade {

class TorchFile final : public TensorFile {
 public:
  static constexpr size_t kMaxPickleBytes = 16 << 20;
  static constexpr size_t kMaxValues = 1 << 20;  // about 15 per tensor
  static constexpr size_t kMaxMemo = 1 << 20;
  static constexpr size_t kMaxTextBytes = 4096;
  static constexpr size_t kMaxRank = 64;  // torch's own

  // NOT_FOUND: no such file. INVALID_ARGUMENT: not such a file, or damaged. UNIMPLEMENTED: what is
  // listed above. Errors name the file, the entry, and the place in the pickle.
  static absl::StatusOr<TorchFile> Open(const std::string& path);
  // The same over bytes in memory, which must outlive the result; `name` is for errors.
  static absl::StatusOr<TorchFile> Parse(std::span<const uint8_t> bytes, std::string_view name);

 private:
  TorchFile() = default;
  absl::Status Read(std::span<const uint8_t> bytes);
};

}  // namespace saccade
