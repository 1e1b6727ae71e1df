// Any bytes are the texts of a model folder beside real weights, separated by a byte that no text
// has: config.json, preprocessor_config.json, dataset_statistics.json, model.safetensors.index.json
// (none: one file). Refused, or described with every size known when nothing speaks against it.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "model/families/describe.h"

namespace {

namespace fs = std::filesystem;

constexpr char kSeparator = '\xff';
constexpr std::array<std::string_view, 4> kFiles = {"config.json", "preprocessor_config.json",
                                                    "dataset_statistics.json",
                                                    "model.safetensors.index.json"};

// In memory where there is such a place; gone with the process.
class Folder {
 public:
  Folder() {
    const fs::path parent = fs::is_directory("/dev/shm") ? "/dev/shm" : fs::temp_directory_path();
    std::string name = (parent / "saccade-checkpoint-fuzz-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) std::abort();
    path_ = name;
    const fs::path demo = fs::path(SACCADE_SOURCE_DIR) / "deploy" / "demo" / "checkpoint";
    fs::create_symlink(demo / "tokenizer.json", path_ / "tokenizer.json");
    fs::create_symlink(demo / "model.safetensors", path_ / "weights.safetensors");
  }
  ~Folder() { fs::remove_all(path_); }

  void Write(std::string_view bytes) const {
    fs::remove(path_ / "model.safetensors");
    for (const std::string_view file : kFiles) {
      const size_t end = std::min(bytes.find(kSeparator), bytes.size());
      fs::remove(path_ / file);
      if (end > 0) std::ofstream(path_ / file, std::ios::binary) << bytes.substr(0, end);
      bytes.remove_prefix(std::min(end + 1, bytes.size()));
    }
    if (fs::exists(path_ / kFiles.back())) return;
    fs::create_symlink("weights.safetensors", path_ / "model.safetensors");
  }
  std::string path() const { return path_.string(); }

 private:
  fs::path path_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Folder folder;
  folder.Write({reinterpret_cast<const char*>(data), size});
  const auto description =
      saccade::DescribeFolder(folder.path(), {.frames = 8, .rows = 512, .logit_rows = 64});
  if (!description.ok()) {
    if (description.status().message().empty()) std::abort();
    return 0;
  }
  if (!description->problems.empty()) return 0;
  if (!description->known_sizes || description->towers.empty() || description->memory.empty() ||
      description->spec.statistics.empty() || description->spec.vision_tokens == 0) {
    std::abort();
  }
  return 0;
}
