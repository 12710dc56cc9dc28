/* A stand-in for libcuda.so.1: device memory is a file in /dev/shm, a stream runs at once, every call is counted.
   Memory of the driver's virtual memory management is a memory file, of which handles are descriptors.
   FAKE_CUDA_FAIL="name:code" makes one call fail; FAKE_CUDA_POOL=1 makes memory that cannot be exported;
   FAKE_CUDA_LACKS=n: the device lacks attribute n. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct { char bytes[64]; } Handle;
typedef struct { char name[56]; int owner; } Named;

static struct { uint64_t base; size_t size; char name[56]; } made[64];
static struct { uint64_t base; size_t size; char name[56]; int opens; } opened[64];
static int made_count, opened_count, numbers;
static char calls[1 << 16];
static _Thread_local int current; /* contexts that this thread has pushed */

static int note(const char *name) {
    const char *fail = getenv("FAKE_CUDA_FAIL");
    size_t used = strlen(calls), length = strlen(name);
    if (used + length + 2 < sizeof calls) { strcat(calls, name); strcat(calls, " "); }
    if (fail && !strncmp(fail, name, length) && fail[length] == ':') return atoi(fail + length + 1);
    return 0;
}

#define NEED() do { if (!current) return 201; } while (0) /* as CUDA: no context is current */
#define NOTE() do { int code_ = note(__func__); if (code_) return code_; } while (0)

static void *map_file(const char *name, size_t size, int create) {
    int file = open(name, O_RDWR | O_CLOEXEC | (create ? O_CREAT | O_EXCL : 0), 0600);
    if (file < 0) return NULL;
    if (create && ftruncate(file, (off_t)size)) { close(file); return NULL; }
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return at == MAP_FAILED ? NULL : at;
}

static void new_name(char *name) { snprintf(name, 56, "/dev/shm/trinity-fake-%d-%d", getpid(), ++numbers); }

/* for the tests alone */
const char *fake_calls(void) { return calls; }
int fake_current(void) { return current; }
void fake_forget(void) { calls[0] = 0; }
int fake_opens(void) { int sum = 0; for (int i = 0; i < opened_count; i++) sum += opened[i].opens; return sum; }
uint64_t fake_alloc(size_t size) {
    new_name(made[made_count].name);
    made[made_count].size = size;
    made[made_count].base = (uint64_t)map_file(made[made_count].name, size, 1);
    return made[made_count++].base;
}
void fake_clean(void) { for (int i = 0; i < made_count; i++) unlink(made[i].name); }

int cuInit(unsigned flags) { (void)flags; NOTE(); return 0; }
int cuGetErrorName(int code, const char **name) {
    *name = code == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : code == 201 ? "CUDA_ERROR_INVALID_CONTEXT" : "CUDA_ERROR_FAKE";
    return 0;
}
int cuDeviceGet(int *device, int ordinal) { NOTE(); *device = ordinal; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device; NOTE();
    const char *lacks = getenv("FAKE_CUDA_LACKS");
    *value = !(lacks && atoi(lacks) == attribute);
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; NOTE(); *context = calls; return 0; }
int cuCtxPushCurrent_v2(void *context) { if (context != calls) return 201; current++; return 0; }
int cuCtxPopCurrent_v2(void **context) { if (!current) return 201; *context = calls; current--; return 0; }
int cuPointerGetAttribute(int *data, int attribute, uint64_t at) {
    (void)at; NOTE(); NEED();
    if (attribute != 10) return 1;
    *data = getenv("FAKE_CUDA_POOL") == NULL;
    return 0;
}
int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t at) {
    NOTE(); NEED();
    for (int i = 0; i < made_count; i++)
        if (at >= made[i].base && at < made[i].base + made[i].size) {
            *base = made[i].base; *size = made[i].size; return 0;
        }
    return 1;
}
int cuIpcGetMemHandle(Handle *handle, uint64_t base) {
    NOTE(); NEED();
    for (int i = 0; i < made_count; i++)
        if (made[i].base == base) {
            Named named = {.owner = getpid()};
            memcpy(named.name, made[i].name, 56); memcpy(handle, &named, sizeof named); return 0;
        }
    return 1; /* not a base: an offset was exported */
}
int cuIpcOpenMemHandle_v2(uint64_t *base, Handle handle, unsigned flags) {
    NOTE(); NEED();
    Named named; memcpy(&named, &handle, sizeof named);
    if (flags != 1) return 1;
    if (named.owner == getpid()) return 201;
    int file = open(named.name, O_RDWR | O_CLOEXEC);
    if (file < 0) return 400;
    size_t size = (size_t)lseek(file, 0, SEEK_END);
    close(file);
    opened[opened_count].size = size;
    opened[opened_count].base = (uint64_t)map_file(named.name, size, 0);
    opened[opened_count].opens = 1;
    *base = opened[opened_count++].base;
    return 0;
}
int cuIpcCloseMemHandle(uint64_t base) {
    NOTE(); NEED();
    for (int i = 0; i < opened_count; i++)
        if (opened[i].base == base && opened[i].opens) {
            opened[i].opens = 0; munmap((void *)base, opened[i].size); return 0;
        }
    return 1;
}
int cuStreamCreate(void **stream, unsigned flags) { (void)flags; NOTE(); NEED(); *stream = calloc(1, sizeof(int64_t)); return 0; }
int cuStreamDestroy_v2(void *stream) { NOTE(); NEED(); free(stream); return 0; }
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void *stream) {
    (void)stream; NOTE(); NEED(); memcpy((void *)to, (void *)from, size); return 0;
}
int cuStreamSynchronize(void *stream) { (void)stream; NOTE(); NEED(); return 0; }

