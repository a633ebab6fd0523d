// The last block of a row on targets without masked memory operations: through a buffer, so that nothing is read or
// written past the row's ends. Included inside an anonymous namespace after the target's load and store.

template <class T>
inline F load_n(T type, const char* p, int n) {
  char buffer[kLanes * kSize<T>] = {};
  __builtin_memcpy(buffer, p, static_cast<std::size_t>(n * kSize<T>));
  return load(type, buffer);
}
inline F load_sum_n(const char* x, const char* bias, int n) {
  char a[kLanes * 4] = {}, b[kLanes * 4] = {};
  __builtin_memcpy(a, x, static_cast<std::size_t>(n * 4));
  __builtin_memcpy(b, bias, static_cast<std::size_t>(n * 4));
  return load_sum(a, b);
}
template <class T, class Value>
inline void store_n(T type, char* p, Value value, int n) {
  char buffer[kLanes * kSize<T>];
  store(type, buffer, value);
  __builtin_memcpy(p, buffer, static_cast<std::size_t>(n * kSize<T>));
}
