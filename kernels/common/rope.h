#pragma once
// Angles of rotary position embedding, half-split (element i pairs with i + D/2), as Hugging Face's
// Llama computes them: every step rounded to F32, the power, sine and cosine evaluated in F64
// first, so that all backends agree on every bit that the host's libm decides. Fill a table on the
// host and hand it to the kernel. Source: Su et al., RoFormer (arXiv 2104.09864);
// transformers/models/llama/modeling_llama.py.
#include <cmath>
#include <cstdint>

namespace saccade {

// theta^(-2i/D) in F32, for i < head_dim / 2.
inline float RopeInverseFrequency(double theta, uint32_t head_dim, uint32_t i) {
  const float exponent = static_cast<float>(2 * i) / static_cast<float>(head_dim);
  const auto power = static_cast<float>(std::pow(theta, static_cast<double>(exponent)));
  return 1.0f / power;
}

struct RopeAngle {
  float cos = 1;
  float sin = 0;
};

inline RopeAngle RopeAngleAt(int32_t position, float inverse_frequency) {
  const float angle = static_cast<float>(position) * inverse_frequency;
  return {static_cast<float>(std::cos(static_cast<double>(angle))),
          static_cast<float>(std::sin(static_cast<double>(angle)))};
}

}  // namespace saccade
