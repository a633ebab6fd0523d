// Preloaded by test_allocation.py: makes chosen allocations of one thread fail. After watch_this_thread(), and from the moment
// that `granted` is set to n >= 0, that thread gets n allocations; of the following ones `to_refuse` fail. Plain variables, since
// calling a function from Python allocates. glibc only.
#include <errno.h>
#include <pthread.h>
#include <stddef.h>

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

volatile long granted = -1, to_refuse, refused;
static pthread_t watched;

void watch_this_thread(void) { watched = pthread_self(); }

static int refuse(void) {
  if (granted < 0 || !pthread_equal(pthread_self(), watched)) return 0;
  if (granted > 0) {
    --granted;
    return 0;
  }
  if (refused == to_refuse) return 0;
  ++refused;
  errno = ENOMEM;
  return 1;
}

void* malloc(size_t size) { return refuse() ? NULL : __libc_malloc(size); }
void* calloc(size_t n, size_t size) { return refuse() ? NULL : __libc_calloc(n, size); }
void* realloc(void* old, size_t size) { return refuse() ? NULL : __libc_realloc(old, size); }
void* memalign(size_t alignment, size_t size) { return refuse() ? NULL : __libc_memalign(alignment, size); }
void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }
int posix_memalign(void** result, size_t alignment, size_t size) {
  void* p = memalign(alignment, size);
  if (p == NULL) return ENOMEM;
  *result = p;
  return 0;
}
