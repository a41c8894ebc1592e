#pragma once

// Stochastic gradient descent with momentum (Polyak, 1964; Nesterov's form after Sutskever et al., 2013), as
// torch does it.
struct Sgd {
  static constexpr int kNumMoments = 1;
  static constexpr Sign kSigns[] = {Sign::kAny, Sign::kAny};

  struct Scalars {
    float grad_factor;  // unscale and clip
    float weight_decay;
    float momentum;
    float new_weight;       // 1 - dampening; 1 at the first step, when the buffer becomes the gradient
    float gradient_weight;  // Nesterov: the step is gradient_weight * gradient + buffer_weight * buffer
    float buffer_weight;
    float lr;
  };

  template <typename Number>
  static inline Number step(Number param, Number raw_grad, Number& buffer, Number&, const Scalars& k) {
    const Number grad = raw_grad * k.grad_factor + k.weight_decay * param;
    buffer = k.momentum * buffer + k.new_weight * grad;
    return param - k.lr * (k.gradient_weight * grad + k.buffer_weight * buffer);
  }
};
