#include "base/strings.h"
#include "config/numbers.h"
#include "config/schema.h"

namespace saccade {
namespace {

std::string Quoted(std::string_view text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (byte < 0x20 || byte == 0x7f) {
      out += "\\x";
      out += kHex[byte >> 4];
      out += kHex[byte & 15];
    } else {
      out += c;
    }
  }
  return out + "\"";
}

class Writer {
 public:
  Writer(std::string& out, int indent) : out_(out), indent_(indent) {}
  // The next line starts a list entry.
  void StartEntry() { entry_ = true; }

  void Text(Key key, const std::string& value, TextKind) { Line(key, Quoted(value)); }
  template <class T>
  void Integer(Key key, const T& value, uint64_t, uint64_t) {
    Line(key, StrCat(value));
  }
  void Real(Key key, double value, double, double) { Line(key, WriteReal(value)); }
  void Bool(Key key, bool value) { Line(key, value ? "true" : "false"); }
  template <class E>
  void Enum(Key key, E value) {
    Line(key, EnumTable<E>::kNames[static_cast<size_t>(value)]);
  }
  void Names(Key key, const std::vector<std::string>& value, std::string_view) {
    std::string list = "[";
    for (const std::string& name : value)
      StrAppend(&list, list.size() > 1 ? ", " : "", Quoted(name));
    Line(key, list + "]");
  }
  template <class T>
  void Section(Key key, T& value) {
    Line(key, "");
    Writer inner(out_, indent_ + 2);
    Describe(inner, value);
  }
  template <class T>
  void List(Key key, std::vector<T>& value, size_t, size_t) {
    Line(key, value.empty() ? "[]" : "");
    for (T& entry : value) {
      Writer inner(out_, indent_ + 4);
      inner.StartEntry();
      Describe(inner, entry);
    }
  }
  template <class T>
  void Optional(Key key, std::optional<T>& value) {
    if (value) Section(key, *value);
  }

 private:
  void Line(const Key& key, std::string_view value) {
    out_.append(static_cast<size_t>(entry_ ? indent_ - 2 : indent_), ' ');
    StrAppend(&out_, entry_ ? "- " : "", key.name, ":", value.empty() ? "" : " ", value, "\n");
    entry_ = false;
  }

  std::string& out_;
  int indent_;
  bool entry_ = false;
};

}  // namespace

std::string ToYaml(const Config& config) {
  std::string out;
  Config copy = config;  // visitors see mutable fields
  Writer writer(out, 0);
  Describe(writer, copy);
  return out;
}

}  // namespace saccade
