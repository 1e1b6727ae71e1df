#include "model/checkpoint.h"

#include <sys/stat.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_join.h"
#include "base/strings.h"

namespace saccade {
namespace {

constexpr size_t kMaxConfigBytes = 16 << 20;
constexpr size_t kMaxIndexBytes = 64 << 20;
constexpr size_t kMaxShards = 4096;
constexpr size_t kSampleBlock = 4096;
constexpr size_t kSampleBlocks = 16;

bool Exists(const std::string& path) {
  struct stat info {};
  return stat(path.c_str(), &info) == 0;
}

// A name that cannot leave the folder.
bool IsPlainName(std::string_view name) {
  return !name.empty() && name.size() <= 255 && name[0] != '.' &&
         name.find("..") == std::string_view::npos &&
         name.find_first_of(std::string_view("/\\\0", 3)) == std::string_view::npos;
}

std::string ShapeText(const SafetensorsFile::Entry& entry) {
  return StrCat(entry.dtype, " [", absl::StrJoin(entry.dims, ", "), "]");
}

void DigestSamples(DigestBuilder& digest, std::span<const uint8_t> bytes) {
  if (bytes.size() <= kSampleBlock * kSampleBlocks) {
    digest.Field(DigestBytes("checkpoint.sample", bytes));
    return;
  }
  const size_t last = bytes.size() - kSampleBlock;
  for (size_t i = 0; i < kSampleBlocks; ++i) {
    const size_t offset = last / (kSampleBlocks - 1) * i;
    digest.Field(DigestBytes("checkpoint.sample",
                             bytes.subspan(i + 1 == kSampleBlocks ? last : offset, kSampleBlock)));
  }
}

}  // namespace

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& dir) {
  struct stat info {};
  if (stat(dir.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) {
    return absl::NotFoundError(StrCat(dir, ": no such folder"));
  }
  Checkpoint checkpoint;
  checkpoint.dir_ = dir;
  ASSIGN_OR_RETURN(checkpoint.config_text_, ReadFile(dir + "/config.json", kMaxConfigBytes));
  ASSIGN_OR_RETURN(checkpoint.config_, ParseJson(checkpoint.config_text_, dir + "/config.json",
                                                 {.max_bytes = kMaxConfigBytes}));
  if (!checkpoint.config_.is_object()) {
    return absl::InvalidArgumentError(StrCat(dir, "/config.json: expected an object"));
  }

  const std::string single = dir + "/model.safetensors";
  const std::string index = dir + "/model.safetensors.index.json";
  if (Exists(index)) {
    if (Exists(single)) {
      return absl::InvalidArgumentError(
          StrCat(dir,
                 ": has both model.safetensors and model.safetensors.index.json; which "
                 "weights are meant is ambiguous, remove one"));
    }
    RETURN_IF_ERROR(checkpoint.OpenSharded(index));
    return checkpoint;
  }
  if (!Exists(single)) {
    return absl::NotFoundError(
        StrCat(dir, ": has neither model.safetensors nor model.safetensors.index.json",
               Exists(dir + "/pytorch_model.bin") || Exists(dir + "/pytorch_model.bin.index.json")
                   ? " (pickled weights are not read: convert them to safetensors)"
                   : ""));
  }
  ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::Open(single));
  for (const auto& [name, entry] : file.entries()) checkpoint.shard_of_.emplace(name, 0);
  checkpoint.shards_.push_back(std::move(file));
  return checkpoint;
}

