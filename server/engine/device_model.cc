#include "engine/device_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/strings.h"
#include "engine/meta_writer.h"

namespace saccade {
namespace {

// Of the token array, for each sequence. A row reads the token sampled directly before it, so this
// is a ring: one column would do, two keep a step's own tokens apart.
constexpr uint32_t kTokenColumns = 2;

// One tapped request alone in a step gets its taps; a mixed step has none.
TapSink* TapOf(const StepPlan& plan) {
  TapSink* tap = nullptr;
  RequestId request;
  for (const EncodeItem& item : plan.encodes) {
    if (item.tap == nullptr) return nullptr;
    tap = item.tap.get();
    request = item.request;
  }
  const auto same = [&](const auto& item) {
    if (item.tap == nullptr || (tap != nullptr && item.request != request)) return false;
    tap = item.tap.get();
    request = item.request;
    return true;
  };
  if (!std::all_of(plan.trunk.begin(), plan.trunk.end(), same) ||
      !std::all_of(plan.flows.begin(), plan.flows.end(), same)) {
    return nullptr;
  }
  return tap;
}

size_t ChunkFloats(const ModelSpec& spec) { return size_t{spec.head.horizon} * spec.head.width; }

// Of the frames of a camera, bytes.
constexpr size_t kFrameAlignment = 64;

struct DeviceSizes {
  size_t embeddings = 0;
  size_t latents = 0;
  size_t chunks = 0;
  size_t tokens = 0;
  size_t sampled = 0;
  size_t tops = 0;
  size_t rgb = 0;
  size_t pages = 0;   // entries of the page tables of a step
  size_t copies = 0;  // words
  size_t meta_words = 0;
};

DeviceSizes SizesOf(const ModelSpec& spec, const DeviceModelOptions& options) {
  DeviceSizes sizes;
  sizes.embeddings =
      (size_t{options.embedding_slots} * spec.vision_tokens + 1) * spec.hidden * sizeof(float);
  sizes.chunks = size_t{options.max_logit_rows} * ChunkFloats(spec) * sizeof(float);
  if (spec.head.kind == HeadKind::kFlow) {
    sizes.latents = size_t{options.sequence_slots} * ChunkFloats(spec) * sizeof(float);
  }
  const size_t sampled = size_t{options.sequence_slots} * kTokenColumns;
  sizes.sampled = sampled * sizeof(int32_t);
  sizes.tokens = (sampled + options.max_rows) * sizeof(int32_t);
  sizes.tops = size_t{options.max_logit_rows} * kMaxTopTokens * (sizeof(int32_t) + sizeof(float));
  size_t frame_bytes = 0;
  for (const CameraSpec& camera : spec.cameras)
    frame_bytes = std::max(frame_bytes, camera.FrameBytes());
  sizes.rgb = size_t{options.max_frames} * frame_bytes + spec.cameras.size() * kFrameAlignment;
  // Pages are part-full only where a segment ends, so they hold more than 8 tokens on average.
  const size_t max_seqs = options.max_rows;
  sizes.pages = max_seqs * (spec.max_positions / 8 + 16);
  sizes.copies = 2 * (size_t{options.num_blocks} + options.sequence_slots + 16);
  sizes.meta_words = 3 * (sizes.pages + 16) + 2 * (max_seqs + 32) +
                     7 * (size_t{options.max_rows} + 16) +
                     10 * (size_t{HeadRows(spec, options)} + 16) + sizes.copies;
  // States of prompts, or states and flow times of denoise steps, and the arrays of their rows.
  const size_t rows = size_t{options.max_logit_rows} * spec.head.suffix_rows();
  sizes.meta_words += size_t{options.max_rows} * (spec.state_width > 0 ? 1 + spec.state_width : 0) +
                      11 * (rows + 16) +
                      options.max_logit_rows * 2 * (spec.head.time_width + size_t{32});
  return sizes;
}

// What the scheduler keeps per block of a pool.
constexpr uint64_t kBookBytesPerBlock = 192;

}  // namespace

DeviceModelOptions FitToModel(const ModelSpec& spec, DeviceModelOptions options) {
  options.max_rows = std::max(options.max_rows, spec.max_group_rows);
  uint32_t rows = 1;  // of a chunk
  if (spec.head.kind == HeadKind::kFlow) rows = spec.head.suffix_rows();
  if (spec.head.kind == HeadKind::kOnePass) {  // the shortest prompt
    rows = spec.head.read_rows + spec.head.read_before_end;
    for (const CameraSpec& camera : spec.cameras) rows += camera.optional ? 0 : spec.vision_tokens;
  }
  if (rows > 1) {
    options.max_logit_rows =
        std::max(1u, std::min(options.max_logit_rows, options.max_rows / rows));
  }
  return options;
}

uint32_t ScratchBlocks(const ModelSpec& spec, const DeviceModelOptions& options) {
  if (spec.head.kind != HeadKind::kFlow) return 0;
  const uint32_t block = std::max(1u, spec.kv.block_tokens);
  return options.max_logit_rows * ((spec.head.suffix_rows() + block - 1) / block);
}

uint32_t HeadRows(const ModelSpec& spec, const DeviceModelOptions& options) {
  return options.max_logit_rows * (spec.head.kind == HeadKind::kOnePass ? spec.head.read_rows : 1);
}

DeviceBytes PlanDeviceBytes(const ModelSpec& spec, const DeviceModelOptions& options,
                            uint64_t kv_storage, uint64_t workspace, uint64_t parking) {
  const DeviceSizes sizes = SizesOf(spec, options);
  DeviceBytes bytes;
  bytes.kv = kv_storage + kBookBytesPerBlock * options.num_blocks;
  bytes.embeddings = sizes.embeddings + sizes.latents;
  bytes.scratch = workspace + parking * options.parking_places;
  bytes.staging = 3 * sizes.chunks + sizes.tokens + sizes.sampled + 2 * sizes.tops + 2 * sizes.rgb +
                  3 * sizes.meta_words * sizeof(int32_t);  // Staging, and its two copies
  return bytes;
}

DeviceModel::DeviceModel(Backend& backend, Stream& stream, const Model& model,
                         const DeviceModelOptions& options)
    : backend_(backend), stream_(stream), model_(model), options_(options) {}

int32_t DeviceModel::TokenCell(SequenceSlot slot, uint32_t index) const {
  return slot.value() * static_cast<int32_t>(kTokenColumns) +
         static_cast<int32_t>(index % kTokenColumns);
}

absl::StatusOr<std::unique_ptr<DeviceModel>> DeviceModel::Create(Backend& backend, Stream& stream,
                                                                 const Model& model,
                                                                 const DeviceModelOptions& asked,
                                                                 MemoryBudget* budget) {
  const DeviceModelOptions options = FitToModel(model.spec(), asked);
  if (options.num_blocks == 0 || options.max_rows == 0 || options.max_frames == 0 ||
      options.max_logit_rows == 0 || options.sequence_slots == 0 || options.embedding_slots == 0) {
    return absl::InvalidArgumentError(
        "a device model needs at least one block, row, frame, logit row and slot");
  }
  auto device_model =
      std::unique_ptr<DeviceModel>(new DeviceModel(backend, stream, model, options));
  const DeviceBytes bytes = PlanDeviceBytes(
      model.spec(), options,
      backend.KvBytes(model.spec().kv, options.num_blocks + ScratchBlocks(model.spec(), options)),
      device_model->ArenaBytes(), device_model->ParkingBytes());
  for (const auto& [kind, size] : {std::pair(MemoryKind::kKvCache, bytes.kv),
                                   std::pair(MemoryKind::kEmbeddings, bytes.embeddings),
                                   std::pair(MemoryKind::kScratch, bytes.scratch),
                                   std::pair(MemoryKind::kStaging, bytes.staging)}) {
    ASSIGN_OR_RETURN(MemoryHold hold, MemoryBudget::Hold(budget, kind, size));
    device_model->holds_.push_back(std::move(hold));
  }
  RETURN_IF_ERROR(device_model->Allocate());
  return device_model;
}

absl::Status DeviceModel::Allocate() {
  const ModelSpec& spec = model_.spec();
  const DeviceSizes sizes = SizesOf(spec, options_);
  meta_words_ = sizes.meta_words;
  staging_.Reserve(options_.max_rows, options_.max_logit_rows, sizes.pages, sizes.copies);
  if (options_.check_pages) {
    guard_ = std::make_unique<PageGuard>(options_.num_blocks, spec.kv.block_tokens,
                                         options_.embedding_slots, options_.sequence_slots);
  }
  ASSIGN_OR_RETURN(
      kv_, backend_.NewKvStorage(spec.kv, options_.num_blocks + ScratchBlocks(spec, options_)));
  ASSIGN_OR_RETURN(embeddings_, backend_.Allocate(sizes.embeddings, MemKind::kDevice));
  ASSIGN_OR_RETURN(tokens_, backend_.Allocate(sizes.tokens, MemKind::kDevice));
  ASSIGN_OR_RETURN(sampled_host_, backend_.Allocate(sizes.sampled, MemKind::kPinned));
  ASSIGN_OR_RETURN(tops_, backend_.Allocate(sizes.tops, MemKind::kDevice));
  ASSIGN_OR_RETURN(tops_host_, backend_.Allocate(sizes.tops, MemKind::kPinned));
  ASSIGN_OR_RETURN(arena_buffer_, backend_.Allocate(ArenaBytes(), MemKind::kDevice));
  if (const size_t bytes = ParkingBytes(); bytes > 0) {
    for (uint32_t i = 0; i < options_.parking_places; ++i) {
      ASSIGN_OR_RETURN(parked_.emplace_back(), backend_.Allocate(bytes, MemKind::kDevice));
    }
  }
  ASSIGN_OR_RETURN(rgb_, backend_.Allocate(sizes.rgb, MemKind::kDevice));
  ASSIGN_OR_RETURN(rgb_host_, backend_.Allocate(sizes.rgb, MemKind::kPinned));
  ASSIGN_OR_RETURN(meta_, backend_.Allocate(meta_words_ * sizeof(int32_t), MemKind::kDevice));
  ASSIGN_OR_RETURN(meta_host_, backend_.Allocate(meta_words_ * sizeof(int32_t), MemKind::kPinned));
  if (sizes.latents > 0) {
    ASSIGN_OR_RETURN(latents_, backend_.Allocate(sizes.latents, MemKind::kDevice));
  }
  if (sizes.chunks > 0) {
    ASSIGN_OR_RETURN(chunks_, backend_.Allocate(sizes.chunks, MemKind::kDevice));
    ASSIGN_OR_RETURN(chunks_host_, backend_.Allocate(sizes.chunks, MemKind::kPinned));
    ASSIGN_OR_RETURN(noise_host_, backend_.Allocate(sizes.chunks, MemKind::kPinned));
  }
  return ClearPlaces();
}

size_t DeviceModel::ArenaBytes() const {
  return std::max(model_.WorkspaceBytes(options_.max_frames, options_.max_rows,
                                        HeadRows(model_.spec(), options_)),
                  model_.DenoiseBytes(options_.max_logit_rows));
}

size_t DeviceModel::ParkingBytes() const {
  return model_.ParkingBytes(options_.max_frames, options_.max_rows,
                             HeadRows(model_.spec(), options_));
}

// The row that places of an answer are made of. On a stream of its own: the worker may be in a step
// of another model.
absl::Status DeviceModel::ClearPlaces() {
  const auto width = static_cast<int64_t>(model_.spec().hidden);
  const size_t bytes = static_cast<size_t>(width) * sizeof(float);
  ASSIGN_OR_RETURN(const std::unique_ptr<Stream> stream, backend_.NewStream());
  ASSIGN_OR_RETURN(const std::unique_ptr<Buffer> zeros, backend_.Allocate(bytes, MemKind::kPinned));
  std::memset(zeros->data(), 0, bytes);
  RETURN_IF_ERROR(
      stream->Copy(embeddings_->View(DType::kF32, {1, width}, embeddings_->size() - bytes),
                   zeros->View(DType::kF32, {1, width})));
  return stream->Synchronize();
}

absl::StatusOr<LayerRange> DeviceModel::RangeOf(const StepPlan& plan) const {
  if (plan.slice.whole()) return LayerRange{};
  if (plan.slice.place >= parked_.size()) {
    return absl::InternalError("a slice has no parking place");
  }
  return LayerRange{plan.slice.begin, plan.slice.end, parked_[plan.slice.place].get()};
}

absl::Status DeviceModel::Run(const StepPlan& plan, StepResult& result) {
  if (guard_ != nullptr && plan.slice.first()) {
    const auto* tokens = reinterpret_cast<const int32_t*>(sampled_host_->data());
    RETURN_IF_ERROR(guard_->Check(plan, [this, tokens](SequenceSlot slot, uint32_t index) {
      return tokens[TokenCell(slot, index)];
    }));
  }
  meta_used_ = 0;
  Arena arena(*arena_buffer_);
  ExecContext ctx{backend_.ops(), stream_, arena, TapOf(plan)};
  absl::Status status = RunEncodes(ctx, plan);
  if (status.ok()) {
    arena.Reset();  // in stream order: the trunk may reuse what the encodes wrote to scratch
    status = RunTrunk(ctx, plan);
  }
  if (status.ok()) {
    arena.Reset();
    status = RunFlows(ctx, plan);
  }
  // Also after an error: staging and scratch must be quiet before the next step uses them.
  const absl::Status finished = stream_.Synchronize();
  if (status.ok()) status = finished;
  if (status.ok() && plan.slice.last()) ReadResults(plan, result);
  return status;
}

// What the step has copied to the host.
void DeviceModel::ReadResults(const StepPlan& plan, StepResult& result) const {
  const auto* sampled = reinterpret_cast<const int32_t*>(sampled_host_->data());
  const auto* ids = reinterpret_cast<const int32_t*>(tops_host_->data());
  const auto* log_probs = reinterpret_cast<const float*>(
      tops_host_->data() + size_t{options_.max_logit_rows} * kMaxTopTokens * sizeof(int32_t));
  uint32_t chunk = 0;
  for (const TrunkItem& item : plan.trunk) {
    for (const SampleTarget& target : item.samples) {
      if (model_.spec().head.kind == HeadKind::kOnePass) {
        ReadChunk(item.request, target.sample, target.index, chunk++, result);
        continue;
      }
      result.tokens.push_back({item.request, target.sample, target.index,
                               sampled[TokenCell(target.slot, target.index)]});
    }
    if (!item.top) continue;
    TopTokens top{item.request, item.top->sample, item.top->index, {}};
    for (uint32_t i = 0; i < item.top->count && ids[i] != kInvalidSample; ++i) {
      top.tokens.push_back({ids[i], log_probs[i]});
    }
    result.tops.push_back(std::move(top));
    ids += kMaxTopTokens;
    log_probs += kMaxTopTokens;
  }
  for (const FlowItem& item : plan.flows) {
    if (item.index + 1 == item.steps) {
      ReadChunk(item.request, item.sample, item.index, chunk++, result);
      // Inpainting ends a step before flow time 0: what is committed is answered as it is.
      if (item.input != nullptr) {
        std::copy(item.input->committed.begin(), item.input->committed.end(),
                  result.chunks.back().values.begin());
      }
    } else {
      result.tokens.push_back({item.request, item.sample, item.index, 0});
    }
  }
}

// Chunk `at` of the step, with the token that ends its sample.
void DeviceModel::ReadChunk(RequestId request, uint32_t sample, uint32_t index, uint32_t at,
                            StepResult& result) const {
  const size_t floats = ChunkFloats(model_.spec());
  const auto* values = reinterpret_cast<const float*>(chunks_host_->data()) + at * floats;
  SampledChunk chunk{request, sample, {values, values + floats}};
  const bool finite = std::all_of(chunk.values.begin(), chunk.values.end(),
                                  [](float v) { return std::isfinite(v); });
  result.tokens.push_back({request, sample, index, finite ? 0 : kInvalidSample});
  result.chunks.push_back(std::move(chunk));
}

absl::Status DeviceModel::RunEncodes(ExecContext& ctx, const StepPlan& plan) {
  if (plan.encodes.size() > options_.max_frames) return PlanTooLarge("frames");
  ASSIGN_OR_RETURN(const LayerRange layers, RangeOf(plan));
  const ModelSpec& spec = model_.spec();
  // Frames of one camera are one batch: they share a size.
  size_t staged_bytes = 0;
  for (uint32_t camera = 0; camera < spec.cameras.size(); ++camera) {
    const CameraSpec& shape = spec.cameras[camera];
    const size_t frame_bytes = shape.FrameBytes();
    staged_bytes = (staged_bytes + kFrameAlignment - 1) / kFrameAlignment * kFrameAlignment;
    const size_t begin = staged_bytes;
    std::vector<TensorView> out;
    for (const EncodeItem& item : plan.encodes) {
      if (item.camera != camera) continue;
      if (item.frame == nullptr || item.frame->rgb.size() != frame_bytes ||
          static_cast<uint32_t>(item.slot.value()) >= options_.embedding_slots) {
        return absl::InternalError("an encode item does not fit its model");
      }
      std::memcpy(rgb_host_->data() + staged_bytes, item.frame->rgb.data(), frame_bytes);
      staged_bytes += frame_bytes;
      out.push_back(embeddings_->View(DType::kF32, {spec.vision_tokens, spec.hidden},
                                      static_cast<size_t>(item.slot.value()) * spec.vision_tokens *
                                          spec.hidden * sizeof(float)));
    }
    if (out.empty()) continue;
    const auto frames = static_cast<int64_t>(out.size());
    EncodeBatch batch;
    batch.rgb = rgb_->View(shape.dtype, {frames, shape.height, shape.width, 3}, begin);
    batch.out = out;
    batch.layers = layers;
    RETURN_IF_ERROR(stream_.Copy(
        batch.rgb, rgb_host_->View(shape.dtype, {frames, shape.height, shape.width, 3}, begin)));
    RETURN_IF_ERROR(model_.Encode(ctx, batch));
  }
  return absl::OkStatus();
}

void DeviceModel::Staging::Reserve(size_t rows, size_t logits, size_t page_entries,
                                   size_t copy_words) {
  for (auto* values : {&row_begin, &page_begin}) values->reserve(rows + 1);
  for (auto* values : {&row_pos, &row_limit, &row_slot, &token_index, &embedding_index, &text}) {
    values->reserve(rows);
  }
  for (auto* values : {&pages, &page_len, &page_pos}) values->reserve(page_entries);
  for (auto* values : {&logit_rows, &source_row, &draw, &dest, &top_rows}) values->reserve(logits);
  for (auto* values : {&temperature, &top_p}) values->reserve(logits);
  seed.reserve(logits);
  state_index.reserve(rows);
  copies.reserve(copy_words);
}

void DeviceModel::Staging::Clear() {
  for (auto* values : {&row_begin, &page_begin, &pages, &page_len, &page_pos, &row_pos, &row_limit,
                       &row_slot, &token_index, &embedding_index, &text, &logit_rows, &source_row,
                       &draw, &dest, &top_rows, &copies, &state_index}) {
    values->clear();
  }
  states.clear();
  temperature.clear();
  top_p.clear();
  seed.clear();
  row_begin.push_back(0);
  page_begin.push_back(0);
}

absl::Status DeviceModel::StageTrunk(const StepPlan& plan, TrunkBatch& batch) {
  const ModelSpec& spec = model_.spec();
  const auto block_tokens = static_cast<int32_t>(spec.kv.block_tokens);
  const auto text_base = static_cast<int32_t>(options_.sequence_slots * kTokenColumns);
  staging_.Clear();
  auto& [row_begin, page_begin, pages, page_len, page_pos, row_pos, row_limit, row_slot,
         token_index, embedding_index, text, logit_rows, source_row, draw, dest, top_rows, copies,
         temperature, top_p, states, state_index, seed] = staging_;
  const bool one_pass = spec.head.kind == HeadKind::kOnePass;
  int32_t max_pages = 0;
  for (const TrunkItem& item : plan.trunk) {
    const Timeline& timeline = *item.timeline;
    for (const PageRef& page : item.pages) {
      pages.push_back(page.block.value());
      page_len.push_back(page.len);
      page_pos.push_back(static_cast<int32_t>(page.position));
    }
    max_pages = std::max(max_pages, static_cast<int32_t>(item.pages.size()));
    page_begin.push_back(static_cast<int32_t>(pages.size()));

    size_t page = 0;
    size_t segment = 0;
    for (uint32_t t = item.begin; t < item.begin + item.count; ++t) {
      while (page < item.pages.size() && t >= item.pages[page].position + item.pages[page].len)
        ++page;
      if (page == item.pages.size()) return absl::InternalError("a row of a step has no page");
      row_pos.push_back(static_cast<int32_t>(t));
      row_limit.push_back(static_cast<int32_t>(timeline.Sees(t)));
      row_slot.push_back(item.pages[page].block.value() * block_tokens +
                         static_cast<int32_t>(t - item.pages[page].position));
      int32_t token = -1;
      int32_t embedding = -1;
      int32_t state = -1;
      if (t - item.begin < item.known_tokens.size()) {
        token = text_base + static_cast<int32_t>(text.size());
        text.push_back(item.known_tokens[t - item.begin]);
      } else if (t >= timeline.num_tokens()) {
        token = TokenCell(item.slot, t - timeline.num_tokens());
      } else {
        while (t >= timeline.segments()[segment].end) ++segment;
        const Segment& s = timeline.segments()[segment];
        if (s.modality == Modality::kVision) {
          if (segment >= item.embeddings.size() || !item.embeddings[segment].valid()) {
            return absl::InternalError("a vision row of a step has no embedding");
          }
          embedding = item.embeddings[segment].value() * static_cast<int32_t>(spec.vision_tokens) +
                      static_cast<int32_t>(t - s.begin);
        } else if (s.modality == Modality::kState) {
          if (s.state == nullptr || s.state->size() != spec.state_width) {
            return absl::InternalError("a state row of a step has no state");
          }
          state = static_cast<int32_t>(states.size() / spec.state_width);
          states.insert(states.end(), s.state->begin(), s.state->end());
        } else if (s.modality == Modality::kAction) {
          embedding = static_cast<int32_t>(options_.embedding_slots * spec.vision_tokens);
        } else {
          token = text_base + static_cast<int32_t>(text.size());
          text.push_back(timeline.tokens()[t]);
        }
      }
      state_index.push_back(state);
      token_index.push_back(token);
      embedding_index.push_back(embedding);
    }
    row_begin.push_back(static_cast<int32_t>(row_pos.size()));
    if (one_pass && !item.samples.empty()) {
      const uint32_t end = timeline.num_tokens() - spec.head.read_before_end;
      for (uint32_t t = end - spec.head.read_rows; t < end; ++t) {
        logit_rows.push_back(row_begin[row_begin.size() - 2] +
                             static_cast<int32_t>(t - item.begin));
      }
    } else if (!item.samples.empty() || item.top) {
      for (const SampleTarget& target : item.samples) {
        source_row.push_back(static_cast<int32_t>(logit_rows.size()));
        temperature.push_back(target.temperature);
        top_p.push_back(target.top_p);
        seed.push_back(static_cast<int64_t>(target.seed));
        draw.push_back(static_cast<int32_t>(target.index));
        dest.push_back(TokenCell(target.slot, target.index));
      }
      if (item.top) top_rows.push_back(static_cast<int32_t>(logit_rows.size()));
      logit_rows.push_back(static_cast<int32_t>(row_pos.size()) - 1);
    }
  }
  if (row_pos.size() > options_.max_rows) return PlanTooLarge("rows");
  if (logit_rows.size() > HeadRows(spec, options_) ||
      dest.size() + top_rows.size() > options_.max_logit_rows) {
    return PlanTooLarge("logit rows");
  }
  for (const BlockCopy& copy : plan.copies) {
    copies.push_back(copy.from.value());
    copies.push_back(copy.to.value());
  }

  MetaWriter writer(*meta_host_, *meta_, meta_words_, meta_used_);
  TensorView text_view;
  TensorView copies_view;
  TensorView seed_words;
  TensorView temperature_words;
  TensorView top_p_words;
  bool fits = true;
  int32_t* seeds = writer.Reserve(2 * seed.size(), seed_words);
  int32_t* temperatures = writer.Reserve(temperature.size(), temperature_words);
  int32_t* top_ps = writer.Reserve(top_p.size(), top_p_words);
  fits = seeds != nullptr && temperatures != nullptr && top_ps != nullptr;
  if (fits && !seed.empty()) {  // a step without samples has neither
    std::memcpy(seeds, seed.data(), seed.size() * sizeof(int64_t));
    std::memcpy(temperatures, temperature.data(), temperature.size() * sizeof(float));
    std::memcpy(top_ps, top_p.data(), top_p.size() * sizeof(float));
  }
  PagedBatch& paged = batch.paged;
  fits = fits && writer.Add(row_begin, paged.row_begin) &&
         writer.Add(page_begin, paged.page_begin) && writer.Add(pages, paged.pages) &&
         writer.Add(page_len, paged.page_len) && writer.Add(page_pos, paged.page_pos) &&
         writer.Add(row_pos, paged.row_pos) && writer.Add(row_limit, paged.row_limit) &&
         writer.Add(row_slot, paged.row_slot) && writer.Add(token_index, batch.token_index) &&
         writer.Add(embedding_index, batch.embedding_index) &&
         writer.Add(logit_rows, batch.logit_rows) &&
         writer.Add(source_row, batch.sample.source_row) && writer.Add(draw, batch.sample.draw) &&
         writer.Add(dest, batch.sample.dest) && writer.Add(top_rows, batch.top.source_row) &&
         writer.Add(text, text_view) && writer.Add(copies, copies_view) &&
         writer.Add(state_index, batch.state_index) &&
         writer.Add(states, std::max<int64_t>(spec.state_width, 1), batch.states);
  if (!fits) return PlanTooLarge("page table entries");
  meta_used_ = writer.used();
  const auto samples = static_cast<int64_t>(dest.size());
  batch.sample.seed = TensorView::Dense(seed_words.data, DType::kI64, MemKind::kDevice, {samples});
  batch.sample.temperature =
      TensorView::Dense(temperature_words.data, DType::kF32, MemKind::kDevice, {samples});
  batch.sample.top_p =
      TensorView::Dense(top_p_words.data, DType::kF32, MemKind::kDevice, {samples});
  const auto tops = static_cast<int64_t>(top_rows.size());
  const auto all_rows = static_cast<int64_t>(options_.max_logit_rows);
  int64_t most = 0;  // candidates of one row; the others take the first of as many
  for (const TrunkItem& item : plan.trunk) {
    if (item.top) most = std::max(most, int64_t{item.top->count});
  }
  if (most > int64_t{kMaxTopTokens}) return PlanTooLarge("candidates of a beam");
  batch.top.ids = tops_->View(DType::kI32, {tops, kMaxTopTokens}).Columns(0, most);
  batch.top.log_probs = tops_
                            ->View(DType::kF32, {tops, kMaxTopTokens},
                                   static_cast<size_t>(all_rows) * kMaxTopTokens * sizeof(int32_t))
                            .Columns(0, most);
  RETURN_IF_ERROR(writer.Upload(stream_));

  const int64_t all_tokens = text_base + static_cast<int64_t>(options_.max_rows);
  batch.tokens = tokens_->View(DType::kI32, {all_tokens});
  batch.sample.tokens = batch.tokens;
  if (!text.empty()) {
    const auto count = static_cast<int64_t>(text.size());
    RETURN_IF_ERROR(stream_.Copy(batch.tokens.Rows(text_base, text_base + count), text_view));
  }
  if (!plan.copies.empty()) {
    const auto count = static_cast<int32_t>(plan.copies.size());
    RETURN_IF_ERROR(
        backend_.ops().CopyBlocks(stream_, *kv_, copies_view.Reshape({count, 2}), count));
  }
  paged.num_seqs = static_cast<int32_t>(plan.trunk.size());
  paged.num_rows = static_cast<int32_t>(row_pos.size());
  paged.num_pages = static_cast<int32_t>(pages.size());
  paged.max_pages = max_pages;
  batch.kv = kv_.get();
  batch.embeddings = embeddings_->View(
      DType::kF32, {int64_t{options_.embedding_slots} * spec.vision_tokens + 1, spec.hidden});
  batch.num_logit_rows = static_cast<int32_t>(logit_rows.size());
  if (one_pass) {
    const auto chunks = static_cast<int64_t>(logit_rows.size() / spec.head.read_rows);
    batch.actions = chunks_->View(DType::kF32, {chunks * spec.head.horizon, spec.head.width});
  }
  return absl::OkStatus();
}

absl::Status DeviceModel::RunTrunk(ExecContext& ctx, const StepPlan& plan) {
  if (plan.trunk.empty() && plan.copies.empty()) return absl::OkStatus();
  TrunkBatch batch;
  RETURN_IF_ERROR(StageTrunk(plan, batch));
  if (plan.trunk.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(batch.layers, RangeOf(plan));
  RETURN_IF_ERROR(model_.Forward(ctx, batch));
  if (!plan.slice.last()) return absl::OkStatus();
  if (!staging_.top_rows.empty()) {
    const auto words = static_cast<int64_t>(2 * size_t{options_.max_logit_rows} * kMaxTopTokens);
    RETURN_IF_ERROR(
        stream_.Copy(tops_host_->View(DType::kI32, {words}), tops_->View(DType::kI32, {words})));
  }
  if (batch.actions.rank == 2 && batch.actions.dim(0) > 0) {
    return stream_.Copy(
        chunks_host_->View(DType::kF32, {batch.actions.dim(0), batch.actions.dim(1)}),
        batch.actions);
  }
  if (staging_.dest.empty()) return absl::OkStatus();
  const auto sampled = static_cast<int64_t>(options_.sequence_slots) * kTokenColumns;
  return stream_.Copy(sampled_host_->View(DType::kI32, {sampled}), batch.tokens.Rows(0, sampled));
}

}  // namespace saccade
