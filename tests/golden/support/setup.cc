#include "tests/golden/support/setup.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <iterator>

#include "assembly.h"
#include "kernels/cpu/api.h"
#include "model/checkpoint.h"

namespace saccade {

BackendConfig RefBackendConfig(bool guarded) {
  BackendConfig config;
  config.name = guarded ? "ref_guarded" : "ref";
  config.kind = BackendKind::kRef;
  config.guarded = guarded;
  return config;
}

std::vector<BackendConfig> AllBackends() {
  std::vector<BackendConfig> out = {RefBackendConfig(false), RefBackendConfig(true)};
  for (const auto& [level, isa] : {std::pair{IsaLevel::kAvx2, cpu::Isa::kAvx2},
                                   std::pair{IsaLevel::kAvx512, cpu::Isa::kAvx512},
                                   std::pair{IsaLevel::kAvx512Bf16, cpu::Isa::kAvx512Bf16},
                                   std::pair{IsaLevel::kAmxBf16, cpu::Isa::kAmxBf16}}) {
    if (!cpu::IsaSupported(isa)) continue;
    BackendConfig config;
    config.name = "cpu_" + std::string(Name(level));
    config.isa = level;
    config.threads = 2;
    out.push_back(config);
  }
  return out;
}

absl::StatusOr<LoadedModel> LoadFrom(const std::string& dir, const BackendConfig& backend,
                                     DType compute, const std::optional<OftOptions>& oft) {
  LoadedModel out;
  ASSIGN_OR_RETURN(out.backend, MakeBackend(backend));
  ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(dir));
  ModelOptions options;
  options.compute = compute;
  options.oft = oft;
  ASSIGN_OR_RETURN(out.model, LoadModel(checkpoint, *out.backend, options));
  return out;
}

FolderCopy::FolderCopy(const std::string& dir) {
  static std::atomic<int> next{0};
  path_ = std::filesystem::path(testing::TempDir()) /
          ("saccade_golden_" + std::to_string(getpid()) + "_" + std::to_string(next++));
  std::filesystem::create_directories(path_);
  std::filesystem::copy(
      dir, path_,
      std::filesystem::copy_options::recursive | std::filesystem::copy_options::overwrite_existing);
  std::filesystem::permissions(path_, std::filesystem::perms::owner_all);
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path_)) {
    std::filesystem::permissions(entry.path(), std::filesystem::perms::owner_all);
  }
}

FolderCopy::~FolderCopy() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string FolderCopy::Read(const std::string& name) const {
  std::ifstream in(file(name), std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void FolderCopy::Write(const std::string& name, const std::string& bytes) const {
  std::ofstream(file(name), std::ios::binary | std::ios::trunc) << bytes;
}

Json FolderCopy::ReadJson(const std::string& name) const { return Json::parse(Read(name)); }

void FolderCopy::WriteJson(const std::string& name, const Json& value) const {
  Write(name, value.dump());
}

void FolderCopy::Remove(const std::string& name) const { std::filesystem::remove(file(name)); }

}  // namespace saccade
