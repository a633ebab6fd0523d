# Included by _core.pyx: NumPy arrays to operand views, and the arrays of results. Arrays are read through NumPy's C API: one typed
# memoryview argument would cost more than the whole argument list does.

cdef extern from "numpy/arrayobject.h":
    ctypedef struct PyArrayObject:  # by pointer, so that nothing counts references
        pass
    PyTypeObject PyArray_Type
    bint PyArray_CheckExact(PyObject*) noexcept
    int PyArray_TYPE(PyArrayObject*) noexcept
    int PyArray_NDIM(PyArrayObject*) noexcept
    void* PyArray_DATA(PyArrayObject*) noexcept
    cnp.npy_intp PyArray_ITEMSIZE(PyArrayObject*) noexcept
    cnp.npy_intp* PyArray_DIMS(PyArrayObject*) noexcept
    cnp.npy_intp* PyArray_STRIDES(PyArrayObject*) noexcept
    cnp.PyArray_Descr* PyArray_DESCR(PyArrayObject*) noexcept
    bint PyArray_ISNOTSWAPPED(PyArrayObject*) noexcept
    bint PyArray_ISWRITEABLE(PyArrayObject*) noexcept
    object PyArray_NewFromDescr(PyTypeObject*, cnp.PyArray_Descr*, int ndim, const cnp.npy_intp* shape,
                                const cnp.npy_intp* strides, void* data, int flags, PyObject* owner)


cdef DType[32] dtype_of_number  # NumPy's built-in type numbers; written at import, before any call
cdef atomic[int] bfloat16_number  # ml_dtypes registers bfloat16 under a number of its own, once a process; 0: not met yet


def _fill_dtypes():
    names = {np.int8: <int>DType.int8, np.int16: <int>DType.int16, np.int32: <int>DType.int32, np.int64: <int>DType.int64,
             np.uint8: <int>DType.uint8, np.uint16: <int>DType.uint16, np.uint32: <int>DType.uint32,
             np.uint64: <int>DType.uint64, np.float16: <int>DType.float16, np.float32: <int>DType.float32,
             np.float64: <int>DType.float64, np.bool_: <int>DType.boolean, np.complex64: <int>DType.complex64,
             np.complex128: <int>DType.complex128}
    for i in range(32):
        dtype_of_number[i] = DType.other
    for scalar, code in names.items():
        dtype_of_number[np.dtype(scalar).num] = <DType><int>code
    # C long and long long are both 64 bits wide but have two numbers.
    for letter in "lqLQ":
        dtype_of_number[np.dtype(letter).num] = dtype_of_number[np.dtype(f"{'i' if letter in 'lq' else 'u'}8").num]


_fill_dtypes()
cdef object MaskedArray = np.ma.MaskedArray


cdef inline DType dtype_of(PyArrayObject* array) noexcept:
    """other: also for a bfloat16 that has not been met yet."""
    cdef int number = PyArray_TYPE(array)
    if 0 <= number < 32:
        return dtype_of_number[number]
    return DType.bfloat16 if number == bfloat16_number.load(memory_order_relaxed) else DType.other


cdef DType user_dtype(cnp.ndarray array) except *:
    scalar = array.dtype.type
    if cnp.PyArray_TYPE(array) >= 256 and scalar.__name__ == "bfloat16" and scalar.__module__.split(".")[0] == "ml_dtypes":
        bfloat16_number.store(cnp.PyArray_TYPE(array), memory_order_relaxed)
        return DType.bfloat16
    return DType.other


cdef int fill(View* view, object given, Argument argument) except -1:
    """The view of one array, or TypeError; never a conversion."""
    if not cnp.PyArray_Check(given):
        raise TypeError(f"{name_of(argument)}: expected a numpy.ndarray, got {type(given).__name__}")
    # By its type, not its __class__, which may be code that changes operands already looked at.
    if not cnp.PyArray_CheckExact(given) and PyObject_TypeCheck(given, <PyTypeObject*>MaskedArray):
        raise TypeError(f"{name_of(argument)}: expected a plain numpy.ndarray, got a masked array")
    cdef PyArrayObject* array = <PyArrayObject*>given
    if not PyArray_ISNOTSWAPPED(array):
        raise TypeError(f"{name_of(argument)}: expected native byte order, got dtype {given.dtype.str}")
    cdef int ndim = PyArray_NDIM(array), i
    view.dtype = dtype_of(array)
    if view.dtype == DType.other:
        view.dtype = user_dtype(given)
    view.data = PyArray_DATA(array)
    view.read_only = not PyArray_ISWRITEABLE(array)
    view.ndim = ndim
    for i in range(ndim if ndim < 4 else 4):
        view.shape[i] = PyArray_DIMS(array)[i]
        view.strides[i] = PyArray_STRIDES(array)[i]
    return 0


cdef inline bint is_like(const View* view, PyArrayObject* array) noexcept:
    """Whether fill() would give this view again, the address apart. False may also mean that it takes fill() to tell."""
    if (dtype_of(array) != view.dtype or PyArray_NDIM(array) != view.ndim or not PyArray_ISNOTSWAPPED(array)
            or PyArray_ISWRITEABLE(array) == view.read_only):
        return False
    cdef cnp.npy_intp* shape = PyArray_DIMS(array)
    cdef cnp.npy_intp* strides = PyArray_STRIDES(array)
    cdef int i
    for i in range(view.ndim):
        if shape[i] != view.shape[i] or strides[i] != view.strides[i]:
            return False
    return True


cdef cnp.npy_intp no_elements = 0
cdef int64_t nothing  # what arrays without elements point to, so that NumPy need not allocate


cdef object new_array(PyArrayObject* like, int ndim, const cnp.npy_intp* shape, void* data):
    """A contiguous array of the dtype of `like`; data: its memory, NULL to allocate it."""
    cdef cnp.PyArray_Descr* descr = PyArray_DESCR(like)
    Py_INCREF(<object>descr)  # stolen by the call
    return PyArray_NewFromDescr(&PyArray_Type, descr, ndim, shape, NULL, data, 0 if data == NULL else cnp.NPY_ARRAY_CARRAY, NULL)


cdef object aligned_array(PyArrayObject* like, int ndim, const cnp.npy_intp* shape, size_t bytes):
    """new_array() at a multiple of 64 bytes, as NumPy's own memory hardly ever is: each store of the kernels is then a line."""
    cdef cnp.npy_intp room = bytes + 63
    owner = cnp.PyArray_SimpleNew(1, &room, cnp.NPY_UINT8)
    cdef uintptr_t address = (<uintptr_t>PyArray_DATA(<PyArrayObject*>owner) + 63) & ~<uintptr_t>63
    array = new_array(like, ndim, shape, <void*>address)
    cnp.set_array_base(array, owner)
    return array