/* virtual memory management: a handle is a descriptor and one; an address is reserved without access, then mapped */
typedef struct { int kind, handles, place, device; void *windows; uint64_t flags; } Properties;
typedef struct { int place, device, flags; } Access;
#define GRAIN (2u << 20)

static int is_good(const Properties *asked) {
    return asked->kind == 1 && asked->handles == 1 && asked->place == 1 && !asked->windows && !asked->flags;
}
int cuMemGetAllocationGranularity(size_t *grain, const Properties *asked, int option) {
    NOTE(); NEED(); *grain = GRAIN; return is_good(asked) && !option ? 0 : 1;
}
int cuMemCreate(uint64_t *handle, size_t size, const Properties *asked, uint64_t flags) {
    NOTE(); NEED();
    if (!is_good(asked) || flags || size % GRAIN) return 1;
    int file = memfd_create("trinity-fake-memory", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (off_t)size)) return 2;
    *handle = (uint64_t)file + 1;
    return 0;
}
int cuMemExportToShareableHandle(int *file, uint64_t handle, int kind, uint64_t flags) {
    NOTE(); NEED();
    if (kind != 1 || flags) return 1;
    *file = fcntl((int)handle - 1, F_DUPFD_CLOEXEC, 0);
    return *file < 0;
}
int cuMemImportFromShareableHandle(uint64_t *handle, void *file, int kind) {
    NOTE(); NEED();
    if (kind != 1) return 1;
    int held = fcntl((int)(intptr_t)file, F_DUPFD_CLOEXEC, 0);
    if (held < 0) return 400;
    *handle = (uint64_t)held + 1;
    return 0;
}
int cuMemRelease(uint64_t handle) { NOTE(); NEED(); return close((int)handle - 1) ? 1 : 0; }
int cuMemAddressReserve(uint64_t *at, size_t size, size_t alignment, uint64_t wish, uint64_t flags) {
    NOTE(); NEED();
    if (size % GRAIN || alignment || wish || flags) return 1;
    *at = (uint64_t)mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return 0;
}
int cuMemMap(uint64_t at, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
    NOTE(); NEED();
    if (offset || flags) return 1;
    void *got = mmap((void *)at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle - 1, 0);
    return got == MAP_FAILED ? 1 : 0;
}
int cuMemSetAccess(uint64_t at, size_t size, const Access *access, size_t count) {
    NOTE(); NEED();
    if (count != 1 || access->place != 1 || access->flags != 3) return 1;
    return mprotect((void *)at, size, PROT_READ | PROT_WRITE) ? 1 : 0;
}
int cuCtxSynchronize(void) { NOTE(); NEED(); return 0; }
int cuMemUnmap(uint64_t at, size_t size) {
    NOTE(); NEED();
    void *got = mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return got == MAP_FAILED ? 1 : 0;
}
int cuMemAddressFree(uint64_t at, size_t size) { NOTE(); NEED(); return munmap((void *)at, size) ? 1 : 0; }
