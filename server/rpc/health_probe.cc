#include "rpc/health_probe.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <memory>
#include <vector>

#include "base/strings.h"
#include "rpc/credential_file.h"

namespace saccade {
namespace {

// HealthCheckResponse { ServingStatus status = 1; } with SERVING = 1: the only answer that is OK.
// Debian's gRPC ships the service but not its generated messages, and this one is two bytes.
constexpr char kServing[] = "\x08\x01";

constexpr size_t kMaxPemBytes = 1 << 20;

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> CredentialsOf(const ProbeTls& tls) {
  if (tls.ca.empty()) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions options;
  ASSIGN_OR_RETURN(options.pem_root_certs,
                   ReadCredentialFile("--tls-ca", tls.ca, Secrecy::kPublic, kMaxPemBytes));
  if (!tls.certificate.empty()) {
    ASSIGN_OR_RETURN(options.pem_cert_chain, ReadCredentialFile("--tls-cert", tls.certificate,
                                                                Secrecy::kPublic, kMaxPemBytes));
    ASSIGN_OR_RETURN(options.pem_private_key,
                     ReadCredentialFile("--tls-key", tls.key, Secrecy::kSecret, kMaxPemBytes));
  }
  return grpc::SslCredentials(options);
}

}  // namespace

absl::Status ProbeHealth(const std::string& address, const ProbeTls& tls,
                         std::chrono::milliseconds timeout) {
  ASSIGN_OR_RETURN(const std::shared_ptr<grpc::ChannelCredentials> credentials, CredentialsOf(tls));
  grpc::ChannelArguments arguments;
  if (!tls.server_name.empty()) arguments.SetSslTargetNameOverride(tls.server_name);
  grpc::GenericStub stub(grpc::CreateCustomChannel(address, credentials, arguments));
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
