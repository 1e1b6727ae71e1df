#include "cmd_verify.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <string_view>

#include "base/strings.h"
#include "model/checkpoint.h"
#include "verify_golden.h"
#include "verify_pass.h"

namespace saccade {
namespace {

struct Kind {
  std::string_view family;
  absl::StatusOr<bool> (*run)(const VerifyContext& context, bool bf16);
  // Why a record has no BF16 run; null: every one has.
  std::string (*without_bf16)(const Golden& golden);
};
constexpr std::array kKinds = {
    Kind{"openvla", VerifyTokens, VerifyTokensWithoutBf16},
    Kind{"openvla_oft", VerifyOnePass, nullptr},
    Kind{"smolvla", VerifyLerobot, nullptr},
    Kind{"pi0", VerifyLerobot, nullptr},
    Kind{"pi05", VerifyLerobot, nullptr},
    Kind{"pi0_fast", VerifyLerobot, nullptr},
};

absl::StatusOr<bool> VerifyAll(const VerifyOptions& options) {
  ASSIGN_OR_RETURN(const Golden golden, Golden::Load(options.golden_path));
  ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(options.model_dir));
  if (!options.f32 && !options.bf16) return absl::InvalidArgumentError("no precision to verify");
  ModelOptions model;
  // Without heads of its own the folder would be OpenVLA's.
  if (golden.info().String("model", "").value_or("") == "openvla-oft") model.oft.emplace();
  ASSIGN_OR_RETURN(const Family* family, FindFamily(checkpoint, model));
  const auto* kind = std::find_if(kKinds.begin(), kKinds.end(),
                                  [&](const Kind& k) { return k.family == family->name; });
  if (kind == kKinds.end()) {
    return absl::UnimplementedError(StrCat("nothing is known of records of ", family->name));
  }
  const VerifyContext context{options, checkpoint, golden};
  bool good = true;
  for (const bool bf16 : {false, true}) {
    if (!(bf16 ? options.bf16 : options.f32)) continue;
    const std::string why =
        bf16 && kind->without_bf16 != nullptr ? kind->without_bf16(golden) : std::string();
    if (!why.empty()) {
      if (!options.f32) return absl::NotFoundError(why);
      std::printf("bf16 pass left out: %s\n", why.c_str());
      continue;
    }
    ASSIGN_OR_RETURN(const bool ok, kind->run(context, bf16));
    good = good && ok;
  }
  return good;
}

}  // namespace

int RunVerify(const VerifyOptions& options) {
  const absl::StatusOr<bool> good = VerifyAll(options);
  std::fflush(stdout);
  if (!good.ok()) {
    std::fprintf(stderr, "verify: %s\n", std::string(good.status().message()).c_str());
    return 1;
  }
  std::printf("%s\n", *good ? "everything recorded is within its tolerance"
                            : "FAILED: see the lines marked MISS or NOT COMPARED");
  std::fflush(stdout);
  return *good ? 0 : 1;
}

}  // namespace saccade
