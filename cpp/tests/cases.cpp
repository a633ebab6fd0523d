#include "cases.hpp"

#include <algorithm>

namespace kvtest {

using kvquant::Argument;
using kvquant::CacheMode;
using kvquant::DType;
using kvquant::Operands;
using kvquant::Options;
using kvquant::View;

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::none: return "none";
    case DType::int8: return "int8";
    case DType::int32: return "int32";
    case DType::int64: return "int64";
    case DType::float16: return "float16";
    case DType::bfloat16: return "bfloat16";
    case DType::float32: return "float32";
    default: return "other";
  }
}

std::string describe(const Case& c) {
  const auto number = [](auto value) { return std::to_string(static_cast<long long>(value)); };
  std::string s = std::string(name_of(c.x)) + "->" + name_of(c.out);
  s += " B=" + number(c.batch) + " S=" + number(c.sequence) + " Nq=" + number(c.heads_q) + " Nkv=" + number(c.heads_kv);
  s += " D=" + number(c.dim) + (c.three_d ? " 3-D" : " 2-D") + (c.packed ? " packed" : " three-sources");
  s += c.mode == CacheMode::page ? " page C2=" + number(c.page_rows) : std::string(" contiguous");
  s += c.numerics == kvquant::Numerics::ascend ? " ascend" : " fp32";
  s += std::string(c.kv_output ? " kv_output" : "") + (c.padding ? " padding" : "") + (c.duplicates ? " duplicates" : "");
  s += c.tables == Case::Tables::full ? " positions" : c.tables == Case::Tables::half ? " positions half-width" : "";
  s += std::string(" bias=") + name_of(c.bias) + " index=" + name_of(c.index);
  s += std::string(c.activation_scale ? " activation_scale" : "") + (c.offset_k ? " offset_k" : "") + (c.offset_v ? " offset_v" : "");
  s += " scale_shapes=";
  for (ScaleShape shape : c.scale_shape) s += number(shape);
  s += " layouts=" + number(c.cache_layout) + number(c.input_layout) + number(c.output_layout);
  s += std::string(c.strided_vectors ? " strided_vectors" : "") + (c.junk_unit_strides ? " junk_unit_strides" : "") + (c.uneven ? " uneven" : "");
  s += " misalign=" + number(c.misalign) + " placement=" + number(c.placement) + " values=" + number(c.values);
  return s + " seed=" + number(c.seed);
}

void draw_choices(Case& c, Random& random) {
  c.packed = random.chance(60);
  c.page_rows = random.pick({1, 3, 4, 16});
  c.mode = random.chance(60) ? CacheMode::page : CacheMode::contiguous;
  c.numerics = random.chance(40) ? kvquant::Numerics::ascend : kvquant::Numerics::fp32;
  c.kv_output = random.chance(50);
  c.padding = random.chance(40);
  c.duplicates = random.chance(40);
  c.bias = random.pick(kBiases);
  c.index = random.chance(50) ? DType::int32 : DType::int64;
  c.activation_scale = random.chance(50);
  c.offset_k = random.chance(50);
  c.offset_v = random.chance(50);
  for (ScaleShape& shape : c.scale_shape) shape = static_cast<ScaleShape>(random.below(kScaleShapes));
  c.input_layout = static_cast<InputLayout>(random.below(kInputLayouts));
  c.output_layout = static_cast<OutputLayout>(random.below(kOutputLayouts));
  c.strided_vectors = random.chance(40);
  c.junk_unit_strides = random.chance(30);
  c.uneven = random.chance(60);
  c.tables = random.pick({Case::Tables::per_token, Case::Tables::full, Case::Tables::half});
  c.position = random.chance(50) ? DType::int32 : DType::int64;
}

namespace {

// Builds the operands of one case. Every operand gets its own block, except that interleaved views share one.
struct Builder {
  const Case& c;
  Arena& arena;
  Operands& a;
  Random random;

  Spread base() const {
    Spread spread;
    spread.misalign = c.misalign;
    spread.junk_unit_strides = c.junk_unit_strides;
    return spread;
  }

  // [B,S,inner...] or [B,inner...].
  std::vector<std::int64_t> shape(std::vector<std::int64_t> inner) const {
    std::vector<std::int64_t> all{c.batch};
    if (c.three_d) all.push_back(c.sequence);
    all.insert(all.end(), inner.begin(), inner.end());
    return all;
  }

  // Adds gaps that are different for each `i` to the axes before `axes`.
  void make_uneven(Spread& spread, int i, int axes) const {
    if (!c.uneven) return;
    for (int axis = 0; axis < axes; ++axis) spread.gap[axis] += 4 * i + 2 * axis + (axis == 0 ? 8 * i : 0);
  }

  void over_tokens(bool (&axes)[4]) const {
    axes[0] = true;
    axes[1] = c.three_d;
  }

  Spread input_spread() const {
    Spread spread = base();
    if (c.input_layout == InputLayout::padded) {
      spread.gap[0] = 13;
      if (c.three_d) spread.gap[1] = 20;
    }
    if (c.input_layout == InputLayout::transposed && c.three_d) std::swap(spread.order[0], spread.order[1]);
    if (c.input_layout == InputLayout::reversed) over_tokens(spread.reversed);
    return spread;
  }

