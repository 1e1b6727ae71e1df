// The tokenizer of a folder or a tokenizer.json, for tests in other languages:
//   tokenize_lines FOLDER|FILE
// Each line of standard input is a JSON object. {"text": "...", "special": true, "template": true}
// is encoded, with allow_special and add_special_tokens as it says, and answered
// {"ids": [...], "text": "..."}, the text being that of the ids; {"ids": [...]} is only decoded.
// What is refused is answered {"error": "..."}.
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "model/json_util.h"
#include "model/text_decoder.h"
#include "model/tokenizer.h"

namespace saccade {
namespace {

absl::StatusOr<std::unique_ptr<const Tokenizer>> Load(const std::string& path) {
  if (std::filesystem::is_directory(path)) return Tokenizer::Load(path);
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path, 128 << 20));
  return Tokenizer::FromJson(text);
}

absl::StatusOr<Json> Answer(const Tokenizer& tokenizer, const std::string& line) {
  ASSIGN_OR_RETURN(const Json json, ParseJson(line, "line"));
  const JsonView view(json, "line");
  std::vector<int32_t> ids;
  if (view.Has("text")) {
    EncodeOptions options;
    ASSIGN_OR_RETURN(const std::string text, view.String("text"));
    ASSIGN_OR_RETURN(options.allow_special, view.Bool("special", true));
    ASSIGN_OR_RETURN(options.add_special_tokens, view.Bool("template", true));
    ASSIGN_OR_RETURN(ids, tokenizer.Encode(text, options));
  } else {
    ASSIGN_OR_RETURN(const JsonView list, view.Get("ids"));
    ASSIGN_OR_RETURN(const std::vector<int64_t> wide, list.AsInts(INT32_MIN, INT32_MAX));
    ids.assign(wide.begin(), wide.end());
  }
  Json answer{{"ids", ids}};
  if (tokenizer.decoding().supported) answer["text"] = TextDecoder::Decode(tokenizer, ids);
  return answer;
}

int Run(const std::string& path) {
  const auto tokenizer = Load(path);
  if (!tokenizer.ok()) {
    std::cerr << tokenizer.status() << "\n";
    return 1;
  }
  for (std::string line; std::getline(std::cin, line);) {
    const absl::StatusOr<Json> answer = Answer(**tokenizer, line);
    std::cout << (answer.ok() ? *answer : Json{{"error", answer.status().ToString()}}).dump()
              << "\n";
  }
  return 0;
}

}  // namespace
}  // namespace saccade

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "tokenize_lines FOLDER|FILE\n";
    return 2;
  }
  return saccade::Run(argv[1]);
}
