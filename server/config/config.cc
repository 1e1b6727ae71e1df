#include "config/config.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>
#include <set>
#include <type_traits>
#include <utility>

#include "absl/strings/ascii.h"
#include "base/strings.h"
#include "config/numbers.h"
#include "config/schema.h"
#include "config/yaml_tree.h"

namespace saccade {
namespace {

template <class Texts>
std::string Join(const Texts& texts) {
  std::string out;
  for (const auto& text : texts) StrAppend(&out, out.empty() ? "" : ", ", text);
  return out;
}

template <class E>
std::string Choices() {
  return Join(EnumTable<E>::kNames);
}

// ---------------------------------------------------------------- documentation

std::string JoinPath(std::string_view section, std::string_view key) {
  return section.empty() ? std::string(key) : StrCat(section, ".", key);
}

class Documenter {
 public:
  Documenter(std::string section, std::vector<KeyDoc>& docs)
      : section_(std::move(section)), docs_(docs) {}

  void Text(Key key, const std::string& value, TextKind kind) {
    static constexpr std::string_view kAllowed[] = {"letters, digits, `_` `.` `-`; at most 63",
                                                    "`host:port`",
                                                    "`host:port` or empty",
                                                    "not empty",
                                                    "a path or empty",
                                                    "at most 32 bytes"};
    Add(key, "text", std::string(kAllowed[static_cast<size_t>(kind)]),
        value.empty() ? "empty" : value);
  }
  template <class T>
  void Integer(Key key, const T& value, uint64_t min, uint64_t max) {
    Add(key, "integer", StrCat(min, "..", max), StrCat(value));
  }
  void Real(Key key, double value, double min, double max) {
    Add(key, "number", StrCat(WriteReal(min), "..", WriteReal(max)), WriteReal(value));
  }
  void Bool(Key key, bool value) { Add(key, "boolean", "true, false", value ? "true" : "false"); }
  template <class E>
  void Enum(Key key, E value) {
    Add(key, "choice", Choices<E>(), std::string(EnumTable<E>::kNames[static_cast<size_t>(value)]));
  }
  void Names(Key key, const std::vector<std::string>& value, std::string_view allowed) {
    Add(key, "name or list of names", std::string(allowed), value.empty() ? "empty" : Join(value));
  }
  template <class T>
  void Section(Key key, T& value) {
    Add(key, "section", "", "");
    Documenter inner(JoinPath(section_, key.name), docs_);
    Describe(inner, value);
  }
  template <class T>
  void List(Key key, std::vector<T>&, size_t min, size_t max) {
    Add(key, "list", StrCat(min, "..", max, " entries"), "");
    Documenter inner(JoinPath(section_, StrCat(key.name, "[]")), docs_);
    T entry{};
    Describe(inner, entry);
  }
  template <class T>
  void Optional(Key key, std::optional<T>&) {
    T value{};
    Add(key, "section", "", "absent");
    Documenter inner(JoinPath(section_, key.name), docs_);
    Describe(inner, value);
  }

 private:
  void Add(const Key& key, std::string_view type, std::string allowed, std::string initial) {
    docs_.push_back({JoinPath(section_, key.name), std::string(type), std::move(allowed),
                     key.required ? "required" : std::move(initial), key.meaning});
  }

  std::string section_;
  std::vector<KeyDoc>& docs_;
};

// ---------------------------------------------------------------- names of keys

// The keys of one section, without those of sections inside it.
class KeyCollector {
 public:
  std::vector<Key> keys;

