#include "rpc/tls.h"

#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpcpp/security/server_credentials.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <sys/stat.h>

#include <string_view>
#include <utility>
#include <vector>

#include "base/logging.h"
#include "base/strings.h"
#include "rpc/credential_file.h"

namespace saccade {
namespace {

constexpr size_t kMaxPemBytes = 1 << 20;
constexpr std::string_view kCertificateKey = "server.tls.certificate";
constexpr std::string_view kPrivateKeyKey = "server.tls.key";
constexpr std::string_view kClientCaKey = "server.tls.client_ca";

template <auto Free>
struct Freer {
  template <class T>
  void operator()(T* object) const {
    Free(object);
  }
};
using BioPtr = std::unique_ptr<BIO, Freer<BIO_free>>;
using X509Ptr = std::unique_ptr<X509, Freer<X509_free>>;
using KeyPtr = std::unique_ptr<EVP_PKEY, Freer<EVP_PKEY_free>>;

BioPtr ReaderOf(const std::string& pem) {
  return BioPtr(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
}

// An encrypted key is refused; OpenSSL would ask the terminal for its password.
int NoPassword(char*, int, int, void*) { return -1; }

// Every certificate of a file, of which there must be one at least.
absl::StatusOr<std::vector<X509Ptr>> ReadCertificates(std::string_view key, const std::string& path,
                                                      const std::string& pem) {
  const BioPtr reader = ReaderOf(pem);
  std::vector<X509Ptr> certificates;
  ERR_clear_error();
  while (X509* certificate = PEM_read_bio_X509(reader.get(), nullptr, NoPassword, nullptr))
    certificates.emplace_back(certificate);
  const int end = ERR_GET_REASON(ERR_peek_last_error());
  ERR_clear_error();
  if (certificates.empty() || end != PEM_R_NO_START_LINE) {
    return absl::InvalidArgumentError(StrCat(key, ": ", path, ": certificate ",
                                             certificates.size() + 1, " is no PEM certificate"));
  }
  return certificates;
}

void WarnOfDates(const std::string& path, const X509& certificate) {
  const auto warn = [&](const char* what) {
    LogWarn("clients will refuse the server's certificate",
            {{"why", what}, {"file", path}, {"key", kCertificateKey}});
  };
  if (X509_cmp_current_time(X509_get0_notBefore(&certificate)) > 0) warn("it is not valid yet");
  if (X509_cmp_current_time(X509_get0_notAfter(&certificate)) < 0) warn("it has expired");
}

// grpc++ offers no credentials that ask for their certificates; the core below it does.
class FetchedCredentials final : public grpc::ServerCredentials {
 public:
  explicit FetchedCredentials(grpc_server_credentials* credentials) : credentials_(credentials) {}
  FetchedCredentials(const FetchedCredentials&) = delete;
  FetchedCredentials& operator=(const FetchedCredentials&) = delete;
  ~FetchedCredentials() override { grpc_server_credentials_release(credentials_); }

 private:
  int AddPortToServer(const std::string& address, grpc_server* server) override {
    return grpc_server_add_http2_port(server, address.c_str(), credentials_);
  }
  void SetAuthMetadataProcessor(
      const std::shared_ptr<grpc::AuthMetadataProcessor>& /*processor*/) override {}

  grpc_server_credentials* const credentials_;
};

}  // namespace

absl::StatusOr<TlsPems> LoadTls(const TlsConfig& config) {
  TlsPems pems;
  ASSIGN_OR_RETURN(pems.certificate, ReadCredentialFile(kCertificateKey, config.certificate,
                                                        Secrecy::kPublic, kMaxPemBytes));
  ASSIGN_OR_RETURN(pems.key,
                   ReadCredentialFile(kPrivateKeyKey, config.key, Secrecy::kSecret, kMaxPemBytes));
  ASSIGN_OR_RETURN(const std::vector<X509Ptr> chain,
                   ReadCertificates(kCertificateKey, config.certificate, pems.certificate));
  const BioPtr reader = ReaderOf(pems.key);
  const KeyPtr key(PEM_read_bio_PrivateKey(reader.get(), nullptr, NoPassword, nullptr));
  if (key == nullptr) {
    ERR_clear_error();
    return absl::InvalidArgumentError(
        StrCat(kPrivateKeyKey, ": ", config.key, ": is no unencrypted PEM private key"));
  }
  if (X509_check_private_key(chain.front().get(), key.get()) != 1) {
    ERR_clear_error();
    return absl::InvalidArgumentError(StrCat(kPrivateKeyKey, ": ", config.key,
                                             ": is not the key of the certificate in ",
                                             config.certificate, " (", kCertificateKey, ")"));
  }
  if (!config.client_ca.empty()) {
    ASSIGN_OR_RETURN(pems.client_ca, ReadCredentialFile(kClientCaKey, config.client_ca,
                                                        Secrecy::kPublic, kMaxPemBytes));
    RETURN_IF_ERROR(ReadCertificates(kClientCaKey, config.client_ca, pems.client_ca).status());
  }
  WarnOfDates(config.certificate, *chain.front());
  return pems;
}

struct ServerTls::Fetcher {
  // Every handshake asks; an answer other than NEW leaves what gRPC has.
  static grpc_ssl_certificate_config_reload_status Fetch(
      void* tls, grpc_ssl_server_certificate_config** config) {
    auto& self = *static_cast<ServerTls*>(tls);
    const std::lock_guard lock(self.mu_);
    if (!self.fresh_) return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    const grpc_ssl_pem_key_cert_pair pair{self.pems_.key.c_str(), self.pems_.certificate.c_str()};
    // gRPC asserts that there are roots even where no client is asked for a certificate. They are
    // not looked at then, so any certificate will do.
    const std::string& roots =
        self.pems_.client_ca.empty() ? self.pems_.certificate : self.pems_.client_ca;
    *config = grpc_ssl_server_certificate_config_create(roots.c_str(), &pair, 1);
    self.fresh_ = false;
    return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
  }
};

ServerTls::ServerTls(TlsConfig config, Stamps stamps, TlsPems pems)
    : config_(std::move(config)), stamps_(stamps), pems_(std::move(pems)) {}

absl::StatusOr<std::unique_ptr<ServerTls>> ServerTls::Create(const TlsConfig& config) {
  const Stamps stamps = StampsOf(config);  // before reading, so that no change is missed
  ASSIGN_OR_RETURN(TlsPems pems, LoadTls(config));
  return std::unique_ptr<ServerTls>(new ServerTls(config, stamps, std::move(pems)));
}

std::shared_ptr<grpc::ServerCredentials> ServerTls::Credentials() {
  {
    const std::lock_guard lock(mu_);
    fresh_ = true;
  }
  grpc_ssl_server_credentials_options* options =
      grpc_ssl_server_credentials_create_options_using_config_fetcher(
          config_.client_ca.empty() ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                                    : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY,
          &Fetcher::Fetch, this);
  return std::make_shared<FetchedCredentials>(
      grpc_ssl_server_credentials_create_with_options(options));
}

void ServerTls::Refresh() {
  const Stamps stamps = StampsOf(config_);
  if (stamps == stamps_) return;
  stamps_ = stamps;
  absl::StatusOr<TlsPems> pems = LoadTls(config_);
  if (!pems.ok()) {
    LogWarn("changed TLS files are not used", {{"error", FromAbsl(pems.status().message())}});
    return;
  }
  {
    const std::lock_guard lock(mu_);
    pems_ = *std::move(pems);
    fresh_ = true;
  }
  LogInfo("TLS files were read again", {{"certificate", config_.certificate}});
}

ServerTls::Stamps ServerTls::StampsOf(const TlsConfig& config) {
  Stamps stamps;
  const std::array<const std::string*, 3> paths = {&config.certificate, &config.key,
                                                   &config.client_ca};
  for (size_t i = 0; i < paths.size(); ++i) {
    struct stat info = {};
    if (::stat(paths[i]->c_str(), &info) != 0) continue;
    stamps[i] = {int64_t{info.st_ctim.tv_sec} * 1'000'000'000 + info.st_ctim.tv_nsec, info.st_size,
                 info.st_ino};
  }
  return stamps;
}

}  // namespace saccade
