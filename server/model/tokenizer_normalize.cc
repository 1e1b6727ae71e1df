#include "model/tokenizer_normalize.h"

#include <utility>

#include "base/strings.h"
#include "model/tokenizer_parse.h"
#include "model/unicode_nfc.h"

namespace saccade {

absl::StatusOr<TextNormalizer> TextNormalizer::Parse(const JsonView& view) {
  TextNormalizer result;
  RETURN_IF_ERROR(result.Add(view));
  return result;
}

absl::Status TextNormalizer::Add(const JsonView& view) {
  ASSIGN_OR_RETURN(const std::string type, view.String("type"));
  if (type == "Sequence") {
    ASSIGN_OR_RETURN(const JsonView list, view.Get("normalizers"));
    ASSIGN_OR_RETURN(const size_t size, list.ArraySize());
    for (size_t i = 0; i < size; ++i) {
      ASSIGN_OR_RETURN(const JsonView item, list.At(i));
      RETURN_IF_ERROR(Add(item));
    }
    return absl::OkStatus();
  }
  Step step;
  size_t growth = 3;  // of NFC
  if (type == "Prepend") {
    step.kind = Step::Kind::kPrepend;
    ASSIGN_OR_RETURN(step.to, view.String("prepend"));
    growth = 1 + step.to.size();
  } else if (type == "Replace") {
    step.kind = Step::Kind::kReplace;
    ASSIGN_OR_RETURN(step.from, StringPattern(view));
    ASSIGN_OR_RETURN(step.to, view.String("content"));
    growth = 1 + step.to.size() / step.from.size();
  } else if (type == "NFC") {
    step.kind = Step::Kind::kNfc;
  } else {
    return UnsupportedPart(view, StrCat("the normalizer ", type));
  }
  RETURN_IF_ERROR(budget_.Add(view, growth));
  steps_.push_back(std::move(step));
  return absl::OkStatus();
}

std::string TextNormalizer::Normalize(std::string_view text) const {
  std::string out(text);
  for (const Step& step : steps_) {
    switch (step.kind) {
      case Step::Kind::kPrepend:
        if (!out.empty()) out.insert(0, step.to);
        break;
      case Step::Kind::kReplace:
        out = ReplaceAll(out, step.from, step.to);
        break;
      case Step::Kind::kNfc:
        out = ComposeNfc(out);
        break;
    }
  }
  return out;
}

}  // namespace saccade
