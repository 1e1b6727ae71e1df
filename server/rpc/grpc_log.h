#pragma once
// The own logs of gRPC and its protobuf, and nothing else of them.

namespace saccade {

// Sends what they write of their own accord through our logger as debug records: what they report
// as errors (a port in use, a peer that is gone) is said once, by us, where it matters, and what a
// client sends (text that is not UTF-8) must not fill a log. Once, at start, after InitLogging.
void RouteGrpcLog();

}  // namespace saccade
