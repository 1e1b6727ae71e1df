#include "backend/ref/ops.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "backend/ref/binder.h"
#include "backend/ref/storage.h"
#include "base/strings.h"
#include "kernels/common/bf16.h"
#include "kernels/common/rope.h"
#include "kernels/common/sampling.h"

namespace saccade::ref {
namespace {

static_assert(kNoSample == kInvalidSample);

constexpr DType kF32 = DType::kF32;
constexpr DType kBf16 = DType::kBf16;
constexpr DType kI32 = DType::kI32;

absl::Status NotOurs(std::string_view op, std::string_view what) {
  return absl::InvalidArgumentError(StrCat(op, ": ", what, " is missing or of another backend"));
}

// ---- access to bound views
// -----------------------------------------------------------------------------------------

float LoadElement(const std::byte* data, DType dtype, int64_t at) {
  return dtype == kF32 ? reinterpret_cast<const float*>(data)[at]
                       : Bf16ToF32(reinterpret_cast<const uint16_t*>(data)[at]);
}

void StoreElement(std::byte* data, DType dtype, int64_t at, float value) {
  if (dtype == kF32) {
    reinterpret_cast<float*>(data)[at] = value;
  } else {
    reinterpret_cast<uint16_t*>(data)[at] = F32ToBf16(value);
  }
}

std::byte* RowOf(const TensorView& view, int64_t row) {
  return view.data + static_cast<size_t>(row * view.strides[0]) * DTypeSize(view.dtype);
}

int32_t I32At(const TensorView& view, int64_t at) { return view.As<const int32_t>()[at]; }
float F32At(const TensorView& view, int64_t at) { return view.As<const float>()[at]; }

// Row `row` of a rank-2 view, each element rounded to `dtype`.
void LoadRow(const TensorView& view, int64_t row, DType dtype, float* out) {
  const std::byte* from = RowOf(view, row);
  const bool round = dtype == kBf16 && view.dtype == kF32;
  for (int64_t i = 0; i < view.dims[1]; ++i) {
    const float value = LoadElement(from, view.dtype, i);
    out[i] = round ? RoundToBf16(value) : value;
  }
}

// ---- matrix product
// ------------------------------------------------------------------------------------------------

// products[r][n] = sum over k of x[r][k] * W[n][k], k ascending, for `rows` rows. The same sequence
// of operations for every row, however many rows there are.
template <class Acc>
void Products(const WeightData& weight, const float* x, int64_t rows, Acc* products) {
  const float* column = weight.transposed();
  std::fill(products, products + rows * weight.n, Acc{0});
  for (int64_t k = 0; k < weight.k; ++k, column += weight.n) {
    for (int64_t r = 0; r < rows; ++r) {
      const Acc factor = x[r * weight.k + k];
      Acc* sums = products + r * weight.n;
      for (int64_t n = 0; n < weight.n; ++n) sums[n] += factor * static_cast<Acc>(column[n]);
    }
  }
}

// Calls row(m, products of row m as F32 [n]) for every row of x.
template <class Acc, class Row>
void MatMulAs(const WeightData& weight, const TensorView& x, const Row& row) {
  constexpr int64_t kRowsAtOnce = 4;  // reads the weight once for so many rows
  std::vector<float> inputs(static_cast<size_t>(kRowsAtOnce * weight.k));
  std::vector<Acc> products(static_cast<size_t>(kRowsAtOnce * weight.n));
  std::vector<float> rounded(static_cast<size_t>(weight.n));
  for (int64_t m = 0; m < x.dims[0]; m += kRowsAtOnce) {
    const int64_t rows = std::min(kRowsAtOnce, x.dims[0] - m);
    for (int64_t r = 0; r < rows; ++r)
      LoadRow(x, m + r, weight.dtype, inputs.data() + r * weight.k);
    Products(weight, inputs.data(), rows, products.data());
    for (int64_t r = 0; r < rows; ++r) {
      const Acc* from = products.data() + r * weight.n;
      std::transform(from, from + weight.n, rounded.begin(),
                     [](Acc value) { return static_cast<float>(value); });
      row(m + r, rounded.data());
    }
  }
}

template <class Row>
void MatMul(const WeightData& weight, const TensorView& x, const Row& row) {
  if (weight.dtype == kF32) {
    MatMulAs<double>(weight, x, row);
  } else {
    MatMulAs<float>(weight, x, row);
  }
}

// 1 / sqrt(mean of squares + eps) of a row of F32.
double InverseRms(const std::byte* row, int64_t width, float eps) {
  double squares = 0;
  for (int64_t i = 0; i < width; ++i) {
    const double value = LoadElement(row, kF32, i);
    squares += value * value;
  }
  return 1.0 / std::sqrt(squares / static_cast<double>(width) + static_cast<double>(eps));
}

float Activate(Activation activation, float x) {
  const double v = x;
  switch (activation) {
    case Activation::kNone:
      return x;
    case Activation::kGeluErf:
      return static_cast<float>(0.5 * v * (1.0 + std::erf(v * 0.70710678118654752440)));
    case Activation::kGeluTanh:
      return static_cast<float>(
          0.5 * v * (1.0 + std::tanh(0.79788456080286535588 * (v + 0.044715 * v * v * v))));
    case Activation::kSilu:
      return static_cast<float>(v / (1.0 + std::exp(-v)));
    case Activation::kRelu:
      return std::isnan(x) ? x : std::max(x, 0.0f);
  }
  return x;
}

// ---- paged batches
// -------------------------------------------------------------------------------------------------

// What the index arrays say when the op runs. Errors here are the caller's broken promise, found
// late.
absl::Status CheckRanges(const TensorView& begin, int32_t count, int32_t limit,
                         std::string_view name) {
  for (int32_t s = 0; s < count; ++s) {
    const int32_t from = I32At(begin, s);
    const int32_t to = I32At(begin, s + 1);
    if (from < 0 || to < from || to > limit) {
      return absl::InternalError(StrCat("batch.", name, "[", s, "] = ", from, ", then ", to,
                                        "; must ascend within [0, ", limit, "]"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPages(const PagedBatch& batch, const KvData& kv) {
  RETURN_IF_ERROR(CheckRanges(batch.row_begin, batch.num_seqs, batch.num_rows, "row_begin"));
  RETURN_IF_ERROR(CheckRanges(batch.page_begin, batch.num_seqs, batch.num_pages, "page_begin"));
  for (int32_t s = 0; s < batch.num_seqs; ++s) {
    const int32_t pages = I32At(batch.page_begin, s + 1) - I32At(batch.page_begin, s);
    if (pages > batch.max_pages) {
      return absl::InternalError(
          StrCat("batch: sequence ", s, " has ", pages, " pages, max_pages is ", batch.max_pages));
    }
  }
  for (int32_t p = 0; p < batch.num_pages; ++p) {
    const int32_t block = I32At(batch.pages, p);
    const int32_t length = I32At(batch.page_len, p);
    if (block < 0 || static_cast<uint32_t>(block) >= kv.num_blocks || length < 0 ||
        static_cast<uint32_t>(length) > kv.geometry.block_tokens) {
      return absl::InternalError(
          StrCat("batch: page ", p, " is block ", block, " with ", length, " tokens"));
    }
  }
  return absl::OkStatus();
}

// One cached token of a sequence.
struct CachedToken {
  uint32_t block;
  uint32_t offset;
  int32_t position;
};

std::vector<CachedToken> TokensOf(const PagedBatch& batch, int32_t sequence) {
  std::vector<CachedToken> tokens;
  for (int32_t p = I32At(batch.page_begin, sequence); p < I32At(batch.page_begin, sequence + 1);
       ++p) {
    for (int32_t t = 0; t < I32At(batch.page_len, p); ++t) {
      tokens.push_back({static_cast<uint32_t>(I32At(batch.pages, p)), static_cast<uint32_t>(t),
                        I32At(batch.page_pos, p) + t});
    }
  }
  return tokens;
}

// ---- attention
// -----------------------------------------------------------------------------------------------------

// K and V of one head: keys [dim, tokens] and values [tokens, dim].
struct HeadCache {
  int64_t dim = 0;
  int64_t tokens = 0;
  std::vector<float> keys;
  std::vector<float> values;

  HeadCache(int64_t head_dim, int64_t count)
      : dim(head_dim),
        tokens(count),
        keys(static_cast<size_t>(head_dim * count)),
        values(static_cast<size_t>(head_dim * count)) {}
  void SetKey(int64_t token, int64_t d, float value) {
    keys[static_cast<size_t>(d * tokens + token)] = value;
  }
  void SetValue(int64_t token, int64_t d, float value) {
    values[static_cast<size_t>(token * dim + d)] = value;
  }
};

// out[dim] = softmax(scale * q . K) . V over the tokens where visible(token); zeros when there is
// none.
template <class Visible>
void Attend(const HeadCache& cache, const float* q, float scale, const Visible& visible,
            std::vector<double>& scores, std::vector<double>& sums, float* out) {
  const auto tokens = static_cast<size_t>(cache.tokens);
  const auto dim = static_cast<size_t>(cache.dim);
  scores.assign(tokens, 0.0);
  for (size_t d = 0; d < dim; ++d) {
    const double factor = q[d];
    const float* key = cache.keys.data() + d * tokens;
    for (size_t t = 0; t < tokens; ++t) scores[t] += factor * static_cast<double>(key[t]);
  }
  float largest = -std::numeric_limits<float>::infinity();
  for (size_t t = 0; t < tokens; ++t) {
    if (!visible(t)) continue;
    const auto score = static_cast<float>(scores[t] * static_cast<double>(scale));
    scores[t] = static_cast<double>(score);
    largest = std::max(largest, score);
  }
  sums.assign(dim, 0.0);
  double total = 0;
  for (size_t t = 0; t < tokens; ++t) {
    if (!visible(t)) continue;
    const double weight = std::exp(scores[t] - static_cast<double>(largest));
    total += weight;
    const float* value = cache.values.data() + t * dim;
    for (size_t d = 0; d < dim; ++d) sums[d] += weight * static_cast<double>(value[d]);
  }
  for (size_t d = 0; d < dim; ++d) out[d] = total == 0 ? 0.0f : static_cast<float>(sums[d] / total);
}

absl::Status RunPagedAttention(const PagedAttentionArgs& args, const KvData& kv) {
  const PagedBatch& batch = args.batch;
  RETURN_IF_ERROR(CheckPages(batch, kv));
  const int64_t dim = kv.geometry.head_dim;
  const uint32_t group = args.q_heads / kv.geometry.kv_heads;
  std::vector<float> q(static_cast<size_t>(dim));
  std::vector<float> out(static_cast<size_t>(dim));
  std::vector<double> scores;
  std::vector<double> sums;
  for (int32_t s = 0; s < batch.num_seqs; ++s) {
    const int32_t row_end = I32At(batch.row_begin, s + 1);
    if (I32At(batch.row_begin, s) == row_end) continue;
    const std::vector<CachedToken> tokens = TokensOf(batch, s);
    HeadCache cache(dim, static_cast<int64_t>(tokens.size()));
    for (uint32_t kv_head = 0; kv_head < kv.geometry.kv_heads; ++kv_head) {
      for (size_t t = 0; t < tokens.size(); ++t) {
        const std::byte* key = kv.key(args.layer, tokens[t].block, tokens[t].offset);
        const std::byte* value = kv.value(args.layer, tokens[t].block, tokens[t].offset);
        for (int64_t d = 0; d < dim; ++d) {
          cache.SetKey(static_cast<int64_t>(t), d,
                       LoadElement(key, kv.geometry.dtype, kv_head * dim + d));
          cache.SetValue(static_cast<int64_t>(t), d,
                         LoadElement(value, kv.geometry.dtype, kv_head * dim + d));
        }
      }
      for (int32_t row = I32At(batch.row_begin, s); row < row_end; ++row) {
        const int32_t limit = I32At(batch.row_limit, row);
        const auto visible = [&](size_t t) { return tokens[t].position <= limit; };
        for (uint32_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
          for (int64_t d = 0; d < dim; ++d) {
            q[static_cast<size_t>(d)] =
                LoadElement(RowOf(args.q, row), args.q.dtype, head * dim + d);
          }
          Attend(cache, q.data(), args.scale, visible, scores, sums, out.data());
          for (int64_t d = 0; d < dim; ++d) {
            StoreElement(RowOf(args.out, row), args.out.dtype, head * dim + d,
                         out[static_cast<size_t>(d)]);
          }
        }
      }
    }
  }
  return absl::OkStatus();
}

void RunDenseAttention(const DenseAttentionArgs& args) {
  const int64_t rows = args.group_rows;
  const int64_t width = args.out.dims[1];
  const int64_t dim = width / args.heads;
  const DType dtype = args.qkv.dtype;
  HeadCache cache(dim, rows);
  std::vector<float> q(static_cast<size_t>(dim));
  std::vector<float> out(static_cast<size_t>(dim));
  std::vector<double> scores;
  std::vector<double> sums;
  const auto visible = [](size_t) { return true; };
  for (int64_t first = 0; first < args.out.dims[0]; first += rows) {
    for (int64_t head = 0; head < args.heads; ++head) {
      for (int64_t t = 0; t < rows; ++t) {
        const std::byte* row = RowOf(args.qkv, first + t);
        for (int64_t d = 0; d < dim; ++d) {
          cache.SetKey(t, d, LoadElement(row, dtype, width + head * dim + d));
          cache.SetValue(t, d, LoadElement(row, dtype, 2 * width + head * dim + d));
        }
      }
      for (int64_t t = 0; t < rows; ++t) {
        for (int64_t d = 0; d < dim; ++d) {
          q[static_cast<size_t>(d)] =
              LoadElement(RowOf(args.qkv, first + t), dtype, head * dim + d);
        }
        Attend(cache, q.data(), args.scale, visible, scores, sums, out.data());
        for (int64_t d = 0; d < dim; ++d) {
          StoreElement(RowOf(args.out, first + t), args.out.dtype, head * dim + d,
                       out[static_cast<size_t>(d)]);
        }
      }
    }
  }
}

// ---- slots
// ----------------------------------------------------------------------------------------------

// Fails when an index array holds a value outside [lowest, limit).
absl::Status CheckIndices(const TensorView& index, int64_t count, int64_t lowest, int64_t limit,
                          std::string_view name) {
  for (int64_t i = 0; i < count; ++i) {
    if (I32At(index, i) < lowest || I32At(index, i) >= limit) {
      return absl::InternalError(
          StrCat(name, "[", i, "] = ", I32At(index, i), " outside [", lowest, ", ", limit, ")"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckSlots(const TensorView& slots, int64_t count, const KvData& kv,
                        std::string_view name) {
  return CheckIndices(slots, count, 0, int64_t{kv.num_blocks} * kv.geometry.block_tokens, name);
}

struct SlotBytes {
  std::byte* key;
  std::byte* value;
};

SlotBytes SlotOf(const KvData& kv, uint32_t layer, int32_t slot) {
  const uint32_t block = static_cast<uint32_t>(slot) / kv.geometry.block_tokens;
  const uint32_t offset = static_cast<uint32_t>(slot) % kv.geometry.block_tokens;
  return {kv.key(layer, block, offset), kv.value(layer, block, offset)};
}

// ---- fused projection
// ----------------------------------------------------------------------------------------------

// `kv`: nullopt projects q alone.
absl::Status RunQkvRopeAppend(const QkvRopeAppendArgs& args, const WeightData& weight, int64_t dim,
                              const std::optional<KvData>& kv) {
  const PagedBatch& batch = args.batch;
  if (kv) RETURN_IF_ERROR(CheckSlots(batch.row_slot, batch.num_rows, *kv, "batch.row_slot"));
  const int64_t half = dim / 2;
  const int64_t q_width = args.q_heads * dim;
  std::vector<float> frequencies(static_cast<size_t>(half));
  for (int64_t i = 0; i < half; ++i) {
    frequencies[static_cast<size_t>(i)] =
        RopeInverseFrequency(args.rope_theta, static_cast<uint32_t>(dim), static_cast<uint32_t>(i));
  }
  std::vector<RopeAngle> angles(static_cast<size_t>(half));
  // Rotates the heads of `from` and stores them.
  const auto rotate = [&](const float* from, int64_t width, std::byte* to, DType dtype) {
    for (int64_t head = 0; head < width; head += dim) {
      for (int64_t i = 0; i < half; ++i) {
        const auto [cosine, sine] = angles[static_cast<size_t>(i)];
        const float low = from[head + i];
        const float high = from[head + half + i];
        StoreElement(to, dtype, head + i, low * cosine - high * sine);
        StoreElement(to, dtype, head + half + i, high * cosine + low * sine);
      }
    }
  };
  MatMul(weight, args.x, [&](int64_t row, const float* products) {
    for (int64_t i = 0; i < half; ++i) {
      const auto at = static_cast<size_t>(i);
      angles[at] = RopeAngleAt(I32At(batch.row_pos, row), frequencies[at]);
    }
    rotate(products, q_width, RowOf(args.q, row), args.q.dtype);
    if (!kv) return;
    const int64_t kv_width = kv->geometry.kv_heads * dim;
    const auto [key, value] = SlotOf(*kv, args.layer, I32At(batch.row_slot, row));
    rotate(products + q_width, kv_width, key, kv->geometry.dtype);
    for (int64_t i = 0; i < kv_width; ++i) {
      StoreElement(value, kv->geometry.dtype, i, products[q_width + kv_width + i]);
    }
  });
  return absl::OkStatus();
}

const WeightData* WeightOf(const PackedWeight* weight) {
  const auto* ours = dynamic_cast<const RefPackedWeight*>(weight);
  return ours == nullptr ? nullptr : &ours->data();
}

const KvData* KvOf(const KvStorage* kv) {
  const auto* ours = dynamic_cast<const RefKvStorage*>(kv);
  return ours == nullptr ? nullptr : &ours->data();
}

// Calls move(slot, key, its dtype, value, its dtype, the cache's dtype, i) for every element i of
// every row of k and v.
template <class Move>
absl::Status MoveSlots(Stream& stream, std::string_view op, const KvStorage& kv, uint32_t layer,
                       const TensorView& slots, const TensorView& k, const TensorView& v,
                       const Move& move) {
  auto* queue = dynamic_cast<RefStream*>(&stream);
  if (queue == nullptr) return NotOurs(op, "stream");
  const KvData* data = KvOf(&kv);
  if (data == nullptr) return NotOurs(op, "kv");
  Binder bind(*queue, op);
  const DType dtype = data->geometry.dtype;
  const int64_t width = int64_t{data->geometry.kv_heads} * data->geometry.head_dim;
  bind.Require(layer < data->geometry.layers, "layer");
  const TensorView keys = bind.Device(k, "k", {dtype, kF32}, {kAnyDim, width});
  const TensorView values = bind.Device(v, "v", {dtype, kF32}, {k.dims[0], width});
  const TensorView at = bind.Array(slots, "slots", kI32, k.dims[0]);
  bind.Use(data->memory);
  return bind.Submit(
      *queue, [keys, values, at, layer, width, dtype, move, cache = *data]() -> absl::Status {
        RETURN_IF_ERROR(CheckSlots(at, keys.dims[0], cache, "slots"));
        for (int64_t row = 0; row < keys.dims[0]; ++row) {
          const SlotBytes slot = SlotOf(cache, layer, I32At(at, row));
          for (int64_t i = 0; i < width; ++i) {
            move(slot, RowOf(keys, row), keys.dtype, RowOf(values, row), values.dtype, dtype, i);
          }
        }
        return absl::OkStatus();
      });
}

}  // namespace

absl::Status RefOps::Linear(Stream& stream, const LinearArgs& args) const {
  auto* queue = dynamic_cast<RefStream*>(&stream);
  if (queue == nullptr) return NotOurs("Linear", "stream");
  const WeightData* weight = WeightOf(args.weight);
  if (weight == nullptr) return NotOurs("Linear", "weight");
  Binder bind(*queue, "Linear");
  bind.Require(!weight->gated, "the weight was packed by PackGated");
  LinearArgs a = args;
  const int64_t rows = args.x.dims[0];
  const int64_t n = weight->n;
  a.x = bind.Device(args.x, "x", {kF32, weight->dtype}, {kAnyDim, weight->k});
  a.y = bind.Device(args.y, "y", {kF32, weight->dtype}, {rows, n});
  if (args.bias) a.bias = bind.Device(*args.bias, "bias", {kF32}, {n});
  if (args.scale) a.scale = bind.Device(*args.scale, "scale", {kF32}, {n});
  if (args.residual) a.residual = bind.Device(*args.residual, "residual", {kF32}, {rows, n});
  bind.Use(weight->memory);
  return bind.Submit(*queue, [a, w = *weight] {
    MatMul(w, a.x, [&](int64_t row, const float* products) {
      for (int64_t i = 0; i < w.n; ++i) {
        float value = products[i];
        if (a.bias) value += F32At(*a.bias, i);
        value = Activate(a.activation, value);
        if (a.scale) value *= F32At(*a.scale, i);
        if (a.residual) value += LoadElement(RowOf(*a.residual, row), kF32, i);
        StoreElement(RowOf(a.y, row), a.y.dtype, i, value);
      }
    });
    return absl::OkStatus();
  });
}

absl::Status RefOps::GatedLinear(Stream& stream, const GatedLinearArgs& args) const {
  auto* queue = dynamic_cast<RefStream*>(&stream);
  if (queue == nullptr) return NotOurs("GatedLinear", "stream");
  const WeightData* weight = WeightOf(args.weight);
  if (weight == nullptr) return NotOurs("GatedLinear", "weight");
  Binder bind(*queue, "GatedLinear");
  bind.Require(weight->gated, "the weight was not packed by PackGated");
  bind.Require(args.activation == Activation::kSilu || args.activation == Activation::kGeluTanh,
               "activation");
  GatedLinearArgs a = args;
  a.x = bind.Device(args.x, "x", {weight->dtype}, {kAnyDim, weight->k});
  a.y = bind.Device(args.y, "y", {weight->dtype}, {args.x.dims[0], weight->n / 2});
  bind.Use(weight->memory);
  return bind.Submit(*queue, [a, w = *weight] {
    MatMul(w, a.x, [&](int64_t row, const float* products) {
      const int64_t width = w.n / 2;
      for (int64_t i = 0; i < width; ++i) {
        StoreElement(RowOf(a.y, row), a.y.dtype, i,
                     Activate(a.activation, products[i]) * products[width + i]);
      }
    });
    return absl::OkStatus();
  });
}

absl::Status RefOps::QkvRopeAppend(Stream& stream, const QkvRopeAppendArgs& args) const {
  auto* queue = dynamic_cast<RefStream*>(&stream);
  if (queue == nullptr) return NotOurs("QkvRopeAppend", "stream");
  const WeightData* weight = WeightOf(args.weight);
  if (weight == nullptr) return NotOurs("QkvRopeAppend", "weight");
  const KvData* kv = KvOf(args.kv);
  if (kv == nullptr && args.kv != nullptr) return NotOurs("QkvRopeAppend", "kv");
  Binder bind(*queue, "QkvRopeAppend");
  const int64_t heads =
      int64_t{args.q_heads} + (kv == nullptr ? 0 : 2 * int64_t{kv->geometry.kv_heads});
  const int64_t dim =
      kv != nullptr ? kv->geometry.head_dim : weight->n / std::max<int64_t>(1, heads);
  bind.Require(!weight->gated, "the weight was packed by PackGated");
  bind.Require(kv == nullptr || args.layer < kv->geometry.layers, "layer");
  bind.Require(args.q_heads > 0 && dim > 0 && dim % 2 == 0, "head_dim must be even");
  bind.Require(weight->n == heads * dim, "weight rows are not (q_heads + 2 * kv_heads) * head_dim");
  bind.Require(std::isfinite(args.rope_theta) && args.rope_theta > 0, "rope_theta");
  QkvRopeAppendArgs a = args;
  a.x = bind.Device(args.x, "x", {weight->dtype}, {args.batch.num_rows, weight->k});
  a.q = bind.Device(args.q, "q", {weight->dtype}, {args.batch.num_rows, args.q_heads * dim});
  a.batch.row_pos = bind.Array(args.batch.row_pos, "batch.row_pos", kI32, args.batch.num_rows);
  bind.Use(weight->memory);
  std::optional<KvData> cache;
  if (kv != nullptr) {
    a.batch.row_slot = bind.Array(args.batch.row_slot, "batch.row_slot", kI32, args.batch.num_rows);
    bind.Use(kv->memory);
    cache = *kv;
  }
  return bind.Submit(*queue,
                     [a, w = *weight, dim, cache] { return RunQkvRopeAppend(a, w, dim, cache); });
}

absl::Status RefOps::PagedAttention(Stream& stream, const PagedAttentionArgs& args) const {
  auto* queue = dynamic_cast<RefStream*>(&stream);
  if (queue == nullptr) return NotOurs("PagedAttention", "stream");
  const KvData* kv = KvOf(args.kv);
  if (kv == nullptr) return NotOurs("PagedAttention", "kv");
  Binder bind(*queue, "PagedAttention");
  bind.Require(args.layer < kv->geometry.layers, "layer");
  bind.Require(args.q_heads > 0 && args.q_heads % kv->geometry.kv_heads == 0,
               "q_heads is no multiple of kv_heads");
  bind.Require(std::isfinite(args.scale), "scale");
  const int64_t width = args.q_heads * int64_t{kv->geometry.head_dim};
  PagedAttentionArgs a = args;
  a.q = bind.Device(args.q, "q", {kF32, kBf16}, {args.batch.num_rows, width});
  a.out = bind.Device(args.out, "out", {args.q.dtype}, {args.batch.num_rows, width});
  a.batch = bind.Batch(args.batch);
  bind.Use(kv->memory);
  return bind.Submit(*queue, [a, cache = *kv] { return RunPagedAttention(a, cache); });
}

absl::Status RefOps::DenseAttention(Stream& stream, const DenseAttentionArgs& args) const {
  auto* queue = dynamic_cast<RefStream*>(&stream);
  if (queue == nullptr) return NotOurs("DenseAttention", "stream");
  Binder bind(*queue, "DenseAttention");
  const int64_t rows = args.qkv.dims[0];
  const int64_t width = args.out.dims[1];
  bind.Require(args.group_rows > 0 && rows % args.group_rows == 0,
               "rows are no multiple of group_rows");
  bind.Require(args.heads > 0 && width > 0 && width % args.heads == 0,
               "width is no multiple of heads");
  bind.Require(std::isfinite(args.scale), "scale");
  DenseAttentionArgs a = args;
  a.qkv = bind.Device(args.qkv, "qkv", {kF32, kBf16}, {rows, 3 * width});
  a.out = bind.Device(args.out, "out", {args.qkv.dtype}, {rows, width});
  return bind.Submit(*queue, [a] {
    RunDenseAttention(a);
    return absl::OkStatus();
  });
}

absl::Status RefOps::RmsNorm(Stream& stream, TensorView x, TensorView gamma, TensorView y,
                             float eps) const {
  auto* queue = dynamic_cast<RefStream*>(&stream);
  if (queue == nullptr) return NotOurs("RmsNorm", "stream");
  Binder bind(*queue, "RmsNorm");
  const int64_t width = x.dims[1];
  bind.Require(std::isfinite(eps) && eps >= 0, "eps");
  const TensorView in = bind.Device(x, "x", {kF32}, {kAnyDim, kAnyDim});
  const TensorView weight = bind.Device(gamma, "gamma", {kF32}, {width});
  const TensorView out = bind.Device(y, "y", {kF32, kBf16}, {x.dims[0], width});
  return bind.Submit(*queue, [in, weight, out, eps] {
    for (int64_t row = 0; row < in.dims[0]; ++row) {
      const std::byte* from = RowOf(in, row);
      const double factor = InverseRms(from, in.dims[1], eps);
      for (int64_t i = 0; i < in.dims[1]; ++i) {
        const double value = static_cast<double>(LoadElement(from, kF32, i)) * factor;
        StoreElement(RowOf(out, row), out.dtype, i,
                     static_cast<float>(value * static_cast<double>(F32At(weight, i))));
      }
    }
    return absl::OkStatus();
  });
}

absl::Status RefOps::LayerNorm(Stream& stream, TensorView x, TensorView gamma, TensorView beta,
                               TensorView y, float eps) const {
  auto* queue = dynamic_cast<RefStream*>(&stream);
  if (queue == nullptr) return NotOurs("LayerNorm", "stream");
  Binder bind(*queue, "LayerNorm");
  const int64_t width = x.dims[1];
  bind.Require(std::isfinite(eps) && eps >= 0, "eps");
  const TensorView in = bind.Device(x, "x", {kF32}, {kAnyDim, kAnyDim});
  const TensorView weight = bind.Device(gamma, "gamma", {kF32}, {width});
  const TensorView shift = bind.Device(beta, "beta", {kF32}, {width});
  const TensorView out = bind.Device(y, "y", {kF32, kBf16}, {x.dims[0], width});
  return bind.Submit(*queue, [in, weight, shift, out, eps] {
    const auto count = static_cast<double>(in.dims[1]);
    for (int64_t row = 0; row < in.dims[0]; ++row) {
      const std::byte* from = RowOf(in, row);
      double sum = 0;
      for (int64_t i = 0; i < in.dims[1]; ++i)
        sum += static_cast<double>(LoadElement(from, kF32, i));
      const double mean = sum / count;
      double squares = 0;
      for (int64_t i = 0; i < in.dims[1]; ++i) {
        const double delta = static_cast<double>(LoadElement(from, kF32, i)) - mean;
        squares += delta * delta;
      }
      const double factor = 1.0 / std::sqrt(squares / count + static_cast<double>(eps));
      for (int64_t i = 0; i < in.dims[1]; ++i) {
        const double value = (static_cast<double>(LoadElement(from, kF32, i)) - mean) * factor;
        StoreElement(RowOf(out, row), out.dtype, i,
                     static_cast<float>(value * static_cast<double>(F32At(weight, i)) +
                                        static_cast<double>(F32At(shift, i))));
      }
    }
    return absl::OkStatus();
  });
}

absl::Status RefOps::AdaRmsNorm(Stream& stream, TensorView x, TensorView scale, TensorView shift,
                                TensorView row_group, TensorView y, float eps) const {
  auto* queue = dynamic_cast<RefStream*>(&stream);
  if (queue == nullptr) return NotOurs("AdaRmsNorm", "stream");
  Binder bind(*queue, "AdaRmsNorm");
  const int64_t width = x.dims[1];
  bind.Require(std::isfinite(eps) && eps >= 0, "eps");
  const TensorView in = bind.Device(x, "x", {kF32}, {kAnyDim, kAnyDim});
  const TensorView scales = bind.Device(scale, "scale", {kF32}, {kAnyDim, width});
  const TensorView shifts = bind.Device(shift, "shift", {kF32}, {scale.dims[0], width});
  const TensorView groups = bind.Array(row_group, "row_group", kI32, x.dims[0]);
  const TensorView out = bind.Device(y, "y", {kF32, kBf16}, {x.dims[0], width});
  return bind.Submit(*queue, [in, scales, shifts, groups, out, eps]() -> absl::Status {
    RETURN_IF_ERROR(CheckIndices(groups, in.dims[0], 0, scales.dims[0], "AdaRmsNorm: row_group"));
    for (int64_t row = 0; row < in.dims[0]; ++row) {
      const std::byte* from = RowOf(in, row);
      const std::byte* factors = RowOf(scales, I32At(groups, row));
      const std::byte* offsets = RowOf(shifts, I32At(groups, row));
      const double factor = InverseRms(from, in.dims[1], eps);
      for (int64_t i = 0; i < in.dims[1]; ++i) {
        const double value = static_cast<double>(LoadElement(from, kF32, i)) * factor *
                                 (1.0 + static_cast<double>(LoadElement(factors, kF32, i))) +
                             static_cast<double>(LoadElement(offsets, kF32, i));
        StoreElement(RowOf(out, row), out.dtype, i, static_cast<float>(value));
      }
    }
    return absl::OkStatus();
  });
}

absl::Status RefOps::AddGated(Stream& stream, TensorView y, TensorView gate, TensorView row_group,
                              TensorView x) const {
  auto* queue = dynamic_cast<RefStream*>(&stream);
  if (queue == nullptr) return NotOurs("AddGated", "stream");
  Binder bind(*queue, "AddGated");
  const bool one_gate = gate.dims[1] == 1;
  const TensorView to = bind.Device(x, "x", {kF32}, {kAnyDim, kAnyDim});
  const TensorView in = bind.Device(y, "y", {kF32, kBf16}, {x.dims[0], x.dims[1]});
  const TensorView gates = bind.Device(gate, "gate", {kF32}, {kAnyDim, one_gate ? 1 : x.dims[1]});
  const TensorView groups = bind.Array(row_group, "row_group", kI32, x.dims[0]);
  return bind.Submit(*queue, [to, in, gates, groups, one_gate]() -> absl::Status {
    RETURN_IF_ERROR(CheckIndices(groups, to.dims[0], 0, gates.dims[0], "AddGated: row_group"));
    for (int64_t row = 0; row < to.dims[0]; ++row) {
      for (int64_t i = 0; i < to.dims[1]; ++i) {
        const float factor = LoadElement(RowOf(gates, I32At(groups, row)), kF32, one_gate ? 0 : i);
        const float product = factor * LoadElement(RowOf(in, row), in.dtype, i);
        StoreElement(RowOf(to, row), kF32, i, LoadElement(RowOf(to, row), kF32, i) + product);
      }
    }
    return absl::OkStatus();
  });
}

absl::Status RefOps::Embed(Stream& stream, TensorView table, TensorView ids, TensorView index,
                           float scale, TensorView out) const {
  auto* queue = dynamic_cast<RefStream*>(&stream);
  if (queue == nullptr) return NotOurs("Embed", "stream");
  Binder bind(*queue, "Embed");
  const int64_t rows = out.dims[0];
  const TensorView from = bind.Device(table, "table", {kF32, kBf16}, {kAnyDim, kAnyDim});
  const TensorView tokens = bind.Device(ids, "ids", {kI32}, {kAnyDim});
  const TensorView at = bind.Array(index, "index", kI32, rows);
  const TensorView to = bind.Device(out, "out", {kF32}, {rows, table.dims[1]});
  bind.Require(std::isfinite(scale), "scale");
  return bind.Submit(*queue, [from, tokens, at, to, scale]() -> absl::Status {
    RETURN_IF_ERROR(CheckIndices(at, to.dims[0], std::numeric_limits<int32_t>::min(),
                                 tokens.dims[0], "Embed: index"));
    for (int64_t row = 0; row < to.dims[0]; ++row) {
      if (I32At(at, row) < 0) continue;
      const int32_t id = I32At(tokens, I32At(at, row));
      const bool known = id >= 0 && id < from.dims[0];
      for (int64_t i = 0; i < to.dims[1]; ++i) {
        const float value = known ? LoadElement(RowOf(from, id), from.dtype, i) * scale
                                  : std::numeric_limits<float>::quiet_NaN();
        StoreElement(RowOf(to, row), kF32, i, value);
      }
    }
    return absl::OkStatus();
  });
}

absl::Status RefOps::GatherRows(Stream& stream, TensorView in, TensorView index,
                                TensorView out) const {
  auto* queue = dynamic_cast<RefStream*>(&stream);
  if (queue == nullptr) return NotOurs("GatherRows", "stream");
  Binder bind(*queue, "GatherRows");
  const int64_t rows = out.dims[0];
  const TensorView from = bind.Device(in, "in", {kF32}, {kAnyDim, kAnyDim});
  const TensorView at = bind.Array(index, "index", kI32, rows);
  const TensorView to = bind.Device(out, "out", {kF32}, {rows, in.dims[1]});
  return bind.Submit(*queue, [from, at, to]() -> absl::Status {
    RETURN_IF_ERROR(CheckIndices(at, to.dims[0], std::numeric_limits<int32_t>::min(), from.dims[0],
                                 "GatherRows: index"));
    for (int64_t row = 0; row < to.dims[0]; ++row) {
      const int32_t source = I32At(at, row);
      if (source < 0) continue;
      for (int64_t i = 0; i < to.dims[1]; ++i)
        StoreElement(RowOf(to, row), kF32, i, LoadElement(RowOf(from, source), kF32, i));
    }
    return absl::OkStatus();
  });
}

absl::Status RefOps::Patchify(Stream& stream, TensorView rgb, uint32_t patch_size,
                              std::span<const float, 3> mean, std::span<const float, 3> std,
                              TensorView out) const {
  auto* queue = dynamic_cast<RefStream*>(&stream);
  if (queue == nullptr) return NotOurs("Patchify", "stream");
  Binder bind(*queue, "Patchify");
  const int64_t size = patch_size;
  bind.Require(size > 0 && rgb.rank == 4 && rgb.dims[1] % size == 0 && rgb.dims[2] % size == 0,
               "the frame is no multiple of the patch");
  if (!bind.ok()) return bind.status();
  for (float s : std) bind.Require(std::isfinite(s) && s != 0, "std");
  const int64_t down = rgb.dims[1] / size;
  const int64_t across = rgb.dims[2] / size;
  const TensorView in = bind.Device(rgb, "rgb", {DType::kU8, kF32}, {kAnyDim, kAnyDim, kAnyDim, 3});
  const TensorView to =
      bind.Device(out, "out", {kF32, kBf16}, {rgb.dims[0] * down * across, 3 * size * size});
  const std::array<float, 3> means = {mean[0], mean[1], mean[2]};
  const std::array<float, 3> stds = {std[0], std[1], std[2]};
  return bind.Submit(*queue, [in, to, means, stds, size, down, across] {
    for (int64_t row = 0; row < to.dims[0]; ++row) {
      const int64_t frame = row / (down * across);
      const int64_t top = row / across % down * size;
      const int64_t left = row % across * size;
      for (int64_t at = 0; at < to.dims[1]; ++at) {
        const int64_t channel = at / (size * size);
        const int64_t y = top + at / size % size;
        const int64_t x = left + at % size;
        const int64_t pixel =
            frame * in.strides[0] + y * in.strides[1] + x * in.strides[2] + channel;
        const float unit = in.dtype == kF32
                               ? in.As<const float>()[pixel]
                               : static_cast<float>(in.As<const uint8_t>()[pixel]) / 255.0f;
        const auto c = static_cast<size_t>(channel);
        StoreElement(RowOf(to, row), to.dtype, at, (unit - means[c]) / stds[c]);
      }
    }
    return absl::OkStatus();
  });
}

absl::Status RefOps::Convert(Stream& stream, TensorView src, TensorView dst) const {
  auto* queue = dynamic_cast<RefStream*>(&stream);
  if (queue == nullptr) return NotOurs("Convert", "stream");
  Binder bind(*queue, "Convert");
  const TensorView from = bind.Device(src, "src", {kF32, kBf16}, {kAnyDim, kAnyDim});
  const TensorView to = bind.Device(dst, "dst", {kF32, kBf16}, {src.dims[0], src.dims[1]});
  return bind.Submit(*queue, [from, to] {
    for (int64_t row = 0; row < to.dims[0]; ++row) {
      for (int64_t i = 0; i < to.dims[1]; ++i) {
        StoreElement(RowOf(to, row), to.dtype, i, LoadElement(RowOf(from, row), from.dtype, i));
      }
    }
    return absl::OkStatus();
  });
}

absl::Status RefOps::Sample(Stream& stream, const SampleArgs& args) const {
  auto* queue = dynamic_cast<RefStream*>(&stream);
  if (queue == nullptr) return NotOurs("Sample", "stream");
  Binder bind(*queue, "Sample");
  const int64_t samples = args.dest.dims[0];
  SampleArgs a = args;
  a.logits = bind.Device(args.logits, "logits", {kF32}, {kAnyDim, kAnyDim});
  a.source_row = bind.Device(args.source_row, "source_row", {kI32}, {samples});
  a.temperature = bind.Device(args.temperature, "temperature", {kF32}, {samples});
  a.top_p = bind.Device(args.top_p, "top_p", {kF32}, {samples});
  a.seed = bind.Device(args.seed, "seed", {DType::kI64}, {samples});
  a.draw = bind.Device(args.draw, "draw", {kI32}, {samples});
  a.dest = bind.Device(args.dest, "dest", {kI32}, {samples});
  a.tokens = bind.Device(args.tokens, "tokens", {kI32}, {kAnyDim});
  return bind.Submit(*queue, [a, samples]() -> absl::Status {
    RETURN_IF_ERROR(CheckIndices(a.source_row, samples, 0, a.logits.dims[0], "Sample: source_row"));
    RETURN_IF_ERROR(CheckIndices(a.dest, samples, 0, a.tokens.dims[0], "Sample: dest"));
    for (int64_t n = 0; n < samples; ++n) {
      const auto* row = reinterpret_cast<const float*>(RowOf(a.logits, I32At(a.source_row, n)));
      a.tokens.As<int32_t>()[I32At(a.dest, n)] =
          SampleRow(row, a.logits.dims[1], F32At(a.temperature, n), F32At(a.top_p, n),
                    a.seed.As<const int64_t>()[n], I32At(a.draw, n));
    }
    return absl::OkStatus();
  });
}

absl::Status RefOps::TopTokens(Stream& stream, const TopTokensArgs& args) const {
  auto* queue = dynamic_cast<RefStream*>(&stream);
  if (queue == nullptr) return NotOurs("TopTokens", "stream");
  Binder bind(*queue, "TopTokens");
  const int64_t rows = args.ids.dims[0];
  const int64_t count = args.ids.dims[1];
  TopTokensArgs a = args;
  a.logits = bind.Device(args.logits, "logits", {kF32}, {kAnyDim, kAnyDim});
  a.source_row = bind.Device(args.source_row, "source_row", {kI32}, {rows});
  a.ids = bind.Device(args.ids, "ids", {kI32}, {kAnyDim, kAnyDim});
  a.log_probs = bind.Device(args.log_probs, "log_probs", {kF32}, {rows, count});
  return bind.Submit(*queue, [a, rows, count]() -> absl::Status {
    RETURN_IF_ERROR(CheckIndices(a.source_row, rows, 0, a.logits.dims[0], "TopTokens: source_row"));
    for (int64_t n = 0; n < rows; ++n) {
      TopOfRow(reinterpret_cast<const float*>(RowOf(a.logits, I32At(a.source_row, n))),
               a.logits.dims[1], count, reinterpret_cast<int32_t*>(RowOf(a.ids, n)),
               reinterpret_cast<float*>(RowOf(a.log_probs, n)));
    }
    return absl::OkStatus();
  });
}

absl::Status RefOps::CopyBlocks(Stream& stream, KvStorage& kv, TensorView pairs,
                                int32_t count) const {
  auto* queue = dynamic_cast<RefStream*>(&stream);
  if (queue == nullptr) return NotOurs("CopyBlocks", "stream");
  const KvData* data = KvOf(&kv);
  if (data == nullptr) return NotOurs("CopyBlocks", "kv");
  Binder bind(*queue, "CopyBlocks");
  bind.Require(count >= 0 && pairs.rank == 2 && pairs.dims[0] >= count, "count");
  const TensorView list = bind.Device(pairs, "pairs", {kI32}, {kAnyDim, 2});
  bind.Use(data->memory);
  return bind.Submit(*queue, [list, count, cache = *data]() -> absl::Status {
    for (int32_t i = 0; i < count; ++i) {
      const auto* pair = reinterpret_cast<const int32_t*>(RowOf(list, i));
      for (int side = 0; side < 2; ++side) {
        if (pair[side] < 0 || static_cast<uint32_t>(pair[side]) >= cache.num_blocks) {
          return absl::InternalError(StrCat("CopyBlocks: pairs[", i, "] names block ", pair[side]));
        }
      }
      for (uint32_t layer = 0; layer < cache.geometry.layers; ++layer) {
        const std::byte* from = cache.block(layer, static_cast<uint32_t>(pair[0]));
        std::byte* to = cache.block(layer, static_cast<uint32_t>(pair[1]));
        if (from != to) std::copy_n(from, cache.block_bytes(), to);
      }
    }
    return absl::OkStatus();
  });
}

absl::Status RefOps::ReadKv(Stream& stream, const KvStorage& kv, uint32_t layer,
                            const PagedBatch& batch, TensorView k, TensorView v) const {
  auto* queue = dynamic_cast<RefStream*>(&stream);
  if (queue == nullptr) return NotOurs("ReadKv", "stream");
  const KvData* data = KvOf(&kv);
  if (data == nullptr) return NotOurs("ReadKv", "kv");
  Binder bind(*queue, "ReadKv");
  const int64_t width = int64_t{data->geometry.kv_heads} * data->geometry.head_dim;
  bind.Require(layer < data->geometry.layers, "layer");
  bind.Require(batch.num_seqs == 1, "the batch must hold one sequence");
  const PagedBatch pages = bind.Batch(batch);
  const TensorView keys = bind.Device(k, "k", {kF32}, {kAnyDim, width});
  const TensorView values = bind.Device(v, "v", {kF32}, {k.dims[0], width});
  bind.Use(data->memory);
  return bind.Submit(*queue, [pages, keys, values, layer, width, cache = *data]() -> absl::Status {
    RETURN_IF_ERROR(CheckPages(pages, cache));
    const std::vector<CachedToken> tokens = TokensOf(pages, 0);
    if (static_cast<int64_t>(tokens.size()) != keys.dims[0]) {
      return absl::InternalError(
          StrCat("ReadKv: ", tokens.size(), " tokens do not fit ", keys.DebugString()));
    }
    for (int64_t row = 0; row < keys.dims[0]; ++row) {
      const CachedToken& token = tokens[static_cast<size_t>(row)];
      const std::byte* key = cache.key(layer, token.block, token.offset);
      const std::byte* value = cache.value(layer, token.block, token.offset);
      for (int64_t i = 0; i < width; ++i) {
        StoreElement(RowOf(keys, row), kF32, i, LoadElement(key, cache.geometry.dtype, i));
        StoreElement(RowOf(values, row), kF32, i, LoadElement(value, cache.geometry.dtype, i));
      }
    }
    return absl::OkStatus();
  });
}

absl::Status RefOps::GatherKv(Stream& stream, const KvStorage& kv, uint32_t layer, TensorView slots,
                              TensorView k, TensorView v) const {
  return MoveSlots(stream, "GatherKv", kv, layer, slots, k, v,
                   [](const SlotBytes& slot, std::byte* key, DType k_dtype, std::byte* value,
                      DType v_dtype, DType dtype, int64_t i) {
                     StoreElement(key, k_dtype, i, LoadElement(slot.key, dtype, i));
                     StoreElement(value, v_dtype, i, LoadElement(slot.value, dtype, i));
                   });
}

absl::Status RefOps::ScatterKv(Stream& stream, KvStorage& kv, uint32_t layer, TensorView slots,
                               TensorView k, TensorView v) const {
  return MoveSlots(stream, "ScatterKv", kv, layer, slots, k, v,
                   [](const SlotBytes& slot, std::byte* key, DType k_dtype, std::byte* value,
                      DType v_dtype, DType dtype, int64_t i) {
                     StoreElement(slot.key, dtype, i, LoadElement(key, k_dtype, i));
                     StoreElement(slot.value, dtype, i, LoadElement(value, v_dtype, i));
                   });
}

}  // namespace saccade::ref
