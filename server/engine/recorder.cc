#include "engine/recorder.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

#include "base/strings.h"

namespace saccade {
namespace {

template <class T>
std::vector<T> InOrder(const std::vector<T>& ring, uint64_t count) {
  std::vector<T> ordered;
  ordered.reserve(ring.size());
  const size_t oldest = ring.empty() ? 0 : static_cast<size_t>(count % ring.size());
  const auto split = ring.begin() + static_cast<std::ptrdiff_t>(oldest);
  ordered.insert(ordered.end(), split, ring.end());
  ordered.insert(ordered.end(), ring.begin(), split);
  return ordered;
}

// Names come from the configuration and are printable; quotes and backslashes are not excluded.
std::string Quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + '"';
}

// One complete event. `pid` 1 holds the workers, 2 the sessions.
std::string Span(std::string_view name, int pid, uint64_t tid, int64_t begin_us, int64_t us,
                 std::string_view args) {
  return StrCat("{\"name\":", Quoted(name), ",\"ph\":\"X\",\"pid\":", pid, ",\"tid\":", tid,
                ",\"ts\":", begin_us, ",\"dur\":", std::max<int64_t>(us, 1), ",\"args\":{", args,
                "}}");
}

std::string RowName(std::string_view kind, int pid, uint64_t tid, std::string_view name) {
  return StrCat("{\"name\":\"", kind, "\",\"ph\":\"M\",\"pid\":", pid, ",\"tid\":", tid,
                ",\"args\":{\"name\":", Quoted(name), "}}");
}

}  // namespace

void Recorder::Step(const StepPlan& plan, const StepResult& result) {
  StepRecord record;
  record.id = plan.id;
  record.worker = plan.worker;
  record.model = plan.model;
  record.shape = plan.shape;
  record.slice = plan.slice;
  record.sequences = static_cast<uint32_t>(plan.trunk.size() + plan.flows.size());
  record.started = result.started;
  record.finished = result.finished;
  record.predicted_p50 = plan.predicted_p50;
  record.ok = result.status.ok();
  Put(steps_, kSteps, num_steps_, record);
}

void Recorder::Request(RequestId id, const ActRequest& request, const absl::Status& status,
                       const ActResult* result, TimePoint now) {
  RequestRecord record;
  record.id = id;
  record.session = request.session;
  record.model = request.model;
  record.klass = request.klass;
  record.arrival = request.arrival;
  record.deadline = request.deadline;
  record.next_arrival = request.next_arrival;
  record.finished = now;
  record.code = status.code();
  if (!status.ok()) record.reason = GetErrorInfo(status).reason;
  if (result != nullptr) {
    record.timings = result->timings;
    record.cached_tokens = result->cached_tokens;
    record.prompt_tokens = result->prompt_tokens;
    record.late = result->late;
  }
  Put(requests_, kRequests, num_requests_, record);
}

RecentWork Recorder::Recent() const {
  return {InOrder(steps_, num_steps_), InOrder(requests_, num_requests_)};
}

std::string ChromeTrace(const RecentWork& recent, const Engine& engine, TimePoint epoch) {
  const auto since = [epoch](TimePoint time) { return ToMicros(time - epoch).count(); };
  auto model = [&engine,
                names = std::map<ModelId, std::string>()](ModelId id) mutable -> std::string_view {
    const auto [it, added] = names.try_emplace(id);
    if (added) it->second = engine.ModelName(id);
    return it->second;
  };
  std::vector<std::string> events = {RowName("process_name", 1, 0, "workers"),
                                     RowName("process_name", 2, 0, "sessions")};
  std::set<uint64_t> rows;
  for (const StepRecord& step : recent.steps) {
    const auto row = static_cast<uint64_t>(step.worker.value());
    if (rows.insert(row).second)
      events.push_back(RowName("thread_name", 1, row, StrCat("worker ", row)));
    const std::string layers = step.slice.whole()
                                   ? ""
                                   : StrCat(", layers ", step.slice.begin + 1, "-", step.slice.end,
                                            " of ", step.slice.layers);
    const std::string name =
        StrCat(model(step.model), ": ", step.shape.frames, " frames, ", step.shape.prefill_rows,
               " prefill, ", step.shape.decode_rows, " decode", layers, step.ok ? "" : ", failed");
    events.push_back(Span(name, 1, row, since(step.started),
                          ToMicros(step.finished - step.started).count(),
                          StrCat("\"step\":", step.id.value(), ",\"sequences\":", step.sequences,
                                 ",\"predicted_us\":", step.predicted_p50.count())));
  }
  rows.clear();
  for (const RequestRecord& request : recent.requests) {
    const auto row = request.session.value();
    if (rows.insert(row).second)
      events.push_back(RowName("thread_name", 2, row, StrCat("session ", row)));
    const std::string_view klass =
        engine.classes()[static_cast<size_t>(request.klass.value())].name;
    const std::string outcome = request.code == absl::StatusCode::kOk
                                    ? std::string(request.late ? "late" : "ok")
                                    : absl::StatusCodeToString(request.code);
    const int64_t begin = since(request.arrival);
    events.push_back(
        Span(StrCat(klass, " ", outcome), 2, row, begin,
             ToMicros(request.finished - request.arrival).count(),
             StrCat("\"request\":", request.id.value(), ",\"model\":", Quoted(model(request.model)),
                    ",\"reason\":", Quoted(ReasonName(request.reason)))));
    if (request.code != absl::StatusCode::kOk) continue;
    int64_t at = begin;
    const std::pair<std::string_view, Micros> parts[] = {{"queue", request.timings.queue},
                                                         {"encode", request.timings.encode},
                                                         {"prefill", request.timings.prefill},
                                                         {"act", request.timings.act}};
    for (const auto& [name, us] : parts) {
      if (us.count() > 0) events.push_back(Span(name, 2, row, at, us.count(), ""));
      at += us.count();
    }
  }
  std::string json = "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[";
  for (size_t i = 0; i < events.size(); ++i) {
    if (i > 0) json += ",\n";
    json += events[i];
  }
  return json + "]}";
}

}  // namespace saccade
