#pragma once
// One run of a model in one precision, against its record: what is alike for all kinds of models.
// A kind is one file verify_<kind>.cc: it says what goes in, derives from VerifyPass, and is named
// in the table of cmd_verify.cc.
#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "cmd_verify.h"
#include "model/checkpoint.h"
#include "verify_golden.h"
#include "verify_run.h"

namespace saccade {

// What the run computed for one recorded tensor, in the recorded order.
struct Computed {
  std::vector<double> values;
  double tolerance = 0;
  size_t count = 0;  // with a note: leading values that can be compared
  std::string note;
};

class VerifyPass {
 public:
  VerifyPass(const Golden& golden, const VerifyOutput& output) : golden_(golden), output_(output) {}
  virtual ~VerifyPass() = default;
  VerifyPass(const VerifyPass&) = delete;
  VerifyPass& operator=(const VerifyPass&) = delete;

  // Each recorded tensor.
  void RunAll(Report& report) const;

 protected:
  // Why a recorded tensor is not compared by this run, though that is no fault; empty: it is.
  virtual std::string Skipped(const std::string& name) const;
  virtual absl::StatusOr<Computed> Compute(const std::string& name,
                                           const Recorded& reference) const = 0;
  virtual double StageTolerance(const Recorded& reference) const = 0;

  void Compare(const std::string& name, const absl::StatusOr<Recorded>& reference,
               const absl::StatusOr<Computed>& computed, Report& report) const;
  // Ids of the prompt's text; as the tokenizer gives them, before the `added` ones that every
  // prompt ends with, when so many fewer are recorded.
  absl::StatusOr<Computed> PromptIds(size_t recorded, size_t added = 1) const;
  // [1, 3 * towers * frames, height, width], frame after frame.
  absl::StatusOr<Computed> Pixels(const Recorded& reference) const;
  // [1, heads, tokens, head_dim]; the cache is read as [tokens, heads * head_dim].
  absl::StatusOr<Computed> Cache(const std::string& name, const Recorded& reference) const;
  // Any other tensor is the stage of its name.
  absl::StatusOr<Computed> Stage(const std::string& name, const Recorded& reference) const;

  const Golden& golden_;
  const VerifyOutput& output_;
};

// Of stages, in F32: max(2e-5, 4e-6 * max|reference|).
double ExactStageTolerance(double largest);

struct VerifyContext {
  const VerifyOptions& options;
  const Checkpoint& checkpoint;
  const Golden& golden;
};
// A run of each kind; true when all that is recorded was compared and is good.
absl::StatusOr<bool> VerifyTokens(const VerifyContext& context, bool bf16);
absl::StatusOr<bool> VerifyOnePass(const VerifyContext& context, bool bf16);
absl::StatusOr<bool> VerifyLerobot(const VerifyContext& context, bool bf16);
// Why there is no BF16 run of this record; empty: there is one.
std::string VerifyTokensWithoutBf16(const Golden& golden);

}  // namespace saccade