  template <class T>
  void Text(Key key, T&, TextKind) {
    keys.push_back(key);
  }
  template <class T>
  void Integer(Key key, T&, uint64_t, uint64_t) {
    keys.push_back(key);
  }
  void Real(Key key, double, double, double) { keys.push_back(key); }
  void Bool(Key key, bool) { keys.push_back(key); }
  template <class E>
  void Enum(Key key, E) {
    keys.push_back(key);
  }
  template <class T>
  void Names(Key key, T&, std::string_view) {
    keys.push_back(key);
  }
  template <class T>
  void Section(Key key, T&) {
    keys.push_back(key);
  }
  template <class T>
  void List(Key key, T&, size_t, size_t) {
    keys.push_back(key);
  }
  template <class T>
  void Optional(Key key, T&) {
    keys.push_back(key);
  }
};

size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t cost = absl::ascii_tolower(static_cast<unsigned char>(a[i - 1])) ==
                                  absl::ascii_tolower(static_cast<unsigned char>(b[j - 1]))
                              ? 0
                              : 1;
      diagonal = std::exchange(row[j], std::min({row[j] + 1, row[j - 1] + 1, diagonal + cost}));
    }
  }
  return row[b.size()];
}

// What the author of an unknown key may have meant.
std::string Suggestion(std::string_view key, const std::vector<Key>& valid) {
  constexpr size_t kLongestKey = 64;
  if (key.size() <= kLongestKey) {
    for (const KeyDoc& doc : Schema()) {
      if (std::string_view(doc.path).ends_with(StrCat(".", key))) {
        return StrCat("it belongs elsewhere: ", doc.path);
      }
    }
  }
  std::string_view nearest = valid.front().name;
  size_t best = SIZE_MAX;
  for (const Key& candidate : valid) {
    const size_t distance = EditDistance(key.substr(0, kLongestKey), candidate.name);
    if (distance < best) {
      best = distance;
      nearest = candidate.name;
    }
  }
  return StrCat("nearest valid name: ", nearest);
}

// ---------------------------------------------------------------- values that stand alone

bool IsName(std::string_view text) {
  const auto good = [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '.' || c == '-';
  };
  return !text.empty() && text.size() <= 63 &&
         absl::ascii_isalnum(static_cast<unsigned char>(text.front())) &&
         std::all_of(text.begin(), text.end(), good);
}

// "host:port", "[ipv6]:port"; the port 1..65535. A numeric host must be a real address: some
// resolvers quietly take 999.1.1.1 for another one.
bool IsAddress(std::string_view text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return false;
  const std::optional<uint64_t> port = ReadInteger(text.substr(colon + 1));
  if (!port || *port < 1 || *port > 65'535) return false;
  const std::string host(text.substr(0, colon));
  std::array<unsigned char, sizeof(in6_addr)> parsed{};
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    return ::inet_pton(AF_INET6, host.substr(1, host.size() - 2).c_str(), parsed.data()) == 1;
  }
  if (host.find_first_not_of("0123456789.") == std::string::npos) {
    return ::inet_pton(AF_INET, host.c_str(), parsed.data()) == 1;
  }
  return host.size() <= 253 && std::all_of(host.begin(), host.end(), [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '.';
         });
}

// Why `text` is not acceptable, or empty.
std::string TextFault(std::string_view text, TextKind kind) {
  switch (kind) {
    case TextKind::kName:
      if (!IsName(text))
        return "letters, digits and _ . - are allowed, a letter or digit first, at most 63";
      break;
    case TextKind::kOptionalAddress:
      if (text.empty()) break;
      [[fallthrough]];
    case TextKind::kAddress:
      if (!IsAddress(text)) return "allowed is host:port with a port of 1..65535";
      break;
    case TextKind::kOptionalPath:
      if (text.empty()) break;
      [[fallthrough]];
    case TextKind::kPath:
      if (text.empty() || text.size() > 4096 || text.find('\0') != std::string_view::npos)
        return "allowed are 1..4096 bytes";
      break;
    case TextKind::kUnit:
      if (text.size() > 32) return "at most 32 bytes are allowed";
      break;
  }
  return "";
}

// ---------------------------------------------------------------- settings that contradict each
// other

struct Fault {
  std::string path;  // relative to the section that was checked
  std::string message;
};

template <class T>
std::optional<Fault> Check(const T&) {
  return std::nullopt;
}

template <class T>
std::optional<Fault> CheckUniqueNames(std::string_view list, const std::vector<T>& entries) {
  std::set<std::string_view> seen;
  for (size_t i = 0; i < entries.size(); ++i) {
    if (!seen.insert(entries[i].name).second) {
      return Fault{StrCat(list, "[", i, "].name"),
                   StrCat("the name ", entries[i].name, " is repeated")};
    }
  }
  return std::nullopt;
}

