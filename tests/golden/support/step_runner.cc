#include "tests/golden/support/step_runner.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "base/strings.h"

namespace saccade {

absl::StatusOr<std::unique_ptr<StepRunner>> StepRunner::Create(Backend& backend, const Model& model,
                                                               const StepLimits& limits) {
  auto runner = std::unique_ptr<StepRunner>(new StepRunner(backend, model, limits));
  RETURN_IF_ERROR(runner->Allocate());
  return runner;
}

absl::Status StepRunner::Allocate() {
  const ModelSpec& spec = model_.spec();
  sequences_.resize(limits_.sequences);
  // Segments start blocks of their own, so a prompt may need a few more than its tokens say.
  blocks_per_sequence_ = (limits_.rows + spec.max_action_tokens) / spec.kv.block_tokens + 5;
  ASSIGN_OR_RETURN(stream_, backend_.NewStream());
  ASSIGN_OR_RETURN(kv_, backend_.NewKvStorage(spec.kv, limits_.sequences * blocks_per_sequence_));
  const size_t rows = size_t{limits_.sequences} * spec.vision_tokens;
  ASSIGN_OR_RETURN(embeddings_,
                   backend_.Allocate(rows * spec.hidden * sizeof(float), MemKind::kDevice));
  const size_t ids = size_t{limits_.sequences} * spec.max_action_tokens + limits_.rows;
  ASSIGN_OR_RETURN(tokens_, backend_.Allocate(ids * sizeof(int32_t), MemKind::kDevice));
  ASSIGN_OR_RETURN(arena_, backend_.Allocate(model_.WorkspaceBytes(limits_.frames, limits_.rows,
                                                                   limits_.logit_rows),
                                             MemKind::kDevice));
  if (limits_.layers > 0) {
    ASSIGN_OR_RETURN(parked_, backend_.Allocate(model_.ParkingBytes(limits_.frames, limits_.rows,
                                                                    limits_.logit_rows),
                                                MemKind::kDevice));
  }
  return absl::OkStatus();
}

template <class Run>
absl::Status StepRunner::Slices(size_t layers, TapSink* tap, const Run& run) {
  const auto all = static_cast<uint32_t>(layers);
  const uint32_t step = limits_.layers == 0 ? all : limits_.layers;
  for (uint32_t begin = 0; begin < all; begin += step) {
    Arena arena(*arena_);
    ExecContext ctx{backend_.ops(), *stream_, arena, tap};
    LayerRange range;
    if (limits_.layers > 0) range = {begin, std::min(begin + step, all), parked_.get()};
    const absl::Status status = run(ctx, range);
    const absl::Status done = stream_->Synchronize();
    if (!status.ok()) return status;
    RETURN_IF_ERROR(done);
    if (arena.used() != 0) return absl::InternalError("a slice keeps scratch");
  }
  return absl::OkStatus();
}

void StepRunner::Start(uint32_t s, const Prompt& prompt) {
  Sequence& sequence = sequences_[s];
  sequence = {};
  uint32_t block = 0;
  for (const PromptSegment& segment : prompt.segments) {
    const bool vision = segment.modality == Modality::kVision;
    const auto count =
        vision ? model_.spec().vision_tokens : static_cast<uint32_t>(segment.tokens.size());
    for (uint32_t i = 0; i < count; ++i) {
      Token token;
      if (vision) {
        token.embedding = static_cast<int32_t>(s * model_.spec().vision_tokens + i);
      } else {
        token.id = segment.tokens[i];
      }
      token.block = block + i / model_.spec().kv.block_tokens;
      token.offset = i % model_.spec().kv.block_tokens;
      sequence.prompt.push_back(token);
    }
    block += (count + model_.spec().kv.block_tokens - 1) / model_.spec().kv.block_tokens;
  }
}

uint32_t StepRunner::prompt_tokens(uint32_t s) const {
  return static_cast<uint32_t>(sequences_[s].prompt.size());
}

StepRunner::Token StepRunner::TokenAt(uint32_t s, uint32_t t) const {
  const Sequence& sequence = sequences_[s];
  if (t < sequence.prompt.size()) return sequence.prompt[t];
  const auto action = static_cast<uint32_t>(t - sequence.prompt.size());
  Token token;
  token.block = sequence.prompt.back().block + 1 + action / model_.spec().kv.block_tokens;
  token.offset = action % model_.spec().kv.block_tokens;
  return token;
}

absl::StatusOr<TensorView> StepRunner::Put(const std::vector<int32_t>& values) {
  const auto count = static_cast<int64_t>(values.size());
  // A view needs an address, so an empty array gets one element.
  std::vector<int32_t> host = values;
  if (host.empty()) host.push_back(0);
  ASSIGN_OR_RETURN(std::unique_ptr<Buffer> buffer,
                   Upload(backend_, *stream_,
                          TensorView::Dense(host.data(), DType::kI32, MemKind::kHost,
                                            {static_cast<int64_t>(host.size())}),
                          DType::kI32));
  step_.push_back(std::move(buffer));
  return step_.back()->View(DType::kI32, {count});
}

absl::Status StepRunner::PageTable(std::span<const Part> parts, PagedBatch& batch) {
  const auto block_tokens = static_cast<int32_t>(model_.spec().kv.block_tokens);
  std::vector<int32_t> row_begin{0}, page_begin{0}, pages, page_len, page_pos, row_pos, row_slot;
  for (const Part& part : parts) {
    const auto base = static_cast<int32_t>(part.sequence * blocks_per_sequence_);
    for (uint32_t t = 0; t < part.begin + part.count; ++t) {
      const Token token = TokenAt(part.sequence, t);
      const int32_t block = base + static_cast<int32_t>(token.block);
      if (token.offset == 0) {
        pages.push_back(block);
        page_len.push_back(0);
        page_pos.push_back(static_cast<int32_t>(t));
      }
      ++page_len.back();
      if (t < part.begin) continue;
      row_pos.push_back(static_cast<int32_t>(t));
      row_slot.push_back(block * block_tokens + static_cast<int32_t>(token.offset));
    }
    batch.max_pages =
        std::max(batch.max_pages, static_cast<int32_t>(pages.size()) - page_begin.back());
    row_begin.push_back(static_cast<int32_t>(row_pos.size()));
    page_begin.push_back(static_cast<int32_t>(pages.size()));
  }
  batch.num_seqs = static_cast<int32_t>(parts.size());
  batch.num_rows = static_cast<int32_t>(row_pos.size());
  batch.num_pages = static_cast<int32_t>(pages.size());
  ASSIGN_OR_RETURN(batch.row_begin, Put(row_begin));
  ASSIGN_OR_RETURN(batch.page_begin, Put(page_begin));
  ASSIGN_OR_RETURN(batch.pages, Put(pages));
  ASSIGN_OR_RETURN(batch.page_len, Put(page_len));
  ASSIGN_OR_RETURN(batch.page_pos, Put(page_pos));
  ASSIGN_OR_RETURN(batch.row_pos, Put(row_pos));
  batch.row_limit = batch.row_pos;
  ASSIGN_OR_RETURN(batch.row_slot, Put(row_slot));
  return absl::OkStatus();
}

absl::Status StepRunner::Encode(std::span<const uint32_t> sequences,
                                std::span<const ModelImage> frames, TapSink* tap) {
  const ModelSpec& spec = model_.spec();
  const CameraSpec& camera = spec.cameras.front();
  const size_t frame_bytes = camera.FrameBytes();
  const auto count = static_cast<int64_t>(frames.size());
  const size_t total = frame_bytes * frames.size();
  ASSIGN_OR_RETURN(const std::unique_ptr<Buffer> host, backend_.Allocate(total, MemKind::kPinned));
  ASSIGN_OR_RETURN(const std::unique_ptr<Buffer> rgb, backend_.Allocate(total, MemKind::kDevice));
  std::vector<TensorView> out;
  for (size_t i = 0; i < frames.size(); ++i) {
    std::memcpy(host->data() + i * frame_bytes, frames[i].rgb.data(), frame_bytes);
    out.push_back(
        embeddings_->View(DType::kF32, {spec.vision_tokens, spec.hidden},
                          size_t{sequences[i]} * spec.vision_tokens * spec.hidden * sizeof(float)));
  }
  const TensorView view = rgb->View(camera.dtype, {count, camera.height, camera.width, 3});
  RETURN_IF_ERROR(
      stream_->Copy(view, host->View(camera.dtype, {count, camera.height, camera.width, 3})));
  return Slices(spec.vision_layers.size(), tap, [&](ExecContext& ctx, const LayerRange& layers) {
    return model_.Encode(ctx, {view, out, layers});
  });
}

absl::Status StepRunner::Forward(std::span<const Part> parts, TapSink* tap) {
  const ModelSpec& spec = model_.spec();
  const auto columns = static_cast<int32_t>(spec.max_action_tokens);
  const auto text_base = static_cast<int32_t>(limits_.sequences) * columns;
  TrunkBatch batch;
  RETURN_IF_ERROR(PageTable(parts, batch.paged));
  std::vector<int32_t> text, token_index, embedding_index, logit_rows, dest, draw;
  for (const Part& part : parts) {
    Sequence& sequence = sequences_[part.sequence];
    const auto slot = static_cast<int32_t>(part.sequence) * columns;
    for (uint32_t t = part.begin; t < part.begin + part.count; ++t) {
      const Token token = TokenAt(part.sequence, t);
      embedding_index.push_back(token.embedding);
      if (t >= sequence.prompt.size()) {
        token_index.push_back(slot + static_cast<int32_t>(t - sequence.prompt.size()));
      } else if (token.id >= 0) {
        token_index.push_back(text_base + static_cast<int32_t>(text.size()));
        text.push_back(token.id);
      } else {
        token_index.push_back(-1);
      }
    }
    if (!part.sample) continue;
    logit_rows.push_back(static_cast<int32_t>(token_index.size()) - 1);
    draw.push_back(static_cast<int32_t>(sequence.sampled));
    dest.push_back(slot + static_cast<int32_t>(sequence.sampled++));
  }
  const auto samples = static_cast<int64_t>(dest.size());
  std::vector<int32_t> source_row(dest.size());
  for (size_t i = 0; i < dest.size(); ++i) source_row[i] = static_cast<int32_t>(i);
  batch.kv = kv_.get();
  batch.tokens = tokens_->View(DType::kI32, {text_base + static_cast<int64_t>(limits_.rows)});
  batch.embeddings = embeddings_->View(
      DType::kF32, {int64_t{limits_.sequences} * spec.vision_tokens, spec.hidden});
  if (!text.empty()) {
    ASSIGN_OR_RETURN(const TensorView ids, Put(text));
    RETURN_IF_ERROR(stream_->Copy(batch.tokens.Rows(text_base, text_base + ids.dim(0)), ids));
  }
  ASSIGN_OR_RETURN(batch.token_index, Put(token_index));
  ASSIGN_OR_RETURN(batch.embedding_index, Put(embedding_index));
  batch.num_logit_rows = static_cast<int32_t>(samples);
  ASSIGN_OR_RETURN(batch.logit_rows, Put(logit_rows));
  ASSIGN_OR_RETURN(batch.sample.source_row, Put(source_row));
  ASSIGN_OR_RETURN(batch.sample.draw, Put(draw));
  ASSIGN_OR_RETURN(batch.sample.dest, Put(dest));
  // Zero is the same bytes as F32, I32 and I64.
  ASSIGN_OR_RETURN(const TensorView zeros, Put(std::vector<int32_t>(2 * dest.size() + 2, 0)));
  batch.sample.temperature =
      TensorView::Dense(zeros.data, DType::kF32, MemKind::kDevice, {samples});
  ASSIGN_OR_RETURN(const TensorView ones,
                   Put(std::vector<int32_t>(dest.size(), std::bit_cast<int32_t>(1.0F))));
  batch.sample.top_p = TensorView::Dense(ones.data, DType::kF32, MemKind::kDevice, {samples});
  batch.sample.seed = TensorView::Dense(zeros.data, DType::kI64, MemKind::kDevice, {samples});
  batch.sample.tokens = batch.tokens;
  // The head runs only where a row is sampled.
  const size_t layers = spec.trunk_layers.size() - (samples == 0 ? 1 : 0);
  absl::Status status = Slices(layers, tap, [&](ExecContext& ctx, const LayerRange& range) {
    batch.layers = range;
    return model_.Forward(ctx, batch);
  });
  step_.clear();
  return status;
}

absl::StatusOr<std::vector<int32_t>> StepRunner::Tokens(uint32_t s) {
  const auto columns = static_cast<int64_t>(model_.spec().max_action_tokens);
  const int64_t count = sequences_[s].sampled;
  std::vector<int32_t> out(static_cast<size_t>(count));
  if (count == 0) return out;
  ASSIGN_OR_RETURN(const std::unique_ptr<Buffer> host,
                   backend_.Allocate(out.size() * sizeof(int32_t), MemKind::kPinned));
  const TensorView all = tokens_->View(DType::kI32, {int64_t{limits_.sequences} * columns});
  RETURN_IF_ERROR(
      stream_->Copy(host->View(DType::kI32, {count}), all.Rows(s * columns, s * columns + count)));
  RETURN_IF_ERROR(stream_->Synchronize());
  std::memcpy(out.data(), host->data(), out.size() * sizeof(int32_t));
  return out;
}

absl::StatusOr<StepRunner::LayerCache> StepRunner::ReadCache(uint32_t s, uint32_t layer,
                                                             uint32_t tokens) {
  const KvGeometry& kv = model_.spec().kv;
  const int64_t width = int64_t{kv.kv_heads} * kv.head_dim;
  const size_t values = size_t{tokens} * static_cast<size_t>(width);
  const Part part{s, 0, tokens, false};
  PagedBatch batch;
  RETURN_IF_ERROR(PageTable(std::span(&part, 1), batch));
  LayerCache out;
  ASSIGN_OR_RETURN(const std::unique_ptr<Buffer> device,
                   backend_.Allocate(2 * values * sizeof(float), MemKind::kDevice));
  ASSIGN_OR_RETURN(const std::unique_ptr<Buffer> host,
                   backend_.Allocate(2 * values * sizeof(float), MemKind::kPinned));
  const TensorView both = device->View(DType::kF32, {int64_t{2} * tokens, width});
  RETURN_IF_ERROR(backend_.ops().ReadKv(*stream_, *kv_, layer, batch, both.Rows(0, tokens),
                                        both.Rows(tokens, int64_t{2} * tokens)));
  RETURN_IF_ERROR(stream_->Copy(host->View(DType::kF32, {int64_t{2} * tokens, width}), both));
  RETURN_IF_ERROR(stream_->Synchronize());
  step_.clear();
  const auto* from = reinterpret_cast<const float*>(host->data());
  out.k.assign(from, from + values);
  out.v.assign(from + values, from + 2 * values);
  return out;
}

absl::StatusOr<std::vector<int32_t>> StepRunner::Act(uint32_t s, const Prompt& prompt,
                                                     const ModelImage& frame, uint32_t actions,
                                                     uint32_t chunk, TapSink* tap) {
  Start(s, prompt);
  RETURN_IF_ERROR(Encode(std::span(&s, 1), std::span(&frame, 1), tap));
  const uint32_t n = prompt_tokens(s);
  for (uint32_t begin = 0; begin < n; begin += chunk) {
    const uint32_t count = std::min(chunk, n - begin);
    const Part part{s, begin, count, begin + count == n};
    RETURN_IF_ERROR(Forward(std::span(&part, 1), tap));
  }
  for (uint32_t i = 1; i < actions; ++i) {
    const Part part{s, n + i - 1, 1, true};
    RETURN_IF_ERROR(Forward(std::span(&part, 1), tap));
  }
  return Tokens(s);
}

}  // namespace saccade
