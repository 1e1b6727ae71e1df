// Who may call what: tokens, TLS, limits by peer. Certificates are made here, handshakes are real.
#include "rpc/auth.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <openssl/sha.h>

#include <array>
#include <chrono>
#include <map>
#include <thread>

#include "base/strings.h"
#include "rpc/front.h"
#include "rpc/health_probe.h"
#include "rpc/peer.h"
#include "rpc/tls.h"
#include "saccade/v1/models.grpc.pb.h"
#include "saccade/v1/server.grpc.pb.h"
#include "tests/rpc/certs.h"
#include "tests/rpc/client.h"
#include "tests/rpc/harness.h"

namespace saccade::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

constexpr TimePoint kStart{std::chrono::hours(1)};
constexpr const char* kInferToken = "robot-7-secret";
constexpr const char* kAdminToken = "operator-secret";
constexpr const char* kReflectionMethod =
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";

std::string Sha256(std::string_view text) {
  std::array<unsigned char, SHA256_DIGEST_LENGTH> digest{};
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  std::string hex;
  for (const unsigned char byte : digest) {
    std::array<char, 3> two{};
    std::snprintf(two.data(), two.size(), "%02x", byte);
    hex += two.data();
  }
  return hex;
}

std::string TokensText() {
  return StrCat("# who\ninfer:", Sha256(kInferToken), ":robot-7\nadmin:", Sha256(kAdminToken),
                "\n");
}

// ---------------------------------------------------------------- the tokens file

TEST(TokensTest, ReadsRolesDigestsAndNames) {
  const auto tokens = ParseTokens(
      StrCat("\n  # a comment\r\n", TokensText(), " infer:", std::string(64, 'A'), " \n"), "t");
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  ASSERT_EQ(tokens->size(), 3U);
  EXPECT_EQ((*tokens)[0].role, Role::kInfer);
  EXPECT_EQ((*tokens)[0].name, "robot-7");
  EXPECT_EQ((*tokens)[1].role, Role::kAdmin);
  EXPECT_EQ((*tokens)[1].name, "");
  EXPECT_EQ((*tokens)[2].digest[31], 0xAA);
}