absl::Status Checkpoint::OpenSharded(const std::string& index_path) {
  ASSIGN_OR_RETURN(const Json index, ReadJsonFile(index_path, {.max_bytes = kMaxIndexBytes}));
  const JsonView root(index, index_path);
  ASSIGN_OR_RETURN(const JsonView map, root.Get("weight_map"));
  if (!map.json().is_object()) return map.Error("expected an object");

  std::map<std::string, std::vector<std::string>> tensors_of;  // by shard file name
  for (const auto& item : map.json().items()) {
    ASSIGN_OR_RETURN(const std::string shard, map.String(item.key()));
    if (!IsPlainName(shard)) {
      return map.Error(StrCat(item.key(), ": \"", shard, "\" is not a plain file name"));
    }
    tensors_of[shard].push_back(item.key());
  }
  if (tensors_of.empty()) return map.Error("names no tensor");
  if (tensors_of.size() > kMaxShards) {
    return map.Error(StrCat("names ", tensors_of.size(), " shards, more than ", kMaxShards));
  }
  for (const auto& [shard, names] : tensors_of) {
    absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Open(dir_ + "/" + shard);
    if (absl::IsNotFound(file.status())) {
      return absl::NotFoundError(
          StrCat(dir_, "/", shard, ": missing, but ", index_path, " names it for ", names.front()));
    }
    if (!file.ok()) return file.status();
    for (const std::string& name : names) {
      if (!file->Has(name)) {
        return absl::InvalidArgumentError(StrCat(dir_, "/", shard, ": has no tensor \"", name,
                                                 "\", but ", index_path, " says so"));
      }
      shard_of_.emplace(name, shards_.size());
    }
    shards_.push_back(std::move(*file));
  }
  // A second copy of an indexed tensor in another shard: the folder is a mixture of two models.
  for (size_t i = 0; i < shards_.size(); ++i) {
    for (const auto& [name, entry] : shards_[i].entries()) {
      const auto it = shard_of_.find(name);
      if (it != shard_of_.end() && it->second != i) {
        return absl::InvalidArgumentError(StrCat(shards_[i].path(), ": holds ", name,
                                                 ", which the index places in ",
                                                 shards_[it->second].path()));
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<Json>> Checkpoint::OptionalJson(std::string_view file_name) const {
  if (!IsPlainName(file_name)) {
    return absl::InvalidArgumentError(StrCat("\"", file_name, "\" is not a plain file name"));
  }
  absl::StatusOr<Json> json = ReadJsonFile(StrCat(dir_, "/", file_name));
  if (absl::IsNotFound(json.status())) return std::optional<Json>();
  if (!json.ok()) return json.status();
  return std::optional<Json>(*std::move(json));
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  names.reserve(shard_of_.size());
  for (const auto& [name, shard] : shard_of_) names.push_back(name);
  return names;
}

absl::StatusOr<TensorView> Checkpoint::Tensor(std::string_view name) const {
  const auto it = shard_of_.find(name);
  if (it == shard_of_.end()) {
    return absl::NotFoundError(StrCat(dir_, ": the weights lack the tensor ", name));
  }
  return shards_[it->second].Tensor(name);
}

absl::StatusOr<TensorView> Checkpoint::TensorWithShape(std::string_view name,
                                                       std::initializer_list<int64_t> dims) const {
  ASSIGN_OR_RETURN(const TensorView view, Tensor(name));
  const SafetensorsFile& shard = shards_[shard_of_.find(name)->second];
  const SafetensorsFile::Entry& entry = shard.entries().find(name)->second;
  const bool floating =
      view.dtype == DType::kF32 || view.dtype == DType::kBf16 || view.dtype == DType::kF16;
  if (!floating || !std::equal(dims.begin(), dims.end(), entry.dims.begin(), entry.dims.end())) {
    return absl::InvalidArgumentError(
        StrCat(shard.path(), ": ", name, ": expected F32, BF16 or F16 [", absl::StrJoin(dims, ", "),
               "], got ", ShapeText(entry)));
  }
  return view;
}

absl::StatusOr<TensorView> Checkpoint::TensorOrTied(std::string_view name, std::string_view tied_to,
                                                    std::initializer_list<int64_t> dims) const {
  if (Has(name)) return TensorWithShape(name, dims);
  const JsonView config = config_view();
  ASSIGN_OR_RETURN(bool tied, config.Bool("tie_word_embeddings", false));
  if (!tied && config.Has("text_config")) {
    ASSIGN_OR_RETURN(const JsonView text, config.Get("text_config"));
    ASSIGN_OR_RETURN(tied, text.Bool("tie_word_embeddings", false));
  }
  if (!tied) {
    return absl::NotFoundError(StrCat(dir_, ": the weights lack the tensor ", name,
                                      " and config.json does not say tie_word_embeddings: true"));
  }
  return TensorWithShape(tied_to, dims);
}

size_t Checkpoint::TotalBytes() const {
  size_t total = 0;
  for (const auto& [name, shard] : shard_of_) {
    total += shards_[shard].entries().find(name)->second.bytes;
  }
  return total;
}

Digest128 Checkpoint::WeightsFingerprint() const {
  DigestBuilder digest("checkpoint.weights.v1");
  digest.Field(config_text_);
  for (const SafetensorsFile& shard : shards_) {
    digest.Field(static_cast<uint64_t>(shard.data().size()));
    digest.Field(DigestBytes("checkpoint.header", shard.header()));
    if (shard.data().size() < kFullDigestBytes) {
      digest.Field(DigestBytes("checkpoint.data", shard.data()));
      continue;
    }
    for (const auto& [name, entry] : shard.entries()) {
      DigestSamples(digest, shard.data().subspan(entry.offset, entry.bytes));
    }
  }
  return digest.Finish();
}

}  // namespace saccade
