#include "config/yaml_tree.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <exception>
#include <sstream>

#include "absl/strings/escaping.h"
#include "base/strings.h"
#include "config/config.h"

namespace saccade {
namespace {

// Builds the tree from the parser's events. After the first error every further event is ignored,
// so neither depth nor size of the tree grows past its bounds.
class TreeBuilder final : public YAML::EventHandler {
 public:
  explicit TreeBuilder(std::string_view file_name) : file_name_(file_name) {}

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    Scalar(mark, "?", anchor, YamlNode::Kind::kNull, "");
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    Fail(mark, "aliases (*name) are not accepted");
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    Scalar(mark, tag, anchor, tag == "!" ? YamlNode::Kind::kQuoted : YamlNode::Kind::kPlain, value);
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    Open(mark, tag, anchor, YamlNode::Kind::kSequence);
  }
  void OnSequenceEnd() override { Close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    Open(mark, tag, anchor, YamlNode::Kind::kMap);
  }
  void OnMapEnd() override { Close(); }

  const absl::Status& error() const { return error_; }
  bool has_root() const { return has_root_; }
  YamlNode TakeRoot() { return std::move(root_); }

 private:
  struct Frame {
    YamlNode* node;  // stable: the parent gains no child while this one is open
    bool expects_key;
  };

  void Fail(const YAML::Mark& mark, std::string_view message) {
    if (error_.ok()) error_ = FileError(file_name_, mark.line + 1, message);
  }

  bool Acceptable(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) {
    if (anchor != YAML::NullAnchor) Fail(mark, "anchors (&name) are not accepted");
    if (!tag.empty() && tag != "?" && tag != "!") {
      Fail(mark, StrCat("tags are not accepted, got ", Printable(tag)));
    }
    return error_.ok();
  }

  // Where the next value goes; nullptr when it was a map's key, or is refused.
  YamlNode* Place(const YAML::Mark& mark, YamlNode::Kind kind, const std::string& value) {
    if (stack_.empty()) {
      has_root_ = true;
      return &root_;
    }
    Frame& top = stack_.back();
    if (top.node->kind == YamlNode::Kind::kMap && top.expects_key) {
      if (kind != YamlNode::Kind::kPlain && kind != YamlNode::Kind::kQuoted) {
        Fail(mark, "a key must be text");
        return nullptr;
      }
      const auto same = std::find(top.node->keys.begin(), top.node->keys.end(), value);
      if (same != top.node->keys.end()) {
        const int first = top.node->key_lines[static_cast<size_t>(same - top.node->keys.begin())];
        Fail(mark, StrCat(Printable(value), ": the key is repeated, first seen on line ", first));
        return nullptr;
      }
      top.node->keys.push_back(value);
      top.node->key_lines.push_back(mark.line + 1);
      top.expects_key = false;
      return nullptr;
    }
    top.expects_key = true;
    return &top.node->children.emplace_back();
  }

  void Scalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
              YamlNode::Kind kind, const std::string& value) {
    if (!Acceptable(mark, tag, anchor)) return;
    YamlNode* node = Place(mark, kind, value);
    if (node == nullptr) return;
    node->kind = kind;
    // The parser sees an absent value only at the token after it.
    const bool absent =
        kind == YamlNode::Kind::kNull && !stack_.empty() && !stack_.back().node->keys.empty();
    node->line = absent ? stack_.back().node->key_lines.back() : mark.line + 1;
    node->value = value;
  }

  void Open(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
            YamlNode::Kind kind) {
    if (!Acceptable(mark, tag, anchor)) return;
    if (stack_.size() >= static_cast<size_t>(kMaxConfigDepth)) {
      Fail(mark, StrCat("nested deeper than ", kMaxConfigDepth, " levels"));
      return;
    }
    YamlNode* node = Place(mark, kind, "");
    if (node == nullptr) return;
    node->kind = kind;
    node->line = mark.line + 1;
    stack_.push_back({node, true});
  }

  void Close() {
    if (error_.ok()) stack_.pop_back();
  }

  std::string_view file_name_;
  absl::Status error_;
  YamlNode root_;
  bool has_root_ = false;
  std::vector<Frame> stack_;
};

}  // namespace

const YamlNode* YamlNode::Find(std::string_view key) const {
  const auto found = std::find(keys.begin(), keys.end(), key);
  return found == keys.end() ? nullptr : &children[static_cast<size_t>(found - keys.begin())];
}

int YamlNode::LineOf(std::string_view key) const {
  const auto found = std::find(keys.begin(), keys.end(), key);
  return found == keys.end() ? line : key_lines[static_cast<size_t>(found - keys.begin())];
}

absl::Status FileError(std::string_view file_name, int line, std::string_view message) {
  return absl::InvalidArgumentError(StrCat(file_name, ":", line, ": ", message));
}

std::string Printable(std::string_view text) {
  constexpr size_t kLongest = 60;
  std::string out = absl::Utf8SafeCEscape(ToAbsl(text.substr(0, kLongest)));
  if (text.size() > kLongest) out += "...";
  return out;
}

absl::StatusOr<YamlNode> ParseYamlTree(std::string_view text, std::string_view file_name) {
  if (text.size() > kMaxConfigBytes) {
    return FileError(
        file_name, 1,
        StrCat("the file has ", text.size(), " bytes, at most ", kMaxConfigBytes, " are accepted"));
  }
  TreeBuilder builder(file_name);
  bool second_document = false;
  try {
    std::istringstream stream{std::string(text)};
    YAML::Parser parser(stream);
    parser.HandleNextDocument(builder);
    if (builder.error().ok()) {
      TreeBuilder rest(file_name);
      second_document = parser.HandleNextDocument(rest);
    }
  } catch (const YAML::Exception& e) {
    if (!builder.error().ok()) return builder.error();  // came first
    return FileError(file_name, std::max(e.mark.line, 0) + 1,
                     StrCat("not valid YAML: ", Printable(e.msg)));
  } catch (const std::exception& e) {
    return FileError(file_name, 1, StrCat("not valid YAML: ", Printable(e.what())));
  }
  if (!builder.error().ok()) return builder.error();
  if (second_document) return FileError(file_name, 1, "more than one YAML document");
  if (!builder.has_root()) return FileError(file_name, 1, "the file is empty");
  return builder.TakeRoot();
}

}  // namespace saccade
