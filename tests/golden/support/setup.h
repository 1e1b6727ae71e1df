#pragma once
// Where the golden data is, and the backends every golden must pass on.
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "config/config.h"
#include "model/json_util.h"
#include "model/model.h"
#include "tensor/backend.h"

namespace saccade {

inline std::string DataDir() { return SACCADE_SOURCE_DIR "/tests/golden/data"; }
inline std::string DemoCheckpoint() { return SACCADE_SOURCE_DIR "/deploy/demo/checkpoint"; }

// ref, ref with memory the host cannot read, and cpu at every level this machine has. `name` is
// also a valid test name.
std::vector<BackendConfig> AllBackends();
BackendConfig RefBackendConfig(bool guarded);

// A model with what it needs to live, in an order that destroys it first.
struct LoadedModel {
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Model> model;
};
absl::StatusOr<LoadedModel> LoadFrom(const std::string& dir, const BackendConfig& backend,
                                     DType compute,
                                     const std::optional<OftOptions>& oft = std::nullopt);

// A private copy of a folder that a test may damage; removed at the end.
class FolderCopy {
 public:
  explicit FolderCopy(const std::string& dir);
  ~FolderCopy();
  FolderCopy(const FolderCopy&) = delete;
  FolderCopy& operator=(const FolderCopy&) = delete;

  std::string path() const { return path_.string(); }
  std::string file(const std::string& name) const { return (path_ / name).string(); }
  Json ReadJson(const std::string& name) const;
  void WriteJson(const std::string& name, const Json& value) const;
  std::string Read(const std::string& name) const;
  void Write(const std::string& name, const std::string& bytes) const;
  void Remove(const std::string& name) const;

 private:
  std::filesystem::path path_;
};

}  // namespace saccade