std::optional<Fault> Check(const ServerConfig& c) {
  if (c.listen == c.metrics_listen)
    return Fault{"metrics_listen", "is the same address as server.listen"};
  if (!c.allow_insecure && !IsLoopback(c.listen) && (!c.tls || c.tokens_file.empty())) {
    const std::string_view lacking = c.tls                   ? "server.tokens_file"
                                     : c.tokens_file.empty() ? "server.tls and server.tokens_file"
                                                             : "server.tls";
    return Fault{"listen", StrCat(c.listen, " is beyond loopback; set ", lacking,
                                  ", or server.allow_insecure: true to serve whoever reaches it")};
  }
  return std::nullopt;
}

std::optional<Fault> Check(const BackendConfig& c) {
  if (c.kind == BackendKind::kRef) {
    if (c.isa != IsaLevel::kAuto)
      return Fault{"isa", "the ref backend has no instruction sets, allowed is auto"};
    if (c.threads > 1)
      return Fault{"threads", "the ref backend has one thread, allowed are 0 and 1"};
  } else if (c.guarded) {
    return Fault{"guarded", "only the ref backend can guard its memory, allowed is false"};
  }
  return std::nullopt;
}

std::optional<Fault> Check(const std::array<PartitionConfig, kModalities>& c) {
  double floors = 0;
  for (size_t m = 0; m < kModalities; ++m) {
    const PartitionConfig& partition = c[m];
    if (partition.cap < partition.floor) {
      return Fault{StrCat(kModalityNames[m], ".cap"),
                   StrCat("the cap ", WriteReal(partition.cap), " is below the floor ",
                          WriteReal(partition.floor))};
    }
    floors += partition.floor;
  }
  constexpr double kRounding = 1e-9;
  if (floors > 1 + kRounding) {
    return Fault{"", StrCat("the floors add up to ", WriteReal(floors), ", allowed is at most 1")};
  }
  return std::nullopt;
}

std::optional<Fault> Check(const OftConfig& c) {
  const std::set<std::string_view> names(c.cameras.begin(), c.cameras.end());
  if (names.size() != c.cameras.size()) return Fault{"cameras", "a name is repeated"};
  if (names.size() > 16) return Fault{"cameras", "at most 16 names are allowed"};
  return std::nullopt;
}

std::optional<Fault> Check(const ActionSpaceConfig& c) { return CheckUniqueNames("dims", c.dims); }

std::optional<Fault> Check(const Config& c) {
  for (auto fault :
       {CheckUniqueNames("backends", c.backends), CheckUniqueNames("classes", c.classes),
        CheckUniqueNames("models", c.models)}) {
    if (fault) return fault;
  }
  // A frame travels inside a message that also names its camera and times.
  constexpr uint64_t kMessageOverhead = 4'096;
  if (c.limits.max_image_bytes + kMessageOverhead > c.server.max_message_bytes) {
    return Fault{"limits.max_image_bytes",
                 StrCat("an image of ", c.limits.max_image_bytes, " bytes and ", kMessageOverhead,
                        " around it do not fit in a message of ", c.server.max_message_bytes,
                        " (server.max_message_bytes)")};
  }
  const auto names = [](const auto& list) {
    std::vector<std::string_view> out;
    for (const auto& entry : list) out.push_back(entry.name);
    return out;
  };
  const std::vector<std::string_view> backends = names(c.backends);
  const std::vector<std::string_view> classes = names(c.classes);
  for (size_t i = 0; i < c.models.size(); ++i) {
    const ModelConfig& model = c.models[i];
    const std::string path = StrCat("models[", i, "]");
    std::set<std::string_view> seen;
    for (const std::string& name : model.backends) {
      if (std::find(backends.begin(), backends.end(), name) == backends.end()) {
        return Fault{
            path + ".backend",
            StrCat(Printable(name), " is no configured backend, allowed are ", Join(backends))};
      }
      if (!seen.insert(name).second)
        return Fault{path + ".backend", StrCat(name, " is named twice")};
    }
    if (std::find(classes.begin(), classes.end(), model.default_class) == classes.end()) {
      return Fault{
          path + ".default_class",
          StrCat(model.default_class, " is no configured class, allowed are ", Join(classes))};
    }
  }
  return std::nullopt;
}

