#pragma once
// Robots: clients that send frames and act requests at times of their own, whatever comes back, and
// remember what became of each. A session and a connection each.
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace saccade::bench {

// Clients of one kind.
struct ClientKind {
  std::string latency_class;
  int count = 1;
  double hz = 1;         // of each
  double new_frame = 1;  // share of the requests that bring a new frame
  uint32_t samples = 1;
  bool poisson = true;     // else periodic with a jitter of a fifth
  double deadline_ms = 0;  // what counts as met; 0: any answer
};

struct Asked {
  enum class End : uint8_t { kAnswered, kRefused, kFailed, kUnanswered };
  size_t kind = 0;    // index into the kinds
  double sent_s = 0;  // since the start of the run
  double took_s = 0;
  End end = End::kUnanswered;
};

// Sends for `seconds` at `scale` times the kinds' rates, waits up to three seconds for the rest.
std::vector<Asked> RunLoad(const std::string& address, const std::vector<ClientKind>& kinds,
                           double scale, double seconds, uint32_t seed);

// Mean seconds of a request of each kind, one after the other on an idle server.
std::vector<double> SoloSeconds(const std::string& address, const std::vector<ClientKind>& kinds,
                                int requests);

// Of one kind: the share of what was asked that was answered in its time.
double MetShare(const std::vector<Asked>& asked, const std::vector<ClientKind>& kinds, size_t kind);

}  // namespace saccade::bench
