# Included by _core.pyx: the arguments of a call to a request, and the plan that fits it.

# ---- options --------------------------------------------------------------------------------------------------------

cdef bint flag(str argument, value) except -1:
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise ValueError(f"{argument}: expected True or False, got {value!r}")


cdef bint is_integer(value) except -1:
    return PyLong_CheckExact(value) or isinstance(value, (int, np.integer)) and not isinstance(value, bool)


@cython.boundscheck(True)  # another thread may shorten a list
cdef int set_splits(Request* r, size_splits) except -1:
    cdef int i, overflow = 0
    cdef long long columns
    if cnp.PyArray_Check(size_splits):
        if size_splits.dtype.kind not in "iu" or size_splits.ndim != 1:
            raise TypeError("size_splits: expected three integers, got an array of "
                            f"{size_splits.ndim} dimensions and dtype {size_splits.dtype}")
    elif not isinstance(size_splits, (list, tuple)):
        raise TypeError(f"size_splits: expected a list, tuple or array of three integers, got {type(size_splits).__name__}")
    if len(size_splits) != 3:
        raise ValueError(f"size_splits: expected 3 integers, got {len(size_splits)}")
    for i in range(3):
        value = size_splits[i]
        if not is_integer(value):
            raise TypeError(f"size_splits[{i}]: expected an integer, got {type(value).__name__}")
        columns = PyLong_AsLongLongAndOverflow(value, &overflow)
        if columns < 0 or overflow:
            raise ValueError(f"size_splits[{i}]: expected a length in columns, got {value}")
        r.size_splits[i] = columns
    return 0


cdef object frozen(out):
    """`out` as a tuple, which no other thread can change: a request only borrows its arrays."""
    if type(out) is tuple or out is None:
        return out
    if not isinstance(out, (tuple, list)):
        raise ValueError(f"out: expected None or (q, k, v), got {type(out).__name__}")
    return tuple(out)


cdef PyObject* borrowed(given) noexcept:
    return <PyObject*>NULL if given is None else <PyObject*>given


cdef int set_out(Request* r, tuple out) except -1:
    # `out` has been through frozen() and outlives the request.
    if out is None:
        return 0
    if len(out) != 3:
        raise ValueError(f"out: expected None or (q, k, v), got {len(out)} items")
    r.arrays[<int>Argument.q] = borrowed(out[0])
    r.arrays[<int>Argument.k] = borrowed(out[1])
    r.arrays[<int>Argument.v] = borrowed(out[2])
    return 0


cdef int set_threads(Request* r, num_threads) except -1:
    if num_threads is None:
        r.threads = 0
    elif not is_integer(num_threads) or num_threads < 1:
        raise ValueError(f"num_threads: expected None or an integer of at least 1, got {num_threads!r}")
    else:
        r.threads = num_threads if num_threads < 1 << 20 else 1 << 20
    if r.threads != 1 and thread_limit() == 0:
        raise ValueError("KVQUANT_NUM_THREADS: expected an integer of at least 1, got "
                         f"{os.environ.get('KVQUANT_NUM_THREADS')!r}")
    return 0


cdef int set_options(Request* r, quant_mode, input_layout, kv_output, cache_mode, numerics, padding_index, allow_duplicates,
                     vendor_limits, isa) except -1:
    cdef Py_ssize_t length
    if not (quant_mode == "static" if isinstance(quant_mode, str) else is_integer(quant_mode) and quant_mode == 0):
        raise ValueError(f"quant_mode: expected 0 or 'static', got {quant_mode!r}")
    if not isinstance(input_layout, str) or input_layout != "BSND":
        raise ValueError(f"input_layout: expected 'BSND', got {input_layout!r}")
    r.options.kv_output = flag("kv_output", kv_output)
    if isinstance(cache_mode, str) and cache_mode == "contiguous":
        r.options.cache_mode = CacheMode.contiguous
    elif isinstance(cache_mode, str) and cache_mode == "page":
        r.options.cache_mode = CacheMode.page
    else:
        raise ValueError(f"cache_mode: expected 'contiguous' or 'page', got {cache_mode!r}")
    if isinstance(numerics, str) and numerics == "fp32":
        r.options.numerics = Numerics.fp32
    elif isinstance(numerics, str) and numerics == "ascend":
        r.options.numerics = Numerics.ascend
    else:
        raise ValueError(f"numerics: expected 'fp32' or 'ascend', got {numerics!r}")
    if padding_index is not None and not (is_integer(padding_index) and padding_index == -1):
        raise ValueError(f"padding_index: expected None or -1, got {padding_index!r}")
    r.options.skip_padding = padding_index is not None
    r.options.allow_duplicates = flag("allow_duplicates", allow_duplicates)
    r.options.vendor_limits = flag("vendor_limits", vendor_limits)
    if isa is not None:
        if not isinstance(isa, str) or not isa or "\0" in isa:
            raise ValueError(f"isa: expected None or one of {', '.join(target_names())}, got {isa!r}")
        try:
            r.options.isa = PyUnicode_AsUTF8AndSize(isa, &length)
        except UnicodeEncodeError:
            raise ValueError(f"isa: expected None or one of {', '.join(target_names())}, got {isa!r}") from None
    return 0


