#include "rpc/credential_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/logging.h"
#include "base/strings.h"

namespace saccade {
namespace {

struct FileCloser {
  int fd;
  ~FileCloser() { ::close(fd); }
};

}  // namespace

absl::StatusOr<std::string> ReadCredentialFile(std::string_view key, const std::string& path,
                                               Secrecy secrecy, size_t max_bytes) {
  const auto refuse = [&](std::string_view why) {
    return absl::InvalidArgumentError(StrCat(key, ": ", path, ": ", why));
  };
  // Non-blocking, so that a named pipe is refused below instead of waiting for a writer.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return refuse(StrCat("cannot be read: ", std::strerror(errno)));
  const FileCloser closer{fd};
  struct stat info = {};
  if (::fstat(fd, &info) != 0) return refuse(std::strerror(errno));
  if (!S_ISREG(info.st_mode)) return refuse("is not a regular file");
  if (secrecy == Secrecy::kSecret) {
    if ((info.st_mode & (S_IRWXO | S_IWGRP)) != 0) {
      return refuse("others may read or change it; take that away (chmod 600)");
    }
    if ((info.st_mode & S_IRGRP) != 0) {
      LogWarn("a secret file can be read by its group", {{"key", key}, {"file", path}});
    }
  }
  std::string text(max_bytes + 1, '\0');
  size_t size = 0;
  while (size < text.size()) {
    const ssize_t got = ::read(fd, text.data() + size, text.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return refuse(StrCat("cannot be read: ", std::strerror(errno)));
    if (got == 0) break;
    size += static_cast<size_t>(got);
  }
  if (size > max_bytes) return refuse(StrCat("has more than ", max_bytes, " bytes"));
  if (size == 0) return refuse("is empty");
  text.resize(size);
  return text;
}

}  // namespace saccade