  void source(Argument argument, std::vector<std::int64_t> inner, int i) {
    Spread spread = input_spread();
    make_uneven(spread, i, c.three_d ? 3 - c.packed : 2 - c.packed);
    if (!c.packed && c.input_layout == InputLayout::padded) spread.gap[c.three_d ? 2 : 1] = 8;
    View& view = a[argument] = arena.view(kvquant::name(argument), c.x, shape(std::move(inner)), spread, c.placement);
    if (c.x == DType::int32) fill_integers(view, c.values, 20000, random);
    else fill_floats(view, c.values, 12.0f, random);
  }

  void sources() {
    if (c.packed) {
      source(Argument::x, {(c.heads_q + 2 * c.heads_kv) * c.dim}, 0);
      a.size_splits[0] = c.heads_q * c.dim;
      a.size_splits[1] = a.size_splits[2] = c.heads_kv * c.dim;
    } else {
      source(Argument::q_source, {c.heads_q, c.dim}, 0);
      source(Argument::k_source, {c.heads_kv, c.dim}, 1);
      source(Argument::v_source, {c.heads_kv, c.dim}, 2);
    }
  }

  void tables() {
    Spread spread = input_spread();
    if (c.input_layout == InputLayout::shared) over_tokens(spread.repeated);
    const std::int64_t table_rows = c.tables == Case::Tables::per_token ? 0 : 1 + random.below(9);
    if (c.tables != Case::Tables::per_token) {  // axis 1 is not S but D
      spread.gap[1] = 0;
      spread.order[0] = 0;
      spread.order[1] = 1;
      spread.reversed[1] = spread.repeated[1] = false;
    }
    for (Argument argument : {Argument::cos, Argument::sin}) {
      if (argument == Argument::sin) make_uneven(spread, 1, c.three_d && c.tables == Case::Tables::per_token ? 2 : 1);
      const auto inner = c.three_d ? std::vector<std::int64_t>{1, c.dim} : std::vector<std::int64_t>{c.dim};
      const std::vector<std::int64_t> table{table_rows, c.tables == Case::Tables::half ? c.dim / 2 : c.dim};
      const auto rows = c.tables == Case::Tables::per_token ? shape(inner) : table;
      a[argument] = arena.view(kvquant::name(argument), c.out, rows, spread, c.placement);
      fill_floats(a[argument], c.values, 1.0f, random);
    }
    if (c.tables == Case::Tables::per_token) return;
    const View& view = a[Argument::positions] = vector(Argument::positions, c.position, {c.batch * c.sequence});
    for (std::int64_t t = 0; t < c.batch * c.sequence; ++t)  // the first and the last row, which the guard pages are next to
      put_bits(element(view, t), c.position, static_cast<std::uint64_t>(t < 2 ? t * (table_rows - 1) : random.below(table_rows)));
  }

  View vector(Argument argument, DType dtype, std::vector<std::int64_t> shape) {
    Spread spread = base();
    if (c.strided_vectors && !shape.empty()) {
      const std::size_t last = shape.size() - 1;
      spread.gap[last] = random.pick({0, 4, 3, 12});
      spread.reversed[last] = random.chance(30);
      if (last == 1) spread.gap[0] = 4;
    }
    return arena.view(kvquant::name(argument), dtype, std::move(shape), spread, c.placement);
  }

  void vectors() {
    const std::int64_t columns = (c.heads_q + 2 * c.heads_kv) * c.dim, tokens = c.batch * c.sequence;
    if (c.x == DType::int32) {
      a[Argument::weight_scale] = vector(Argument::weight_scale, DType::float32, {columns});
      fill_floats(a[Argument::weight_scale], c.values, c.values == Values::ties ? 1.0f : 0.002f, random);
    }
    if (c.x == DType::int32 && c.activation_scale) {
      a[Argument::activation_scale] = vector(Argument::activation_scale, DType::float32, {tokens});
      fill_floats(a[Argument::activation_scale], c.values, 1.5f, random);
    }
    if (c.x == DType::int32 && c.bias != DType::none) {
      a[Argument::bias] = vector(Argument::bias, c.bias, {columns});
      if (c.bias == DType::int32) fill_integers(a[Argument::bias], c.values, 3000, random);
      else fill_floats(a[Argument::bias], c.values, 4.0f, random);
    }
    const Argument names[4] = {Argument::scale_k, Argument::scale_v, Argument::offset_k, Argument::offset_v};
    // Half the special calls have scales whose reciprocals may be used, so that special values meet those kernels too.
    const Values values = c.values == Values::special && random.chance(50) ? Values::plain : c.values;
    for (int i = 0; i < 4; ++i) {
      if ((i == 2 && !c.offset_k) || (i == 3 && !c.offset_v)) continue;
      const std::vector<std::int64_t> shapes[kScaleShapes] = {
          {c.heads_kv, c.dim}, {c.heads_kv * c.dim}, {c.heads_kv, 1}, {1}, {}};
      View& view = a[names[i]] = vector(names[i], DType::float32, shapes[static_cast<int>(c.scale_shape[i])]);
      if (i < 2) fill_scales(view, values, random);
      else fill_offsets(view, values, random);
    }
  }

