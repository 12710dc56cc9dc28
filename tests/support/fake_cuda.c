/* A stand-in for libcuda.so.1: device memory is a file in /dev/shm, a stream runs at once, every call is counted.
   FAKE_CUDA_FAIL="name:code" makes one call fail; FAKE_CUDA_POOL=1 makes memory that cannot be exported. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct { char bytes[64]; } Handle;
typedef struct { char name[56]; int owner; } Named;
typedef struct { char name[56]; int owner; int64_t *value; } Event;

static struct { uint64_t base; size_t size; char name[56]; } made[64];
static struct { uint64_t base; size_t size; char name[56]; int opens; } opened[64];
static int made_count, opened_count, numbers;
static char calls[1 << 16];

static int note(const char *name) {
    const char *fail = getenv("FAKE_CUDA_FAIL");
    size_t used = strlen(calls), length = strlen(name);
    if (used + length + 2 < sizeof calls) { strcat(calls, name); strcat(calls, " "); }
    if (fail && !strncmp(fail, name, length) && fail[length] == ':') return atoi(fail + length + 1);
    return 0;
}

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
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; NOTE(); *context = calls; return 0; }
int cuCtxSetCurrent(void *context) { return context == calls ? 0 : 201; }
int cuPointerGetAttribute(int *data, int attribute, uint64_t at) {
    (void)at; NOTE();
    if (attribute != 10) return 1;
    *data = getenv("FAKE_CUDA_POOL") == NULL;
    return 0;
}
int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t at) {
    NOTE();
    for (int i = 0; i < made_count; i++)
        if (at >= made[i].base && at < made[i].base + made[i].size) {
            *base = made[i].base; *size = made[i].size; return 0;
        }
    return 1;
}
int cuIpcGetMemHandle(Handle *handle, uint64_t base) {
    NOTE();
    for (int i = 0; i < made_count; i++)
        if (made[i].base == base) {
            Named named = {.owner = getpid()};
            memcpy(named.name, made[i].name, 56); memcpy(handle, &named, sizeof named); return 0;
        }
    return 1; /* not a base: an offset was exported */
}
int cuIpcOpenMemHandle_v2(uint64_t *base, Handle handle, unsigned flags) {
    NOTE();
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
    NOTE();
    for (int i = 0; i < opened_count; i++)
        if (opened[i].base == base && opened[i].opens) {
            opened[i].opens = 0; munmap((void *)base, opened[i].size); return 0;
        }
    return 1;
}
static Event *event_at(const char *name, int owner, int create) {
    Event *event = calloc(1, sizeof *event);
    memcpy(event->name, name, 56); event->owner = owner;
    event->value = map_file(name, 8, create);
    return event->value ? event : NULL;
}
int cuEventCreate(void **event, unsigned flags) {
    NOTE();
    char name[56] = {0};
    if (flags != 6) return 1; /* must be interprocess, timing off */
    new_name(name);
    *event = event_at(name, getpid(), 1);
    return *event ? 0 : 2;
}
int cuIpcGetEventHandle(Handle *handle, Event *event) {
    NOTE();
    Named named = {.owner = getpid()};
    memcpy(named.name, event->name, 56); memcpy(handle, &named, sizeof named);
    return 0;
}
int cuIpcOpenEventHandle(void **event, Handle handle) {
    NOTE();
    Named named; memcpy(&named, &handle, sizeof named);
    *event = event_at(named.name, named.owner, 0);
    return *event ? 0 : 400;
}
int cuEventRecord(Event *event, void *stream) { NOTE(); if (stream) return 400; ++*event->value; return 0; }
int cuEventDestroy_v2(Event *event) {
    NOTE();
    munmap(event->value, 8);
    if (event->owner == getpid()) unlink(event->name);
    free(event);
    return 0;
}
int cuStreamCreate(void **stream, unsigned flags) { (void)flags; NOTE(); *stream = calloc(1, sizeof(int64_t)); return 0; }
int cuStreamDestroy_v2(void *stream) { NOTE(); free(stream); return 0; }
int cuStreamWaitEvent(int64_t *stream, Event *event, unsigned flags) {
    (void)flags; NOTE();
    if (*event->value < 1) return 719; /* nothing was ever recorded: it would not wait */
    *stream = *event->value;
    return 0;
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void *stream) {
    (void)stream; NOTE(); memcpy((void *)to, (void *)from, size); return 0;
}
int cuStreamSynchronize(void *stream) { (void)stream; NOTE(); return 0; }
