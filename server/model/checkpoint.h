#pragma once
// A Hugging Face model folder: config.json and weights in model.safetensors, or in shards named by
// model.safetensors.index.json. Nothing is converted; weights stay mapped. Opening checks the whole
// folder against itself, so a short, missing or inconsistent shard fails here and not in an answer.
// Immutable: any thread may read.
#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/digest.h"
#include "base/status.h"
#include "model/json_util.h"
#include "model/safetensors.h"
#include "model/tensor_source.h"
#include "tensor/tensor.h"

namespace saccade {

class Checkpoint final : public TensorSource {
 public:
  // Files are sampled instead of read whole by WeightsFingerprint from this size on.
  static constexpr size_t kFullDigestBytes = 64 << 20;

  // Errors name the file and, where there is one, the tensor. With an index, only the shards it
  // names are read; a model.safetensors beside an index is refused as ambiguous.
  static absl::StatusOr<Checkpoint> Open(const std::string& dir);

  const std::string& dir() const { return dir_; }
  const Json& config() const { return config_; }
  JsonView config_view() const { return JsonView(config_, "config.json"); }
  // Another JSON file of the folder (a plain name); nullopt when it does not exist.
  absl::StatusOr<std::optional<Json>> OptionalJson(std::string_view file_name) const;

  bool Has(std::string_view name) const override { return shard_of_.find(name) != shard_of_.end(); }
  std::vector<std::string> names() const;  // sorted
  // Read-only host memory, valid as long as the checkpoint. See SafetensorsFile::Tensor for the
  // errors.
  absl::StatusOr<TensorView> Tensor(std::string_view name) const override;
  // A weight: F32, BF16 or F16 with exactly these dimensions; else INVALID_ARGUMENT with what is
  // there.
  absl::StatusOr<TensorView> TensorWithShape(std::string_view name,
                                             std::initializer_list<int64_t> dims) const;
  // A head that may be tied: `name`, or, only when the file lacks it and config.json (or its
  // text_config) says tie_word_embeddings: true, `tied_to`.
  absl::StatusOr<TensorView> TensorOrTied(std::string_view name, std::string_view tied_to,
                                          std::initializer_list<int64_t> dims) const;

  size_t TotalBytes() const;  // of all named tensors
  // Identity of the weights for cache keys: config.json, and per file its size, its header and its
  // data: all of it below kFullDigestBytes, else of every tensor its first and last 4 KiB and 14
  // blocks of 4 KiB spread evenly between (all of it up to 64 KiB). A retrained tensor changes
  // nearly every block; a hand edit of single values in a large file between samples goes unseen.
  // Reads up to 64 MB or 64 KiB per tensor: call it once.
  Digest128 WeightsFingerprint() const;

 private:
  Checkpoint() = default;
  absl::Status OpenSharded(const std::string& index_path);

  std::string dir_;
  std::string config_text_;
  Json config_;
  std::vector<SafetensorsFile> shards_;  // sorted by file name
  std::map<std::string, size_t, std::less<>> shard_of_;
};

}  // namespace saccade
