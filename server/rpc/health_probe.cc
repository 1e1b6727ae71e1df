#include "rpc/health_probe.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <vector>

#include "base/strings.h"

namespace saccade {
namespace {

// HealthCheckResponse { ServingStatus status = 1; } with SERVING = 1: the only answer that is OK.
// Debian's gRPC ships the service but not its generated messages, and this one is two bytes.
constexpr char kServing[] = "\x08\x01";

}  // namespace

absl::Status ProbeHealth(const std::string& address, std::chrono::milliseconds timeout) {
  grpc::GenericStub stub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + timeout);
  grpc::CompletionQueue queue;
  const grpc::Slice nothing;
  const grpc::ByteBuffer request(&nothing,
                                 1);  // HealthCheckRequest for the whole server: no field set
  const auto call =
      stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", request, &queue);
  call->StartCall();
  grpc::ByteBuffer response;
  grpc::Status status;
  call->Finish(&response, &status, nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  queue.Shutdown();
  if (!status.ok()) return absl::UnavailableError(StrCat(address, ": ", status.error_message()));
  std::vector<grpc::Slice> slices;
  std::string bytes;
  if (response.Dump(&slices).ok()) {
    for (const grpc::Slice& slice : slices)
      bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  if (bytes != kServing) return absl::UnavailableError(StrCat(address, ": not serving"));
  return absl::OkStatus();
}

}  // namespace saccade