TEST(TokensTest, KnowsTheDigestOfAKnownText) {  // FIPS 180-2: "abc"
  EXPECT_EQ(Sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(TokensTest, FaultsNameTheLineAndShowNothingOfIt) {
  const std::string good = StrCat("infer:", Sha256("a"), "\n");
  const std::map<std::string, std::string> faults = {
      {"hunter2", "expected role:sha256-hex[:name]"},
      {"root:hunter2", "the role must be infer or admin"},
      {"infer:hunter2", "64 hexadecimal digits"},
      {"infer:" + std::string(63, 'a'), "64 hexadecimal digits"},
      {"infer:" + std::string(63, 'a') + "g", "64 hexadecimal digits"},
      {"infer:" + Sha256("b") + ":", "the name may have"},
      {"infer:" + Sha256("b") + ":hunter2 or so", "the name may have"},
      {"infer:" + Sha256("b") + ":" + std::string(64, 'n'), "the name may have"},
      {"admin:" + Sha256("a"), "the same token is listed before"},
  };
  for (const auto& [line, message] : faults) {
    const absl::Status status = ParseTokens(StrCat(good, "\n", line, "\n"), "dir/tokens").status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << line;
    EXPECT_THAT(std::string(FromAbsl(status.message())),
                AllOf(StartsWith("dir/tokens:3: "), HasSubstr(message), Not(HasSubstr("hunter2"))));
  }
  EXPECT_THAT(ParseTokens("# none\n", "t").status().ToString(), HasSubstr("holds no token"));
  EXPECT_THAT(ParseTokens(std::string(kMaxTokensBytes + 1, '\n'), "t").status().ToString(),
              HasSubstr("more than"));
  std::string many;
  for (size_t i = 0; i <= kMaxTokens; ++i) StrAppend(&many, "infer:", Sha256(StrCat(i)), "\n");
  EXPECT_THAT(ParseTokens(many, "t").status().ToString(), HasSubstr("t:1025: more than 1024"));
}

// ---------------------------------------------------------------- who may call what

absl::Status Check(Authenticator& authenticator, std::string_view method,
                   const std::vector<std::string>& headers, TimePoint now = kStart,
                   const std::string& address = "ipv4:10.0.0.1") {
  const std::vector<std::string_view> views(headers.begin(), headers.end());
  return authenticator.Check(method, views, address, now);
}

std::unique_ptr<Authenticator> TwoTokens() {
  return std::make_unique<Authenticator>(ParseTokens(TokensText(), "t").value());
}

TEST(AuthenticatorTest, RolesReachWhatTheyShould) {
  const auto auth = TwoTokens();
  const std::string infer = StrCat("Bearer ", kInferToken);
  const std::string admin = StrCat("Bearer ", kAdminToken);
  const std::string unlisted = "/saccade.v1.Inference/AddedLater";
  EXPECT_TRUE(Check(*auth, method::kPredict, {infer}).ok());
  EXPECT_TRUE(Check(*auth, method::kPredict, {admin}).ok());
  EXPECT_TRUE(Check(*auth, method::kGenerate, {infer}).ok());
  EXPECT_FALSE(Check(*auth, method::kGenerate, {}).ok());
  EXPECT_TRUE(Check(*auth, kReflectionMethod, {infer}).ok());
  EXPECT_TRUE(Check(*auth, "/grpc.health.v1.Health/Check", {}).ok());
  // Denied unless listed, whatever it looks like.
  for (const std::string& method :
       {unlisted, std::string("/saccade.v1.Admin/Drain"), std::string("")}) {
    const absl::Status denied = Check(*auth, method, {infer});
    EXPECT_EQ(denied.code(), absl::StatusCode::kPermissionDenied);
    EXPECT_EQ(GetErrorInfo(denied).reason, Reason::kPermissionDenied);
    EXPECT_EQ(Check(*auth, method, {}).code(), absl::StatusCode::kUnauthenticated);
    EXPECT_TRUE(Check(*auth, method, {admin}).ok());
  }
}

TEST(AuthenticatorTest, OneHeaderOfTheRightSchemeIsNeeded) {
  const auto auth = TwoTokens();
  EXPECT_TRUE(Check(*auth, method::kPredict, {StrCat("bEARER ", kInferToken)}).ok());
  const std::string good = StrCat("Bearer ", kInferToken);
  const std::vector<std::vector<std::string>> bad = {
      {},
      {""},
      {"Bearer"},
      {"Bearer "},
      {kInferToken},
      {StrCat("Basic ", kInferToken)},
      {StrCat("Bearer  ", kInferToken)},
      {StrCat("Bearer ", kInferToken, " ")},
      {StrCat("Bearer ", Sha256(kInferToken))},  // the file's content opens nothing
      {"Bearer " + std::string(kMaxTokenBytes + 1, 'x')},
      {good, good},
  };
  for (const auto& headers : bad) {
    const absl::Status status = Check(*auth, method::kPredict, headers);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated)
        << ::testing::PrintToString(headers);
    EXPECT_EQ(GetErrorInfo(status).reason, Reason::kUnauthenticated);
    EXPECT_THAT(status.ToString(), Not(HasSubstr(kInferToken)));
  }
}

TEST(AuthenticatorTest, GuessingIsLimitedByAddress) {
  const auto auth = TwoTokens();
  const std::string good = StrCat("Bearer ", kInferToken);
  // Calls without any token are no guesses.
  for (int i = 0; i < 100; ++i) EXPECT_FALSE(Check(*auth, method::kPredict, {}).ok());
  int looked_at = 0;
  for (int i = 0; i < 1000; ++i) {
    looked_at += Check(*auth, method::kPredict, {StrCat("Bearer guess", i)}).code() ==
                 absl::StatusCode::kUnauthenticated;
  }
  EXPECT_EQ(looked_at, static_cast<int>(Authenticator::kFailuresBurst));
  // Unseen, so a right guess is not found out either.
  const absl::Status limited = Check(*auth, method::kPredict, {good});
  EXPECT_EQ(limited.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(GetErrorInfo(limited).reason, Reason::kRateLimited);
  ASSERT_TRUE(GetErrorInfo(limited).retry_after.has_value());
  EXPECT_NEAR(GetErrorInfo(limited).retry_after->count(), 1'000'000, 1);
  // Others go on, and health does for everybody.
  EXPECT_TRUE(Check(*auth, method::kPredict, {good}, kStart, "ipv4:10.0.0.2").ok());
  EXPECT_TRUE(Check(*auth, "/grpc.health.v1.Health/Check", {}).ok());
  EXPECT_TRUE(
      Check(*auth, method::kPredict, {good}, kStart + *GetErrorInfo(limited).retry_after).ok());
}

TEST(PeerTest, TheAddressWithoutItsPort) {
  EXPECT_EQ(PeerAddress("ipv4:10.1.2.3:50000"), "ipv4:10.1.2.3");
  EXPECT_EQ(PeerAddress("ipv6:%5B::1%5D:50000"), "ipv6:::/64");
  EXPECT_EQ(PeerAddress("ipv6:[2001:db8:1:2:3:4:5:6]:7"), "ipv6:2001:db8:1:2::/64");
  EXPECT_EQ(PeerAddress("ipv6:%5B2001:db8:1:2:ffff::9%5D:8"), "ipv6:2001:db8:1:2::/64");
  EXPECT_EQ(PeerAddress("ipv6:%5Bfe80::1%25eth0%5D:8"), "ipv6:fe80::/64");
  EXPECT_EQ(PeerAddress("ipv6:%5B::ffff:10.1.2.3%5D:8"), "ipv4:10.1.2.3");
  EXPECT_EQ(PeerAddress("unix:/run/saccade"), "unix:/run/saccade");
  EXPECT_EQ(PeerAddress("ipv6:nonsense"), "ipv6:nonsense");
  EXPECT_EQ(PeerAddress(""), "");
}

TEST(PeerTest, TellsThisHostFromOthers) {
  for (const char* peer : {"ipv4:127.0.0.1:50000", "ipv4:127.8.9.1:1", "ipv6:[::1]:50000",
                           "ipv6:%5B::1%5D:50000", "ipv6:%5b0:0:0:0:0:0:0:1%5d:8",
                           "ipv6:%5B::ffff:127.0.0.1%5D:8", "unix:/run/saccade", "unix:"}) {
    EXPECT_TRUE(IsOnThisHost(peer)) << peer;
  }
  for (const char* peer : {"ipv4:10.1.2.3:50000", "ipv4:1127.0.0.1:1", "ipv6:[::2]:50000",
                           "ipv6:%5B::1:1%5D:50000", "ipv6:%5Bfe80::1%25eth0%5D:8",
                           "ipv6:%5B::ffff:10.1.2.3%5D:8", "ipv6:nonsense", "localhost:1", ""}) {
    EXPECT_FALSE(IsOnThisHost(peer)) << peer;
  }
}

TEST(AdminAccessTest, WithoutTokensAdminIsForThisHostOnly) {
  const SteadyClock clock;
  Front front(Config(), nullptr, clock, nullptr, nullptr, "1.2.3");
  for (const std::string_view method :
       {method::kGetRecent, method::kGetTrace, method::kGetCache, method::kDrain}) {
    EXPECT_TRUE(front.Authorize(method, {}, "ipv4:127.0.0.1:9").ok()) << method;
    const absl::Status refused = front.Authorize(method, {}, "ipv4:10.1.2.3:9");
    EXPECT_EQ(refused.code(), absl::StatusCode::kPermissionDenied) << method;
    EXPECT_EQ(GetErrorInfo(refused).reason, Reason::kPermissionDenied) << method;
  }
  EXPECT_TRUE(front.Authorize(method::kPredict, {}, "ipv4:10.1.2.3:9").ok());
}

TEST(PeerTest, BucketsAreBoundedAndThoseWithoutAPlaceShareOne) {
  PeerBuckets buckets(1, 2);
  for (size_t i = 0; i < PeerBuckets::kMaxPeers; ++i) EXPECT_FALSE(buckets.Take(StrCat(i), kStart));
  EXPECT_EQ(buckets.peers(), PeerBuckets::kMaxPeers);
  EXPECT_FALSE(buckets.WaitFor("new", kStart, 2));
  EXPECT_FALSE(buckets.Take("new", kStart));
  EXPECT_FALSE(buckets.Take("newer", kStart));
  EXPECT_TRUE(buckets.Take("newest", kStart));
  EXPECT_TRUE(buckets.WaitFor("newest", kStart));
  EXPECT_TRUE(buckets.WaitFor("0", kStart, 2));  // nobody lost what is known of them
  EXPECT_EQ(buckets.peers(), PeerBuckets::kMaxPeers);
  // Those that have recovered make room.
  EXPECT_FALSE(buckets.Take("later", kStart + std::chrono::seconds(2)));
  EXPECT_EQ(buckets.peers(), 1U);
}

// ---------------------------------------------------------------- every method, every kind of
// token

// The names that reflection lists: whatever was registered.
std::vector<std::string> ServicesOf(const std::string& response) {
  const auto read_length = [](const std::string& bytes, size_t& at) {
    size_t value = 0;
    for (int shift = 0; at < bytes.size(); shift += 7) {
      const auto byte = static_cast<uint8_t>(bytes[at++]);
      value |= size_t{byte & 0x7FU} << shift;
      if (byte < 0x80) break;
    }
    return value;
  };
  // ServerReflectionResponse { list_services_response = 6 { repeated service = 1 { name = 1 } } }
  const auto fields = [&](const std::string& bytes, char tag) {
    std::vector<std::string> found;
    for (size_t at = 0; at < bytes.size();) {
      const char key = bytes[at++];
      const size_t length = read_length(bytes, at);
      if (key == tag) found.push_back(bytes.substr(at, length));
      at += length;
    }
    return found;
  };
  std::vector<std::string> names;
  for (const std::string& list : fields(response, '\x32')) {
    for (const std::string& service : fields(list, '\x0a')) {
      for (const std::string& name : fields(service, '\x0a')) names.push_back(name);
    }
  }
  return names;
}

struct RawAnswer {
  grpc::Status status;
  std::string first_message;
};

// One call of any method: sends `request`, half-closes, reads up to one message.
RawAnswer Call(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
               const std::string& token, const std::string& request = "") {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  if (!token.empty()) context.AddMetadata("authorization", "Bearer " + token);
  grpc::CompletionQueue queue;
  const auto wait = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    return ok;
  };
  const auto call = stub.PrepareCall(&context, method, &queue);
  RawAnswer answer;
  call->StartCall(nullptr);
  const grpc::Slice slice(request);
  if (wait()) {
    call->WriteLast(grpc::ByteBuffer(&slice, 1), {}, nullptr);
    wait();
  }
  grpc::ByteBuffer response;
  call->Read(&response, nullptr);
  if (wait()) {
    std::vector<grpc::Slice> slices;
    EXPECT_TRUE(response.Dump(&slices).ok());
    for (const grpc::Slice& part : slices)
      answer.first_message.append(reinterpret_cast<const char*>(part.begin()), part.size());
  }
  call->Finish(&answer.status, nullptr);
  wait();
  queue.Shutdown();
  return answer;
}

class TokenServerTest : public ::testing::Test {
 protected:
  TokenServerTest() : tokens_(folder_.Write("tokens", TokensText())) {}
  ServerOptions Options() {
    return {.config = [this](Config& config) { config.server.tokens_file = tokens_; }};
  }
  CredentialFolder folder_;
  const std::string tokens_;
};

const std::string kListServices("\x3a\x01*", 3);

TEST_F(TokenServerTest, EveryMethodAsksForAToken) {
  TestServer server(Options());
  const auto channel = NewChannel(server.address());
  const std::vector<std::string> services =
      ServicesOf(Call(channel, kReflectionMethod, kInferToken, kListServices).first_message);
  std::vector<std::string> methods;
  for (const std::string& service : services) {
    if (service == "grpc.health.v1.Health") {  // their descriptors are not in this binary
      methods.insert(methods.end(),
                     {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"});
      continue;
    }
    if (service.starts_with("grpc.reflection.")) {
      methods.push_back(StrCat("/", service, "/ServerReflectionInfo"));
      continue;
    }
    const auto* descriptor =
        google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(service);
    ASSERT_NE(descriptor, nullptr) << "a service whose methods are not known here: " << service;
    for (int i = 0; i < descriptor->method_count(); ++i)
      methods.push_back(StrCat("/", service, "/", descriptor->method(i)->name()));
  }
  for (const std::string_view checked : method::kCheckedByHandler)
    EXPECT_THAT(methods, ::testing::Contains(std::string(checked)));
  EXPECT_GE(methods.size(), 8U);

  double refused = 0;
  for (const std::string& method : methods) {
    SCOPED_TRACE(method);
    const bool reflection = method == kReflectionMethod;
    const std::string request = reflection ? kListServices : "";
    if (method == "/grpc.health.v1.Health/Watch") continue;  // open, and never ends by itself
    if (method == "/grpc.health.v1.Health/Check") {
      EXPECT_TRUE(Call(channel, method, "").status.ok());
      EXPECT_TRUE(Call(channel, method, "unknown").status.ok());
      continue;
    }
    for (const char* token : {"", "unknown"}) {
      const RawAnswer answer = Call(channel, method, token, request);
      EXPECT_EQ(answer.status.error_code(), grpc::StatusCode::UNAUTHENTICATED)
          << answer.status.error_message();
      EXPECT_EQ(answer.first_message, "");
      ++refused;
      if (ChecksItself(method)) {
        EXPECT_EQ(DetailOf(answer.status).reason(), v1::ERROR_REASON_UNAUTHENTICATED);
      }
      EXPECT_THAT(answer.status.error_message(), HasSubstr("token"));
    }
    const bool admin_only = AccessOf(method) == Access::kAdmin;
    const grpc::StatusCode infer = Call(channel, method, kInferToken, request).status.error_code();
    EXPECT_EQ(infer == grpc::StatusCode::PERMISSION_DENIED, admin_only);
    refused += admin_only ? 1 : 0;
    for (const char* token : {kInferToken, kAdminToken}) {
      if (admin_only && token == kInferToken) continue;
      const RawAnswer answer = Call(channel, method, token, request);
      EXPECT_NE(answer.status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
      EXPECT_NE(answer.status.error_code(), grpc::StatusCode::PERMISSION_DENIED);
      EXPECT_NE(answer.status.error_code(), grpc::StatusCode::CANCELLED);
      if (reflection) {
        EXPECT_EQ(ServicesOf(answer.first_message), services);
      }
    }
  }
  const auto& counters = server.metrics().refused;
  EXPECT_EQ(counters[static_cast<size_t>(Reason::kUnauthenticated)]->Value() +
                counters[static_cast<size_t>(Reason::kPermissionDenied)]->Value(),
            refused);
  server.ExpectIdleSoon();
}

TEST_F(TokenServerTest, TheRightTokenGetsAnAnswer) {
  TestServer server(Options());
  const auto stub = v1::Inference::NewStub(NewChannel(server.address()));
  v1::PredictRequest request;
  request.mutable_text()->set_instruction("go");
  *request.add_frames() = RawFrame("front", 7);
  grpc::ClientContext context;
  context.AddMetadata("authorization", StrCat("Bearer ", kInferToken));
  v1::PredictResponse response;
  const grpc::Status status = stub->Predict(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.chunk().samples_size(), 1);
}

TEST_F(TokenServerTest, RefusalsComeBeforeAnythingElseIsTold) {
  ServerOptions options = Options();
  options.serve = false;  // loading: that is nobody's business
  TestServer server(options);
  const auto channel = NewChannel(server.address());
  for (const std::string_view method : method::kCheckedByHandler) {
    EXPECT_EQ(Call(channel, std::string(method), "").status.error_code(),
              grpc::StatusCode::UNAUTHENTICATED)
        << method;
  }
}

// ---------------------------------------------------------------- TLS

class TlsTest : public ::testing::Test {
 protected:
  TlsTest()
      : ca_(MakeIdentity("ca")),
        other_ca_(MakeIdentity("other ca")),
        server_(MakeIdentity("server", &ca_)),
        client_(MakeIdentity("client", &ca_)) {
    WriteServer(server_);
  }
  void WriteServer(const Identity& identity) {
    tls_.certificate = folder_.Write("server.pem", identity.CertificatePem());
    tls_.key = folder_.Write("server.key", identity.KeyPem());
  }
  void AskForClientCertificates() {
    tls_.client_ca = folder_.Write("client_ca.pem", ca_.CertificatePem());
  }
  ServerOptions Options() {
    return {.config = [this](Config& config) { config.server.tls = tls_; }};
  }
  static std::shared_ptr<grpc::ChannelCredentials> Trusting(const Identity& ca,
                                                            const Identity* client = nullptr) {
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = ca.CertificatePem();
    if (client != nullptr) {
      options.pem_cert_chain = client->CertificatePem();
      options.pem_private_key = client->KeyPem();
    }
    return grpc::SslCredentials(options);
  }
  // A call on a connection of its own.
  static grpc::Status Try(const TestServer& server,
                          const std::shared_ptr<grpc::ChannelCredentials>& credentials) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    const auto channel = grpc::CreateCustomChannel(server.address(), credentials, arguments);
    const auto stub = v1::Server::NewStub(channel);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    v1::GetStatusResponse response;
    return stub->GetStatus(&context, {}, &response);
  }
  std::string Fault() { return std::string(FromAbsl(LoadTls(tls_).status().message())); }

  CredentialFolder folder_;
  const Identity ca_;
  const Identity other_ca_;
  const Identity server_;
  const Identity client_;
  TlsConfig tls_;
};

TEST_F(TlsTest, OnlyWhoTrustsTheServerTalksToIt) {
  TestServer server(Options());
  EXPECT_TRUE(Try(server, Trusting(ca_)).ok());
  EXPECT_EQ(Try(server, Trusting(other_ca_)).error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Try(server, grpc::InsecureChannelCredentials()).error_code(),
            grpc::StatusCode::UNAVAILABLE);
  // A certificate that nobody asks for does no harm.
  EXPECT_TRUE(Try(server, Trusting(ca_, &client_)).ok());
}

TEST_F(TlsTest, AnExpiredServerCertificateIsRefusedByClients) {
  WriteServer(MakeIdentity("server", &ca_, -60));
  TestServer server(Options());
  EXPECT_EQ(Try(server, Trusting(ca_)).error_code(), grpc::StatusCode::UNAVAILABLE);
}

TEST_F(TlsTest, WithAClientCaOnlyItsClientsAreServed) {
  AskForClientCertificates();
  TestServer server(Options());
  EXPECT_TRUE(Try(server, Trusting(ca_, &client_)).ok());
  const Identity foreign = MakeIdentity("client", &other_ca_);
  const Identity expired = MakeIdentity("client", &ca_, -60);
  EXPECT_EQ(Try(server, Trusting(ca_)).error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Try(server, Trusting(ca_, &foreign)).error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Try(server, Trusting(ca_, &expired)).error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(Try(server, grpc::InsecureChannelCredentials()).error_code(),
            grpc::StatusCode::UNAVAILABLE);
}

TEST_F(TlsTest, TheHealthCommandSpeaksTlsToo) {
  AskForClientCertificates();
  TestServer server(Options());
  ProbeTls tls;
  tls.ca = folder_.Write("ca.pem", ca_.CertificatePem());
  EXPECT_FALSE(ProbeHealth(server.address(), {}, std::chrono::seconds(5)).ok());
  EXPECT_FALSE(ProbeHealth(server.address(), tls, std::chrono::seconds(5)).ok());
  tls.certificate = folder_.Write("c.pem", client_.CertificatePem());
  tls.key = folder_.Write("c.key", client_.KeyPem());
  EXPECT_TRUE(ProbeHealth(server.address(), tls, std::chrono::seconds(5)).ok());
  tls.server_name = "elsewhere";
  EXPECT_FALSE(ProbeHealth(server.address(), tls, std::chrono::seconds(5)).ok());
  tls.ca = folder_ / "nothing";
  EXPECT_THAT(ProbeHealth(server.address(), tls, std::chrono::seconds(5)).ToString(),
              HasSubstr("--tls-ca: "));
}

TEST_F(TlsTest, NewFilesAreUsedWithoutARestartAndBadOnesAreNot) {
  TestServer server(Options());
  ASSERT_TRUE(Try(server, Trusting(ca_)).ok());
  // Half of a change: goes on with what was there.
  const Identity next = MakeIdentity("next server", &other_ca_);
  tls_.certificate = folder_.Write("server.pem", next.CertificatePem());
  std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // longer than it takes to look
  EXPECT_TRUE(Try(server, Trusting(ca_)).ok());
  folder_.Write("server.key", next.KeyPem());
  EXPECT_TRUE(Eventually([&] { return Try(server, Trusting(other_ca_)).ok(); }));
  EXPECT_FALSE(Try(server, Trusting(ca_)).ok());
}

TEST_F(TlsTest, UnusableFilesAreNamedWithTheirKey) {
  EXPECT_TRUE(LoadTls(tls_).ok());
  const TlsConfig good = tls_;
  const auto with = [&](std::string TlsConfig::*member, const std::string& path) {
    tls_ = good;
    tls_.*member = path;
    return Fault();
  };
  const std::string nothing = folder_ / "nothing";
  EXPECT_EQ(
      with(&TlsConfig::certificate, nothing),
      StrCat("server.tls.certificate: ", nothing, ": cannot be read: No such file or directory"));
  EXPECT_THAT(with(&TlsConfig::key, nothing), StartsWith(StrCat("server.tls.key: ", nothing)));
  EXPECT_THAT(with(&TlsConfig::client_ca, nothing),
              StartsWith(StrCat("server.tls.client_ca: ", nothing)));
  EXPECT_THAT(with(&TlsConfig::certificate, folder_ / ""), HasSubstr("is not a regular file"));
  EXPECT_THAT(with(&TlsConfig::certificate, folder_.Write("empty", "")), HasSubstr("is empty"));
  EXPECT_THAT(with(&TlsConfig::certificate, folder_.Write("text", "no certificate")),
              HasSubstr("certificate 1 is no PEM certificate"));
  EXPECT_THAT(with(&TlsConfig::client_ca,
                   folder_.Write("half", ca_.CertificatePem() + "-----BEGIN CERTIFICATE-----\nAA")),
              AllOf(StartsWith("server.tls.client_ca: "), HasSubstr("certificate 2 is no PEM")));
  EXPECT_THAT(with(&TlsConfig::key, folder_.Write("enc.key", server_.KeyPem("pass"))),
              HasSubstr("is no unencrypted PEM private key"));
  EXPECT_THAT(with(&TlsConfig::key, folder_.Write("wrong.key", client_.KeyPem())),
              AllOf(StartsWith("server.tls.key: "), HasSubstr("is not the key of the certificate"),
                    HasSubstr("server.pem")));
  EXPECT_THAT(with(&TlsConfig::key, folder_.Write("open.key", server_.KeyPem(), 0644)),
              HasSubstr("chmod 600"));
  EXPECT_EQ(with(&TlsConfig::key, folder_.Write("group.key", server_.KeyPem(), 0640)), "");
}

TEST_F(TlsTest, TheServerDoesNotStartWithoutThem) {
  Config config;
  config.server.listen = "127.0.0.1:0";
  config.server.tls = tls_;
  config.server.tls->key = folder_ / "nothing";
  const SteadyClock clock;
  absl::Status status = RpcServer::Start(config, clock, nullptr, "1").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.ToString(), HasSubstr("server.tls.key: "));
  config.server.tls.reset();
  config.server.tokens_file = folder_.Write("tokens", TokensText(), 0604);
  status = RpcServer::Start(config, clock, nullptr, "1").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(status.ToString(), HasSubstr("server.tokens_file: "));
  config.server.tokens_file = folder_.Write("tokens", "hunter2");
  status = RpcServer::Start(config, clock, nullptr, "1").status();
  EXPECT_THAT(status.ToString(), AllOf(HasSubstr("server.tokens_file: "), HasSubstr("tokens:1: "),
                                       Not(HasSubstr("hunter2"))));
}

// ---------------------------------------------------------------- limits by peer and session

TEST(PeerLimitsTest, OneAddressHasSoManySessions) {
  TestServer server({.config = [](Config& config) { config.limits.sessions_per_peer = 2; }});
  const auto first = std::make_unique<SessionClient>(NewChannel(server.address()));
  first->Open();
  {
    SessionClient second(NewChannel(server.address()));
    second.Open();
    SessionClient third(NewChannel(server.address()));
    const grpc::Status refused = third.Finish();
    EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    EXPECT_EQ(DetailOf(refused).reason(), v1::ERROR_REASON_RATE_LIMITED);
    EXPECT_TRUE(DetailOf(refused).has_retry_after_us());
    EXPECT_THAT(refused.error_message(), HasSubstr("this address has 2 sessions"));
  }
  EXPECT_TRUE(Eventually([&] {
    SessionClient again(NewChannel(server.address()));
    v1::SessionRequest request;
    request.mutable_open();
    again.Send(request);
    return again.Next().has_value();
  }));
}

// A frame of 48 pixels at one a second: the first is given and owed, the next has to wait 48 s.
void OnePixelPerSecond(Config& config) { config.limits.pixels_per_s = 1; }

void ExpectPixelLimit(const v1::ErrorDetail& detail) {
  EXPECT_EQ(detail.reason(), v1::ERROR_REASON_RATE_LIMITED);
  EXPECT_GT(detail.retry_after_us(), 30'000'000U);
  EXPECT_LE(detail.retry_after_us(), 48'000'001U);
}

TEST(PeerLimitsTest, PixelsOfASessionAreLimitedBeforeDecoding) {
  TestServer server({.config = OnePixelPerSecond});
  SessionClient client(NewChannel(server.address()));
  v1::Open open;
  open.set_instruction("go");
  EXPECT_EQ(client.Open(open).limits().pixels_per_s(), 1);
  // Larger than any frame may be: that is the error then, and it costs nothing.
  v1::VisionFrame huge = RawFrame("front", 5);
  huge.mutable_raw()->set_width(60'000);
  huge.mutable_raw()->set_height(60'000);
  client.SendFrame(huge);
  EXPECT_EQ(client.NextError().detail().reason(), v1::ERROR_REASON_INVALID_INPUT);
  client.SendFrame(RawFrame("front", 5, 1));
  EXPECT_EQ(client.Act(1).frames(0).capture_time_ns(), 1);
  // No image of that size: were it looked at, that would be the error.
  v1::VisionFrame fake = RawFrame("front", 5, 2);
  fake.mutable_raw()->set_data("short");
  client.SendFrame(fake);
  const v1::RequestError error = client.NextError();
  EXPECT_EQ(error.code(), static_cast<int>(grpc::StatusCode::RESOURCE_EXHAUSTED));
  ExpectPixelLimit(error.detail());
  EXPECT_EQ(client.Act(2).frames(0).capture_time_ns(), 1);
  // Another session has its own.
  SessionClient other(NewChannel(server.address()));
  other.Open(open);
  other.SendFrame(RawFrame("front", 5, 3));
  EXPECT_EQ(other.Act(1).frames(0).capture_time_ns(), 3);
}

TEST(PeerLimitsTest, PixelsOfPredictCallsAreLimitedByAddress) {
  TestServer server({.config = OnePixelPerSecond});
  const auto predict = [&] {
    const auto stub = v1::Inference::NewStub(NewChannel(server.address()));
    v1::PredictRequest request;
    request.mutable_text()->set_instruction("go");
    *request.add_frames() = RawFrame("front", 5);
    grpc::ClientContext context;
    v1::PredictResponse response;
    return stub->Predict(&context, request, &response);
  };
  EXPECT_TRUE(predict().ok());
  const grpc::Status refused = predict();
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  ExpectPixelLimit(DetailOf(refused));
  server.ExpectIdleSoon();
}

}  // namespace
}  // namespace saccade::testing
