#pragma once

// Adagrad (Duchi, Hazan and Singer, "Adaptive Subgradient Methods", 2011), as torch does it.
struct Adagrad {
  static constexpr int kNumMoments = 1;
  static constexpr Sign kSigns[] = {Sign::kNonNegative, Sign::kAny};

  struct Scalars {
    float grad_factor;  // unscale and clip
    float weight_decay;
    float initial;  // what the sum starts with: of the first step, 0 afterwards
    float eps;
    float step_size;  // lr / (1 + (t - 1) * lr_decay)
  };

  static inline float step(float param, float raw_grad, float& sum, float&, const Scalars& k) {
    const float grad = raw_grad * k.grad_factor + k.weight_decay * param;
    sum = (sum + k.initial) + grad * grad;
    return param - k.step_size * (grad / (__builtin_sqrtf(sum) + k.eps));
  }
};
