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

  template <typename Number>
  static inline Number step(Number param, Number raw_grad, Number& sum, Number&, const Scalars& k) {
    const Number grad = raw_grad * k.grad_factor + k.weight_decay * param;
    sum = (sum + k.initial) + grad * grad;
    return param - k.step_size * (grad / (square_root(sum) + k.eps));
  }
};