  void caches() {
    const bool page = c.mode == CacheMode::page;
    const std::int64_t tokens = c.batch * c.sequence;
    const std::int64_t rows = page ? c.page_rows : c.sequence + random.below(4) + (c.sequence == 0 ? 1 : 0);
    const std::int64_t blocks = page ? tokens / rows + 1 + random.below(2) : c.batch + random.below(2) + (c.batch == 0 ? 1 : 0);
    const std::int64_t head = c.dim, row = c.heads_kv * head, block = rows * row;
    Spread spread = base();
    std::int64_t v_offset = 0;
    switch (c.cache_layout) {
      case CacheLayout::contiguous: break;
      case CacheLayout::pages_interleaved: spread.gap[0] = v_offset = block; break;
      case CacheLayout::rows_interleaved: spread.gap[0] = spread.gap[1] = v_offset = row; break;
      case CacheLayout::values_interleaved: spread.gap[0] = spread.gap[1] = spread.gap[2] = v_offset = head; break;
      case CacheLayout::head_major: std::swap(spread.order[1], spread.order[2]); break;
      case CacheLayout::padded_page: spread.gap[0] = 37, spread.gap[1] = 5, spread.gap[2] = 3; break;
      case CacheLayout::reversed: spread.reversed[0] = spread.reversed[1] = true; break;
    }
    spread.tail = v_offset;
    if (v_offset != 0) spread.junk_unit_strides = false;
    const std::vector<std::int64_t> shape{blocks, rows, c.heads_kv, c.dim};
    View& k = a[Argument::k_cache] = arena.view(v_offset != 0 ? "kv_cache" : "k_cache", DType::int8, shape, spread, c.placement);
    if (v_offset != 0) {
      a[Argument::v_cache] = k;
      a[Argument::v_cache].data = static_cast<char*>(k.data) + v_offset;
    } else {
      make_uneven(spread, 1, 3);
      a[Argument::v_cache] = arena.view("v_cache", DType::int8, shape, spread, c.placement);
    }
    indices(page, tokens, blocks, rows);
  }

  void indices(bool page, std::int64_t tokens, std::int64_t blocks, std::int64_t rows) {
    const std::int64_t count = page ? tokens : c.batch;
    std::vector<std::int64_t> value(static_cast<std::size_t>(page ? blocks * rows : count));
    for (std::size_t i = 0; i < value.size(); ++i)
      value[i] = page ? static_cast<std::int64_t>(i) : random.below(rows - c.sequence + 1);
    if (page) random.shuffle(value);
    value.resize(static_cast<std::size_t>(count));
    if (page && c.duplicates)
      for (std::int64_t& v : value)
        if (random.chance(40)) v = value[static_cast<std::size_t>(random.below(count))];
    if (c.padding)
      for (std::int64_t& v : value)
        if (random.chance(30)) v = -1;
    View& view = a[Argument::indices] = vector(Argument::indices, c.index, {count});
    for (std::int64_t i = 0; i < count; ++i)
      put_bits(element(view, i), c.index, static_cast<std::uint64_t>(value[static_cast<std::size_t>(i)]));
  }

  void outputs() {
    const Argument names[3] = {Argument::q, Argument::k, Argument::v};
    const std::int64_t heads[3] = {c.heads_q, c.heads_kv, c.heads_kv};
    Spread spread = base();
    const int head_axis = c.three_d ? 2 : 1;
    if (c.output_layout == OutputLayout::padded) spread.gap[0] = 10, spread.gap[1] = 6, spread.gap[head_axis] = 2;
    if (c.output_layout == OutputLayout::head_major) std::swap(spread.order[head_axis], spread.order[head_axis - 1]);
    if (c.output_layout == OutputLayout::fused && c.kv_output) {
      View all = arena.view("q k v", c.out, shape({c.heads_q + 2 * c.heads_kv, c.dim}), spread, c.placement);
      for (int i = 0; i < 3; ++i) {
        View& view = a[names[i]] = all;
        view.shape[head_axis] = heads[i];
        all.data = static_cast<char*>(all.data) + (c.batch * c.sequence != 0 ? heads[i] * all.strides[head_axis] : 0);
      }
      return;
    }
    for (int i = 0; i < (c.kv_output ? 3 : 1); ++i) {
      make_uneven(spread, i, head_axis + 1);
      a[names[i]] = arena.view(kvquant::name(names[i]), c.out, shape({heads[i], c.dim}), spread, c.placement);
    }
  }
};

}  // namespace

void build(const Case& c, Arena& arena, Operands& operands, Options& options) {
  operands = Operands{};
  options = Options{};
  options.cache_mode = c.mode;
  options.numerics = c.numerics;
  options.kv_output = c.kv_output;
  options.skip_padding = c.padding;
  options.allow_duplicates = c.duplicates;
  Builder builder{c, arena, operands, Random(c.seed)};
  builder.sources();
  builder.tables();
  builder.vectors();
  builder.caches();
  builder.outputs();
}

}  // namespace kvtest
