#pragma once
// Limits that can change while the server runs, as messages and as configuration. Pure functions.
#include "base/status.h"
#include "config/config.h"
#include "saccade/v1/admin.pb.h"

namespace saccade {

v1::LiveLimits LiveLimitsOf(const Config& config);
// Writes the fields that are set into `config`, all or none. INVALID_ARGUMENT names the key: out of
// its range, at odds with others, above what `started` was started with, or an unknown class.
absl::Status ApplyLimits(const v1::LiveLimits& changes, const Config& started, Config& config);

}  // namespace saccade