cdef int fill_request(Request* r, x, cos, sin, k_cache, v_cache, indices, scale_k, scale_v, size_splits, offset_k, offset_v,
                      weight_scale, activation_scale, bias, positions, quant_mode, input_layout, kv_output, cache_mode, numerics,
                      padding_index, allow_duplicates, vendor_limits, out, num_threads, isa) except -1:
    r.arrays[<int>Argument.x] = <PyObject*>x
    r.arrays[<int>Argument.cos] = <PyObject*>cos
    r.arrays[<int>Argument.sin] = <PyObject*>sin
    r.arrays[<int>Argument.k_cache] = <PyObject*>k_cache
    r.arrays[<int>Argument.v_cache] = <PyObject*>v_cache
    r.arrays[<int>Argument.indices] = <PyObject*>indices
    r.arrays[<int>Argument.scale_k] = <PyObject*>scale_k
    r.arrays[<int>Argument.scale_v] = <PyObject*>scale_v
    r.arrays[<int>Argument.offset_k] = borrowed(offset_k)
    r.arrays[<int>Argument.offset_v] = borrowed(offset_v)
    r.arrays[<int>Argument.weight_scale] = borrowed(weight_scale)
    r.arrays[<int>Argument.activation_scale] = borrowed(activation_scale)
    r.arrays[<int>Argument.bias] = borrowed(bias)
    r.arrays[<int>Argument.positions] = borrowed(positions)
    set_splits(r, size_splits)
    set_options(r, quant_mode, input_layout, kv_output, cache_mode, numerics, padding_index, allow_duplicates, vendor_limits, isa)
    set_out(r, out)
    set_threads(r, num_threads)
    return 0


# ---- the plan of a call ---------------------------------------------------------------------------------------------

cdef int fill_any(Request* r, int argument, View* view) except -1:
    """The view of an operand, array or tensor; notes its address."""
    if r.tensors:
        fill_tensor(view, <object>r.arrays[argument], <Argument>argument, r.direct)
    else:
        fill(view, <object>r.arrays[argument], <Argument>argument)
    r.data[argument] = view.data
    view.data = NULL
    return 0


cdef int fill_views(Request* r, Made* made) except -1:
    cdef View* x = &made.plan.operands.view[<int>Argument.x]
    cdef int i
    fill_any(r, <int>Argument.x, x)
    made.given = looked_at(r[0], x.dtype == DType.int32)
    for i in range(<int>Argument.x + 1, kOperandCount):
        if made.given >> i & 1:
            fill_any(r, i, &made.plan.operands.view[i])
    return 0


cdef bint is_made_of(Request* r, const Made* made) except -1:
    """Whether the plan was made of operands like those of the request. Notes their addresses, as fill_views() does."""
    cdef const View* view
    cdef PyObject* array
    cdef int i
    if made.given != looked_at(r[0], made.plan.integer_x):
        return False
    for i in range(kOperandCount):
        if not made.given >> i & 1:
            continue
        view = &made.plan.operands.view[i]
        array = r.arrays[i]
        if r.tensors or not PyArray_CheckExact(array):
            if not is_filled_like(r, i, view):
                return False
        else:
            if not is_like(view, <PyArrayObject*>array):
                return False
            r.data[i] = PyArray_DATA(<PyArrayObject*>array)
    return True


cdef bint is_filled_like(Request* r, int argument, const View* known) except -1:
    cdef View view
    fill_any(r, argument, &view)
    return same_metadata(view, known[0])


cdef object array_at(Request* r, Argument argument):
    """What was given for an argument, or None."""
    if argument == Argument.isa:
        return os.environ.get("KVQUANT_ISA") if r.options.isa == NULL else r.options.isa.decode()
    cdef PyObject* array = r.arrays[<int>argument] if <int>argument < kOperandCount else NULL
    return None if array == NULL else <object>array


cdef int check_plan(Request* r) except -1:
    """Finds the plan of a request that has none, or makes it."""
    cdef Made* made
    cdef Status status
    if r.made == NULL:
        borrow_last_plan(r[0])
        if r.last != NULL and r.last.valid and same_options(r[0], r.last.made.plan) and is_made_of(r, &r.last.made):
            r.made = &r.last.made
        else:
            made = &new_plan(r[0])
            fill_views(r, made)
            status = make_plan(made.plan.operands, made.plan.options, made.plan)
            if status.code != Code.ok:
                raise_status(status, array_at(r, status.argument))
            r.made = made
            if r.last != NULL:
                r.last.valid = r.options.isa == NULL  # a name of a target lives as long as its caller wants
    if r.tensors:
        refuse_gradients(r)
    return 0