// ---------------------------------------------------------------- reading

// The line of `path` ("a.b[2].c") under `root`, or of the nearest thing above it that is in the
// file.
int LineOfPath(const YamlNode& root, std::string_view path) {
  const YamlNode* node = &root;
  int line = root.line;
  while (!path.empty()) {
    const size_t dot = path.find('.');
    const std::string_view part = path.substr(0, dot);
    path.remove_prefix(dot == std::string_view::npos ? path.size() : dot + 1);
    const size_t bracket = part.find('[');
    const std::string_view key = part.substr(0, bracket);
    const YamlNode* child = node->Find(key);
    if (child == nullptr) return line;
    line = node->LineOf(key);
    node = child;
    if (bracket == std::string_view::npos) continue;
    const std::optional<uint64_t> index =
        ReadInteger(part.substr(bracket + 1, part.size() - bracket - 2));
    if (index && *index < node->children.size()) {
      node = &node->children[*index];
      line = node->line;
    }
  }
  return line;
}

struct ReadState {
  std::string_view file_name;
  absl::Status error;  // the first fault; nothing is read after it
};

class Reader {
 public:
  Reader(ReadState& state, const YamlNode& node, std::string path)
      : state_(state), node_(node), path_(std::move(path)) {}

  template <class T>
  void ReadInto(T& value) {
    if (!state_.error.ok()) return;
    if (node_.kind != YamlNode::Kind::kMap) {
      Fail(node_.line, path_, StrCat("expected a section of keys, got ", Shown(node_)));
      return;
    }
    KeyCollector known;
    Describe(known, value);
    for (size_t i = 0; i < node_.keys.size(); ++i) {
      const std::string& key = node_.keys[i];
      if (std::none_of(known.keys.begin(), known.keys.end(),
                       [&](const Key& k) { return key == k.name; })) {
        Fail(node_.key_lines[i], JoinPath(path_, Printable(key)),
             StrCat("unknown key; ", Suggestion(key, known.keys)));
        return;
      }
    }
    for (const Key& key : known.keys) {
      if (key.required && node_.Find(key.name) == nullptr) {
        Fail(node_.line, JoinPath(path_, key.name), "the key is required and missing");
        return;
      }
    }
    Describe(*this, value);
    if (!state_.error.ok()) return;
    if (const std::optional<Fault> fault = Check(std::as_const(value))) {
      Fail(LineOfPath(node_, fault->path),
           fault->path.empty() ? path_ : JoinPath(path_, fault->path), fault->message);
    }
  }

  void Text(Key key, std::string& value, TextKind kind) {
    const YamlNode* node = Scalar(key, "text");
    if (node == nullptr) return;
    if (const std::string fault = TextFault(node->value, kind); !fault.empty()) {
      Refuse(key, *node, fault);
      return;
    }
    value = node->value;
  }

  template <class T>
  void Integer(Key key, T& value, uint64_t min, uint64_t max) {
    static_assert(std::is_unsigned_v<T>);
    const YamlNode* node = Plain(key, "an integer");
    if (node == nullptr) return;
    const std::optional<uint64_t> read = ReadInteger(node->value);
    if (!read || *read < min || *read > max) {
      Refuse(key, *node,
             StrCat("allowed are the integers ", min, "..", max, ", in plain decimal digits"));
      return;
    }
    value = static_cast<T>(*read);
  }

  void Real(Key key, double& value, double min, double max) {
    const YamlNode* node = Plain(key, "a number");
    if (node == nullptr) return;
    const std::optional<double> read = ReadReal(node->value);
    if (!read || *read < min || *read > max) {
      Refuse(key, *node,
             StrCat("allowed are the numbers ", WriteReal(min), "..", WriteReal(max),
                    ", in plain decimal digits"));
      return;
    }
    value = *read;
  }

