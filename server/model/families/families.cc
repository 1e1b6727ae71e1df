#include <array>
#include <string>

#include "base/strings.h"
#include "model/checkpoint.h"
#include "model/families/openvla.h"
#include "model/families/openvla_config.h"
#include "model/families/pi.h"
#include "model/families/smolvla.h"

namespace saccade {
namespace {

constexpr std::array kFamilies = {
    Family{"openvla", IsOpenVla, LoadOpenVla},
    Family{"smolvla", IsSmolVla, LoadSmolVla},
    Family{"pi0", IsPi0, LoadPi},
    Family{"pi05", IsPi05, LoadPi},
    Family{"pi0_fast", IsPi0Fast, LoadPi},
};

}  // namespace

std::span<const Family> Families() { return kFamilies; }

absl::StatusOr<std::unique_ptr<Model>> LoadModel(const Checkpoint& checkpoint, Backend& backend,
                                                 const ModelOptions& options) {
  std::string known;
  for (const Family& family : Families()) {
    if (family.matches(checkpoint)) return family.load(checkpoint, backend, options);
    StrAppend(&known, known.empty() ? "" : ", ", family.name);
  }
  const JsonView config = checkpoint.config_view();
  const std::string type = config.String("model_type", "").value_or("");
  return absl::NotFoundError(StrCat(checkpoint.dir(), ": no known family serves this folder",
                                    type.empty() ? "" : StrCat(" (model_type \"", type, "\")"),
                                    "; known: ", known, " (without an OpenVLA-OFT action head)"));
}

}  // namespace saccade
