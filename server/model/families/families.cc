#include <array>
#include <string>

#include "base/strings.h"
#include "model/checkpoint.h"
#include "model/families/openvla.h"
#include "model/families/openvla_config.h"
#include "model/families/openvla_oft.h"
#include "model/families/openvla_oft_config.h"
#include "model/families/pi.h"
#include "model/families/smolvla.h"

namespace saccade {
namespace {

constexpr std::array kFamilies = {
    Family{"openvla_oft", IsOpenVlaOft, LoadOpenVlaOft},
    Family{"openvla",
           [](const Checkpoint& checkpoint, const ModelOptions& options) {
             return IsOpenVlaFolder(checkpoint) && !IsOpenVlaOft(checkpoint, options);
           },
           LoadOpenVla},
    Family{"smolvla", IsSmolVla, LoadSmolVla},
    Family{"pi0", IsPi0, LoadPi},
    Family{"pi05", IsPi05, LoadPi},
    Family{"pi0_fast", IsPi0Fast, LoadPi},
};

}  // namespace

std::span<const Family> Families() { return kFamilies; }

absl::StatusOr<const Family*> FindFamily(const Checkpoint& checkpoint,
                                         const ModelOptions& options) {
  std::string known;
  for (const Family& family : Families()) {
    if (!family.matches(checkpoint, options)) {
      StrAppend(&known, known.empty() ? "" : ", ", family.name);
      continue;
    }
    if (options.oft && family.load != LoadOpenVlaOft) {
      return absl::InvalidArgumentError(StrCat("oft: this folder is one of ", family.name));
    }
    return &family;
  }
  const JsonView config = checkpoint.config_view();
  const std::string type = config.String("model_type", "").value_or("");
  return absl::NotFoundError(StrCat("no known family serves this folder",
                                    type.empty() ? "" : StrCat(" (model_type \"", type, "\")"),
                                    "; known: ", known));
}

absl::StatusOr<std::unique_ptr<Model>> LoadModel(const Checkpoint& checkpoint, Backend& backend,
                                                 const ModelOptions& options) {
  const absl::StatusOr<const Family*> family = FindFamily(checkpoint, options);
  if (!family.ok()) {
    return absl::Status(
        family.status().code(),
        ToAbsl(StrCat(checkpoint.dir(), ": ", FromAbsl(family.status().message()))));
  }
  return (*family)->load(checkpoint, backend, options);
}

}  // namespace saccade