  void Bool(Key key, bool& value) {
    const YamlNode* node = Plain(key, "true or false");
    if (node == nullptr) return;
    if (node->value != "true" && node->value != "false") {
      Refuse(key, *node, "allowed are true and false");
      return;
    }
    value = node->value == "true";
  }

  template <class E>
  void Enum(Key key, E& value) {
    const YamlNode* node = Scalar(key, "a name");
    if (node == nullptr) return;
    const auto& names = EnumTable<E>::kNames;
    const auto found = std::find(names.begin(), names.end(), node->value);
    if (found == names.end()) {
      Refuse(key, *node, StrCat("allowed are ", Choices<E>()));
      return;
    }
    value = static_cast<E>(found - names.begin());
  }

  void Names(Key key, std::vector<std::string>& value, std::string_view) {
    const YamlNode* node = Present(key);
    if (node == nullptr) return;
    std::vector<const YamlNode*> items;
    if (node->kind == YamlNode::Kind::kSequence) {
      for (const YamlNode& child : node->children) items.push_back(&child);
    } else {
      items.push_back(node);
    }
    value.clear();
    for (const YamlNode* item : items) {
      if (item->kind != YamlNode::Kind::kPlain && item->kind != YamlNode::Kind::kQuoted) {
        Refuse(key, *item, "expected a name or a list of names");
        return;
      }
      if (const std::string fault = TextFault(item->value, TextKind::kName); !fault.empty()) {
        Refuse(key, *item, fault);
        return;
      }
      value.push_back(item->value);
    }
  }

  template <class T>
  void Section(Key key, T& value) {
    const YamlNode* node = Present(key);
    if (node != nullptr) Reader(state_, *node, JoinPath(path_, key.name)).ReadInto(value);
  }

  template <class T>
  void List(Key key, std::vector<T>& value, size_t min, size_t max) {
    const YamlNode* node = Present(key);
    if (node == nullptr) return;
    if (node->kind != YamlNode::Kind::kSequence || node->children.size() < min ||
        node->children.size() > max) {
      Refuse(key, *node, StrCat("expected a list of ", min, "..", max, " entries"));
      return;
    }
    value.clear();
    for (size_t i = 0; i < node->children.size(); ++i) {
      Reader(state_, node->children[i], StrCat(JoinPath(path_, key.name), "[", i, "]"))
          .ReadInto(value.emplace_back());
    }
  }

  template <class T>
  void Optional(Key key, std::optional<T>& value) {
    if (Present(key) != nullptr) Section(key, value.emplace());
  }

 private:
  static std::string Shown(const YamlNode& node) {
    switch (node.kind) {
      case YamlNode::Kind::kNull:
        return "nothing (null)";
      case YamlNode::Kind::kPlain:
        return StrCat("the value ", Printable(node.value));
      case YamlNode::Kind::kQuoted:
        return StrCat("the quoted text \"", Printable(node.value), "\"");
      case YamlNode::Kind::kSequence:
        return "a list";
      case YamlNode::Kind::kMap:
        return "a section of keys";
    }
    return "";
  }

  void Fail(int line, std::string_view path, std::string_view message) {
    if (!state_.error.ok()) return;
    state_.error = FileError(state_.file_name, line,
                             path.empty() ? std::string(message) : StrCat(path, ": ", message));
  }
  void Refuse(const Key& key, const YamlNode& node, std::string_view allowed) {
    Fail(node.line, JoinPath(path_, key.name), StrCat("got ", Shown(node), "; ", allowed));
  }

  const YamlNode* Present(const Key& key) const {
    return state_.error.ok() ? node_.Find(key.name) : nullptr;
  }

  const YamlNode* Scalar(const Key& key, std::string_view wanted) {
    const YamlNode* node = Present(key);
    if (node == nullptr || node->kind == YamlNode::Kind::kPlain ||
        node->kind == YamlNode::Kind::kQuoted)
      return node;
    Refuse(key, *node, StrCat("expected ", wanted));
    return nullptr;
  }
  // Unquoted: quoted numbers are text.
  const YamlNode* Plain(const Key& key, std::string_view wanted) {
    const YamlNode* node = Present(key);
    if (node == nullptr || node->kind == YamlNode::Kind::kPlain) return node;
    Refuse(key, *node, StrCat("expected ", wanted));
    return nullptr;
  }

