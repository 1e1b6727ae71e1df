#pragma once
// gRPC's own log, and nothing else of gRPC.

namespace saccade {

// Sends what gRPC writes of its own accord through our logger as debug records: what it reports as
// errors (a port in use, a peer that is gone) is said once, by us, where it matters. Once, at
// start, after InitLogging.
void RouteGrpcLog();

}  // namespace saccade
