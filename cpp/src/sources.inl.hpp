// What the kernels read: int32 or float x as float32 (C2, C3), a pair of blocks from the two halves of a head or some neighbouring
// pairs at once. Included by kernel.inl.hpp.

// The first `kLanes` or, in the last block of a half head, the first n elements.
template <class T, bool kTail>
inline F load_block(T type, const char* p, int n) {
  if constexpr (kTail) return load_n(type, p, n);
  else return load(type, p);
}
// Block i of the two halves of a head: columns 16 i and half + 16 i from where the pointers are. n: of the last block.
struct Block {
  std::int64_t a, b;
  int n;
};
template <class T, bool kTail>
inline Pair load_pair(T type, const char* p, const Block& c) {
  return {load_block<T, kTail>(type, p + c.a * kSize<T>, c.n), load_block<T, kTail>(type, p + c.b * kSize<T>, c.n)};
}
// Neighbouring blocks, the first of them c. Targets overload load_two where two at once are cheaper.
template <class T>
inline void load_two(T type, const char* p, F& first, F& second) {
  first = load(type, p);
  second = load(type, p + kLanes * kSize<T>);
}
template <class T, bool kTail, int kBlocks>
KVQUANT_INLINE void load_pairs(T type, const char* p, const Block& c, Pair (&value)[kBlocks]) {
  if constexpr (kBlocks == 1) {
    value[0] = load_pair<T, kTail>(type, p, c);
  } else {
    KVQUANT_UNROLL
    for (int i = 0; i < kBlocks; i += 2) {
      load_two(type, p + (c.a + i * kLanes) * kSize<T>, value[i].a, value[i + 1].a);
      load_two(type, p + (c.b + i * kLanes) * kSize<T>, value[i].b, value[i + 1].b);
    }
  }
}

// Sources: columns(p, c) loads what all tokens share, load(...) gives the float32 pairs of neighbouring blocks (C2, C3).
template <class T, bool kTail>
struct FloatSource {
  template <class Other> static constexpr bool kIs = is_same<T, Other>;
  using Type = T;
  static constexpr bool kBlocked = false;  // nothing that tokens could share
  static KVQUANT_INLINE void prefetch(const char*, const Block&, std::int64_t) {}
  struct Columns {};
  static KVQUANT_INLINE Columns columns(const Part&, const Block&) { return {}; }
  template <int kBlocks>
  static KVQUANT_INLINE void load(const Columns (&)[kBlocks], const Token& t, const Block& c, Pair (&value)[kBlocks]) {
    load_pairs<T, kTail>(T{}, t.x, c, value);
  }
};

// int32 x is the most of what a call reads, and one head after the other is more than the processor's own prefetchers keep up
// with: rows from memory (W3) take half the time with it. Past the end of a row lie the next part and the next token. `ahead`
// is in bytes; the less a token takes, the further it must reach.
struct Int32Source {
  template <class Other> static constexpr bool kIs = is_same<Int32, Other>;
  using Type = Int32;
  static constexpr bool kBlocked = true;
  static KVQUANT_INLINE void prefetch(const char* x, const Block& c, std::int64_t ahead) {
    __builtin_prefetch(x + c.a * 4 + ahead);
    __builtin_prefetch(x + c.b * 4 + ahead);
  }
};

template <bool kTail>
struct FloatBiasSource : Int32Source {
  struct Columns {
    Pair scale, bias;
  };
  static KVQUANT_INLINE Columns columns(const Part& p, const Block& c) {
    return {load_pair<Float32, kTail>(Float32{}, p.weight_scale, c), load_pair<Float32, kTail>(Float32{}, p.bias, c)};
  }
  template <int kBlocks>
  static KVQUANT_INLINE void load(const Columns (&k)[kBlocks], const Token& t, const Block& c, Pair (&value)[kBlocks]) {
    const F activation = broadcast(t.activation_scale);
    load_pairs<Int32, kTail>(Int32{}, t.x, c, value);
    KVQUANT_UNROLL
    for (int i = 0; i < kBlocks; ++i)
      value[i] = {add(mul(mul(value[i].a, k[i].scale.a), activation), k[i].bias.a),
                  add(mul(mul(value[i].b, k[i].scale.b), activation), k[i].bias.b)};
  }
};

template <bool kTail>
struct IntBiasSource : Int32Source {
  struct Columns {
    Pair scale;
    const char *bias_a, *bias_b;
  };
  static KVQUANT_INLINE Columns columns(const Part& p, const Block& c) {
    return {load_pair<Float32, kTail>(Float32{}, p.weight_scale, c), p.bias + c.a * 4, p.bias + c.b * 4};
  }
  static KVQUANT_INLINE F sum(const char* x, const char* bias, int n) {
    if constexpr (kTail) return load_sum_n(x, bias, n);
    else return load_sum(x, bias);
  }
  template <int kBlocks>
  static KVQUANT_INLINE void load(const Columns (&k)[kBlocks], const Token& t, const Block& c, Pair (&value)[kBlocks]) {
    const F activation = broadcast(t.activation_scale);
    KVQUANT_UNROLL
    for (int i = 0; i < kBlocks; ++i)
      value[i] = {mul(mul(sum(t.x + (c.a + i * kLanes) * 4, k[i].bias_a, c.n), k[i].scale.a), activation),
                  mul(mul(sum(t.x + (c.b + i * kLanes) * 4, k[i].bias_b, c.n), k[i].scale.b), activation)};
  }
};