  ReadState& state_;
  const YamlNode& node_;
  std::string path_;
};

struct FileCloser {
  int fd;
  ~FileCloser() { ::close(fd); }
};

absl::Status ReadError(const std::string& path, int error) {
  const std::string message =
      StrCat(path, ": cannot read the configuration: ", std::strerror(error));
  if (error == ENOENT || error == ENOTDIR) return absl::NotFoundError(message);
  if (error == EACCES || error == EPERM) return absl::PermissionDeniedError(message);
  return absl::FailedPreconditionError(message);
}

}  // namespace

std::vector<KeyDoc> Schema() {
  std::vector<KeyDoc> docs;
  Config config;
  Documenter documenter("", docs);
  Describe(documenter, config);
  return docs;
}

bool IsConfigName(std::string_view text) { return IsName(text); }

bool IsLoopback(std::string_view listen) {
  const std::string host(listen.substr(0, listen.rfind(':')));
  if (host == "localhost") return true;
  in_addr v4{};
  if (::inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6{};
  return host.size() > 2 && host.front() == '[' && host.back() == ']' &&
         ::inet_pton(AF_INET6, host.substr(1, host.size() - 2).c_str(), &v6) == 1 &&
         IN6_IS_ADDR_LOOPBACK(&v6);
}

absl::StatusOr<Config> ParseConfig(std::string_view text, std::string_view file_name) {
  ASSIGN_OR_RETURN(const YamlNode root, ParseYamlTree(text, file_name));
  Config config;
  ReadState state{file_name, absl::OkStatus()};
  Reader(state, root, "").ReadInto(config);
  RETURN_IF_ERROR(state.error);
  const std::filesystem::path folder = std::filesystem::path(file_name).parent_path();
  const auto resolve = [&folder](std::string& path) {
    if (!path.empty()) path = (folder / path).lexically_normal().string();
  };
  for (ModelConfig& model : config.models) resolve(model.path);
  resolve(config.server.tokens_file);
  resolve(config.admin.models_root);
  resolve(config.scheduler.cost_file);
  if (TlsConfig* tls = config.server.tls ? &*config.server.tls : nullptr) {
    for (std::string* path : {&tls->certificate, &tls->key, &tls->client_ca}) resolve(*path);
  }
  return config;
}

absl::StatusOr<Config> LoadConfig(const std::string& path) {
  // Non-blocking, so that a named pipe is refused below instead of waiting for a writer.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return ReadError(path, errno);
  const FileCloser closer{fd};
  struct stat info = {};
  if (::fstat(fd, &info) != 0) return ReadError(path, errno);
  if (!S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(StrCat(path, ": the configuration is not a regular file"));
  }
  std::string text(kMaxConfigBytes + 1, '\0');
  size_t size = 0;
  while (size < text.size()) {
    const ssize_t got = ::read(fd, text.data() + size, text.size() - size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ReadError(path, errno);
    if (got == 0) break;
    size += static_cast<size_t>(got);
  }
  text.resize(size);
  return ParseConfig(text, path);
}

std::string_view Name(BackendKind kind) {
  return EnumTable<BackendKind>::kNames[static_cast<size_t>(kind)];
}
std::string_view Name(IsaLevel level) {
  return EnumTable<IsaLevel>::kNames[static_cast<size_t>(level)];
}
std::string_view Name(OnLate action) {
  return EnumTable<OnLate>::kNames[static_cast<size_t>(action)];
}
std::string_view Name(ComputeType type) {
  return EnumTable<ComputeType>::kNames[static_cast<size_t>(type)];
}
std::string_view Name(OftPlatform platform) {
  return EnumTable<OftPlatform>::kNames[static_cast<size_t>(platform)];
}
std::string_view Name(InvalidActionTokens policy) {
  return EnumTable<InvalidActionTokens>::kNames[static_cast<size_t>(policy)];
}

}  // namespace saccade
