// Any bytes are the texts of a flow policy's folder beside real weights, statistics and tokenizer,
// separated by a byte that no text has: config.json, policy_preprocessor.json,
// policy_postprocessor.json, tiny_dims.json and the config.json of the VLM. The first byte says
// whose weights: SmolVLA's, pi0's, pi0.5's or pi0-FAST's. Refused, or described with every size
// known when nothing speaks against it.
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
constexpr std::array<std::string_view, 5> kFiles = {"config.json", "policy_preprocessor.json",
                                                    "policy_postprocessor.json", "tiny_dims.json",
                                                    "vlm/config.json"};
constexpr std::array<std::string_view, 4> kPolicies = {"smolvla", "pi0", "pi05", "pi0_fast"};

// In memory where there is such a place; gone with the process.
class Folder {
 public:
  explicit Folder(std::string_view policy) {
    const fs::path parent = fs::is_directory("/dev/shm") ? "/dev/shm" : fs::temp_directory_path();
    std::string name = (parent / "saccade-flow-fuzz-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) std::abort();
    path_ = name;
    const fs::path from =
        fs::path(SACCADE_SOURCE_DIR) / "tests" / "golden" / "data" / policy / "checkpoint";
    fs::create_directory(path_ / "vlm");
    for (const auto& file : fs::recursive_directory_iterator(from)) {
      const fs::path relative = file.path().lexically_relative(from);
      if (file.path().extension() != ".safetensors" && file.path().filename() != "tokenizer.json" &&
          file.path().filename() != "processor_config.json") {
        continue;
      }
      fs::create_directories((path_ / relative).parent_path());
      fs::create_symlink(file.path(), path_ / relative);
    }
  }
  ~Folder() { fs::remove_all(path_); }

  void Write(std::string_view bytes) const {
    for (const std::string_view file : kFiles) {
      const size_t end = std::min(bytes.find(kSeparator), bytes.size());
      fs::remove(path_ / file);
      if (end > 0) std::ofstream(path_ / file, std::ios::binary) << bytes.substr(0, end);
      bytes.remove_prefix(std::min(end + 1, bytes.size()));
    }
  }
  std::string path() const { return path_.string(); }

 private:
  fs::path path_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::array<Folder, 4> folders = {Folder(kPolicies[0]), Folder(kPolicies[1]),
                                                Folder(kPolicies[2]), Folder(kPolicies[3])};
  if (size == 0) return 0;
  const Folder& folder = folders[data[0] % folders.size()];
  folder.Write({reinterpret_cast<const char*>(data) + 1, size - 1});
  const auto description = saccade::DescribeFolder(
      folder.path(), {.frames = 8, .rows = 512, .logit_rows = 64, .items = 8});
  if (!description.ok()) {
    if (description.status().message().empty()) std::abort();
    return 0;
  }
  if (!description->problems.empty()) return 0;
  const saccade::ModelSpec& spec = description->spec;
  if (!description->known_sizes || description->towers.empty() || description->memory.empty() ||
      spec.statistics.empty() || spec.vision_tokens == 0 || spec.cameras.empty() ||
      (spec.head.kind == saccade::HeadKind::kFlow ? spec.head.horizon : spec.max_action_tokens) ==
          0 ||
      spec.state_dim == 0 || spec.state_dim > spec.state_width || spec.kv.head_dim % 2 != 0) {
    std::abort();
  }
  return 0;
}
