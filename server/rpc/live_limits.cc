#include "rpc/live_limits.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/strings.h"

namespace saccade {

v1::LiveLimits LiveLimitsOf(const Config& config) {
  v1::LiveLimits out;
  out.set_max_sessions(config.server.max_sessions);
  out.set_max_message_bytes(config.server.max_message_bytes);
  out.set_max_image_bytes(config.limits.max_image_bytes);
  out.set_max_pixels(config.limits.max_pixels);
  out.set_max_instruction_bytes(config.limits.max_instruction_bytes);
  out.set_max_instruction_tokens(config.limits.max_instruction_tokens);
  out.set_acts_per_s(config.limits.acts_per_s);
  out.set_frames_per_s(config.limits.frames_per_s);
  out.set_messages_per_s(config.limits.messages_per_s);
  out.set_pixels_per_s(config.limits.pixels_per_s);
  out.set_sessions_per_peer(config.limits.sessions_per_peer);
  out.set_acts_in_flight(config.limits.acts_in_flight);
  out.set_session_idle_s(config.limits.session_idle_s);
  out.set_max_samples(config.limits.max_samples);
  out.set_outbox_messages(config.limits.outbox_messages);
  for (const ClassConfig& klass : config.classes) {
    v1::ClassLimit& limit = *out.add_classes();
    limit.set_name(klass.name);
    limit.set_max_queued(klass.max_queued);
  }
  return out;
}

absl::Status ApplyLimits(const v1::LiveLimits& changes, const Config& started, Config& config) {
  Config changed = config;
  if (changes.has_max_sessions()) changed.server.max_sessions = changes.max_sessions();
  if (changes.has_max_message_bytes())
    changed.server.max_message_bytes = changes.max_message_bytes();
  if (changes.has_max_image_bytes()) changed.limits.max_image_bytes = changes.max_image_bytes();
  if (changes.has_max_pixels()) changed.limits.max_pixels = changes.max_pixels();
  if (changes.has_max_instruction_bytes())
    changed.limits.max_instruction_bytes = changes.max_instruction_bytes();
  if (changes.has_max_instruction_tokens())
    changed.limits.max_instruction_tokens = changes.max_instruction_tokens();
  if (changes.has_acts_per_s()) changed.limits.acts_per_s = changes.acts_per_s();
  if (changes.has_frames_per_s()) changed.limits.frames_per_s = changes.frames_per_s();
  if (changes.has_messages_per_s()) changed.limits.messages_per_s = changes.messages_per_s();
  if (changes.has_pixels_per_s()) changed.limits.pixels_per_s = changes.pixels_per_s();
  if (changes.has_sessions_per_peer())
    changed.limits.sessions_per_peer = changes.sessions_per_peer();
  if (changes.has_acts_in_flight()) changed.limits.acts_in_flight = changes.acts_in_flight();
  if (changes.has_session_idle_s()) changed.limits.session_idle_s = changes.session_idle_s();
  if (changes.has_max_samples()) changed.limits.max_samples = changes.max_samples();
  if (changes.has_outbox_messages()) changed.limits.outbox_messages = changes.outbox_messages();
  for (const v1::ClassLimit& limit : changes.classes()) {
    const auto klass = std::find_if(changed.classes.begin(), changed.classes.end(),
                                    [&](const ClassConfig& c) { return c.name == limit.name(); });
    if (klass == changed.classes.end())
      return InvalidField("limits.classes", "names no latency class of the server");
    klass->max_queued = limit.max_queued();
  }
  if (changed.server.max_message_bytes > started.server.max_message_bytes) {
    return InvalidField("limits.max_message_bytes",
                        StrCat("is above ", started.server.max_message_bytes,
                               ", with which the server was started"));
  }
  // The configuration's own reader is the judge, of what can change and no more. Its message begins
  // with "limits:LINE: ".
  constexpr std::string_view kName = "limits";
  Config judged;
  judged.server.max_sessions = changed.server.max_sessions;
  judged.server.max_message_bytes = changed.server.max_message_bytes;
  judged.limits = changed.limits;
  judged.classes = changed.classes;
  ModelConfig& model = judged.models.emplace_back();  // there must be one
  model.name = "any";
  model.path = "any";
  model.default_class = changed.classes.front().name;
  const absl::StatusOr<Config> read = ParseConfig(ToYaml(judged), kName);
  if (!read.ok()) {
    std::string_view message = FromAbsl(read.status().message());
    const size_t end = message.find(": ");
    if (end != std::string_view::npos) message.remove_prefix(end + 2);
    return InvalidField(kName, message);
  }
  config = std::move(changed);
  return absl::OkStatus();
}

}  // namespace saccade
