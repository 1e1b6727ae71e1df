#pragma once
// Certificates made when the test runs: nothing secret is checked in, and nothing expires.
#include <gtest/gtest.h>
#include <openssl/bio.h>
#include <openssl/ec.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>

namespace saccade::testing {

struct Identity {
  std::shared_ptr<X509> certificate;
  std::shared_ptr<EVP_PKEY> key;

  std::string CertificatePem() const {
    return Pem([&](BIO* out) { return PEM_write_bio_X509(out, certificate.get()); });
  }
  // With a password the key is encrypted.
  std::string KeyPem(const char* password = nullptr) const {
    return Pem([&](BIO* out) {
      return PEM_write_bio_PKCS8PrivateKey(out, key.get(),
                                           password == nullptr ? nullptr : EVP_aes_256_cbc(),
                                           password, password == nullptr ? 0 : 4, nullptr, nullptr);
    });
  }

 private:
  template <class Write>
  static std::string Pem(const Write& write) {
    const std::unique_ptr<BIO, decltype(&BIO_free)> out(BIO_new(BIO_s_mem()), &BIO_free);
    EXPECT_EQ(write(out.get()), 1);
    char* data = nullptr;
    const auto size = BIO_get_mem_data(out.get(), &data);
    return {data, static_cast<size_t>(size)};
  }
};

// Signed by `issuer`, by itself without one; then it may sign others. Valid from an hour ago until
// `seconds` from now. Good for 127.0.0.1 and localhost.
inline Identity MakeIdentity(const std::string& name, const Identity* issuer = nullptr,
                             long seconds = 3600) {
  Identity made;
  made.key.reset(EVP_EC_gen("P-256"), &EVP_PKEY_free);
  made.certificate.reset(X509_new(), &X509_free);
  X509* x = made.certificate.get();
  X509_set_version(x, 2);
  ASN1_INTEGER_set(X509_get_serialNumber(x),
                   static_cast<long>(std::hash<std::string>{}(name) >> 33));
  X509_gmtime_adj(X509_getm_notBefore(x), -3600);
  X509_gmtime_adj(X509_getm_notAfter(x), seconds);
  X509_set_pubkey(x, made.key.get());
  X509_NAME_add_entry_by_txt(X509_get_subject_name(x), "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(name.c_str()), -1, -1, 0);
  const Identity& signer = issuer == nullptr ? made : *issuer;
  X509_set_issuer_name(x, X509_get_subject_name(signer.certificate.get()));
  const auto extend = [&](int nid, const char* value) {
    X509V3_CTX context;
    X509V3_set_ctx(&context, signer.certificate.get(), x, nullptr, nullptr, 0);
    X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value);
    ASSERT_NE(extension, nullptr);
    X509_add_ext(x, extension, -1);
    X509_EXTENSION_free(extension);
  };
  extend(NID_basic_constraints, issuer == nullptr ? "critical,CA:TRUE" : "critical,CA:FALSE");
  extend(NID_subject_alt_name, "DNS:localhost,IP:127.0.0.1");
  EXPECT_GT(X509_sign(x, signer.key.get(), EVP_sha256()), 0);
  return made;
}

// A folder of its own, removed at the end.
class CredentialFolder {
 public:
  CredentialFolder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "saccade_auth_XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~CredentialFolder() { std::filesystem::remove_all(path_); }
  CredentialFolder(const CredentialFolder&) = delete;
  CredentialFolder& operator=(const CredentialFolder&) = delete;

  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  // Replaces the file at once, as a careful administrator does. Returns its path.
  std::string Write(const std::string& name, const std::string& text, mode_t mode = 0600) const {
    const std::string path = *this / name;
    std::ofstream(path + ".new") << text;
    EXPECT_EQ(::chmod((path + ".new").c_str(), mode), 0);
    std::filesystem::rename(path + ".new", path);
    return path;
  }

 private:
  std::filesystem::path path_;
};

}  // namespace saccade::testing
