// Any bytes are the texts of a policy's folder beside real statistics, separated by a byte that no
// text has: config.json, policy_preprocessor.json, policy_postprocessor.json and the
// processor_config.json of a FAST tokenizer. Refused, or states and actions of every length are
// converted or refused, and nothing that is not finite comes out.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "model/adapters.h"
#include "model/fast_tokens.h"

namespace {

namespace fs = std::filesystem;

constexpr char kSeparator = '\xff';
constexpr std::array<std::string_view, 4> kFiles = {"config.json", "policy_preprocessor.json",
                                                    "policy_postprocessor.json",
                                                    "processor_config.json"};

// In memory where there is such a place; gone with the process.
class Folder {
 public:
  Folder() {
    const fs::path parent = fs::is_directory("/dev/shm") ? "/dev/shm" : fs::temp_directory_path();
    std::string name = (parent / "saccade-adapters-fuzz-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) std::abort();
    path_ = name;
    const fs::path data = fs::path(SACCADE_SOURCE_DIR) / "tests" / "data";
    for (const auto& file : fs::directory_iterator(data / "adapters" / "smolvla")) {
      if (file.path().extension() != ".safetensors") continue;
      fs::create_symlink(file.path(), path_ / file.path().filename());
    }
    fs::create_symlink(data / "tokenizers/fast/tokenizer.json", path_ / "tokenizer.json");
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

template <class T>
void CheckFinite(const std::vector<T>& values) {
  for (const T value : values) {
    if (!std::isfinite(value)) std::abort();
  }
}

void CheckAdapters(const std::string& path) {
  const auto checkpoint = saccade::Checkpoint::Open(path);
  if (!checkpoint.ok()) return;
  const auto sets = saccade::ReadPolicyAdapters(*checkpoint);
  if (!sets.ok()) {
    if (sets.status().message().empty()) std::abort();
    return;
  }
  if (sets->empty()) std::abort();
  for (const saccade::PolicyAdapters& set : *sets) {
    if (set.action.dim() == 0) std::abort();
    for (const float value : {0.0F, -3e38F, 1e-40F}) {
      const std::vector<float> state(set.state.dim(), value);
      const auto normalized = set.state.Normalize(state, 32);
      if (normalized.ok()) CheckFinite(*normalized);
      std::vector<double> actions(2 * set.action.dim(), static_cast<double>(value));
      const auto commands = set.action.Unnormalize(actions, set.action.dim());
      if (!commands.ok()) continue;
      CheckFinite(*commands);
      if (!saccade::AddState(set.relative, state, set.action.dim(), actions).ok()) std::abort();
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Folder folder;
  folder.Write({reinterpret_cast<const char*>(data), size});
  CheckAdapters(folder.path());
  const auto fast = saccade::FastTokens::Load(folder.path(), 10, 6);
  if (!fast.ok()) return 0;
  const auto actions =
      fast->Decode(std::vector<int32_t>{48, 133, 511, -1, 512}, saccade::FastPolicy::kReference);
  if (!actions.ok() || actions->size() != 60) std::abort();
  CheckFinite(*actions);
  return 0;
}
