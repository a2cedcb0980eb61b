// Puts each tensor between two pages that nobody may touch: preloaded, this posix_memalign serves torch's allocator.
// A block ends where the page after it begins, or begins where the page before it ends, in turn; it is filled with the
// poison byte; and once freed it is never given out again, and may not be touched either.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE ((size_t)4096)
#define PAGES ((size_t)1 << 28)  // 1 TB of addresses
#define LARGEST ((size_t)1 << 26)

static char* arena;
static uint32_t* pages_of;  // of the block whose first page it is
static atomic_size_t next_page, blocks;
static atomic_int enabled, poison = 0xff;

void guard_poison(int byte) { poison = byte; }
size_t guard_blocks(void) { return blocks; }

// Guards every tensor from now on; false if there are not so many addresses.
int guard_enable(void) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    pages_of = mmap(NULL, PAGES * sizeof *pages_of, PROT_READ | PROT_WRITE, flags, -1, 0);
    char* found = mmap(NULL, PAGES * PAGE, PROT_NONE, flags, -1, 0);
    if (pages_of == MAP_FAILED || found == MAP_FAILED) return 0;
    arena = found;
    enabled = 1;
    return 1;
}

int posix_memalign(void** out, size_t alignment, size_t size) {
    static int (*plain)(void**, size_t, size_t);
    if (!plain) plain = (int (*)(void**, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
    if (!enabled || !size || size > LARGEST) return plain(out, alignment, size);
    const size_t pages = (size + PAGE - 1) / PAGE, first = atomic_fetch_add(&next_page, pages + 1) + 1;
    if (first + pages >= PAGES) return ENOMEM;
    char* begin = arena + first * PAGE;
    if (mprotect(begin, pages * PAGE, PROT_READ | PROT_WRITE)) return ENOMEM;
    memset(begin, poison, pages * PAGE);
    pages_of[first] = (uint32_t)pages;
    *out = atomic_fetch_add(&blocks, 1) % 2 ? begin : begin + pages * PAGE - size;
    return 0;
}

void free(void* block) {
    static void (*plain)(void*);
    char* at = block;
    if (arena && at >= arena && at < arena + PAGES * PAGE) {
        const size_t first = (size_t)(at - arena) / PAGE;  // the block begins on its first page, wherever there
        mmap(arena + first * PAGE, pages_of[first] * PAGE, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        return;
    }
    if (!plain) plain = (void (*)(void*))dlsym(RTLD_NEXT, "free");
    plain(block);
}
