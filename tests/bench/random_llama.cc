#include "tests/bench/random_llama.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>

#include "base/strings.h"
#include "kernels/common/bf16.h"
#include "kernels/common/philox.h"
#include "model/checkpoint.h"

namespace saccade::bench {
namespace {

class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "saccade-XXXXXX").string();
    if (mkdtemp(name.data()) != nullptr) path_ = name;
  }
  ~Folder() {
    std::error_code none;
    if (!path_.empty()) std::filesystem::remove_all(path_, none);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// All tensors in BF16, cut from the same numbers in [-0.05, 0.05), each from another place.
absl::Status WriteCheckpoint(const std::filesystem::path& folder,
                             const std::vector<TensorSpec>& tensors) {
  std::vector<uint16_t> noise(size_t{1} << 22);
  for (size_t i = 0; i < noise.size(); i += 4) {
    const Philox4x32 block = PhiloxBlock(1, i, 0);
    for (size_t j = 0; j < 4; ++j) {
      noise[i + j] = F32ToBf16((static_cast<float>(block.word[j] >> 8) * 0x1p-23f - 1.0f) * 0.05f);
    }
  }
  nlohmann::json header;
  uint64_t offset = 0;
  for (const TensorSpec& tensor : tensors) {
    const uint64_t bytes = static_cast<uint64_t>(tensor.numel()) * sizeof(uint16_t);
    header[tensor.name] = {
        {"dtype", "BF16"}, {"shape", tensor.dims}, {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string head = header.dump();
  head.resize((head.size() + 7) / 8 * 8, ' ');
  std::ofstream file(folder / "model.safetensors", std::ios::binary);
  const uint64_t size = head.size();
  file.write(reinterpret_cast<const char*>(&size), sizeof(size));
  file << head;
  size_t at = 0;
  for (const TensorSpec& tensor : tensors) {
    at = (at + 7919) % noise.size();
    for (auto left = static_cast<size_t>(tensor.numel()); left > 0;) {
      const size_t count = std::min(left, noise.size() - at);
      file.write(reinterpret_cast<const char*>(noise.data() + at),
                 static_cast<std::streamsize>(count * sizeof(uint16_t)));
      left -= count;
      at = (at + count) % noise.size();
    }
  }
  std::ofstream(folder / "config.json") << "{}";
  file.close();
  if (!file) return absl::UnavailableError("cannot write random weights to a temporary folder");
  return absl::OkStatus();
}

class RandomLlama final : public Model {
 public:
  static absl::StatusOr<std::unique_ptr<Model>> Load(const Checkpoint& checkpoint, Backend& backend,
                                                     const RandomLlamaOptions& options) {
    ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, backend.NewStream());
    WeightLoader loader(checkpoint, backend, *stream, DType::kBf16);
    ASSIGN_OR_RETURN(DecoderTrunk trunk, DecoderTrunk::Load(loader, options.trunk));
    return std::unique_ptr<Model>(new RandomLlama(options, std::move(trunk), backend));
  }
  const ModelSpec& spec() const override { return spec_; }
  absl::StatusOr<Prompt> BuildPrompt(const PromptInput& input) const override {
    return BuildPromptFromTokens(
        std::vector<int32_t>(input.instruction.begin(), input.instruction.end()),
        0);  // a byte is a token
  }
  absl::StatusOr<Prompt> BuildPromptFromTokens(std::span<const int32_t> ids,
                                               uint64_t) const override {
    return Prompt{{{Modality::kText, {ids.begin(), ids.end()}}}};
  }
  absl::StatusOr<ModelImage> Preprocess(uint32_t, ImageRows&) const override {
    return absl::InvalidArgumentError("this model has no camera");
  }
  bool IsActionToken(int32_t) const override { return true; }
  absl::StatusOr<ActionChunk> DecodeActions(std::span<const int32_t> tokens, std::string_view,
                                            InvalidTokenPolicy) const override {
    ActionChunk chunk;
    chunk.tokens.assign(tokens.begin(), tokens.end());
    return chunk;
  }
  size_t WorkspaceBytes(uint32_t, uint32_t rows, uint32_t logit_rows) const override {
    return trunk_.spec().WorkspaceBytes(rows, logit_rows, DType::kBf16);
  }
  size_t ParkingBytes(uint32_t, uint32_t rows, uint32_t logit_rows) const override {
    return trunk_.spec().ParkingBytes(rows, logit_rows);
  }
  absl::Status Encode(ExecContext&, const EncodeBatch&) const override { return absl::OkStatus(); }
  absl::Status Forward(ExecContext& ctx, const TrunkBatch& batch) const override {
    StageTap tap(ctx, backend_);
    RETURN_IF_ERROR(trunk_.Forward(ctx, tap, batch));
    return tap.Finish();
  }

 private:
  RandomLlama(const RandomLlamaOptions& options, DecoderTrunk trunk, Backend& backend)
      : trunk_(std::move(trunk)), backend_(backend) {
    const DecoderSpec& llama = options.trunk;
    spec_.family = "random_llama";
    spec_.compute = DType::kBf16;
    spec_.statistics = options.statistics;
    spec_.kv.layers = llama.layers;
    spec_.kv.kv_heads = llama.kv_heads;
    spec_.kv.head_dim = llama.head_dim;
    spec_.kv.dtype = DType::kBf16;
    spec_.hidden = llama.hidden;
    spec_.vocab_size = llama.vocab;
    spec_.max_positions = options.max_positions;
    spec_.trunk_layers = llama.LayerCosts();
    for (const StatisticsSpec& s : options.statistics) {
      spec_.max_action_tokens = std::max(spec_.max_action_tokens, s.action_dim);
    }
  }

  ModelSpec spec_;
  const DecoderTrunk trunk_;
  Backend& backend_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> MakeRandomLlama(Backend& backend,
                                                       const RandomLlamaOptions& options) {
  RandomLlamaOptions complete = options;
  complete.trunk.prefix = "model.";
  complete.trunk.table = "model.embed_tokens.weight";
  complete.trunk.head = "lm_head.weight";
  const Folder folder;
  RETURN_IF_ERROR(WriteCheckpoint(folder.path(), complete.trunk.Tensors()));
  ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(folder.path().string()));
  return RandomLlama::Load(checkpoint, backend, complete);
}

}  // namespace saccade::bench
